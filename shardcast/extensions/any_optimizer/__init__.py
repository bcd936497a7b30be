"""Optimizers of classes without a fused update: probing what they need, and running them.

The class of an optimizer loads this, not an option; see :func:`.option_values.load_extension`.
"""

from __future__ import annotations

from shardcast.extensions.any_optimizer.probe import traits_of
from shardcast.extensions.any_optimizer.update import AnyOptimizerUpdate

__all__ = ["AnyOptimizerUpdate", "traits_of"]
