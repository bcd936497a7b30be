"""Which update runs an optimizer; of several, each one updates the shards of its own groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.memory.shard import Shard
from shardcast.plan.originals import Originals
from shardcast.plan.partition import ELEMENTWISE
from shardcast.step.decide.decision import Decision
from shardcast.step.update import rules
from shardcast.step.update.any_optimizer import AnyOptimizerUpdate, Ready
from shardcast.step.update.fused import FusedUpdate
from shardcast.step.update.fusion import epilogues_of

Update = FusedUpdate | AnyOptimizerUpdate


class Updates:
    """The updates of all optimizers; each one updates the shards of its own groups.

    Args:
        ready: called with packs that are updated before others, on all ranks alike.

    Raises:
        ValueError: a form of masters or moments, or offload, for a class that keeps its own state.
    """

    def __init__(
        self, originals: Originals, config: ShardcastConfig, comm: Comm,
        ready: Ready = lambda _packs: None,
    ) -> None:  # fmt: skip
        self._updates = [
            _update_of(optimizer, config, comm, ready) for optimizer in originals.optimizers
        ]

    def _of(self, shard: Shard) -> Update:
        return self._updates[shard.pack.layout.group.optimizer]

    def add(self, shard: Shard) -> None:
        """Update ``shard`` too, from now on."""
        self._of(shard).add(shard)

    def __call__(self, decision: Decision, present: Mapping[Shard, Sequence[bool]]) -> None:
        """Unscale, clip, update, cast and publish the own spans; leave absent gradients untouched.

        Args:
            present: per shard and fragment, whether some rank has a gradient.
        """
        for update in self._updates:
            update(decision, present)

    def elementwise(self, shard: Shard) -> bool:
        """Whether the state of a fragment has one element per element of it."""
        return self._of(shard).elementwise

    def switch(self, mode: str) -> bool:
        """Call ``train`` or ``eval`` of optimizers that have it.

        Returns:
            Whether masters may have changed and were published; a sync must follow.
        """
        switched = [update.switch(mode) for update in self._updates]
        return any(switched)

    def nbytes(self) -> int:
        """Bytes of the state, 0-dim tensors aside."""
        return sum(update.nbytes() for update in self._updates)

    def fragment_state(self, shard: Shard, number: int, decode: bool = True) -> dict[str, Any]:
        """torch's state of one fragment, by its number in ``shard.fragments``; empty before use.

        Args:
            decode: without it tensors that are kept in another form are on the meta device.
        """
        return self._of(shard).fragment_state(shard, number, decode)

    def sums(self, shard: Shard) -> dict[str, Tensor]:
        """The sums of epilogues by name: per fragment, of its last update; see :class:`.Epilogue`.

        They are of this rank's part of a parameter; a skipped step leaves them as they were.
        """
        return self._of(shard).sums(shard)

    def load_fragment(self, shard: Shard, number: int, state: Mapping[str, Any]) -> None:
        """Overwrite the state of one fragment by tensors of its length."""
        self._of(shard).load_fragment(shard, number, state)


def _update_of(
    optimizer: torch.optim.Optimizer, config: ShardcastConfig, comm: Comm, ready: Ready
) -> Update:
    """The update for a class; it reads the groups of ``optimizer`` in every step."""
    if type(optimizer) in rules.STATE_NAMES:
        return FusedUpdate(optimizer, config, epilogues_of(config))
    plain = ShardcastConfig()
    for name in ("master", "moments", "offload"):
        if getattr(config, name) != getattr(plain, name):
            raise ValueError(
                f"{name}: {getattr(config, name)!r} needs Adam, AdamW or SGD of torch.optim, got "
                f"{type(optimizer).__name__}, which keeps its state itself; use the default "
                f"{getattr(plain, name)!r}"
            )
    elementwise = type(optimizer) in ELEMENTWISE
    return AnyOptimizerUpdate(optimizer, comm, elementwise, ready)
