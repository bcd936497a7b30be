"""Accelerate with a sharded optimizer; see :mod:`shardcast.accelerate.accelerator`."""

from shardcast.accelerate.accelerator import (
    ConfigSource,
    ShardcastAccelerator,
    ShardcastOptimizer,
    enable,
)

__all__ = ["ConfigSource", "ShardcastAccelerator", "ShardcastOptimizer", "enable"]
