"""The memory of tensors: whether somebody still has it, and hooks that come before all others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class WeakStorage:
    """The storage of a tensor, as long as some tensor of this process has it."""

    def __init__(self, tensor: Tensor) -> None:
        self._pointer = tensor.untyped_storage()._weak_ref()

    def __call__(self) -> torch.UntypedStorage | None:
        """The storage, or ``None`` where nobody has it any more."""
        storage: torch.UntypedStorage | None
        storage = torch.UntypedStorage._new_with_weak_ptr(self._pointer)
        return storage

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._pointer)


def plain_tensors(values: Any) -> Iterator[Tensor]:
    """Find tensors with memory of their own in nested containers, and in wrapper tensors."""
    if isinstance(values, Tensor):
        flatten = getattr(values, "__tensor_flatten__", None)
        if flatten is None:
            yield values
        else:
            yield from plain_tensors([getattr(values, name) for name in flatten()[0]])
    elif isinstance(values, Mapping):
        yield from plain_tensors([*values.values()])
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from plain_tensors(value)


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor of which autograd knows it as a view, and which it keeps."""
    return tensor._base


def put_first(handle: Any) -> Any:
    """Have a hook run before all others of its kind; gives the handle."""
    hooks = handle.hooks_dict_ref()
    earlier = {number: hook for number, hook in hooks.items() if number != handle.id}
    for number in earlier:  # anew, behind it: autograd sees no move_to_end
        del hooks[number]
    hooks.update(earlier)
    return handle
