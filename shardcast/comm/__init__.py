"""The collectives of shardcast, and nothing else that talks to other ranks."""

from .flight import Exchanged, Flight, Scattered, TwoLevel
from .grid import Grid, redistributed
from .group import REMEDY_INIT, Comm, Works, copy_strided_, is_dense

__all__ = [
    "REMEDY_INIT",
    "Comm",
    "Exchanged",
    "Flight",
    "Grid",
    "Scattered",
    "TwoLevel",
    "Works",
    "copy_strided_",
    "is_dense",
    "redistributed",
]
