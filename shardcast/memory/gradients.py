"""The gradients of a pack, of all its parameters or only of what this rank owns."""

from __future__ import annotations

import math
import re
import sys
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from shardcast.memory.pack import Pack

IN_PLACE = re.compile(r"__i(?!nvert|ndex|nt)\w+__|__setitem__|\w*[^_]_")  # names of functions
HARMLESS = ("requires_grad_", "detach_")


class Mark(Tensor):
    """Stands as ``.grad`` for a sharded gradient: all NaN, without memory of its own.

    To zero it zeroes the gradient; any other edit would be lost and is refused.
    """

    grads: weakref.ref[GradPack]  # weak: a parameter holds its .grad where no collector looks
    position: int

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch._foreach_zero_:
            return [tensor.zero_() for tensor in args[0]]
        if IN_PLACE.fullmatch(func.__name__) and func.__name__ not in HARMLESS:
            raise _lost(func.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @property
    def data(self) -> Mark:
        """The mark itself, to which edits come too."""
        return self

    @data.setter
    def data(self, _value: Tensor) -> None:
        raise _lost("grad.data = ...")

    def detach(self) -> Mark:
        """The mark itself, to which edits come too."""
        return self

    def zero_(self) -> Mark:
        """Zero the gradient that it stands for, if it still does."""
        grads = self.grads()
        if grads is not None and grads.holds(self.position):
            grads.clear(self.position)
        return self

    def __deepcopy__(self, _memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def _lost(edit: str) -> RuntimeError:
    return RuntimeError(
        f"{edit}: with grads 'sharded' .grad is only a mark after backward, and an edit of it "
        "would be lost; use optimizer.clip_grad_norm_ or clip_grad_value_, edit gradients in hooks "
        "(register_post_accumulate_grad_hook), or use grads 'full'"
    )


class GradPack:
    """The gradients of one pack in contiguous storage of the same layout.

    The storage is allocated when the first gradient arrives and is kept. Padding is zero from
    the start and is never written, so it enters no sum and no norm.

    Args:
        sharded: give the storage back after every reduction and keep the own span only. What
            ``.grad`` then holds is a mark: of the right shape, without memory, all NaN.
    """

    def __init__(self, pack: Pack, dtype: torch.dtype, sharded: bool = False) -> None:
        self.pack = pack
        self.dtype = dtype
        self.sharded = sharded
        self.released = False  # sharded, and nothing but the own span is here
        self.owned = tuple(  # per slot: whether part of it lies in the own span
            slot.numel > 0 and slot.offset < pack.own.stop and slot.end > pack.own.start
            for slot in pack.layout.slots
        )
        self._data: Tensor | None = None
        self._views: list[Tensor] = []
        self._places: list[int] = []  # where the views are to lie
        self._own: Tensor | None = None
        self._marks: list[Mark] = []

    @property
    def data(self) -> Tensor:
        """All gradients, 1-d, ``layout.numel`` elements."""
        if self._data is None:
            layout = self.pack.layout
            self._data = torch.zeros(layout.numel, dtype=self.dtype, device=self._device)
            self._views = self.pack.views(self._data)
            self._places = [view.data_ptr() for view in self._views]
        return self._data

    @property
    def _device(self) -> torch.device:
        return self.pack.params[0].device

    @property
    def nbytes(self) -> int:
        """Bytes held at the moment."""
        held = (self._data, self._own)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    @property
    def allocated(self) -> bool:
        """Whether the storage of all gradients is there."""
        return self._data is not None

    @property
    def own(self) -> Tensor:
        """This rank's span; sharded and accumulated over backwards it is fp32."""
        if not self.sharded:
            return self.data[self.pack.own.start : self.pack.own.stop]
        if self._own is None:
            self._own = torch.zeros(self.pack.own.numel, dtype=self.dtype, device=self._device)
        return self._own

    def carry(self, dtype: torch.dtype) -> Tensor:
        """What the own span holds, in ``dtype``, to be added to; gradients begin anew."""
        if self.sharded:  # it is the accumulator itself from now on
            self._own = self.own.to(dtype)
            return self._own
        carried = self.own.to(dtype, copy=True)
        self.data.zero_()
        return carried

    def release(self, marked: Collection[int]) -> None:
        """Give the storage back; mark the gradients that were there, and ``marked`` ones."""
        if not self._marks:
            nan = torch.full((), math.nan, dtype=self.dtype, device=self._device)
            for position, slot in enumerate(self.pack.layout.slots):
                mark = nan.expand(slot.shape).as_subclass(Mark)
                mark.grads, mark.position = weakref.ref(self), position
                self._marks.append(mark)
        for position, param in enumerate(self.pack.params):
            if position in marked or self.holds(position):
                param.grad = self._marks[position]
        self._data, self._views, self.released = None, [], True

    def reopen(self, keep_own: bool) -> None:
        """Take the marks away, so that autograd accumulates from nothing. Sharded only."""
        for position, param in enumerate(self.pack.params):
            if self.holds(position):
                param.grad = None
        self.released = False
        if not keep_own and self.own.dtype != self.dtype:
            self._own = None

    def holds(self, position: int) -> bool:
        """Whether ``.grad`` of the parameter at ``position`` is ours: the view, or the mark.

        A view is not that any more where a script did ``.grad.data = ...``.
        """
        grad = self.pack.params[position].grad
        if grad is None or not (self._marks if self.released else self._views):
            return False
        if self.released:
            return grad is self._marks[position]
        return grad is self._views[position] and grad.data_ptr() == self._places[position]

    def _view(self, position: int) -> Tensor:
        """The memory of one slot; a view that a script moved elsewhere is replaced."""
        _ = self.data  # allocates the views
        if self._views[position].data_ptr() != self._places[position]:
            slot = self.pack.layout.slots[position]
            self._views[position] = self.data[slot.offset : slot.end].view(size=slot.shape)
        return self._views[position]

    def _free_view(self, position: int) -> Tensor:
        """The memory of one slot for another gradient; whoever kept the old one gets a copy."""
        if sys.getrefcount(self._views[position]) > 2:  # the list, and the argument itself
            kept = self._views[position]
            kept.data = kept.detach().clone()
        return self._view(position)

    def adopt(self, position: int) -> None:
        """Copy the ``.grad`` at ``position`` in and make it ours; nothing if it is already.

        Raises:
            TypeError: the gradient is sparse.
        """
        grad = self.pack.params[position].grad
        if grad is not None and not self.holds(position):
            self._adopt(position, grad)

    @torch.no_grad()  # a backward with create_graph runs hooks with gradients on
    def _adopt(self, position: int, grad: Tensor) -> None:
        slot = self.pack.layout.slots[position]
        if grad.layout != torch.strided:
            raise TypeError(
                f"gradient of {slot.name!r}: expected a dense tensor, got {grad.layout}; use "
                "sparse=False in the embedding, or leave this parameter to an optimizer of its own"
            )
        if self.released:
            start, stop = self._part(position)
            mine = grad.reshape(-1)[start - slot.offset : stop - slot.offset]
            self._owned_part(position).copy_(mine)
        else:
            _ = self.data  # allocates the views
            self._free_view(position).copy_(grad)
        self.show(position)

    def adopt_all(self) -> None:
        """:meth:`adopt` all that are there, with one call for all copies (one kernel on a GPU)."""
        params = self.pack.params
        new = [position for position in range(len(params)) if not self.holds(position)]
        found = {n: grad for n in new if (grad := params[n].grad) is not None}
        if self.released or any(grad.layout != torch.strided for grad in found.values()):
            for position in found:
                self.adopt(position)
        elif found:
            _ = self.data  # allocates the views
            with torch.no_grad():
                views = [self._free_view(position) for position in found]
                torch._foreach_copy_(views, list(found.values()))
            for position, view in zip(found, views, strict=True):
                params[position].grad = view

    @torch.no_grad()
    def take(self, position: int) -> None:
        """Copy the ``.grad`` at ``position`` in, or zeros, and leave it where it is."""
        grad = self.pack.params[position].grad
        if grad is None:
            self.clear(position)
        else:
            self._view(position).copy_(grad)

    def show(self, position: int) -> None:
        """Set the ``.grad`` at ``position`` to the view into this storage, or to the mark."""
        ours = self._marks[position] if self.released else self._view(position)
        self.pack.params[position].grad = ours

    def clear(self, position: int) -> None:
        """Zero one slot: a gradient that is absent here counts as zero on its owner."""
        if self.released:
            self._owned_part(position).zero_()
        elif self._data is not None:
            self._view(position).zero_()

    def _part(self, position: int) -> tuple[int, int]:
        """The pack elements of a slot that lie in the own span; none: of length 0."""
        slot, own = self.pack.layout.slots[position], self.pack.own
        start = min(max(slot.offset, own.start), slot.end)
        return start, max(start, min(slot.end, own.stop))

    def _owned_part(self, position: int) -> Tensor:
        start, stop = self._part(position)
        begin = min(max(start - self.pack.own.start, 0), self.own.numel())
        return self.own[begin : begin + stop - start]
