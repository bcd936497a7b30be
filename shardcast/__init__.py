"""shardcast: optimizer-state sharding for data-parallel training in plain PyTorch.

Each rank keeps fp32 masters and moments only for the spans it owns, casts once per step in the
optimizer, and broadcasts the low-precision parameters on the compute stream. Start at
:func:`shard`; every option is a field of :class:`ShardcastConfig`.
"""

import importlib
import warnings
from typing import Any

from shardcast.config import ShardcastConfig
from shardcast.launched import is_first_process
from shardcast.memory.convert import convert_
from shardcast.memory.pack_only import PackedParameters, pack_parameters
from shardcast.messages import namesake
from shardcast.optimizer.api import shard
from shardcast.optimizer.sharded import ShardedOptimizer

__version__ = "0.2.0"

__all__ = [
    "PackedParameters",
    "ShardcastConfig",
    "ShardedOptimizer",
    "convert_",
    "pack_parameters",
    "shard",
]

_LAZY = (
    "accelerate", "checkpoint", "estimate", "lightning", "metrics", "publish", "testing",
    "transformers",
)  # fmt: skip


if is_first_process() and (_namesake := namesake()):
    warnings.warn(_namesake, stacklevel=2)


def __getattr__(name: str) -> Any:
    """Modules of the public interface that are imported when they are used first."""
    if name in _LAZY:
        return importlib.import_module(f"shardcast.{name}")
    raise AttributeError(f"module 'shardcast' has no attribute {name!r}")
