"""Memory that a model shares with a parameter: a view made in ``__init__``, a buffer, a list entry.

Parameters move into packs, so what shares their memory would stay behind, in fp32, and show the
first values for ever. What is a view of one parameter is an :class:`.Alias`, made anew on its new
memory; all else is refused by name. A tensor that only the script holds is not found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardcast import _compat

if TYPE_CHECKING:  # imported where there is one
    from shardcast.memory.aliases import Alias

REGISTERED = ("_parameters", "_buffers", "_modules")  # attributes of a module, looked at otherwise
KINDS = (Tensor, nn.Parameter, nn.Buffer)  # others may have no memory


def find_aliases(stages: Sequence[nn.Module]) -> list[Alias]:
    """Find views of parameters among attributes and buffers of all modules.

    Raises:
        ValueError: names what shares memory with a parameter, and is no view of one contiguous
            parameter alone.
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
        if near := in_storage.get(tensor.untyped_storage().data_ptr()):
            from shardcast.memory.aliases import alias_of

            if (alias := alias_of(name, holder, key, tensor, near)) is not None:
                aliases.append(alias)
    return aliases


def _tensors(stages: Sequence[nn.Module]) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """Give all tensors of modules, each with a name and its place: a container and a key."""
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
