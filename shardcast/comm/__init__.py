"""The collectives of shardcast. No other module communicates with other ranks."""

from collections.abc import Mapping

from .group import Work, copy_strided_, is_dense
from .notices import warn_first, warn_once_for
from .objects import Comm
from .process_groups import ProcessGroups
from .reduction import (
    AllToAllReduction,
    Buffer,
    Buffers,
    ReduceScatterReduction,
    Reduction,
    ReplicaSumReduction,
    TwoLevelReduction,
)

__all__ = [
    "REDUCTIONS",
    "Buffer",
    "Buffers",
    "Comm",
    "ProcessGroups",
    "Reduction",
    "ReplicaSumReduction",
    "Work",
    "copy_strided_",
    "is_dense",
    "warn_first",
    "warn_once_for",
]

REDUCTIONS: Mapping[str, type[Reduction]] = {
    "all_to_all": AllToAllReduction,
    "reduce_scatter": ReduceScatterReduction,
    "two_level": TwoLevelReduction,
}
