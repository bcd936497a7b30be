"""shardcast: optimizer-state sharding for data-parallel training in plain PyTorch.

Each rank keeps the fp32 masters and moments of the spans that it owns. The optimizer casts them
once per step and sends the low-precision parameters to all ranks. Start at :func:`shard`; every
option is a field of :class:`ShardcastConfig`.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from shardcast.launched import is_first_process
from shardcast.messages import namesake

if TYPE_CHECKING:  # imported at first use, because torch takes seconds
    from shardcast.config import ShardcastConfig
    from shardcast.memory.convert import convert_
    from shardcast.optimizer.api import shard
    from shardcast.optimizer.sharded import ShardedOptimizer

__version__ = "0.2.0"

__all__ = [
    "ShardcastConfig",
    "ShardedOptimizer",
    "convert_",
    "shard",
]

_MODULES = (
    "accelerate",
    "checkpoint",
    "config",
    "estimate",
    "lightning",
    "metrics",
    "optimizer",
    "publish",
    "testing",
    "transformers",
)
_MODULE_OF = {
    "ShardcastConfig": "config",
    "ShardedOptimizer": "optimizer.sharded",
    "convert_": "memory.convert",
    "shard": "optimizer.api",
}


if is_first_process() and (_namesake := namesake()):
    warnings.warn(_namesake, stacklevel=2)


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name in _MODULES:
        return importlib.import_module(f"shardcast.{name}")
    if name in _MODULE_OF:
        module = importlib.import_module(f"shardcast.{_MODULE_OF[name]}")
        value = globals()[name] = getattr(module, name)
        return value
    raise AttributeError(f"module 'shardcast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *__all__})
