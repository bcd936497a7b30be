"""Gradients of one pack whose micro-batches are added in a tree, not in ``.grad``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardcast.comm import Buffers, Reduction
from shardcast.memory.gradients import Gradients
from shardcast.memory.pack import Pack

if TYPE_CHECKING:
    from shardcast.extensions.reproducible.tree import PartialSums


class TreeGradients(Gradients):
    """Full gradients; those of a micro-batch that ended are in sums, and nothing shows them.

    Attributes:
        taken: slots with a gradient in the sums.
    """

    def __init__(
        self, pack: Pack, dtype: torch.dtype, wire: torch.dtype, sums: PartialSums
    ) -> None:
        super().__init__(pack, dtype, wire)
        self._sums, self.taken = sums, set[int]()

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._sums.nbytes

    def presence(self) -> list[bool]:
        return [is_here or n in self.taken for n, is_here in enumerate(super().presence())]

    def end_micro_batch(self) -> None:
        if any(param.grad is not None for param in self.pack.params):
            super().collect()
            self._take(self._sums.add(self.data))

    def _take(self, memory: Tensor) -> None:
        """Show no gradient any more; the next ones are not added to these.

        Args:
            memory: what they are in, padding zero; other than ``data`` if that is to stay.
        """
        for position, param in enumerate(self.pack.params):
            if param.grad is not None:
                self.taken.add(position)
                param.grad = None
        if memory is not self._data:
            for position in range(len(self.pack.params)):
                self._part_with(position)
            self._allocate(memory)

    def collect(self) -> set[int]:
        for position in self.taken:  # zeros where none came since
            if self.pack.params[position].grad is None:
                self.clear(position)
                self.show(position)
        self.taken.clear()
        return super().collect()

    def send(self, buffers: Buffers) -> Reduction:
        take = partial(buffers.take, device=self.data.device)
        return self._sums.send(self.pack.comm, self.pack.layout, self.data, take)

    def landed(self, pieces: Sequence[Tensor]) -> None:
        self._sums.landed()
        super().landed(pieces)

    def drop_replaced(self) -> None:
        for position in [n for n in self.taken if self.pack.params[n].grad is not None]:
            self.discard(position)

    def discard(self, position: int) -> None:
        slot = self.pack.layout.slots[position]
        self._sums.discard(slice(slot.offset, slot.end))
        self.taken.discard(position)

    def forget(self) -> None:
        super().forget()
        self._sums.clear()
        self.taken.clear()

    def free(self) -> None:
        super().free()
        self._sums.free()
