"""Which update runs an optimizer, and what every update can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.memory.shard import Shard
from shardcast.plan.originals import Groups
from shardcast.plan.partition import ELEMENTWISE
from shardcast.step.combine.decision import Decision
from shardcast.step.update import rules
from shardcast.step.update.any_optimizer import AnyOptimizerUpdate, Ready
from shardcast.step.update.fused import FusedUpdate


class Update(Protocol):
    """Unscales, clips, updates and casts the own spans; leaves absent gradients untouched."""

    elementwise: bool

    def add(self, shard: Shard) -> None:
        """Update ``shard`` too, from now on."""

    def __call__(self, decision: Decision, present: Mapping[Shard, Sequence[bool]]) -> None:
        """Update, cast and publish the own spans.

        Args:
            present: per shard and fragment, whether some rank has a gradient.
        """

    def switch(self, mode: str) -> bool:
        """Call the optimizer's own ``train`` or ``eval``, if it has them.

        Returns:
            Whether masters may have changed and were published; a sync must follow.
        """

    def nbytes(self) -> int:
        """Bytes of the state; 0-dim tensors aside."""

    def fragment_state(self, shard: Shard, number: int) -> dict[str, Any]:
        """torch's state of one fragment; empty before its first step."""

    def load_fragment(self, shard: Shard, number: int, state: Mapping[str, Any]) -> None:
        """Overwrite the state of one fragment by tensors of its length."""


def make_update(
    optimizer: torch.optim.Optimizer, groups: Groups, config: ShardcastConfig, comm: Comm,
    ready: Ready,
) -> Update:  # fmt: skip
    """The update for the class of ``optimizer``, whose groups it reads in every step.

    Args:
        groups: those of the optimizer, by number; may grow.
        ready: see :class:`~shardcast.step.update.several.Updates`.

    Raises:
        ValueError: a form of masters or moments, or offload, for a class that keeps its own state.
    """
    if type(optimizer) in rules.STATE_NAMES:
        return FusedUpdate(type(optimizer), groups, config)
    plain = ShardcastConfig()
    for name in ("master", "moments", "offload"):
        if getattr(config, name) != getattr(plain, name):
            raise ValueError(
                f"{name}: {getattr(config, name)!r} needs Adam, AdamW or SGD of torch.optim, got "
                f"{type(optimizer).__name__}, which keeps its state itself; use the default "
                f"{getattr(plain, name)!r}"
            )
    elementwise = type(optimizer) in ELEMENTWISE
    return AnyOptimizerUpdate(optimizer, groups, comm, elementwise, ready)
