"""The collectives of shardcast, and nothing else that talks to other ranks."""

from .flight import FLIGHTS, Flight, Summed
from .group import Work, copy_strided_, is_dense
from .network import network_bytes
from .objects import Comm
from .process_groups import ProcessGroups, redistributed

__all__ = [
    "FLIGHTS",
    "Comm",
    "Flight",
    "ProcessGroups",
    "Summed",
    "Work",
    "copy_strided_",
    "is_dense",
    "network_bytes",
    "redistributed",
]
