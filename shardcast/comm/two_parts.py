"""Reductions in two parts, the second collective of which is launched with the next pack."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardcast.comm.objects import Comm
from shardcast.comm.reduction import Reduction, TakeBuffer
from shardcast.plan.layout import PackLayout
from shardcast.plan.precision import sum_dtype


class TwoLevelReduction(Reduction):
    """By two all-to-alls: inside each node, then between ranks of equal number on all nodes.

    With ``L`` ranks on each of ``N`` nodes, rank ``l`` of a node first gets what the ranks of its
    node have for the ranks ``l`` of all nodes, and sums it in the dtype of sums. These sums go on
    in that dtype, each to its node: nothing is rounded between the wire dtype, in which every
    gradient leaves its rank, and the mean. Needs spans of equal length. Both collectives are on the
    one process group, with empty pieces for all other ranks.
    """

    _second: tuple[Tensor, Tensor] | None = None  # sums of this node, and of all nodes

    def _launch(self, buffer: TakeBuffer) -> None:
        comm, sent, node = self._comm, self._sent, self._pack.algorithms.node
        self._node, self._nodes = node, comm.size // node
        self._count = self._own.numel()
        self._home, self._number = divmod(comm.rank, node)  # which node, and which of its ranks
        # In the order of those they go to: a pass over the pack, little next to what it saves.
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
            self._sent = rows[:0]  # the copy is free again
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
    """The sum of another reduction's result over the ranks that hold the same span, in fp32.

    The all-reduce runs during the backward as well: it is launched with the next pack.

    Args:
        add: gives the fp32 sum of what the ``first`` reduction brings, 1-d.
    """

    def __init__(
        self,
        first: Reduction,
        comm: Comm,
        pack: PackLayout,
        add: Callable[[Sequence[Tensor]], Tensor],
    ) -> None:
        self._first, self._comm, self._pack, self._add = first, comm, pack, add
        self._total: Tensor | None = None  # whose sum is under way

    def advance(self) -> None:
        if isinstance(self._first, TwoLevelReduction):  # its own second part comes first
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
