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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardcast import _compat

Shape = tuple[int, ...]
KeyPath = tuple[str, ...]  # in the nested state dict, e.g. ``("model", "wte.weight")``


class Run(NamedTuple):
    """Indices ``first, first + 1, ...`` of a dimension, ``size`` of them."""

    first: int
    size: int


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

    def pieces(self, flat: Tensor, start: int) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        """Some elements of the local tensor as boxes of the whole one.

        Args:
            flat: 1-d; elements ``[start, start + n)`` of the local tensor.

        Returns:
            Each box with a view of its elements, of the box's shape. The views are contiguous,
            and at most ``2 d - 1``, where each dimension has one run.
        """
        end, firsts = 0, self._firsts
        for offsets, sizes in boxes(self.local, start, start + flat.numel()):
            begin, end = end, end + math.prod(sizes)
            view = flat[begin:end].view(sizes)
            if firsts is not None:
                yield _chunk(map(add, firsts, offsets), sizes), view
                continue
            for cuts in itertools.product(*map(_overlaps, self.runs, offsets, sizes)):
                inside = tuple(within for _, within in cuts)
                yield _chunk((first for first, _ in cuts), view[inside].shape), view[inside]


@dataclass(frozen=True)
class ShardView:
    """A flat interval of a rank's share of a stored tensor, in memory to write from or read into.

    Attributes:
        path: where the tensor stands in the nested state dict.
        region: what of the tensor the rank has.
        start: of the interval, in elements of what the rank has.
        flat: 1-d, the interval's elements.
    """

    path: KeyPath
    region: Region
    start: int
    flat: Tensor

    @classmethod
    def whole(cls, path: KeyPath, tensor: Tensor) -> ShardView:
        """All of a tensor; what is read reaches a contiguous one only."""
        return cls(path, Region.whole(tensor.shape), 0, tensor.detach().reshape(-1))

    def chunks(self) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        """The boxes of the interval, each with a view of its elements in the box's shape."""
        shape = self.region.shape
        if math.prod(shape) == 0:
            yield _chunk((0,) * len(shape), shape), self.flat.view(shape)
        yield from self.region.pieces(self.flat, self.start)

    def write_items(self, key: str) -> Iterator[tuple[WriteItem, Tensor]]:
        """DCP's plan of writing each box, and the box's elements."""
        properties, size = TensorProperties(self.flat.dtype), torch.Size(self.region.shape)
        for chunk, view in self.chunks():
            index, data = (
                MetadataIndex(key, chunk.offsets),
                TensorWriteData(chunk, properties, size),
            )
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=data), view


def slices_of(chunk: ChunkStorageMetadata) -> tuple[slice, ...]:
    """What a whole tensor is indexed with for a box of it."""
    return tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))


def _chunk(offsets: Iterable[int], sizes: Iterable[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


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


def boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Offsets and sizes of the boxes, in flat order, of elements ``[start, stop)`` of a tensor."""
    if start >= stop:
        return
    if len(shape) == 0:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        yield from _in_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: Shape, number: int, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    base = number * math.prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], start - base, stop - base):
        yield (number, *offsets), (1, *sizes)
