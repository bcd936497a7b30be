"""The collectives of shardcast, and nothing else that talks to other ranks."""

from .flight import Exchanged, Flight, Scattered, TwoLevel
from .group import REMEDY_INIT, Comm, Works, copy_strided_, is_dense
from .process_groups import ProcessGroups, redistributed

__all__ = [
    "REMEDY_INIT",
    "Comm",
    "Exchanged",
    "Flight",
    "ProcessGroups",
    "Scattered",
    "TwoLevel",
    "Works",
    "copy_strided_",
    "is_dense",
    "redistributed",
]
