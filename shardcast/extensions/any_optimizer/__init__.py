"""Optimizers of any other class than those that are fused: what it needs, and its update.

No option asks for it but the class of an optimizer, see :func:`.option_values.load_extension`.
"""

from __future__ import annotations

from shardcast.extensions.any_optimizer.probe import traits_of
from shardcast.extensions.any_optimizer.update import AnyOptimizerUpdate

__all__ = ["AnyOptimizerUpdate", "traits_of"]
