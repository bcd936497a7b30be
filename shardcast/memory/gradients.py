"""The gradients of a pack: storage of the pack's layout, of which ``.grad`` are views."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import REDUCTIONS, Buffers, Reduction
from shardcast.memory.marks import Marks
from shardcast.memory.pack import Pack
from shardcast.memory.ungathered import OWNERS, UngatheredGradient, hide, reveal
from shardcast.plan.precision import MASTER_DTYPE


class Gradients:
    """The gradients of one pack on this rank, allocated with the first one and kept.

    This is the storage behind a pack's :class:`.Bucket`, full on every rank. An option has another
    one by a subclass, of its own span (``Option.gradients``), so that a bucket asks none of them
    which one it is.

    ``collect()`` takes in every ``.grad``, zeros where there is none; ``data`` is sent; the mean is
    written to ``own``, then ``landed(pieces)``. ``reopen(kept)`` begins anew and returns the fp32
    means of the slots ``kept``, to be added to the next ones.

    Outside of the own span ``data`` keeps this rank's own gradients, which are no means. So that
    nobody takes them for means every ``.grad`` is an :class:`.UngatheredGradient` from ``landed()``
    on; and for readers that are not called from Python, of each part of a parameter that lies there
    at least one element in every ``MARKED`` is NaN.

    Attributes:
        stays: whether ``own`` is the same memory in each step.
        cannot_gather: why :func:`.gather` cannot be called, for an error; empty: it can.
        owned: per slot, whether part of it lies in the own span.
        has_graph: whether a gradient had a graph of its own, which the mean has not.
        culprits: ranks whose own gradients made the mean non-finite, where that is known.
        lent: slots that :meth:`lend` shows, without a gradient of this rank.
        carry: fp32 means of the own span from earlier reductions of this step.
        joint: of copies whose gradients are added up, on how many ranks of one data-parallel
            coordinate each slot had one when it was last sent, fp32; ``None`` after a clear.
        is_ungathered: whether ``data`` has means in the own span alone, with other spans elsewhere.
        gone: slots whose gradient a script cleared after it was reduced.
        zeroed: slots that were zeroed after they landed, not set to ``None``.
        narrow_dtype: the dtype of gradients before they were widened.
    """

    stays = True
    cannot_gather = ""
    culprits: Collection[int] = ()
    gone: Collection[int] = ()
    joint: Tensor | None = None
    is_ungathered = False
    carry: Tensor | None = None
    narrow_dtype: torch.dtype | None = None
    _marks: Marks | None = None

    def __init__(self, pack: Pack, dtype: torch.dtype, wire: torch.dtype) -> None:
        self.pack, self.dtype, self.has_graph = pack, dtype, False
        self._wire = wire
        _, start, stop = pack.own
        self.owned = tuple(
            numel > 0 and offset < stop and start < offset + numel
            for _, _, offset, numel in pack.layout.slots
        )
        self._device = pack.params[0].device
        empty = partial(torch.empty, device="meta")
        self._places = [  # shape, strides and offset of each view
            (slot.shape, empty(slot.shape).stride(), slot.offset) for slot in pack.layout.slots
        ]
        self._data: Tensor | None = None
        # The view of each slot that was last shown as ``.grad``. Weakly: a script may keep it.
        self._shown: list[Callable[[], Tensor | None]] = []
        self._addresses: list[int] = []  # of the slots; a script may do ``.grad.data = ...``
        self.lent: set[int] = set()
        self.zeroed: set[int] = set()

    @property
    def allocated(self) -> bool:
        """Return whether ``data`` is there."""
        return self._data is not None

    @property
    def data(self) -> Tensor:
        """The storage, 1-d, ``layout.numel`` elements; padding is zero, in no sum and no norm."""
        return self._allocate() if self._data is None else self._data

    def _allocate(self, data: Tensor | None = None) -> Tensor:
        numel, own = self.pack.layout.numel, self.pack.own
        if data is None:
            data = torch.zeros(numel, dtype=self.dtype, device=self._device)
        assert data.storage_offset() == 0  # from where the places of views are counted
        self._data = data
        OWNERS[data.untyped_storage().data_ptr()] = self
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
        """The bytes of gradients and their marks."""
        marks = 0 if self._marks is None else self._marks.nbytes
        return marks + (0 if self._data is None else self._data.nbytes)

    def widen(self) -> None:
        """Accumulate in fp32 from now on; :func:`.gather` sends what it would have sent."""
        if self.dtype == MASTER_DTYPE:
            return
        params, data = self.pack.params, self._data
        ours = [position for position in range(len(params)) if self.holds(position)]
        for position in ours:
            params[position].grad = None  # not to be cast one by one
        set_grad_dtype(self.pack, MASTER_DTYPE)
        self.narrow_dtype, self.dtype = self.dtype, MASTER_DTYPE
        self._marks = None  # they are of another dtype
        if data is not None:
            self._allocate(data.to(MASTER_DTYPE))
        for position in ours:
            self.show(position)

    def free(self) -> None:
        """Give the storage back, after a clear; the next gradient has it allocated anew."""
        if self._data is not None:
            for position in range(len(self.pack.params)):
                self._part_with(position)
        self._data = self._marks = None
        self._own_data = torch.empty(0)

    def presence(self) -> list[bool]:
        """Return per slot whether this rank has a gradient, or a mean that it knows of."""
        if self.lent:
            lent = {position for position in self.lent if self.holds(position)}
            return [n not in lent and p.grad is not None for n, p in enumerate(self.pack.params)]
        return [param.grad is not None for param in self.pack.params]

    def lend(self, positions: Iterable[int]) -> None:
        """Show means of which only other ranks may have had a gradient.

        As under DDP, so that a script that edits gradients edits every mean of the own span.
        """
        for position in positions:
            self.show(position)
            self.lent.add(position)

    def take_back(self) -> None:
        """Show no more what was lent."""
        if self.lent:
            for position in self.lent:
                if self.holds(position):
                    self.pack.params[position].grad = None
            self.lent.clear()

    def holds(self, position: int) -> bool:
        """Return whether the gradient is ours, not one that a script put in its place."""
        grad = self.pack.params[position].grad
        if self._data is None or grad is None:
            return False
        with _compat.without_torch_function():  # or asking a hidden one for its address is slow
            return self._is_own(position, grad)

    def _is_own(self, position: int, grad: Tensor) -> bool:
        return grad is self._shown[position]() and grad.data_ptr() == self._addresses[position]

    def show(self, position: int) -> None:
        """Set the ``.grad`` at ``position`` to ours."""
        if not self.holds(position):
            self.pack.params[position].grad = self._view(position)

    def expect(self, position: int) -> bool:
        """Hear that a gradient is about to come; return whether every one is to be announced."""
        return False  # autograd adds to what is there

    def collect(self) -> set[int]:
        """Take all gradients in; return the positions without one, which are zeros."""
        self.adopt()
        absent = {n for n, param in enumerate(self.pack.params) if param.grad is None}
        for position in absent:
            self.clear(position)
        return absent

    def given(self) -> list[int]:
        """Return the positions with a gradient that is not ours."""
        params = self.pack.params
        return [n for n, p in enumerate(params) if p.grad is not None and not self.holds(n)]

    def adopt(self, positions: Iterable[int] | None = None) -> bool:
        """Copy gradients that are not ours in, and show ours; return whether there were any."""
        params = self.pack.params
        if self._data is None:
            self._allocate()
        grads: dict[int, Tensor] = {}
        with _compat.without_torch_function():
            for position in range(len(params)) if positions is None else positions:
                grad = params[position].grad
                if grad is None or self._is_own(position, grad):
                    continue
                if type(grad) is not Tensor or grad.layout != torch.strided:
                    from shardcast.memory.gradient_access import check_given

                    check_given(self.pack, position, grad)
                if grad.requires_grad:
                    self.has_graph = True
                grads[position] = grad
            if grads:
                with _compat.without_grad():  # a backward with create_graph runs hooks with it on
                    views = [self._view(position) for position in grads]
                    torch._foreach_copy_(views, list(grads.values()))  # one kernel on a GPU
                for position, view in zip(grads, views, strict=True):
                    params[position].grad = view
        return bool(grads)

    def forget(self) -> None:
        """Learn that all gradients were cleared, by whomever."""
        self.carry = self.joint = None

    def send(self, buffers: Buffers) -> Reduction:
        """Start the collective, on what was collected, into one of the ``buffers``."""
        layout = self.pack.layout
        sent = self.data if self.dtype == self._wire else self.data.to(self._wire)
        reduction = REDUCTIONS[layout.algorithms.reduce or "all_to_all"]  # none in a world of one
        take = partial(buffers.take, dtype=self._wire, device=sent.device)
        return reduction(self.pack.comm, layout, sent, self.local(sent), take)

    def clear(self, position: int) -> None:
        """Zero one slot, if there is storage."""
        if self._data is not None:
            slot = self.pack.layout.slots[position]
            self._data[slot.offset : slot.end].zero_()

    def zero(self, set_to_none: bool) -> None:
        """Hear that the optimizer clears all gradients; it clears the views itself."""
        self.take_back()  # or zeros would be left of what nobody may have had
        if not set_to_none:
            self.zeroed.update(range(len(self.pack.params)))
            self.reveal()  # zeros are what they seem to be

    def local(self, sent: Tensor) -> Tensor:
        """Return the own span of ``sent``; ``own`` itself where that is the same memory."""
        own = self.pack.own
        return self._own_data if sent is self._data else sent[own.start : own.stop]

    def landed(self, pieces: Sequence[Tensor]) -> None:
        """Hear that the mean of ``pieces`` (one piece: a sum over ranks) was written to ``own``."""
        if self._marks is None:
            self._marks = Marks.of(self.pack, self.dtype, self._device)
        self._marks.put(self.data)
        self.zeroed.clear()
        self._hide()

    def _hide(self) -> None:
        """Hide what is shown, which is the mean in places alone."""
        self.is_ungathered = self.pack.comm.size > 1
        for shown in self._shown if self.is_ungathered else ():
            if (view := shown()) is not None:
                hide(view)

    def reveal(self) -> None:
        """Show gradients as they are."""
        if self.is_ungathered:
            self.is_ungathered = False
            for shown in self._shown:
                if (view := shown()) is not None:
                    reveal(view)

    def own_before(self, offset: int) -> Tensor:
        """Return this rank's own value in another one's span. On a host, after ``landed()``."""
        hidden = None if self._marks is None else self._marks.hidden_at(offset)
        return self.data[offset] if hidden is None else hidden

    def reopen(self, kept: Collection[int]) -> Tensor | None:
        """Begin anew: autograd adds to ``data``, so it is zeroed; without ``kept`` overwritten.

        Marks are in slots alone, not in the padding, so that both take them away. Where means are
        kept apart, what is shown is a part of the gradient.
        """
        if not kept:
            self.is_ungathered = False  # nothing is shown, and what a script kept is no mean still
            return None
        for position in range(len(self.pack.params)):
            if position not in kept:
                self.clear(position)
        means = self.own.to(MASTER_DTYPE, copy=True)
        self.data.zero_()
        if self.zeroed.issuperset(kept):  # nothing is kept but zeros
            self.reveal()
        else:
            self._hide()
        return means

    def _view(self, position: int) -> Tensor:
        """Make a new view of one slot, for another gradient."""
        data = self.data
        if self._shown[position]() is not None:
            self._part_with(position)
        # One call: a slice and a view of it take twice as long, for each parameter of each step.
        # Detached, it is no view to autograd, which lets a script call detach_() on a gradient.
        view = data.as_strided(*self._places[position]).detach()
        self._shown[position] = weakref.ref(view)
        if self.is_ungathered:
            hide(view)
        return view

    def _part_with(self, position: int) -> None:
        """Give a copy to whoever kept the view that was last shown.

        Gradients that a script keeps over a backward (PCGrad) must not change.
        """
        last = self._shown[position]()
        if last is not None:
            with _compat.without_torch_function():
                if last.data_ptr() == self._addresses[position]:
                    last.data = last.detach().clone()
                if isinstance(last, UngatheredGradient):
                    last.of = self.pack.layout.slots[position].name


def nothing() -> None:
    """Stand for a weak reference to nothing."""


def own_part(pack: Pack, position: int) -> slice:
    """Return the elements of the own span that belong to one slot."""
    slot, own = pack.layout.slots[position], pack.own
    start = min(max(slot.offset, own.start), own.stop)
    return slice(start - own.start, max(start, min(slot.end, own.stop)) - own.start)


def set_grad_dtype(pack: Pack, dtype: torch.dtype) -> None:
    """Have autograd accumulate gradients in ``dtype``; those that are there are cast."""
    for param in pack.params:
        if param.grad_dtype != dtype:
            grad, param.grad = param.grad, None
            param.grad_dtype = dtype
            param.grad = None if grad is None else grad.to(dtype)
