"""Marks in the gradients of a pack: NaN where a rank has no mean."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.memory.pack import Pack

MARKED = 1 << 10  # of so many elements that are no mean, one at least is NaN


class Marks(NamedTuple):
    """Where the gradients of a pack are marked, and by what.

    Attributes:
        positions: elements of the pack that are marked, then canaries, 1-d int64.
        values: what is written there: NaN, 0 for canaries.
        canaries: the last ones of ``positions``.
        hidden: what was there before, on a host.
    """

    positions: Tensor
    values: Tensor
    canaries: Tensor
    hidden: Tensor | None

    @classmethod
    def of(cls, pack: Pack, dtype: torch.dtype, device: torch.device) -> Marks:
        """The marks of all parts of slots that lie outside of the own span."""
        own, every, canaries = pack.own, [torch.empty(0, dtype=torch.int64)], []
        for slot in pack.layout.slots:
            below = slot.offset, min(slot.end, own.start) if own.numel else slot.end
            above = (max(slot.offset, own.stop), slot.end) if own.numel else (0, 0)
            for start, stop in (below, above):
                if start < stop:
                    every.append(torch.arange(start, stop, MARKED))
                if start + 1 < stop:
                    canaries.append(start + 1)
        marked = torch.cat(every)
        canary = torch.tensor(canaries, dtype=torch.int64)
        values = torch.zeros(len(marked) + len(canary), dtype=dtype)
        values[: len(marked)] = math.nan
        positions = torch.cat([marked, canary]).to(device)
        hidden = values.clone() if _compat.is_host(device) else None
        return cls(positions, values.to(device), positions[len(marked) :], hidden)

    def put(self, data: Tensor) -> None:
        """Mark the gradients of the pack."""
        if self.positions.numel():
            if self.hidden is not None:
                torch.index_select(data, 0, self.positions, out=self.hidden)
            data.index_copy_(0, self.positions, self.values)

    def hidden_at(self, offset: int) -> Tensor | None:
        """What a mark or canary hides; ``None`` where there is none."""
        here = (self.positions == offset).nonzero()
        return self.hidden[here[0, 0]] if self.hidden is not None and here.numel() else None
