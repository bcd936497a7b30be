"""Parts of tensors, and fragments as boxes: a flat interval of a parameter, cut for DCP.

DCP describes a shard by the offsets and sizes of a box. A rank owns a flat interval of a
parameter, which is at most ``2 d - 1`` boxes, each contiguous in memory::

    . . . # #      a suffix of one row       1 box
    # # # # #      whole rows                1 box
    # # # # #
    # # . . .      a prefix of one row       1 box
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Box:
    """A box of a parameter and the flat interval ``[start, stop)`` that it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes, in flat order, of elements ``[start, stop)`` of a tensor of ``shape``."""
    if start >= stop:
        return
    if len(shape) == 0:
        yield Box((), (), 0, 1)
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
        yield Box((first, *zeros), (last - first, *shape[1:]), first * row, last * row)
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], number: int, start: int, stop: int) -> Iterator[Box]:
    base = number * math.prod(shape[1:])
    for box in boxes(shape[1:], start - base, stop - base):
        yield Box((number, *box.offsets), (1, *box.sizes), base + box.start, base + box.stop)


@dataclass(frozen=True)
class Stored:
    """One stored tensor: shape, dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """A flat interval of a stored tensor and the memory that holds it, or shall.

    Attributes:
        path: where it stands in the nested state dict, e.g. ``("model", "wte.weight")``.
        shape: of the whole tensor.
        start: of the interval, in elements of the whole tensor.
        flat: 1-d, the interval's elements.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    start: int
    flat: Tensor

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    def pieces(self) -> Iterator[tuple[Box, Tensor]]:
        """The boxes of the interval, each with a view of its elements in the box's shape."""
        if math.prod(self.shape) == 0:
            yield Box((0,) * len(self.shape), self.shape, 0, 0), self.flat.view(self.shape)
        for box in boxes(self.shape, self.start, self.start + self.flat.numel()):
            here = slice(box.start - self.start, box.stop - self.start)
            yield box, self.flat[here].view(box.sizes)


def whole(path: tuple[str, ...], tensor: Tensor) -> Part:
    """A tensor that one rank has all of; writes to the part reach contiguous tensors only."""
    return Part(path, tuple(tensor.shape), 0, tensor.detach().reshape(-1))


def model_path(name: str) -> tuple[str, ...]:
    """Where a parameter or buffer is stored."""
    return ("model", name)


def state_path(name: str, state: str) -> tuple[str, ...]:
    """Where a tensor of a parameter's optimizer state is stored."""
    return ("optimizer", "state", name, state)


def is_elementwise(value: Tensor, shape: tuple[int, ...], fragment: int) -> bool:
    """Whether a fragment's state tensor has one value per element of the fragment."""
    if value.dim() == 0 or value.numel() != fragment:
        return False
    return tuple(value.shape) in ((fragment,), shape)
