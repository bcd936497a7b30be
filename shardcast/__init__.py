"""shardcast: optimizer-state sharding for data-parallel training in plain PyTorch.

Each rank keeps fp32 masters and moments only for the spans it owns, casts once per step in the
optimizer, and broadcasts the low-precision parameters on the compute stream. Start at
:func:`shard`; every option is a field of :class:`ShardcastConfig`.
"""

from shardcast.build import shard
from shardcast.config import ShardcastConfig
from shardcast.convert import convert_
from shardcast.optimizer import ShardedOptimizer
from shardcast.packed import PackedParameters, pack_parameters

__version__ = "0.1.0"

__all__ = [
    "PackedParameters",
    "ShardcastConfig",
    "ShardedOptimizer",
    "convert_",
    "pack_parameters",
    "shard",
]
