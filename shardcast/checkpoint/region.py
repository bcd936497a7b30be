"""Where a rank's elements lie in the whole tensor: flat intervals as boxes of global indices.

DCP describes a shard by the offsets and sizes of a box. A rank owns a flat interval of a
parameter, which is at most ``2 d - 1`` boxes, each contiguous in memory::

    . . . # #      a suffix of one row       1 box
    # # # # #      whole rows                1 box
    # # # # #
    # # . . .      a prefix of one row       1 box

With tensor parallelism it is an interval of the *local* tensor, whose boxes are moved to where
that lies in the whole one. A strided shard has several runs of indices along a dimension; a box
that reaches over more than one of them is cut there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add
from typing import NamedTuple

from torch import Tensor

from shardcast import _compat

Shape = tuple[int, ...]


class Run(NamedTuple):
    """Indices ``first, first + 1, ...`` of a dimension, ``size`` of them."""

    first: int
    size: int


class Box(NamedTuple):
    """A box of a tensor."""

    offsets: Shape
    sizes: Shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """What a tensor is indexed with for it."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class Region:
    """The indices of a whole tensor that the local one of a rank has, in the same order.

    Attributes:
        shape: of the whole tensor.
        runs: of each dimension, in rising order; none where the local tensor is empty.
    """

    shape: Shape
    runs: tuple[tuple[Run, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """All of a tensor."""
        return cls(tuple(shape), tuple((Run(0, size),) for size in shape))

    @classmethod
    def of(cls, tensor: Tensor) -> Region:
        """Where the local tensor of a DTensor lies; all of a plain one."""
        if not _compat.is_dtensor(tensor):
            return cls.whole(tensor.shape)
        return cls(tuple(tensor.shape), tuple(_runs(tensor, dim) for dim in range(tensor.dim())))

    @cached_property
    def local(self) -> Shape:
        """The shape of the local tensor."""
        return tuple(sum(run.size for run in runs) for runs in self.runs)

    @cached_property
    def _firsts(self) -> list[int] | None:
        """Where the local tensor begins, if each dimension has one run, as nearly always."""
        return [run.first for (run,) in self.runs] if all(len(r) == 1 for r in self.runs) else None

    @property
    def is_whole(self) -> bool:
        """Whether the local tensor is the whole one."""
        return self.local == self.shape

    @property
    def is_first(self) -> bool:
        """Whether the local tensor begins where the whole one does."""
        return all(runs and runs[0].first == 0 for runs in self.runs)

    def pieces(self, flat: Tensor, start: int) -> Iterator[tuple[Box, Tensor]]:
        """Some elements of the local tensor as boxes of the whole one.

        Args:
            flat: 1-d; elements ``[start, start + n)`` of the local tensor.

        Returns:
            Each box with a view of its elements, of the box's shape. The views are contiguous,
            and at most ``2 d - 1``, where each dimension has one run.
        """
        done, firsts = 0, self._firsts
        for box in boxes(self.local, start, start + flat.numel()):
            size = math.prod(box.sizes)
            view = flat[done : done + size].view(box.sizes)
            done += size
            if firsts is not None:
                yield Box(tuple(map(add, firsts, box.offsets)), box.sizes), view
                continue
            for part in itertools.product(*map(_overlaps, self.runs, box.offsets, box.sizes)):
                offsets, inside = (tuple(x) for x in zip(*part, strict=True)) if part else ((), ())
                yield Box(offsets, tuple(view[inside].shape)), view[inside]


def _runs(tensor: Tensor, dim: int) -> tuple[Run, ...]:
    runs: list[Run] = []
    for index in _compat.indices_of(tensor, dim).tolist():
        if runs and sum(runs[-1]) == index:
            runs[-1] = Run(runs[-1].first, runs[-1].size + 1)
        else:
            runs.append(Run(index, 1))
    return tuple(runs)


def _overlaps(runs: Sequence[Run], offset: int, size: int) -> Iterator[tuple[int, slice]]:
    """Local indices ``[offset, offset + size)``, cut where runs end: the index in the whole tensor
    at which each part begins, and where it is in the interval."""
    begin = 0
    for run in runs:
        first, last = max(begin, offset), min(begin + run.size, offset + size)
        if first < last:
            yield run.first + first - begin, slice(first - offset, last - offset)
        begin += run.size


def boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """The boxes, in flat order, of elements ``[start, stop)`` of a tensor of ``shape``."""
    if start >= stop:
        return
    if len(shape) == 0:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        yield from _in_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield Box((first, *zeros), (last - first, *shape[1:]))
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: Shape, number: int, start: int, stop: int) -> Iterator[Box]:
    base = number * math.prod(shape[1:])
    for box in boxes(shape[1:], start - base, stop - base):
        yield Box((number, *box.offsets), (1, *box.sizes))
