"""Memory that a model shares with a parameter: a view made in ``__init__``, a buffer, a list entry.

Parameters move into packs. A tensor that shares their memory would stay behind, in fp32, with the
old values. A view of one parameter is an :class:`Alias`, which is created again on the new memory.
Other sharing raises an error. Tensors that only the script holds are not found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardcast import _compat

# a module's dictionaries, which are searched separately
REGISTERED = ("_parameters", "_buffers", "_modules")
KINDS = (Tensor, nn.Parameter, nn.Buffer)  # others may have no memory


@dataclass(frozen=True)
class Alias:
    """A view of ``param`` in ``holder[key]``: a module's attributes or buffers, or a list.

    Attributes:
        offset: offset of its first element from the parameter's first.
        differentiable: whether gradients flow through it.
    """

    holder: Any
    key: Any
    param: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    differentiable: bool

    def tie(self) -> None:
        """Create the view again, on the parameter's current memory."""
        with torch.set_grad_enabled(self.differentiable):
            source = self.param if self.differentiable else self.param.detach()
            begin = source.storage_offset() + self.offset
            self.holder[self.key] = source.as_strided(self.shape, self.stride, begin)


def find_aliases(stages: Sequence[nn.Module]) -> list[Alias]:
    """Find views of parameters among attributes and buffers of all modules.

    Raises:
        ValueError: a tensor shares memory with a parameter, but is not a view of exactly one
            contiguous parameter; names it.
    """
    params: dict[nn.Parameter, str] = {}
    for stage in stages:
        for name, param in stage.named_parameters():
            params.setdefault(param, name)
    in_storage: dict[int, dict[nn.Parameter, str]] = defaultdict(dict)
    for param, name in params.items():
        if _has_memory(param):
            in_storage[param.untyped_storage().data_ptr()][param] = name
    aliases = []
    for name, holder, key, tensor in _tensors(stages):
        if tensor in params or not _has_memory(tensor):
            continue
        near = in_storage.get(tensor.untyped_storage().data_ptr())
        if near and (alias := _alias_of(name, holder, key, tensor, near)) is not None:
            aliases.append(alias)
    return aliases


def tie(aliases: Iterable[Alias]) -> None:
    """Create all views again."""
    for alias in aliases:
        alias.tie()


def _alias_of(
    name: str, holder: Any, key: Any, tensor: Tensor, params: Mapping[nn.Parameter, str]
) -> Alias | None:
    """Return the alias in ``holder[key]``; ``None`` if it overlaps with no parameter.

    Args:
        name: name of the tensor, for an error.
        params: parameters in its storage, with their names.

    Raises:
        ValueError: it shares memory with a parameter, but is not a view of exactly one contiguous
            parameter.
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
            f"model: {name!r} shares memory with parameter {names}, whose values move into a pack, "
            "so it would keep showing old values; create it after shardcast.shard, compute it in "
            "forward, or use a view of one whole parameter, which shard() moves too"
        )
    differentiable = tensor.requires_grad and not tensor.is_leaf
    place = (start - first) // param.itemsize
    return Alias(holder, key, param, tensor.shape, tensor.stride(), place, differentiable)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte, and after its last one."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.itemsize


def _overlap(one: Tensor, other: Tensor) -> bool:
    (start, stop), (first, end) = _extent(one), _extent(other)
    return start < end and first < stop


def _tensors(stages: Sequence[nn.Module]) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """Yield all tensors of modules, each with a name, its container and its key."""
    for stage in stages:
        for path, module in stage.named_modules():
            prefix = f"{path}." if path else ""
            attributes = vars(module)
            for key in [*attributes]:
                if key not in REGISTERED:
                    yield from _within(prefix + key, attributes, key)
            for key in [*module._buffers]:
                yield from _within(prefix + key, module._buffers, key)


def _within(
    name: str, holder: Any, key: Any, depth: int = 2
) -> Iterator[tuple[str, Any, Any, Any]]:
    value = holder[key]
    if type(value) in KINDS:
        yield name, holder, key, value
    elif type(value) in (list, tuple, dict) and depth:
        for inner in [*value] if isinstance(value, dict) else range(len(value)):
            yield from _within(f"{name}[{inner!r}]", value, inner, depth - 1)


def _has_memory(tensor: Tensor) -> bool:
    plain = type(tensor) in KINDS and tensor.layout == torch.strided and not tensor.is_meta
    return plain and tensor.numel() > 0 and not _compat.is_dtensor(tensor)
