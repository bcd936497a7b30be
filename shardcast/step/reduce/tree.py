"""Reduce: gradients of micro-batches added in one binary tree, whatever rank has which of them.

The leaves are the gradients of the micro-batches of a step, each rounded to the wire dtype; nodes
are fp32 sums of two nodes. Which additions are made, and so every rounding, follows from the number
of micro-batches alone. A rank adds what it has of the tree, as a binary counter does, and sends the
nodes that are complete; owners add the rest. Six micro-batches on two ranks::

    rank 0 has 0, 1, 2 and sends 0 + 1 and 2          owner: ((0 + 1) + (2 + 3)) + (4 + 5)
    rank 1 has 3, 4, 5 and sends 3 and 4 + 5

A gradient that is absent counts as zero and is not added: a sum could differ by the sign of a zero
alone, which is taken away at the end. With one micro-batch on each rank what is sent is what is
sent without a tree; else it is one node of fp32 where the ranks have powers of two of them, and at
most ``log2`` of their number and one more elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import Comm, Reduction
from shardcast.messages import by_rank
from shardcast.plan.layout import PackLayout
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.reduce.mean import CHUNK


class Node(NamedTuple):
    """The sum of micro-batches ``number * 2**level`` up to ``(number + 1) * 2**level``."""

    level: int
    number: int

    @property
    def children(self) -> tuple[Node, Node]:
        return Node(self.level - 1, 2 * self.number), Node(self.level - 1, 2 * self.number + 1)


class MicroBatches:
    """Which micro-batches of a step this rank has, and which of them it has had.

    Args:
        total: in a step, over all ranks, which divide it; ``True``: as many as the first step has.

    Attributes:
        total: 0 as long as it is not known; ``current`` counts this rank's own until then.
        own: those of this rank, rank after rank.
        nodes: of each rank.
        current: the one that the running backward is of, or the next one.
        begun: gradients of it have come.
        numbered: the script says which one each is.
    """

    def __init__(self, total: int, comm: Comm) -> None:
        self._comm, self._done = comm, set[int]()
        self.sums: list[PartialSums] = []  # of each pack
        self._is_counted = total is True
        self._settle(0 if self._is_counted else total)
        self.reset()

    def _settle(self, total: int) -> None:
        self.total, self._is_known = total, total > 0
        count = total // self._comm.size or sys.maxsize
        ranges = [range(rank * count, (rank + 1) * count) for rank in range(self._comm.size)]
        self.own = ranges[self._comm.rank] if total else ranges[0]
        self.nodes = [nodes_of(own) for own in ranges] if total else []

    def load(self, total: int) -> None:
        """Have as many as the steps of a checkpoint, where the first step would say how many."""
        if self._is_counted and total:
            self._settle(total)
            self.reset()

    def agree(self, device: torch.device) -> None:
        """Count those of the first step, of all ranks. Collective; the host waits.

        Raises:
            RuntimeError: on all ranks, if their sums are no nodes of one tree.
        """
        if self.total:
            return
        size, counts = self._comm.size, self._comm.exchange(len(self._done), device)
        count = counts[0]
        if len(set(counts)) > 1 or (size > 1 and count & (count - 1)):
            raise RuntimeError(
                "reproducible: expected in the first step one number of micro-batches on all "
                f"ranks, a power of two, got {by_rank(enumerate(counts))}; with others set "
                f"reproducible to their number over all ranks ({sum(counts)}), not to true"
            )
        self._settle(max(1, count) * size)
        self._is_known = count > 0  # else it is a step without backwards
        self._done = {self.own.start + number for number in self._done}
        self.current += self.own.start
        for sums in self.sums:
            sums.shift(self.own.start)

    def reset(self) -> None:
        """A step begins."""
        if not self._is_known:
            self._settle(0)
        self.current, self.begun, self.numbered = self.own.start, False, False
        self._done.clear()

    @property
    def last(self) -> bool:
        """Whether the current one is known to be this rank's last one of the step."""
        return not self.numbered and self.current >= self.own.stop - 1

    def begin(self) -> None:
        """A gradient of the current one comes.

        Raises:
            RuntimeError: this rank has had all of its own, or a loaded number does not suit ranks.
        """
        if self.total % self._comm.size:
            raise RuntimeError(
                "reproducible: expected a number of ranks that divides the micro-batches of a step "
                f"of the loaded run, {self.total}, got {self._comm.size}"
            )
        if self.current not in self.own:
            raise RuntimeError(
                f"reproducible: expected {len(self.own)} micro-batches in a step on each of "
                f"{self._comm.size} ranks, got one more; call step() and zero_grad() after them, "
                "set reproducible to their number over all ranks, or say by "
                "optimizer.micro_batch(index) which backwards are of one"
            )
        self.begun = True

    def choose(self, index: int) -> None:
        """What comes is of this one; see :meth:`shardcast.ShardedOptimizer.micro_batch`.

        Raises:
            ValueError: it is not one of this rank, or it was ended.
            RuntimeError: how many there are is not known yet.
        """
        if not self.total:
            raise RuntimeError(
                "micro_batch: expected reproducible to be the number of micro-batches of a step, "
                "got true, which counts them in the first step"
            )
        if index not in self.own or index in self._done:
            why = "was ended before" if index in self._done else "is not of this rank"
            raise ValueError(
                f"micro_batch: expected an index from {self.own.start} to {self.own.stop - 1} on "
                f"rank {self._comm.rank}, each once in a step, got {index}, which {why}"
            )
        self.current, self.numbered = index, True

    def end(self) -> None:
        """The current one has all its gradients."""
        self._done.add(self.current)
        self.current, self.begun = self.current + 1, False

    @property
    def count(self) -> str:
        """How many there were in this step; if the number is wrong it differs between all ranks.

        Raises:
            RuntimeError: it is wrong, and there is one rank.
        """
        if self.numbered or not self._done:  # a rank may have none of those with numbers
            return ""
        if len(self._done) == len(self.own):
            return str(len(self._done))
        if self._comm.size == 1:
            raise RuntimeError(
                f"reproducible: expected {self.total} micro-batches in a step, got "
                f"{len(self._done)}; for a step with fewer of them say by "
                "optimizer.micro_batch(index) which ones they are"
            )
        return f"{len(self._done)} instead of {len(self.own)} on rank {self._comm.rank}"


