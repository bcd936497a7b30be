"""Parts of stored tensors, and the paths under which they are stored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardcast.checkpoint.region import Box, Region
from shardcast.plan.layout import Fragment


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
    """A flat interval of a rank's share of a tensor, and the memory that holds it, or shall.

    Attributes:
        path: where it stands in the nested state dict, e.g. ``("model", "wte.weight")``.
        region: what of the stored tensor the rank has.
        start: of the interval, in elements of what the rank has.
        flat: 1-d, the interval's elements.
    """

    path: tuple[str, ...]
    region: Region
    start: int
    flat: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the stored tensor."""
        return self.region.shape

    def pieces(self) -> Iterator[tuple[Box, Tensor]]:
        """The boxes of the interval, each with a view of its elements in the box's shape."""
        if math.prod(self.shape) == 0:
            yield Box((0,) * len(self.shape), self.shape), self.flat.view(self.shape)
        yield from self.region.pieces(self.flat, self.start)


def whole(path: tuple[str, ...], tensor: Tensor) -> Part:
    """A tensor that one rank has all of; writes to the part reach contiguous tensors only."""
    return Part(path, Region.whole(tensor.shape), 0, tensor.detach().reshape(-1))


def model_path(name: str) -> tuple[str, ...]:
    """Where a parameter or buffer is stored."""
    return ("model", name)


def state_path(name: str, state: str) -> tuple[str, ...]:
    """Where a tensor of a parameter's optimizer state is stored."""
    return ("optimizer", "state", name, state)


def is_elementwise(value: Tensor, fragment: Fragment, flat: bool) -> bool:
    """Whether a fragment's state tensor has one value per element of the fragment.

    Args:
        flat: the optimizer keeps such state flat, whatever the shape of the parameter.
    """
    shapes = (fragment.shape, (fragment.numel,)) if flat else (fragment.shape,)
    return value.dim() > 0 and tuple(value.shape) in shapes
