"""Several optimizers on one model: every shard is updated by the one whose group its pack is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.memory.shard import Shard
from shardcast.plan.originals import Originals
from shardcast.step.combine.decision import Decision
from shardcast.step.update.any_optimizer import Ready
from shardcast.step.update.interface import Update, make_update


class Updates:
    """The updates of all optimizers, by the number of the parameter group.

    Args:
        ready: called with packs that are updated before others, on all ranks alike.
    """

    def __init__(
        self, originals: Originals, config: ShardcastConfig, comm: Comm,
        ready: Ready = lambda _packs: None,
    ) -> None:  # fmt: skip
        self._originals = originals
        self._groups: list[dict[int, dict[str, Any]]] = []  # of each optimizer, by number
        self._updates: list[Update] = []
        for place, optimizer in enumerate(originals.optimizers):
            groups = {number: originals.groups[number] for number in originals.numbers(place)}
            self._groups.append(groups)
            self._updates.append(make_update(optimizer, groups, config, comm, ready))

    def _of(self, shard: Shard) -> Update:
        owner = self._originals.owner(shard.pack.layout.group)
        return self._updates[self._originals.optimizers.index(owner)]

    def add(self, shard: Shard) -> None:
        """Update ``shard`` too, from now on."""
        number = shard.pack.layout.group
        place = self._originals.optimizers.index(self._originals.owner(number))
        self._groups[place][number] = self._originals.groups[number]
        self._updates[place].add(shard)

    def __call__(self, decision: Decision, present: Mapping[Shard, Sequence[bool]]) -> None:
        """Unscale, clip, update and cast the own spans.

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

    def fragment_state(self, shard: Shard, number: int) -> dict[str, Any]:
        """torch's state of one fragment, by its number in ``shard.fragments``."""
        return self._of(shard).fragment_state(shard, number)

    def load_fragment(self, shard: Shard, number: int, state: Mapping[str, Any]) -> None:
        """Overwrite the state of one fragment."""
        self._of(shard).load_fragment(shard, number, state)