class PartialSums:
    """The nodes of one pack that this rank has, each with a value for every element of the pack."""

    def __init__(self, micro_batches: MicroBatches, wire: torch.dtype) -> None:
        self._micro_batches, self._wire = micro_batches, wire
        micro_batches.sums.append(self)
        self._sums: dict[Node, Tensor] = {}
        self._sent: list[Tensor] = []  # until they have arrived
        self._free: list[Tensor] = []  # memory for sums: to allocate it anew costs a pass on a CPU

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._sums.values(), *self._free))

    def clear(self) -> None:
        self._free += self._sums.values()
        self._sums.clear()

    def landed(self) -> None:
        """What was sent has arrived."""
        self._free += self._sent
        self._sent = []

    def shift(self, first: int) -> None:
        """Micro-batches that were counted from 0 were counted from ``first``."""
        self._sums = {
            Node(level, number + (first >> level)): total
            for (level, number), total in self._sums.items()
        }

    def discard(self, elements: slice) -> None:
        """Elements whose gradients were cleared."""
        for tensor in self._sums.values():
            tensor[elements].zero_()

    def add(self, gradient: Tensor) -> None:
        """The gradient of the current micro-batch, 1-d."""
        node, total = Node(0, self._micro_batches.current), gradient.to(self._wire)
        while (sibling := Node(node.level, node.number ^ 1)) in self._sums:
            addend, total = total, self._sums.pop(sibling)
            add_(total, addend)
            if node.level:
                self._free.append(addend)
            node = Node(node.level + 1, node.number // 2)
        if not node.level:  # the memory of the gradient is used again
            total = self._room(gradient).copy_(total)
        self._sums[node] = total

    def _room(self, like: Tensor) -> Tensor:
        return self._free.pop() if self._free else torch.empty_like(like, dtype=MASTER_DTYPE)

    def send(
        self, comm: Comm, pack: PackLayout, gradient: Tensor,
        buffer: Callable[[int, torch.dtype], Tensor],
    ) -> Reduction:  # fmt: skip
        """Send to each owner its part of this rank's nodes.

        Args:
            gradient: of the current micro-batch, or zeros.
        """
        own, nodes = self._micro_batches.own, self._micro_batches.nodes
        if len(own) == 1:
            rows = [self._sums.pop(Node(0, own.start), gradient).to(self._wire)]
        else:
            if self._micro_batches.begun:
                self.add(gradient)
            rows = []
            for node in nodes[comm.rank]:
                total = _sum(self._sums, node)
                rows.append(self._room(gradient).zero_() if total is None else total)
            self._sums.clear()
            self._sent = rows
        depth = (self._micro_batches.total - 1).bit_length()
        return _TreeReduction(comm, pack, rows, nodes, Node(depth, 0), buffer)


class _TreeReduction(Reduction):
    """By one all-to-all: the own span of all ranks' nodes comes here, and is added up."""

    def __init__(
        self, comm: Comm, pack: PackLayout, rows: Sequence[Tensor],
        nodes: Sequence[Sequence[Node]], root: Node, buffer: Callable[[int, torch.dtype], Tensor],
    ) -> None:  # fmt: skip
        own = pack.spans[comm.rank]
        self._nodes, self._root, self._rank, self._count = nodes, root, comm.rank, own.numel
        self._own_rows = [row[own.start : own.stop] for row in rows]
        # In the order of the owners they go to.
        self._sent = rows[0]
        if len(rows) > 1:
            parts = [row[span.start : span.stop] for span in pack.spans for row in rows]
            self._sent = torch.cat(parts)
        self.received = buffer(own.numel * sum(map(len, nodes)), rows[0].dtype)
        received = [own.numel * len(of_rank) for of_rank in nodes]
        sent = [span.numel * len(rows) for span in pack.spans]
        equal = len(set(received)) == 1 and len(set(sent)) == 1
        splits: tuple[Any, Any] = (None, None) if equal else (received, sent)
        self._work = comm.all_to_all(self.received, self._sent, *splits, about=pack)

    def wait(self) -> list[Tensor]:
        self._work.wait()
        pieces: dict[Node, Tensor] = {}
        start = 0
        for rank, of_rank in enumerate(self._nodes):
            for number, node in enumerate(of_rank):
                piece = self.received[start : start + self._count]
                pieces[node] = self._own_rows[number] if rank == self._rank else piece
                start += self._count
        total = _sum(pieces, self._root)
        assert total is not None
        return [total.to(MASTER_DTYPE).add_(0.0)]  # -0 becomes 0


def most_sums(count: int) -> int:
    """How many sums a rank keeps at a time that has so many micro-batches in a step."""
    return (count - 1).bit_length()


def nodes_of(leaves: range) -> list[Node]:
    """The largest nodes that consist of ``leaves``, from left to right."""
    nodes, start = [], leaves.start
    while start < leaves.stop:
        level = (start & -start).bit_length() - 1 if start else leaves.stop.bit_length()
        while start + (1 << level) > leaves.stop:
            level -= 1
        nodes.append(Node(level, start >> level))
        start += 1 << level
    return nodes


def _sum(sums: dict[Node, Tensor], node: Node) -> Tensor | None:
    """The value of ``node`` from those of ``sums`` below it, which it overwrites; None of none."""
    if node in sums:
        return sums[node]
    if not node.level:
        return None
    left, right = (_sum(sums, child) for child in node.children)
    if left is None or right is None:
        return right if left is None else left
    total = left.to(MASTER_DTYPE)
    add_(total, right)
    return total


def add_(total: Tensor, addend: Tensor) -> None:
    """``total += addend``, which may be of a lower dtype; 1-d."""
    step = total.numel() if not _compat.is_host(total.device) else CHUNK
    for start in range(0, total.numel(), max(1, step)):  # a CPU casts all of it before it adds
        total[start : start + step].add_(addend[start : start + step])
