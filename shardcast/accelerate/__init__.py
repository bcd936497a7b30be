"""Accelerate with a sharded optimizer; see :mod:`shardcast.accelerate.accelerator`."""

try:
    import accelerate  # noqa: F401
except ImportError as error:
    raise ImportError(
        "shardcast.accelerate needs Accelerate, which is not installed here: "
        "pip install 'accelerate>=1.10.1'"
    ) from error

from shardcast.accelerate.accelerator import ShardcastAccelerator
from shardcast.accelerate.optimizer import ShardcastOptimizer
from shardcast.config import ConfigSource

__all__ = ["ConfigSource", "ShardcastAccelerator", "ShardcastOptimizer"]
