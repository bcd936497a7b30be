"""shardcast: optimizer-state sharding for data-parallel training in plain PyTorch.

Each rank keeps fp32 masters and moments only for the spans it owns, casts once per step in the
optimizer, and broadcasts the low-precision parameters on the compute stream. Start at
:func:`shard`; every option is a field of :class:`ShardcastConfig`.
"""

from shardcast.config import ShardcastConfig
from shardcast.memory.convert import convert_
from shardcast.memory.pack_only import PackedParameters, pack_parameters
from shardcast.optimizer.setup import shard
from shardcast.optimizer.sharded import ShardedOptimizer

__version__ = "0.1.0"

__all__ = [
    "PackedParameters",
    "ShardcastConfig",
    "ShardedOptimizer",
    "convert_",
    "pack_parameters",
    "shard",
]
