"""One pack's gradients on their way to the owners of its spans; one class per algorithm.

Everything in flight, with its buffers, belongs to one object. Nobody may change or free sent data
until :meth:`Reduction.wait` has returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm.group import Work
from shardcast.comm.objects import Comm
from shardcast.plan.layout import PackLayout
from shardcast.plan.precision import sum_dtype

# From so many ranks on, one call sums all received rows. Its order is torch's, equal in every run,
# and it cannot tell whose row was not finite.
MANY = 33


class Buffer:
    """Memory that one pack after another sends from or receives into, with cached views.

    Attributes:
        data: part for the current pack, 1-d, with any values.
    """

    __slots__ = ("_memory", "_pieces", "data")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = self._memory = torch.empty(numel, dtype=dtype, device=device)
        self._pieces: Sequence[Tensor] = ()

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def fits(self, numel: int) -> bool:
        """Return whether it has room for this many elements; then ``data`` has that length."""
        if numel != self.data.numel():
            if numel > self._memory.numel():
                return False
            self.data, self._pieces = self._memory[:numel], ()
        return True

    def pieces(self, count: int) -> list[Tensor]:
        """Return ``data`` in parts of ``count`` elements; the same tensors for every pack."""
        if not self._pieces or self._pieces[0].numel() != count:
            self._pieces = self.data.split(count)
        return [*self._pieces]


class Buffers:
    """Free buffers of a reducer, for packs to send from and receive into.

    A host keeps them from step to step, at most as many as were in flight at once. Its allocator
    would return them to the system, and each step would fault every page again. On an accelerator
    none are kept, because torch's allocator reuses memory and knows which streams still use it.
    """

    def __init__(self) -> None:
        self._free: list[Buffer] = []

    @property
    def nbytes(self) -> int:
        """Bytes of kept buffers."""
        return sum(buffer.nbytes for buffer in self._free)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Buffer:
        """Return a free buffer, or a new one."""
        small = None
        for position, buffer in enumerate(self._free):
            if (buffer.data.dtype, buffer.data.device) == (dtype, device):
                if buffer.fits(numel):
                    return self._free.pop(position)
                small = position
        if small is not None:
            del self._free[small]  # a larger one replaces it
        return Buffer(numel, dtype, device)

    def free(self) -> None:
        """Release all buffers."""
        self._free.clear()

    def give(self, buffer: Buffer) -> None:
        """Take back a buffer, which is free again."""
        if _compat.is_host(buffer.data.device):
            self._free.append(buffer)


TakeBuffer = Callable[[int], Buffer]  # returns a buffer for so many elements of the wire dtype


class Reduction(ABC):
    """A reduction in flight: one pack's gradients on one rank.

    Args:
        sent: the pack's gradients in the wire dtype, unchanged until :meth:`wait` returns.
        own: this rank's span of ``sent``.

    Attributes:
        received: a buffer that is free again after :meth:`wait`.
        by_rank: whether :meth:`wait` returns one piece per rank.
        mean_: writes the mean of the pieces from :meth:`wait` in a specific order, like
            :data:`.reduce.mean.Mean`; ``None``: any order.
    """

    received: Buffer
    by_rank = False
    mean_: Callable[[Sequence[Tensor], float | Tensor, Tensor | None, Tensor], None] | None = None
    _work: Work

    def __init__(
        self, comm: Comm, pack: PackLayout, sent: Tensor, own: Tensor, buffer: TakeBuffer
    ) -> None:
        self._comm, self._pack, self._sent, self._own = comm, pack, sent, own
        self._launch(buffer)

    def _launch(self, buffer: TakeBuffer) -> None:  # noqa: B027, some have a constructor of their own
        """Launch the first collective."""

    def advance(self) -> None:  # noqa: B027, most have nothing to do
        """Launch the collective that follows the first one, if any.

        Every rank must call it at the same point among its collectives, or not at all.
        """

    @abstractmethod
    def wait(self) -> list[Tensor]:
        """Return the pieces to sum for this rank's span, 1-d; one piece if already summed."""


