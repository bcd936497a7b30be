"""The collectives of shardcast, and nothing else that talks to other ranks."""

from .compare import same_everywhere
from .flight import Exchanged, Flight, Scattered, TwoLevel
from .grid import Grid, redistributed
from .group import REMEDY_INIT, Comm, copy_strided_, is_dense
from .waiting import Works

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
    "same_everywhere",
]
