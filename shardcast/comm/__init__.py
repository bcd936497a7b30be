"""The collectives of shardcast, and nothing else that talks to other ranks."""

from .flight import FLIGHTS, Flight, Summed
from .group import REMEDY_INIT, Comm, Works, copy_strided_, is_dense
from .network import network_bytes
from .process_groups import ProcessGroups, redistributed

__all__ = [
    "FLIGHTS",
    "REMEDY_INIT",
    "Comm",
    "Flight",
    "ProcessGroups",
    "Summed",
    "Works",
    "copy_strided_",
    "is_dense",
    "network_bytes",
    "redistributed",
]
