"""Marks in the gradients of a pack: NaN where a rank has no mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.memory.pack import Pack
from shardcast.plan.layout import Slot, Span

MARKED = 1 << 10  # of so many elements that are no mean, one at least is NaN


class Marks(NamedTuple):
    """The places where the gradients of a pack are marked.

    Attributes:
        positions: elements of the pack, 1-d int64.
        hidden: what was there before, on a host.
    """

    positions: Tensor
    hidden: Tensor | None

    @classmethod
    def of(cls, pack: Pack, dtype: torch.dtype, device: torch.device) -> Marks:
        """Make the marks of all parts of slots that lie outside of the own span."""
        every = [torch.empty(0, dtype=torch.int64)]
        for start, stop in elsewhere(pack.layout.slots, pack.own):
            every.append(torch.arange(start, stop, MARKED))
        positions = torch.cat(every)
        hidden = torch.empty(len(positions), dtype=dtype) if _compat.is_host(device) else None
        return cls(positions.to(device), hidden)

    @property
    def nbytes(self) -> int:
        """The bytes on this rank."""
        return self.positions.nbytes + (0 if self.hidden is None else self.hidden.nbytes)

    def put(self, data: Tensor) -> None:
        """Mark the gradients of the pack."""
        if self.positions.numel():
            if self.hidden is not None:
                torch.index_select(data, 0, self.positions, out=self.hidden)
            data.index_fill_(0, self.positions, math.nan)

    def hidden_at(self, offset: int) -> Tensor | None:
        """Return what a mark hides; ``None`` where there is none."""
        places = (self.positions == offset).nonzero()
        return self.hidden[places[0, 0]] if self.hidden is not None and places.numel() else None


def elsewhere(slots: Iterable[Slot], own: Span) -> Iterator[tuple[int, int]]:
    """Give the parts of slots that lie outside of the own span."""
    for slot in slots:
        below = slot.offset, min(slot.end, own.start) if own.numel else slot.end
        above = (max(slot.offset, own.stop), slot.end) if own.numel else (0, 0)
        for start, stop in (below, above):
            if start < stop:
                yield start, stop
