"""The collectives of shardcast, and nothing else that talks to other ranks."""

from .compare import same_everywhere
from .flight import Exchanged, Flight, Scattered, TwoLevel
from .grid import Grid, redistributed
from .group import REMEDY_INIT, Comm
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
    "redistributed",
    "same_everywhere",
]
