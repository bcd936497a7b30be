"""Gradients of one pack on their way to the owners of its spans, one way of reducing per class.

Everything that is in flight, and the buffers that it needs, lives in one object: nobody may change
or free what was sent until :meth:`Reduction.wait` has returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast.comm.group import Work
from shardcast.comm.objects import Comm
from shardcast.plan.layout import PackLayout
from shardcast.plan.precision import sum_dtype

# From so many ranks on, what arrived is summed by one call over all rows. It takes pieces in an
# order of torch's own, equal in every run, and cannot tell whose was not finite.
MANY = 33


class Buffer:
    """Memory for what arrives of one pack after another; its views are made once for a length.

    Attributes:
        data: for the present pack, 1-d, of any values.
    """

    __slots__ = ("_memory", "_pieces", "data")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = self._memory = torch.empty(numel, dtype=dtype, device=device)
        self._pieces: Sequence[Tensor] = ()

    def fits(self, numel: int) -> bool:
        """Return whether it has room for so many elements; then ``data`` has that length."""
        if numel != self.data.numel():
            if numel > self._memory.numel():
                return False
            self.data, self._pieces = self._memory[:numel], ()
        return True

    def is_like(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether it is of this kind."""
        return self._memory.dtype == dtype and self._memory.device == device

    def pieces(self, count: int) -> list[Tensor]:
        """Return ``data`` in parts of ``count`` elements, the same tensors from pack to pack."""
        if not self._pieces or self._pieces[0].numel() != count:
            self._pieces = self.data.split(count)
        return [*self._pieces]


class Buffers:
    """The buffers of one pass that are free."""

    def __init__(self) -> None:
        self._free: list[Buffer] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Buffer:
        """A free one, or a new one."""
        small = None
        for position, buffer in enumerate(self._free):
            if buffer.is_like(dtype, device):
                if buffer.fits(numel):
                    return self._free.pop(position)
                small = position
        if small is not None:
            del self._free[small]  # a larger one takes its place
        return Buffer(numel, dtype, device)

    def free(self) -> None:
        """Keep none."""
        self._free.clear()

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back, which is free again."""
        self._free.append(buffer)


TakeBuffer = Callable[[int], Buffer]  # for so many elements of the wire dtype


class Reduction(ABC):
    """The gradients of one pack that one rank has under way.

    Args:
        sent: the gradients of the pack in the wire dtype, unchanged until :meth:`wait` returns.
        own: the own span of what is sent.

    Attributes:
        received: a buffer that is free again after :meth:`wait`.
        by_rank: whether what :meth:`wait` returns is a piece for each rank.
        mean_: writes the mean of what :meth:`wait` returned, as :data:`.reduce.mean.Mean` does, in
            an order of its own; ``None``: any does.
    """

    received: Buffer
    by_rank = False
    mean_: Callable[[Sequence[Tensor], Any, Tensor | None, Tensor], None] | None = None
    _work: Work

    def __init__(
        self, comm: Comm, pack: PackLayout, sent: Tensor, own: Tensor, buffer: TakeBuffer
    ) -> None:
        self._comm, self._pack, self._sent, self._own = comm, pack, sent, own
        self._launch(buffer)

    def _launch(self, buffer: TakeBuffer) -> None:  # noqa: B027, some have a constructor of their own
        """Start the first collective."""

    def advance(self) -> None:  # noqa: B027, most have nothing to do
        """Launch what follows on the first collective, if anything does.

        Every rank must call it at the same place among its collectives, or not at all.
        """

    @abstractmethod
    def wait(self) -> list[Tensor]:
        """Return what is to be added up for the own span, 1-d; one piece if that was done."""


class ReduceScatterReduction(Reduction):
    """By a reduce-scatter: the backend sums."""

    def _launch(self, buffer: TakeBuffer) -> None:
        self.received = buffer(self._own.numel())
        self._work = self._comm.reduce_scatter(self.received.data, self._sent, self._pack)

    def wait(self) -> list[Tensor]:
        self._work.wait()
        return [self.received.data]


class AllToAllReduction(Reduction):
    """By one all-to-all: the pieces of all ranks come here."""

    def _launch(self, buffer: TakeBuffer) -> None:
        comm, lengths, count = self._comm, self._pack.lengths, self._own.numel()
        self.by_rank = comm.size < MANY
        self.received = buffer(count * comm.size)
        received, sent = (None, None) if len(lengths) == 1 else ([count] * comm.size, lengths)
        self._work = comm.all_to_all(self.received.data, self._sent, received, sent, self._pack)

    def wait(self) -> list[Tensor]:
        self._work.wait()
        count = self._own.numel()
        if not count:
            return [self.received.data]
        if self.by_rank:
            pieces = self.received.pieces(count)
            pieces[self._comm.rank] = self._own
            return pieces
        rows = self.received.data.view(-1, count)
        rows[self._comm.rank] = self._own
        return [rows.sum(0, dtype=sum_dtype(rows.dtype))]
