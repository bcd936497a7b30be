"""Gradients of a pack in contiguous storage of the same layout; ``.grad`` are views of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.memory.gradients import GradPack, check_dense
from shardcast.memory.pack import Pack
from shardcast.plan.precision import MASTER_DTYPE


class FullGradients(GradPack):
    """Their storage is allocated with the first gradient and kept.

    Outside of the own span it keeps this rank's own gradients, at which it can look later.
    """

    def __init__(self, pack: Pack, dtype: torch.dtype) -> None:
        super().__init__(pack, dtype)
        self._places: list[int] = []  # where the views are to lie

    @property
    def data(self) -> Tensor:
        if self._data is None:
            data, own = self._allocate(), self.pack.own
            self._own = data[own.start : own.stop]
            self._places = [view.data_ptr() for view in self._views]
            return data
        return self._data

    @property
    def own(self) -> Tensor:
        _ = self.data  # allocates it
        return self._own

    @property
    def nbytes(self) -> int:
        return 0 if self._data is None else self._data.nbytes

    @property
    def version(self) -> int:
        return self.data._version

    def holds(self, position: int) -> bool:
        """Whether ``.grad`` is the view; no longer where a script did ``.grad.data = ...``."""
        grad = self.pack.params[position].grad
        if grad is None or not self._views:
            return False
        return grad is self._views[position] and grad.data_ptr() == self._places[position]

    def show(self, position: int) -> None:
        self.pack.params[position].grad = self._view(position)

    def collect(self) -> tuple[set[int], bool]:
        has_graph = self.adopt()
        absent = {n for n, param in enumerate(self.pack.params) if param.grad is None}
        for position in absent:
            self.clear(position)
        return absent, has_graph

    def adopt(self, positions: Iterable[int] | None = None) -> bool:
        """With one call for all copies (one kernel on a GPU)."""
        params = self.pack.params
        _ = self.data  # allocates the views
        found: list[int] = []
        grads: list[Tensor] = []
        has_graph = False
        for position in range(len(params)) if positions is None else positions:
            grad = params[position].grad
            if grad is None or (
                grad is self._views[position] and grad.data_ptr() == self._places[position]
            ):
                continue
            check_dense(self.pack, position, grad)
            has_graph = has_graph or grad.requires_grad
            found.append(position)
            grads.append(grad)
        if found:
            with torch.no_grad():  # a backward with create_graph runs hooks with gradients on
                views = [self._free_view(position) for position in found]
                torch._foreach_copy_(views, grads)
            for position, view in zip(found, views, strict=True):
                params[position].grad = view
        return has_graph

    @torch.no_grad()
    def take(self) -> None:
        """Copy every ``.grad`` in, or zeros, and leave it where it is."""
        for position, param in enumerate(self.pack.params):
            if param.grad is None:
                self.clear(position)
            else:
                self._view(position).copy_(param.grad)

    @torch.no_grad()
    def gather(self, present: Sequence[bool]) -> None:
        """Have the means of all owners in ``data``, and shown where ``present``. Collective."""
        data, pack = self.data, self.pack
        if len(pack.layout.lengths) == 1:
            pack.comm.all_gather(data, self.own, pack.layout)
        else:
            spans = pack.layout.owned_spans()
            pieces = [(span.owner, data[span.start : span.stop]) for span in spans]
            if pieces:
                pack.comm.broadcast_all(pieces, pack.layout)
        for position, param in enumerate(pack.params):
            if present[position]:
                param.grad = None  # a DTensor's was a part of the sum, and is all of it now
                self.show(position)

    def clear(self, position: int) -> None:
        """Zero one slot, if there is storage."""
        if self._data is not None:
            self._view(position).zero_()

    def local(self, sent: Tensor) -> Tensor:
        return self.own if sent is self._data else super().local(sent)

    def landed(self, pieces: Sequence[Tensor]) -> None: ...

    def reopen(self, kept: Collection[int]) -> Tensor | None:
        """Zero the storage, on which autograd adds up; without ``kept`` all is overwritten."""
        if not kept:
            return None
        for position in range(len(self.pack.params)):
            if position not in kept:
                self.clear(position)
        carry = self.own.to(MASTER_DTYPE, copy=True)
        self.data.zero_()
        return carry

    def _view(self, position: int) -> Tensor:
        """The memory of one slot; a view that a script moved elsewhere is replaced."""
        _ = self.data  # allocates the views
        if self._views[position].data_ptr() != self._places[position]:
            slot = self.pack.layout.slots[position]
            self._views[position] = self.data[slot.offset : slot.end].view(size=slot.shape)
        return self._views[position]

    def _free_view(self, position: int) -> Tensor:
        """The memory of one slot for another gradient; whoever kept the old one gets a copy.

        To make views anew, so that weak references tell which are still in use, would take longer
        than all else here.
        """
        if _compat.held_elsewhere(self._views, position):
            kept = self._views[position]
            kept.data = kept.detach().clone()
        return self._view(position)
