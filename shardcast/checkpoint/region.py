"""The place of a rank's elements in the whole tensor: flat intervals as boxes of global indices.

DCP describes a shard by the offsets and sizes of a box. A rank owns a flat interval of a
parameter, which consists of at most ``2 d - 1`` boxes, each contiguous in memory::

    . . . # #      a suffix of one row       1 box
    # # # # #      whole rows                1 box
    # # # # #
    # # . . .      a prefix of one row       1 box

With tensor parallelism it is an interval of the *local* tensor, and its boxes are shifted to the
local tensor's place in the whole one. A strided shard has several runs of indices along a
dimension; a box is cut where a run ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
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
from shardcast._compat import dtensor

Shape = tuple[int, ...]
KeyPath = tuple[str, ...]  # path in the nested state dict, e.g. ``("model", "wte.weight")``


class IndexRange(NamedTuple):
    """``size`` consecutive indices of a dimension, starting with ``first``."""

    first: int
    size: int


@dataclass(frozen=True)
class Region:
    """The indices of a whole tensor that a rank's local tensor has, in the same order.

    Attributes:
        shape: shape of the whole tensor.
        runs: runs of each dimension, ascending; none if the local tensor is empty.
    """

    shape: Shape
    runs: tuple[tuple[IndexRange, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Return the region of a whole tensor."""
        return cls(tuple(shape), tuple((IndexRange(0, size),) for size in shape))

    @classmethod
    def of(cls, tensor: Tensor) -> Region:
        """Return the region of a DTensor's local tensor; everything for a plain tensor."""
        if not _compat.is_dtensor(tensor):
            return cls.whole(tensor.shape)
        return cls(tuple(tensor.shape), tuple(_runs(tensor, dim) for dim in range(tensor.dim())))

    @cached_property
    def local(self) -> Shape:
        """Shape of the local tensor."""
        return tuple(sum(run.size for run in runs) for runs in self.runs)

    @cached_property
    def size(self) -> torch.Size:
        """:attr:`shape`, in DCP's type."""
        return torch.Size(self.shape)

    @property
    def is_whole(self) -> bool:
        """Whether the local tensor is the whole one."""
        return self.local == self.shape

    @property
    def is_first(self) -> bool:
        """Whether the local tensor starts where the whole one does."""
        return all(runs and runs[0].first == 0 for runs in self.runs)


@dataclass(frozen=True)
class ShardView:
    """A flat interval of a rank's part of a stored tensor, in memory to write from or read into.

    Attributes:
        path: path of the tensor in the nested state dict.
        region: the rank's region of the tensor.
        start: start of the interval, in elements of the rank's part.
        flat: 1-d, the interval's elements.
    """

    path: KeyPath
    region: Region
    start: int
    flat: Tensor

    @classmethod
    def whole(cls, path: KeyPath, tensor: Tensor) -> ShardView:
        """Return a view of a whole tensor; to read into it, it must be contiguous."""
        return cls(path, Region.whole(tensor.shape), 0, tensor.detach().reshape(-1))

    def chunks(self) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        """Return the interval as boxes of the whole tensor, each with a view of its elements.

        The views have the boxes' shapes and are contiguous. There are at most ``2 d - 1`` if each
        dimension has one run. An empty tensor is one empty box.
        """
        region, end = self.region, 0
        if math.prod(region.shape) == 0:
            yield _chunk((0,) * len(region.shape), region.shape), self.flat.view(region.shape)
        for offsets, sizes in boxes(region.local, self.start, self.start + self.flat.numel()):
            begin, end = end, end + math.prod(sizes)
            view = self.flat[begin:end].view(sizes)
            for cuts in itertools.product(*map(_overlaps, region.runs, offsets, sizes)):
                part = view[tuple(within for _, within in cuts)]
                yield _chunk((first for first, _ in cuts), part.shape), part

    def write_items(self, key: str) -> Iterator[tuple[WriteItem, Tensor]]:
        """Return DCP's plan to write each box, and the box's elements."""
        properties, size = _properties(self.flat.dtype), self.region.size
        for chunk, view in self.chunks():
            data = TensorWriteData(chunk, properties, size)
            index = MetadataIndex(key, chunk.offsets)
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=data), view


@cache
def _properties(dtype: torch.dtype) -> TensorProperties:
    """Return one object for all tensors, because pickling these dominates plans and metadata."""
    return TensorProperties(dtype)


def slices_of(chunk: ChunkStorageMetadata) -> tuple[slice, ...]:
    """Return the index of a box in its whole tensor."""
    return tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))


def _chunk(offsets: Iterable[int], sizes: Iterable[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _runs(tensor: Tensor, dim: int) -> tuple[IndexRange, ...]:
    runs: list[IndexRange] = []
    for index in dtensor.indices_of(tensor, dim).tolist():
        if runs and sum(runs[-1]) == index:
            runs[-1] = IndexRange(runs[-1].first, runs[-1].size + 1)
        else:
            runs.append(IndexRange(index, 1))
    return tuple(runs)


def _overlaps(runs: Sequence[IndexRange], offset: int, size: int) -> Iterator[tuple[int, slice]]:
    """Cut local indices ``[offset, offset + size)`` where runs end.

    Returns for each part its first index in the whole tensor, and its place in the interval.
    """
    begin = 0
    for run in runs:
        first, last = max(begin, offset), min(begin + run.size, offset + size)
        if first < last:
            yield run.first + first - begin, slice(first - offset, last - offset)
        begin += run.size


def boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut elements ``[start, stop)`` of a tensor into boxes, in flat order: offsets and sizes."""
    if not shape and start < stop:
        yield (), ()
    row = math.prod(shape[1:])
    while shape and start < stop:
        number, within = divmod(start, row)
        count, end = (stop - start) // row, min(stop, (number + 1) * row)
        if within == 0 and count:
            yield (number, *(0,) * (len(shape) - 1)), (count, *shape[1:])
            end = start + count * row
        else:
            for offsets, sizes in boxes(shape[1:], within, end - number * row):
                yield (number, *offsets), (1, *sizes)
        start = end