class ReduceScatterReduction(Reduction):
    """By a reduce-scatter: the backend sums."""

    def _launch(self, buffer: TakeBuffer) -> None:
        self.received = buffer(self._own.numel())
        self._work = self._comm.reduce_scatter(self.received.data, self._sent, self._pack)

    def wait(self) -> list[Tensor]:
        self._work.wait()
        return [self.received.data]


class AllToAllReduction(Reduction):
    """By one all-to-all: this rank gets all ranks' pieces of its span."""

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


class TwoLevelReduction(Reduction):
    """By two all-to-alls: within each node, then between ranks of equal number on all nodes.

    With ``L`` ranks on each of ``N`` nodes, rank ``l`` of a node first gets its node's pieces for
    the ranks ``l`` of all nodes, and sums them in the dtype of sums. These sums are sent on in that
    dtype, each to its node. So nothing is rounded between the wire dtype, in which a gradient
    leaves its rank, and the mean. It needs spans of equal length. Both collectives use the same
    process group, with empty pieces for all other ranks.
    """

    _second: tuple[Tensor, Tensor] | None = None  # this node's sums, and those of all nodes

    def _launch(self, buffer: TakeBuffer) -> None:
        comm, sent, node = self._comm, self._sent, self._pack.algorithms.node
        self._node, self._nodes = node, comm.size // node
        self._count = self._own.numel()
        # index of the node, and of the rank in it
        self._home, self._number = divmod(comm.rank, node)
        # In the order of receivers. This is a pass over the pack, which costs little compared with
        # the traffic it saves.
        by_number = sent.view(self._nodes, node, self._count).transpose(0, 1).contiguous()
        self._sent = by_number.view(node, self._nodes * self._count)
        self.received = buffer(sent.numel())
        splits = [0] * comm.size
        splits[self._home * node : (self._home + 1) * node] = [self._sent.shape[1]] * node
        self._work = comm.all_to_all(
            self.received.data, self._sent.view(-1), splits, splits, self._pack
        )

    def advance(self) -> None:
        self._advanced()

    def _advanced(self) -> tuple[Tensor, Tensor]:
        if self._second is None:
            self._work.wait()
            rows = self.received.data.view(self._sent.shape)
            rows[self._number] = self._sent[self._number]
            sums = rows.sum(0, dtype=sum_dtype(rows.dtype))
            self._sent = rows[:0]  # release the copy
            self._second = sums, torch.empty_like(sums)
            splits = [0] * self._comm.size
            splits[self._number :: self._node] = [self._count] * self._nodes
            self._work = self._comm.all_to_all(self._second[1], sums, splits, splits, self._pack)
        return self._second

    def wait(self) -> list[Tensor]:
        sums, arrived = self._advanced()
        self._work.wait()
        shape = self._nodes, self._count
        rows = arrived.view(shape)
        rows[self._home] = sums.view(shape)[self._home]
        return [rows.sum(0)]


class ReplicaSumReduction(Reduction):
    """Sum of another reduction's result over the ranks that hold the same span, in fp32.

    The all-reduce also runs during the backward; it is launched with the next pack.

    Args:
        add: returns the fp32 sum of the ``first`` reduction's pieces, 1-d.
    """

    def __init__(
        self,
        first: Reduction,
        comm: Comm,
        pack: PackLayout,
        add: Callable[[Sequence[Tensor]], Tensor],
    ) -> None:
        self._first, self._comm, self._pack, self._add = first, comm, pack, add
        self._total: Tensor | None = None  # this rank's part of the sum in flight

    def advance(self) -> None:
        # it must first launch its own second collective
        if isinstance(self._first, TwoLevelReduction):
            self._first.advance()
        else:
            self._advanced()

    def _advanced(self) -> Tensor:
        if self._total is None:
            self._total = self._add(self._first.wait())
            self.received = self._first.received
            self._work = self._comm.all_reduce(self._total, self._pack, async_op=True)
        return self._total

    def wait(self) -> list[Tensor]:
        total = self._advanced()
        self._work.wait()
        return [total]
