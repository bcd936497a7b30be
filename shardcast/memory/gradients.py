"""The gradients of a pack: storage of the pack's layout, of which ``.grad`` are views."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.memory.pack import Pack
from shardcast.plan.precision import MASTER_DTYPE

COMING = 1 << 22  # bytes of sharded gradients that are copied in by one call


class Gradients:
    """The gradients of one pack on this rank, allocated with the first one and kept.

    ``collect()`` takes in every ``.grad``, zeros where there is none; ``data`` is sent; the mean is
    written to ``own``, then ``landed(pieces)``. ``reopen(kept)`` begins anew and returns the fp32
    means of the slots ``kept``, to be added to the next ones. Outside of the own span ``data``
    keeps this rank's own gradients, which a report of a skipped step looks at.

    Attributes:
        owned: per slot, whether part of it lies in the own span.
        has_graph: some gradient had a graph of its own, which the mean has not.
        culprits: ranks whose own gradients made the mean non-finite, where that is known.
        taken: slots with a gradient that :meth:`take` took and nothing shows.
        joint: of copies whose gradients are added up, on how many ranks of one data-parallel
            coordinate each slot had one when it was last sent, fp32; ``None`` after a clear.
    """

    culprits: Collection[int] = ()
    joint: Tensor | None = None
    _gathered: torch.dtype | None = None  # of gradients before they were widened

    def __init__(self, pack: Pack, dtype: torch.dtype) -> None:
        self.pack, self.dtype, self.has_graph = pack, dtype, False
        self.taken: set[int] = set()
        _, start, stop = pack.own
        self.owned = tuple(
            numel > 0 and offset < stop and start < offset + numel
            for _, _, offset, numel in pack.layout.slots
        )
        self._device = pack.params[0].device
        empty = partial(torch.empty, device="meta")
        self._strides = [empty(slot.shape).stride() for slot in pack.layout.slots]
        self._data: Tensor | None = None
        # The view of each slot that was last shown as ``.grad``. Weakly: a script may keep it.
        self._shown: list[Callable[[], Tensor | None]] = []
        self._addresses: list[int] = []  # of the slots; a script may do ``.grad.data = ...``

    @property
    def allocated(self) -> bool:
        """Whether ``data`` is there."""
        return self._data is not None

    @property
    def data(self) -> Tensor:
        """1-d, ``layout.numel`` elements; padding is zero, in no sum and no norm."""
        return self._allocate() if self._data is None else self._data

    def _allocate(self, data: Tensor | None = None) -> Tensor:
        numel, own = self.pack.layout.numel, self.pack.own
        if data is None:
            data = torch.zeros(numel, dtype=self.dtype, device=self._device)
        self._data = data
        slots, start = self.pack.layout.slots, data.data_ptr()
        self._addresses = [
            start + slot.offset * self.dtype.itemsize if slot.numel else 0 for slot in slots
        ]
        self._shown = [nothing] * len(slots)
        self._own_data = data[own.start : own.stop]
        return data

    @property
    def own(self) -> Tensor:
        """The own span, 1-d: the mean, after a reduction."""
        if self._data is None:
            self._allocate()
        return self._own_data

    @property
    def nbytes(self) -> int:
        return 0 if self._data is None else self._data.nbytes

    @property
    def version(self) -> int:
        """Another number after every edit of ``data``."""
        return 0 if self._data is None else self._data._version

    def widen(self) -> None:
        """Accumulate in fp32 from now on; :meth:`gather` sends what it would have sent."""
        if self.dtype == MASTER_DTYPE:
            return
        params, data = self.pack.params, self._data
        ours = [position for position in range(len(params)) if self.holds(position)]
        for position in ours:
            params[position].grad = None  # not to be cast one by one
        set_grad_dtype(self.pack, MASTER_DTYPE)
        self._gathered, self.dtype = self.dtype, MASTER_DTYPE
        if data is not None:
            self._allocate(data.to(MASTER_DTYPE))
        for position in ours:
            self.show(position)

    def presence(self) -> list[bool]:
        """Per slot, whether there is a gradient here."""
        if self.taken:
            return [p.grad is not None or n in self.taken for n, p in enumerate(self.pack.params)]
        return [param.grad is not None for param in self.pack.params]

    def holds(self, position: int) -> bool:
        """Whether the gradient is ours, not one that a script put in its place."""
        grad = self.pack.params[position].grad
        return self._data is not None and grad is not None and self._is_own(position, grad)

    def _is_own(self, position: int, grad: Tensor) -> bool:
        return grad is self._shown[position]() and grad.data_ptr() == self._addresses[position]

    def show(self, position: int) -> None:
        """Set the ``.grad`` at ``position`` to ours."""
        if not self.holds(position):
            self.pack.params[position].grad = self._view(position)

    def expect(self, position: int) -> bool:
        """A gradient is about to be accumulated; whether every one is to be announced so."""
        return False  # autograd adds to what is there

    def collect(self) -> set[int]:
        """Take all gradients in; returns the positions without one, which are zeros."""
        self.adopt()
        absent = {n for n, param in enumerate(self.pack.params) if param.grad is None}
        for position in absent:
            self.clear(position)
        return absent

    def adopt(self, positions: Iterable[int] | None = None) -> bool:
        """Copy gradients that are not ours in, and show ours; whether there were any."""
        params = self.pack.params
        _ = self.data  # allocates it
        grads: dict[int, Tensor] = {}
        for position in range(len(params)) if positions is None else positions:
            grad = params[position].grad
            if grad is None or self._is_own(position, grad):
                continue
            check_dense(self.pack, position, grad)
            self.has_graph = self.has_graph or grad.requires_grad
            grads[position] = grad
        if grads:
            with torch.no_grad():  # a backward with create_graph runs hooks with gradients on
                views = [self._view(position) for position in grads]
                torch._foreach_copy_(views, list(grads.values()))  # one kernel on a GPU
            for position, view in zip(grads, views, strict=True):
                params[position].grad = view
        return bool(grads)

    def take(self, memory: Tensor) -> None:
        """Show no gradient any more; the next ones are not added to these.

        Args:
            memory: what they are in, padding zero; other than ``data`` if that is to stay.
        """
        for position, param in enumerate(self.pack.params):
            if param.grad is not None:
                self.taken.add(position)
                param.grad = None
        if memory is not self._data:
            for position in range(len(self.pack.params)):
                self._part_with(position)
            self._allocate(memory)

    def show_taken(self) -> None:
        """Show zeros where a gradient was taken and none came since."""
        for position in self.taken:
            if self.pack.params[position].grad is None:
                self.clear(position)
                self.show(position)
        self.taken.clear()

    def clear(self, position: int) -> None:
        """Zero one slot, if there is storage."""
        if self._data is not None:
            slot = self.pack.layout.slots[position]
            self._data[slot.offset : slot.end].zero_()

    def used(self) -> None:
        """A step was made with the gradients."""

    def zero(self, set_to_none: bool) -> None:
        """The optimizer clears all gradients; views itself."""

    def discard(self, position: int) -> None:
        """The script clears one gradient; it is no longer shown then."""

    def local(self, sent: Tensor) -> Tensor:
        """The own span of ``sent``; ``own`` itself where that is the same memory."""
        own = self.pack.own
        return self._own_data if sent is self._data else sent[own.start : own.stop]

    def landed(self, pieces: Sequence[Tensor]) -> None:
        """The mean of ``pieces`` (one piece: of a sum over ranks) was written to ``own``."""

    def reopen(self, kept: Collection[int]) -> Tensor | None:
        """Begin anew: autograd adds to ``data``, so it is zeroed; without ``kept`` overwritten."""
        if not kept:
            return None
        for position in range(len(self.pack.params)):
            if position not in kept:
                self.clear(position)
        means = self.own.to(MASTER_DTYPE, copy=True)
        self.data.zero_()
        return means

    @torch.no_grad()
    def gather(self, present: Sequence[bool]) -> None:
        """Have the means of all owners in ``data``, and shown where ``present``. Collective."""
        pack, own = self.pack, self.pack.own
        # In the dtype that ranks have which add fewer gradients up.
        data = self.data if self._gathered is None else self.data.to(self._gathered)
        if len(pack.layout.lengths) == 1:
            pack.comm.all_gather(data, data[own.start : own.stop], pack.layout)
        else:
            spans = pack.layout.owned_spans
            pieces = [(span.owner, data[span.start : span.stop]) for span in spans]
            if pieces:
                pack.comm.broadcast_all(pieces, pack.layout)
        if data is not self.data:
            self.data[: own.start].copy_(data[: own.start])
            self.data[own.stop :].copy_(data[own.stop :])
        for position, param in enumerate(pack.params):
            if present[position]:
                param.grad = None  # a DTensor's was a part of the sum, and is all of it now
                self.show(position)

    def _view(self, position: int) -> Tensor:
        """A new view of one slot, for another gradient."""
        data, slot = self.data, self.pack.layout.slots[position]
        self._part_with(position)
        start = data.storage_offset() + slot.offset
        # One call: a slice and a view of it take twice as long, for each parameter of each step.
        view = data.as_strided(slot.shape, self._strides[position], start)
        self._shown[position] = weakref.ref(view)
        return view

    def _part_with(self, position: int) -> None:
        """Whoever kept the view that was last shown gets a copy.

        Gradients that a script keeps over a backward (PCGrad) must not change.
        """
        last = self._shown[position]()
        if last is not None and last.data_ptr() == self._addresses[position]:
            last.data = last.detach().clone()


class ShardedGradients(Gradients):
    """Of which only the own span stays: ``data`` is there from the first gradient to ``landed()``.

    ``.grad`` is ``None`` after the reduction, so who has a gradient is noted in here, until the
    optimizer or the model clears gradients, or the backward after a step. Gradients are copied in
    while others still come, so that the pack is not there twice. Over several backwards the own
    span is fp32, in which means are added up.
    """

    def __init__(self, pack: Pack, dtype: torch.dtype) -> None:
        super().__init__(pack, dtype)
        self._own: Tensor | None = None
        self._present: set[int] = set()
        self._used = False  # by a step
        self._zeroed = False  # by zero_grad(set_to_none=False): zeros need not be added to
        self._coming: list[int] = []  # gradients to be copied in when the next one comes
        self._coming_bytes = 0

    @property
    def own(self) -> Tensor:
        if self._own is None:
            self._own = torch.zeros(self.pack.own.numel, dtype=self.dtype, device=self._device)
        return self._own

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self._own is None else self._own.nbytes)

    @property
    def version(self) -> int:
        return 0  # nobody can edit what is not shown

    def presence(self) -> list[bool]:
        return [is_set or n in self._present for n, is_set in enumerate(super().presence())]

    def holds(self, position: int) -> bool:
        return position in self._present and self.pack.params[position].grad is None

    def show(self, position: int) -> None:
        self._present.add(position)
        self.pack.params[position].grad = None

    def expect(self, position: int) -> bool:
        if self._coming_bytes >= COMING:
            self._take(self._coming)
        self._coming.append(position)
        self._coming_bytes += self.pack.layout.slots[position].numel * self.dtype.itemsize
        return True

    def _take(self, positions: Iterable[int]) -> None:
        """Copy gradients into ``data``; ``.grad`` is a view of it, to which autograd may add."""
        super().adopt(positions)
        self._coming, self._coming_bytes = [], 0

    def collect(self) -> set[int]:
        params = self.pack.params
        self._used = self._zeroed = False
        self._take(range(len(params)))
        for position, param in enumerate(params):
            if param.grad is None:
                self.clear(position)  # it may have been cleared since it was copied in
            else:
                self.show(position)
        return set(range(len(params))) - self._present

    @torch.no_grad()
    def adopt(self, positions: Iterable[int] | None = None) -> bool:
        """Take gradients that a script set after the reduction for means."""
        found = False
        for position in range(len(self.pack.params)) if positions is None else positions:
            grad = self.pack.params[position].grad
            if grad is not None:
                found = True
                check_dense(self.pack, position, grad)
                part = own_part(self.pack, position)
                shift = self.pack.own.start - self.pack.layout.slots[position].offset
                self.own[part].copy_(grad.reshape(-1)[part.start + shift : part.stop + shift])
                self.show(position)
        return found

    def used(self) -> None:
        self._used = True

    def discard(self, position: int) -> None:
        self._present.discard(position)

    @torch.no_grad()
    def zero(self, set_to_none: bool) -> None:
        if set_to_none:
            self._present.clear()
        elif self._own is not None:
            self._own.zero_()
        self._zeroed = True

    def local(self, sent: Tensor) -> Tensor:
        return sent[self.pack.own.start : self.pack.own.stop]

    def landed(self, pieces: Sequence[Tensor]) -> None:
        """Give the storage back.

        Nobody could be asked later for the gradients that spoil the mean. So they are looked for
        here, on CPU, where a report names the element: one more sum over the own span, which would
        copy it into another dtype first; where it overflows for nothing, nobody is named.
        """
        self._data = None
        del self._own_data  # a view, which would keep all of the storage
        own = self.own
        if not _compat.is_host(own.device) or len(pieces) == 1 or self.culprits:
            return
        if not bool(own.sum().isfinite()):
            index = int(torch.argmax((~own.isfinite()).to(torch.uint8)))
            self.culprits = [r for r, piece in enumerate(pieces) if not piece[index].isfinite()]

    def reopen(self, kept: Collection[int]) -> Tensor | None:
        """The own span becomes the fp32 sum, unless there is nothing to be added to."""
        if self._used and not self._zeroed:
            self._present.clear()  # the script may have cleared them, which nobody can see
        if self._used or self._zeroed or not kept:
            self.culprits = ()
            if self.own.dtype != self.dtype:
                self._own = None
            return None
        for position in range(len(self.pack.params)):
            if position not in kept:
                self.own[own_part(self.pack, position)].zero_()
        self._own = self.own.to(MASTER_DTYPE)
        return self._own


def nothing() -> None:
    """A weak reference to nothing."""


def own_part(pack: Pack, position: int) -> slice:
    """The elements of the own span that belong to one slot."""
    slot, own = pack.layout.slots[position], pack.own
    start = min(max(slot.offset, own.start), own.stop)
    return slice(start - own.start, max(start, min(slot.end, own.stop)) - own.start)


def check_dense(pack: Pack, position: int, grad: Tensor) -> None:
    """Raise a TypeError for a sparse gradient."""
    if grad.layout != torch.strided:
        raise TypeError(
            f"gradient of {pack.layout.slots[position].name!r}: expected a dense tensor, got "
            f"{grad.layout}; use sparse=False in the embedding, or leave this parameter to an "
            "optimizer of its own"
        )


def set_grad_dtype(pack: Pack, dtype: torch.dtype) -> None:
    """Have autograd accumulate gradients in ``dtype``; those that are there are cast."""
    for param in pack.params:
        if param.grad_dtype != dtype:
            grad, param.grad = param.grad, None
            param.grad_dtype = dtype
            param.grad = None if grad is None else grad.to(dtype)
