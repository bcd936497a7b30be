"""Views of a parameter that a model holds beside it, made anew on its memory in a pack.

A view made in ``__init__``, a buffer, a list entry; see :mod:`.sharing`, which finds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Alias:
    """A view of ``param`` that ``holder[key]`` is: attributes of a module, its buffers, a list.

    Attributes:
        offset: of its first element, from that of the parameter.
        differentiable: whether gradients go through it.
    """

    holder: Any
    key: Any
    param: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    differentiable: bool

    def tie(self) -> None:
        """Make the view anew, on the present memory of the parameter."""
        with torch.set_grad_enabled(self.differentiable):
            source = self.param if self.differentiable else self.param.detach()
            begin = source.storage_offset() + self.offset
            self.holder[self.key] = source.as_strided(self.shape, self.stride, begin)


def alias_of(
    name: str, holder: Any, key: Any, tensor: Tensor, params: Mapping[nn.Parameter, str]
) -> Alias | None:
    """Return the alias that ``holder[key]`` is; ``None`` where it overlaps with no parameter.

    Args:
        name: of the tensor, for an error.
        params: those in its storage, with their names.

    Raises:
        ValueError: it shares memory with a parameter, and is no view of one contiguous parameter
            alone.
    """
    shared = [param for param in params if _overlap(tensor, param)]
    if not shared:
        return None
    param = shared[0]
    start, stop = _extent(tensor)
    first, end = _extent(param)
    is_view = (tensor.dtype, len(shared)) == (param.dtype, 1) and param.is_contiguous()
    if isinstance(holder, tuple) or not (is_view and first <= start and stop <= end):
        names = ", ".join(repr(params[each]) for each in shared)
        raise ValueError(
            f"model: {name!r} shares memory with parameter {names}, which moves into a pack, "
            "so that it would show old values; make it after shardcast.shard, compute it in "
            "forward, or hold a view of one whole parameter, which goes along"
        )
    differentiable = tensor.requires_grad and not tensor.is_leaf
    place = (start - first) // param.itemsize
    return Alias(holder, key, param, tensor.shape, tensor.stride(), place, differentiable)


def tie(aliases: Iterable[Alias]) -> None:
    """Make all views anew."""
    for alias in aliases:
        alias.tie()


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of its first byte and behind its last one."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.itemsize


def _overlap(one: Tensor, other: Tensor) -> bool:
    (start, stop), (first, end) = _extent(one), _extent(other)
    return start < end and first < stop
