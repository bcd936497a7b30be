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

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from shardcast.comm import Buffer, Buffers, Comm, Reduction
from shardcast.extensions.reproducible.exact_norm import ExactNorm
from shardcast.extensions.reproducible.storage import TreeGradients
from shardcast.extensions.reproducible.zero_grad import ZeroGrad
from shardcast.memory.pack import Pack
from shardcast.messages import by_rank
from shardcast.plan.layout import PackLayout
from shardcast.plan.precision import MASTER_DTYPE, sum_dtype
from shardcast.step.decide.norm import PNorm
from shardcast.step.reduce.mean import chunks, divide_
from shardcast.step.reduce.reducer import Reducer

Sum: TypeAlias = "Tensor | tuple[Sum, Sum]"


class Node(NamedTuple):
    """The sum of micro-batches ``number * 2**level`` up to ``(number + 1) * 2**level``."""

    level: int
    number: int

    @property
    def children(self) -> tuple[Node, Node]:
        return Node(self.level - 1, 2 * self.number), Node(self.level - 1, 2 * self.number + 1)

    @property
    def parent(self) -> Node:
        return Node(self.level + 1, self.number // 2)

    @property
    def sibling(self) -> Node:
        return Node(self.level, self.number ^ 1)

    def covers(self, node: Node) -> bool:
        """Return whether ``node`` is this one or below it."""
        return node.level <= self.level and node.number >> (self.level - node.level) == self.number


class MicroBatches:
    """The micro-batches of a step on this rank, and how far it has come among them.

    Args:
        total: in a step, over all ranks, which divide it; ``True``: as many as the first step has.

    Attributes:
        total: 0 as long as it is not known; ``current`` counts this rank's own until then.
        own: those of this rank, rank after rank.
        nodes: of each rank.
        current: the one that the running backward is of, or the next one.
        begun: gradients of it have come.
        numbered: the script says which one each is.
        first: those of this step were counted.
        spare: buffers of messages: to allocate them anew costs a pass on a CPU.
    """

    def __init__(self, total: int, comm: Comm) -> None:
        self._comm, self._done = comm, set[int]()
        self._sums: list[PartialSums] = []  # of each pack
        self.spare = Buffers()
        self._is_counted = total is True
        self._settle(0 if self._is_counted else total)
        self.reset()

    def storage(self, pack: Pack, dtype: torch.dtype, wire: torch.dtype) -> TreeGradients:
        """Return the gradients of one more pack, and what this rank has of the tree in it."""
        self._sums.append(PartialSums(self, wire))
        return TreeGradients(pack, dtype, wire, self._sums[-1])

    def watch(self, model: nn.Module, reducer: Reducer) -> ZeroGrad:
        """Have ``model.zero_grad()`` clear sums of ``reducer`` too."""
        return ZeroGrad(model, reducer)

    def norm(self, norm_type: float, device: torch.device) -> PNorm:
        """A sum of squares without an order; a maximum has none, other powers are rounded."""
        return ExactNorm(device) if norm_type == 2.0 else PNorm(norm_type, device)

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

    def divides(self, total: int) -> bool:
        """Return whether they are what a framework takes for all of a step."""
        if self._is_counted and self.total not in (0, total):
            raise RuntimeError(
                f"reproducible: expected {total} micro-batches in a step, accumulation steps times "
                f"ranks, got {self.total}; set reproducible to their number, not to true"
            )
        return self._is_counted or self.total == total

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
        self._is_known = self.first = count > 0  # else it is a step without backwards
        self._done = {self.own.start + number for number in self._done}
        self.current += self.own.start
        for sums in self._sums:
            sums.shift(self.own.start)

    def reset(self) -> None:
        """A step begins."""
        if not self._is_known:
            self._settle(0)
        self.current, self.begun, self.numbered = self.own.start, False, False
        self.first = False
        self._done.clear()

    @property
    def last(self) -> bool:
        """Return whether the current one is known to be this rank's last one of the step."""
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
        """Begin this micro-batch; see :meth:`shardcast.ShardedOptimizer.micro_batch`.

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
        """Return how many there were in this step; a wrong number differs between all ranks.

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
    """This rank's part of the tree in one pack: nodes, with a value for each element.

    Leaves stay what they are while they take no more memory than their sum: two leaves of 16 bits.
    """

    def __init__(self, micro_batches: MicroBatches, wire: torch.dtype) -> None:
        self._micro_batches, self._wire = micro_batches, wire
        self._sums: dict[Node, Tensor] = {}
        self._sent: list[Tensor] = []  # until they have arrived
        self._free: list[Tensor] = []  # to allocate it anew costs a pass on a CPU; padding is zero

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._sums.values(), *self._free))

    def clear(self) -> None:
        self._free += self._sums.values()
        self._sums.clear()

    def free(self) -> None:
        """Keep no memory, neither of messages."""
        self._sums, self._sent, self._free = {}, [], []
        self._micro_batches.spare.free()

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

    def add(self, gradient: Tensor) -> Tensor:
        """The gradient of the current micro-batch, 1-d.

        Returns:
            Memory for the next one, padding zero: that of this one, unless it stays here.
        """
        node = self._add_leaf(gradient)
        while _is_whole(self._sums, node.sibling):
            node = node.parent
        if self._wire.itemsize << node.level > MASTER_DTYPE.itemsize:
            self._join(node, gradient)
        stays = any(total is gradient for total in self._sums.values())
        return self._room(gradient, gradient.dtype) if stays else gradient

    def _add_leaf(self, gradient: Tensor) -> Node:
        node, leaf = Node(0, self._micro_batches.current), gradient
        if leaf.dtype != self._wire:
            leaf = self._room(gradient, self._wire).copy_(gradient)
        self._sums[node] = leaf
        return node

    def _join(self, node: Node, gradient: Tensor) -> None:
        """Have ``node`` in place of all below it."""
        parts = {below: self._sums.pop(below) for below in [*self._sums] if node.covers(below)}
        rest = [total for total in parts.values() if total is not gradient]
        room = next((total for total in rest if total.dtype == MASTER_DTYPE), None)
        if room is None:
            room = self._room(gradient, MASTER_DTYPE)
        _write(room, _sum_of(parts, node))
        self._sums[node] = room
        self._free += [total for total in rest if total is not room]

    def _room(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        for position, tensor in enumerate(self._free):
            if tensor.dtype == dtype:
                return self._free.pop(position)
        return torch.zeros_like(like, dtype=dtype)

    def send(
        self, comm: Comm, pack: PackLayout, gradient: Tensor,
        buffer: Callable[[int, torch.dtype], Buffer],
    ) -> TreeReduction:  # fmt: skip
        """Send to each owner its part of this rank's nodes.

        Args:
            gradient: of the current micro-batch, or zeros.
        """
        micro_batches, message = self._micro_batches, None
        if len(micro_batches.own) == 1:
            leaf = Node(0, micro_batches.own.start)
            message = self._sums[leaf] = self._sums.get(leaf, gradient).to(self._wire)
        elif micro_batches.begun:
            self._add_leaf(gradient)
        values, self._sums = self._sums, {}
        self._sent = [
            total for total in values.values() if total is not gradient and total is not message
        ]
        root = Node((micro_batches.total - 1).bit_length(), 0)
        return TreeReduction(comm, pack, values, message, micro_batches.nodes, root, buffer)

    def landed(self) -> None:
        """Hear that what was sent has arrived."""
        # A step that did not know which one is its last has made a sum more than others need.
        self._free = [] if self._micro_batches.first else self._free + self._sent
        self._sent = []


class TreeReduction(Reduction):
    """By one all-to-all: the own span of the other ranks' nodes comes here, and is added up.

    Args:
        values: what this rank has of the tree; overwritten by :meth:`mean_`.
        message: what is sent, if it is there as it is.
        nodes: of each rank.
    """

    def __init__(
        self, comm: Comm, pack: PackLayout, values: Mapping[Node, Tensor], message: Tensor | None,
        nodes: Sequence[Sequence[Node]], root: Node,
        buffer: Callable[[int, torch.dtype], Buffer],
    ) -> None:  # fmt: skip
        own, rows = pack.spans[comm.rank], nodes[comm.rank]
        self._rank, self._nodes, self._root = comm.rank, nodes, root
        self._values = _part_of(values, slice(own.start, own.stop))
        self._lengths = [own.numel * len(of_rank) for of_rank in nodes]
        sent = [span.numel * len(rows) for span in pack.spans]
        splits: tuple[Any, Any] = None, None
        if message is None:
            self._lengths[comm.rank] = sent[comm.rank] = 0  # what stays here is added up later
            start = sum(self._lengths)
            self.received = buffer(start + sum(sent), MASTER_DTYPE)
            message, at = self.received.data[start:], 0
            for span, numel in zip(pack.spans, sent, strict=True):
                part = _part_of(values, slice(span.start, span.stop))
                for node in rows if numel else ():
                    _write(message[at : at + span.numel], _sum_of(part, node))
                    at += span.numel
            splits = self._lengths, sent
        else:
            self.received = buffer(sum(self._lengths), message.dtype)
            if len({*self._lengths}) > 1 or len({*sent}) > 1:
                splits = self._lengths, sent
        self._sent = message
        received = self.received.data[: sum(self._lengths)]
        self._work = comm.all_to_all(received, message, *splits, about=pack)

    def wait(self) -> list[Tensor]:
        """Return what each rank sent, but for this one."""
        self._work.wait()
        return list(self.received.data[: sum(self._lengths)].split(self._lengths))

    def mean_(
        self, pieces: Sequence[Tensor], size: float | Tensor, carry: Tensor | None, out: Tensor
    ) -> None:
        """Take the mean as :func:`.mean.mean_` does, of ``pieces`` from :meth:`wait`."""
        values = {**self._values}
        for rank, (nodes, piece) in enumerate(zip(self._nodes, pieces, strict=True)):
            if rank != self._rank and out.numel():
                values.update(zip(nodes, piece.split(out.numel()), strict=True))
        # A power of two divides exactly: fp32 gives the bits of fp64.
        exact = carry is None and not isinstance(size, Tensor) and math.frexp(size)[0] == 0.5
        dtype = MASTER_DTYPE if exact else sum_dtype(MASTER_DTYPE)

        sum_of = _sum_of(values, self._root)

        def total(part: slice) -> Tensor:
            if sum_of is None:
                return torch.zeros_like(out[part], dtype=dtype)
            return _evaluate(sum_of, part).to(dtype).add_(0.0)  # -0 becomes 0

        divide_(total, size, carry, out)


def most_bytes(count: int, grad: torch.dtype, wire: torch.dtype) -> int:
    """Return the most bytes that a rank keeps per element of so many micro-batches in a step.

    Besides the gradients of the current one, of dtype ``grad``.
    """
    depth, master = (count - 1).bit_length(), MASTER_DTYPE.itemsize
    copy = 0 if grad == wire else wire.itemsize
    return copy + (depth * master - (master - wire.itemsize) if depth else 0)


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


def _is_whole(sums: Mapping[Node, Tensor], node: Node) -> bool:
    return node in sums or (node.level > 0 and all(_is_whole(sums, n) for n in node.children))


def _part_of(values: Mapping[Node, Tensor], part: slice) -> dict[Node, Tensor]:
    return {node: value[part] for node, value in values.items()}


def _sum_of(values: Mapping[Node, Tensor], node: Node) -> Sum | None:
    """Return ``node`` as a sum of the ``values`` below it; None where there are none."""
    if node in values:
        return values[node]
    if not node.level:
        return None
    left, right = (_sum_of(values, child) for child in node.children)
    if left is None or right is None:
        return right if left is None else left
    return left, right


def _evaluate(sum_of: Sum, part: slice, out: Tensor | None = None) -> Tensor:
    """Add up these elements of a sum; ``out``, fp32, may be an operand of the last addition."""
    if isinstance(sum_of, Tensor):
        return sum_of[part] if out is None else out.copy_(sum_of[part])
    left, right = _evaluate(sum_of[0], part), _evaluate(sum_of[1], part)
    if left.dtype != MASTER_DTYPE and out is None:
        return left.to(MASTER_DTYPE).add_(right)
    return torch.add(left.to(MASTER_DTYPE), right, out=out)


def _write(out: Tensor, sum_of: Sum | None) -> None:
    """The sum, or zeros of none; ``out`` may be part of it."""
    if sum_of is None:
        out.zero_()
        return
    for part in chunks(out):
        _evaluate(sum_of, part, out[part])
