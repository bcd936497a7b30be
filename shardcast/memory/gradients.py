"""The gradients of a pack: the mean of the own span, and what ``.grad`` shows of it.

Sharded values belong to their owners. Backwards accumulate in ordinary ``.grad``s that autograd
makes. A reduction sends them to the owners of their elements and leaves a :class:`.StandIn` in each
``.grad``. Edits of it edit the mean at its owners; it can be read after a gather.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.memory.local_param import LocalParam
from shardcast.memory.pack import Pack, strides_of
from shardcast.memory.stand_in import StandIn, outdated, stand_in
from shardcast.plan.layout import GroupId, with_values
from shardcast.plan.precision import MASTER_DTYPE, SHORT_SUM


def nothing(*_: object) -> None:
    """Return None; replaces a dead weak reference, or a call that does nothing."""


class Act(Enum):
    """The last thing that a script did to the mean of a slot before another backward."""

    CLEARED = "dropped"
    ASSIGNED = "replaced"


class Gradients:
    """The gradients of one pack on this rank: OPEN in ordinary ``.grad``s, or sent.

    The mean of the own span is a 1-d tensor in ``low`` that stays allocated. Once a reduction adds
    to it, and until it is cleared, it is in fp32, in other memory. After a gather ``.grad``s are
    views of the means of all owners. A lone rank sends nothing, and its ``.grad``s are views of the
    mean.

    Args:
        dtype: dtype of ``.grad``, and of a mean to which nothing was added.
        wire: dtype in which gradients are sent.
        widens: whether long sums of gradients should be exact.
        before_edit: called before a script edits the mean.
        norm_of: returns a norm of the mean of a slot of such gradients, over all ranks, 0-dim fp32;
            ``None`` during a backward. Collective.

    Attributes:
        low: ``dtype``.
        alone: whether nothing is sent; see :meth:`.Reducer.divide_by`.
        owned: per slot, whether part of it lies in the own span.
        has: slots for which this rank's gradient is part of the mean.
        additions: per slot, number of gradients that earlier backwards accumulated since it was
            sent or cleared.
        arrived: slots that got a gradient in the running backward, and how many, the last one last.
        shown: slots whose ``.grad`` shows the mean, unless a script changed it afterwards, or they
            are in ``arrived``; on a lone rank those with a stand-in, after a clip.
        adds: slots to whose mean the next reduction adds.
        held: gradients of this rank that the next reduction adds to a mean that ``.grad`` shows,
            after a backward that failed or sent nothing; for a DTensor, DTensors. ``None``: other
            ranks may have one.
        acts: what a script did to means since the first backward of a step.
        reductions: number of means that have arrived.
        in_flight: whether the pack is being sent, so that the mean must not be edited.
        holders: for copies whose gradients are summed, the number of ranks at one data-parallel
            coordinate that had a gradient of each slot, fp32.
        culprits: ranks whose gradients made the mean non-finite, if known.
        mistake: first error of this rank since gradients were cleared.
        has_come: called with this object when the mean has arrived.
    """

    has_a_part = (
        "but the mean lacks a part of it, because a backward failed, or ran inside no_sync() "
        "without zero_grad() before it: call optimizer.zero_grad() first, or set every .grad to "
        "None"
    )

    def __init__(
        self,
        pack: Pack,
        dtype: torch.dtype,
        wire: torch.dtype,
        widens: bool,
        before_edit: Callable[[], None],
        norm_of: Callable[[Gradients, int, float], Tensor | None],
        alone: bool,
    ) -> None:
        self.pack, self.low, self._wire, self._widens = pack, dtype, wire, widens
        self.alone = alone
        slots = pack.layout.slots
        owned = {fragment.slot for fragment in pack.layout.fragments(pack.own.owner)}
        self.owned = tuple(slot in owned for slot in slots)
        self._own: Tensor | None = None
        self._mean: Tensor | None = None  # in ``low``; this memory stays allocated
        self._full: Tensor | None = None  # means of all owners, after a gather
        self._stand_ins: list[StandIn | None] = [None] * len(slots)
        # The last shown views; weak references, because a script may keep one.
        self._views: list[Callable[[], Tensor | None]] = [nothing] * len(slots)
        self.additions = [0] * len(slots)
        self.arrived: dict[int, int] = {}
        self.has: set[int] = set()
        self.shown: set[int] = set()
        self.adds: set[int] = set()
        self.held: dict[int, Any] = {}
        self.acts: dict[int, Act] = {}
        self.reductions, self.in_flight = 0, False
        self.holders: Tensor | None = None
        self.culprits: Collection[int] = ()
        self._before_edit, self.norm_of = before_edit, norm_of
        self.has_come: Callable[[Gradients], None] = nothing
        self.mistake: Exception | None = None

    # -- the mean -------------------------------------------------------------------------------

    @property
    def own(self) -> Tensor:
        """The mean of the own span, 1-d; padding is zero and takes part in no sum or norm."""
        if self._own is None:
            if self._mean is None:
                numel = self.pack.own.numel
                self._mean = torch.zeros(numel, dtype=self.low, device=self.pack.data.device)
            self._own = self._mean
        return self._own

    @property
    def version(self) -> int:
        """A number that changes when the mean is edited; DTensors that show it count apart."""
        grads = (param.param.grad for param in self.pack.params if isinstance(param, LocalParam))
        apart: int = sum(grad._version for grad in grads if grad is not None)
        return self.own._version + apart

    @property
    def nbytes(self) -> int:
        """Bytes of the mean, and of gradients that are not reduced."""
        held = {id(t): t.nbytes for t in (self._mean, self._own, self._full) if t is not None}
        if self._full is not None:
            held.pop(id(self._own), None)  # part of the mean's memory
        grads = (param.grad for param in self.pack.params)
        with _compat.without_torch_function():
            local: int = sum(
                grad.nbytes
                for n, grad in enumerate(grads)
                if grad is not None and not self.holds(n, grad)
            ) + sum(
                _compat.local_tensor(grad).nbytes for grad in self.held.values() if grad is not None
            )
        return sum(held.values()) + local

    def part(self, position: int) -> Tensor:
        """Return one slot's part of the mean."""
        return self.own[own_part(self.pack, position)]

    def within(self, position: int) -> tuple[int, int]:
        """Return the elements of the flattened parameter in that part."""
        slot, own = self.pack.layout.slots[position], self.pack.own
        part = own_part(self.pack, position)
        shift = own.start - slot.offset
        return (part.start + shift, part.stop + shift) if part.stop > part.start else (0, 0)

    def presence(self) -> list[bool]:
        """Return per slot whether this rank's gradient is part of the mean."""
        return [position in self.has for position in range(len(self.pack.params))]

    def cleared(self) -> list[int]:
        """Return the slots that want a gradient and have none."""
        params = enumerate(self.pack.params)
        return [n for n, param in params if param.grad is None and param.requires_grad]

    @property
    def gone(self) -> set[int]:
        """Slots that a script cleared after the reduction, which shows every trained one."""
        params = enumerate(self.pack.params)
        return {n for n, param in params if n not in self.shown and param.requires_grad}

    def moment(self, position: int) -> Callable[[], bool]:
        """Return a function that returns whether one slot's gradient is as it is now."""
        self._before_edit()
        me, own = weakref.ref(self), weakref.ref(self.own)
        version, reductions = self.own._version, self.reductions

        def stays() -> bool:
            it = me()
            grad = None if it is None else it.pack.params[position].grad
            if it is None or grad is None or position in it.held or not it.holds(position, grad):
                return False
            it._before_edit()
            return it.own is own() and (it.own._version, it.reductions) == (version, reductions)

        return stays

    def edited(self, position: int) -> Tensor:
        """Return one slot's part, for a script that is about to edit it.

        Raises:
            RuntimeError: the pack is being sent, for example after a failed backward, or the mean
                is only a part of the gradient.
        """
        if self.in_flight or position in self.held:
            name = self.pack.layout.slots[position].name
            raise RuntimeError(
                f"backward: .grad of {name!r} was edited or zeroed in place, {self.has_a_part}"
            )
        self._before_edit()
        self.adds.add(position)
        return self.part(position)

    def zero(self, position: int) -> None:
        """Zero the gradient of one slot: it stays present, with nothing to add to."""
        if not self.in_flight:
            self.held.pop(position, None)
        self.edited(position).zero_()
        self.adds.discard(position)

    def is_zeroed(self, position: int) -> bool:
        """Whether a script wrote zeros to a gathered gradient. Waits for the device."""
        slot, full = self.pack.layout.slots[position], self._full
        return full is not None and not bool(full[slot.offset : slot.end].any())

    def own_mean(self) -> tuple[Tensor | None, Tensor]:
        """Return a mean to add to, in fp32, if there is one, and ``own``, which gets the sum."""
        own, adds, full = self.own, self.adds, self._full
        self._full = None
        if not adds:
            self._own = None  # allocates ``low`` again
            return None, self.own
        if self.low == MASTER_DTYPE:
            total = self._mean
            assert total is not None
            if own is not total:
                total.copy_(own)
        else:
            # Frees the old memory first, because both would take half as much again. A script may
            # keep what it gathered.
            total, self._mean = own.to(MASTER_DTYPE, copy=full is not None), None
        for position in range(len(self.pack.params)):
            if position not in adds:
                total[own_part(self.pack, position)].zero_()
        self._own = total
        if full is not None:
            self._spoil(full, adds, 1)  # ``own``
        return total, total

    def _spoil(self, data: Tensor, positions: Iterable[int], known: int = 0) -> None:
        """Write NaN where views of ``.grad`` that a script keeps no longer show it."""
        if _compat.is_shared(data, known):
            for position in positions:
                slot = self.pack.layout.slots[position]
                data[slot.offset : slot.end].fill_(math.nan)

    def landed(self, pieces: Sequence[Tensor], holders: Tensor | None) -> None:
        """Adopt the mean of ``pieces`` that was written to ``own`` (one piece: a finished sum)."""
        self.in_flight, self.culprits, self.holders = False, (), holders
        self.reductions += 1
        self.adds = set(self.shown)
        own = self.own
        self.has_come(self)
        if not _compat.is_host(own.device) or len(pieces) == 1:
            return
        # The gradients that spoil the mean are not available later. If only the sum overflows, no
        # rank is named.
        if not bool(own.sum().isfinite()):
            index = int(torch.argmax((~own.isfinite()).to(torch.uint8)))
            self.culprits = [r for r, piece in enumerate(pieces) if not piece[index].isfinite()]

    def settle(self) -> bool:
        """Adopt what a script did to ``.grad``s after the reduction; the step uses these.

        Returns:
            Whether a gradient was assigned.
        """
        has_taken = False
        if not self.shown and not self.adds:
            self.own.zero_()  # it still has values of cleared gradients
        for position, param in enumerate(self.pack.params):
            grad = param.grad
            if grad is None:
                if position in self.shown:
                    self._drop(position)
                    self._part_with(position)
                    self.part(position).zero_()
                    if self.holders is not None:
                        self.holders[position].fill_(0.0)
            elif not self.holds(position, grad) and self._accepts(position, grad):
                self._part_with(position)  # another ``.grad`` may be this view now
                with torch.no_grad(), _compat.without_torch_function():
                    start, stop = self.within(position)
                    self.part(position).copy_(grad.detach().reshape(-1)[start:stop])
                self.has.add(position)
                self.adds.add(position)
                self.show(position)
                has_taken = True
        return has_taken

    def replaced(self) -> bool:
        """Return whether a ``.grad`` no longer shows the mean: it was cleared or assigned."""
        params = self.pack.params
        return any(params[n].grad is None for n in self.shown | self.has) or bool(self.assigned())

    def kept(self) -> list[int]:
        """Return the slots whose ``.grad`` shows the mean."""
        grads = enumerate(param.grad for param in self.pack.params)
        return [n for n, grad in grads if grad is not None and self.holds(n, grad)]

    def assigned(self) -> list[int]:
        """Return the slots whose ``.grad`` is a script's own tensor."""
        grads = enumerate(param.grad for param in self.pack.params)
        return [n for n, grad in grads if grad is not None and not self.holds(n, grad)]

    @property
    def readable(self) -> range:
        """Addresses of the mean where ``.grad``s are views of it; empty elsewhere."""
        data = self._own if self._full is None and self.alone else self._full
        return range(0) if data is None else range(data.data_ptr(), data.data_ptr() + data.nbytes)

    def copy_assigned(self, memory: Sequence[range]) -> None:
        """Copy assigned gradients that lie in ``memory``, which is about to be overwritten."""
        for position, param in enumerate(self.pack.params):
            grad = param.grad
            if grad is None or type(grad) is StandIn or grad is self._views[position]():
                continue
            if grad.layout == torch.strided and any(grad.data_ptr() in part for part in memory):
                with torch.no_grad():
                    param.grad = grad.clone()

    # -- what ``.grad`` shows -------------------------------------------------------------------

    def holds(self, position: int, grad: Tensor) -> bool:
        """Return whether ``grad`` shows the mean, rather than a script's own tensor."""
        if type(grad) is StandIn:
            own = self._stand_ins[position]
            return own is not None and (
                grad is own or (grad.root is own and grad.shape == own.shape)
            )
        if grad is not self._views[position]():
            return False
        data = self.own if self._full is None else self._full
        offset = self.pack.layout.slots[position].offset if data.numel() else 0
        return grad.data_ptr() == data.data_ptr() + offset * data.element_size() or not grad.numel()

    def show(self, position: int) -> None:
        """Set ``.grad`` to a stand-in for the mean, or for the gradient that it is a part of."""
        if self._full is not None:
            self._outdate(position)
        self.shown.add(position)
        param = self.pack.params[position]
        if param.grad_dtype != self.low:
            param.grad = None
            self._set_dtype(position, self.low)
        if type(param.grad) is StandIn and param.grad is self._stand_ins[position]:
            return
        self._part_with_stand_in(position)
        held = self._stand_ins[position]
        if held is None:
            held = self._stand_ins[position] = stand_in(self, position)
        param.grad = held

    def _part_with_stand_in(self, position: int) -> None:
        """Leave a stand-in to the script that keeps it; it no longer shows the mean."""
        if _compat.is_kept(self._stand_ins, position):
            held, self._stand_ins[position] = self._stand_ins[position], None
            assert held is not None
            held.grads = nothing

    def _outdate(self, position: int) -> None:
        """Clear a ``.grad``, because another one follows; one that a script keeps raises then."""
        last = [self._last(position)]
        if last[0] is not None:
            self._views[position], self.pack.params[position].grad = nothing, None
            if _compat.is_kept(last, 0):
                outdated(last[0], self.pack.layout.slots[position])

    def _last(self, position: int) -> Tensor | None:
        """Return the ``.grad`` that is a view of the mean, or of those of all owners."""
        last = self._views[position]()
        return last if last is not None and self.pack.params[position].grad is last else None

    def _view(self, position: int, data: Tensor, last: Tensor | None = None) -> Tensor:
        """Return a view of one slot: ``last``, which a script may keep, or a new one."""
        if self.alone and last is None:
            self._part_with(position)
        slot = self.pack.layout.slots[position]
        # One call, because a slice and its view take twice as long, for each parameter in each
        # step. Detached, so that autograd does not treat it as a view and a script may call
        # detach_() on it.
        begin = data.storage_offset() + slot.offset
        view = data.as_strided(slot.shape, strides_of(slot.shape), begin).detach()
        if last is not None:
            last.data, view = view, last
        self._views[position] = weakref.ref(view)
        return view

    def _part_with(self, position: int) -> None:
        """Give a script that kept the last shown view its own copy, before it is overwritten.

        Gradients that a script keeps during another backward (PCGrad) must not change.
        """
        last = self._views[position]()
        self._views[position] = nothing
        if last is not None and (self.alone or self._full is not None):
            last.data = last.detach().clone()

    def given(self, position: int) -> Tensor | None:
        """Return the ``.grad`` that is this rank's own; note what a script did to the mean.

        ``None`` instead of the mean means that the script cleared it. Another tensor replaces it,
        as under DDP: it is this rank's gradient, to be averaged over ranks.
        """
        grad = self.pack.params[position].grad
        if grad is None:
            if position in self.shown:
                self._drop(position, Act.CLEARED)
            return None
        if position not in self.arrived:
            if self.holds(position, grad):
                return None
            if position in self.shown:
                self._drop(position, Act.ASSIGNED)
        return grad if self._accepts(position, grad) else None

    def _accepts(self, position: int, grad: Tensor) -> bool:
        """Return whether a gradient can be reduced; otherwise keep the error, and clear it."""
        if type(grad) is not StandIn and grad.layout == torch.strided:
            return True
        error: Exception
        about = f"gradient of {self.pack.layout.slots[position].name!r}"
        if type(grad) is StandIn:
            error = RuntimeError(
                f"{about}: expected its own, got the .grad of {grad.of!r}, whose values are on "
                "other ranks, or a .grad that the script kept; call optimizer.gather_gradients() "
                "first"
            )
        else:
            error = TypeError(
                f"{about}: expected a dense tensor, got {grad.layout}; use sparse=False in the "
                "embedding, or leave this parameter to a plain optimizer, and average its "
                "gradient over the ranks yourself"
            )
        self.refuse(error)
        self.pack.params[position].grad = None
        return False

    def refuse(self, error: Exception) -> None:
        """Keep this rank's first error until the next decision, which raises it on all ranks."""
        self.mistake = self.mistake or error.with_traceback(None)

    def _drop(self, position: int, act: Act | None = None) -> None:
        """Drop the mean of one slot, also from ``.grad``, for example because of a script's act."""
        if act is not None and position in self.adds:
            self.acts[position] = act
        for positions in (self.shown, self.adds, self.has):
            positions.discard(position)
        self.held.pop(position, None)
        self._retire(position)

    # -- a backward -----------------------------------------------------------------------------

    def begin(self, refuses: bool) -> None:
        """Begin to accumulate.

        Args:
            refuses: the means are of this step, and a reduction follows.
        """
        self.arrived = {}
        if self.alone:
            self.restart()
        if refuses:
            self._refuse_local()

    def arrive(self, position: int) -> None:
        """Note a gradient that autograd is about to accumulate; in fp32 after too many.

        If ``.grad`` is a stand-in or was gathered, it becomes this rank's own gradient. The mean
        stays, and the gradient is added to it.
        """
        if self.shown and self.given(position) is None:
            self._lend(position)
        self.arrived[position] = count = self.arrived.pop(position, 0) + 1
        if self._widens and self.additions[position] + count > SHORT_SUM:
            self._widen(position)

    def widen(self) -> None:
        """Widen sums that a backward will make too long, because its hooks may only count."""
        for position, count in enumerate(self.additions if self._widens else ()):
            if count >= SHORT_SUM and position not in self.held:
                self._widen(position)

    def _lend(self, position: int) -> None:
        """Set ``.grad`` to this rank's own gradient, if any, in the place of a mean."""
        if self._full is not None:
            self._outdate(position)
        param, held = self.pack.params[position], self.held.pop(position, None)
        param.grad = None
        if held is not None:
            self._set_dtype(position, held.dtype)
            self.pack.in_model[position].grad = held

    def _refuse_local(self) -> None:
        """Refuse gradients that backwards without a reduction added to means of the same step."""
        for position in sorted(self.held.keys() & self.adds):
            grad = self.pack.params[position].grad
            if grad is not None and self.holds(position, grad):
                name = self.pack.layout.slots[position].name
                self.refuse(
                    RuntimeError(
                        f"backward: {name!r} got a gradient inside no_sync() or attempt() after an "
                        "earlier backward of the same step had been reduced; run the backward "
                        "outside no_sync() last, or call optimizer.zero_grad() in between"
                    )
                )

    def keep(self, has_failed: bool = False) -> None:
        """Keep the gradients of a backward that sent nothing; show means again.

        They get memory of their own. Graphed callables return the same memory in each backward.
        Autograd uses it as ``.grad``, and the next backward would overwrite it.

        Args:
            has_failed: a script's hook may have raised before the last gradient was accumulated.
        """
        arrived, self.arrived = self.arrived, {}
        last = next(reversed(arrived), None) if has_failed else None
        for position, count in arrived.items():
            param, grad = self.pack.params[position], self.pack.params[position].grad
            if position == last and grad is None:  # it never came
                if position in self.shown:
                    self.show(position)
                continue
            self.additions[position] += count
            if grad is None or self.holds(position, grad):
                continue
            if type(grad) is Tensor and _compat.is_shared(grad):
                param.grad = grad.detach().clone()
            if position in self.adds:
                self.held[position] = self.pack.in_model[position].grad
                self.show(position)
            elif position in self.shown:  # zeros, to which nothing is added
                self._drop(position)

    def clear(self, positions: Sequence[int]) -> None:
        """Set the ``.grad`` of these slots to ``None``."""
        for position in positions:
            self.pack.params[position].grad = None

    def show_all(self) -> None:
        """Show a stand-in for every gradient, after a backward that failed before it was sent.

        Other ranks may have what this one lacks, so that no ``.grad`` is whole, not even after a
        gather. From then on ``None`` means that a script cleared a gradient, and a tensor that it
        assigned one.
        """
        for position, param in enumerate(self.pack.params):
            if position in self.held and param.grad is not None:  # otherwise it was cleared
                continue
            grad = self.given(position)
            if param.grad is None:
                if not param.requires_grad:
                    continue
                if self._own is not None:  # it may have values of an earlier step
                    self.part(position).zero_()
            self.held[position] = None if grad is None else self.pack.in_model[position].grad
            self.show(position)

    # -- a reduction ----------------------------------------------------------------------------

    def collect(
        self,
        empty: Callable[[int, torch.dtype], Tensor],
        left_out: Callable[[int], bool] | None = None,
    ) -> Tensor:
        """Return all gradients of this rank, 1-d, with zeros for absent ones.

        From then on every ``.grad`` shows the mean.

        Args:
            empty: returns memory for so many elements; a pack's only gradient needs none.
            left_out: returns whether other ranks send the same gradient of a slot.
        """
        layout, params = self.pack.layout, self.pack.params
        grads: dict[int, Tensor] = {}
        for position, param in enumerate(params):
            grad = self.given(position) if self.shown else param.grad
            if position in self.held:
                self._lend(position)
                grad = param.grad
            if grad is not None and self._accepts(position, grad):
                grads[position] = grad
        absent = [position for position in range(len(params)) if position not in grads]
        without = [n for n in grads if left_out(n)] if left_out is not None else []
        # Others are not copied, and a pack's only gradient, which a script may keep, is not zeroed.
        sent = self._packed({n: g for n, g in grads.items() if n not in without}, empty)
        for position in (*absent, *without):
            slot = layout.slots[position]
            sent[slot.offset : slot.end].zero_()
        self.has |= grads.keys()
        self.arrived = {}
        self.additions = [0] * len(params)
        self.in_flight = True
        for position, param in enumerate(params):
            if param.requires_grad or position in grads or position in self.shown:
                self.show(position)
        return sent

    def _packed(
        self, grads: dict[int, Tensor], empty: Callable[[int, torch.dtype], Tensor]
    ) -> Tensor:
        layout = self.pack.layout
        if len(layout.slots) == len(grads) == 1:
            (grad,) = grads.values()
            alone = not _compat.is_shared(grad) and grad.is_contiguous()
            if alone and grad.dtype == self._wire and grad.numel() == layout.numel:
                return grad.detach().view(-1)
        sent = empty(layout.numel, self._wire)
        if self._gaps.numel():
            sent.index_fill_(0, self._gaps, 0.0)
        if grads:
            every = self.pack.views(sent)
            views = every if len(grads) == len(every) else [every[n] for n in grads]
            self._copy(views, [*grads.values()])
        return sent

    def _copy(self, views: list[Tensor], grads: list[Tensor]) -> None:
        with _compat.without_grad():  # a backward with create_graph runs hooks with it on
            try:
                torch._foreach_copy_(views, grads)  # one kernel on a GPU
            except RuntimeError:
                self.pack.moved()  # a resized parameter raises an error that names it
                raise

    @cached_property
    def _gaps(self) -> Tensor:
        """The elements of the pack that are padding; made when something is sent."""
        slots, numel = self.pack.layout.slots, self.pack.layout.numel
        ends, starts = [0, *(slot.end for slot in slots)], [*(slot.offset for slot in slots), numel]
        parts = [torch.arange(end, start) for end, start in zip(ends, starts, strict=True)]
        return torch.cat(parts).to(self.pack.params[0].device)

    def _widen(self, position: int) -> None:
        """Accumulate one gradient in fp32 from now on, until it is sent or cleared."""
        if self.alone:
            self._widen_all()
        else:
            self._set_dtype(position, MASTER_DTYPE)

    def _widen_all(self) -> None:
        """Keep the mean, and what ``.grad`` shows of it, in fp32 from now on."""
        if self.all_shown.dtype != MASTER_DTYPE:
            self._move(self.all_shown.to(MASTER_DTYPE))

    def _move(self, data: Tensor) -> None:
        """Keep the mean, and what ``.grad`` shows of it, in ``data`` from now on."""
        params, span, old = self.pack.params, self.pack.own, self.all_shown
        views = {n: self._last(n) for n in self.kept() if type(params[n].grad) is not StandIn}
        self._views = [nothing] * len(params)
        if self._full is not None:
            self._full, self._own = data, data[span.start : span.stop]
        else:
            self._own, self._mean = data, data if data.dtype == self.low else None
        for position in views:
            params[position].grad = None  # so that they are not cast one by one
        for position in range(len(params)) if self.alone else views:
            if type(params[position].grad) is not StandIn:
                self._set_dtype(position, data.dtype)
        for position, last in views.items():
            params[position].grad = self._view(position, data, last)
        self._spoil(old, views)

    def narrow(self) -> None:
        """Accumulate in ``low`` again, without the wider gradients."""
        for position, param in enumerate(self.pack.params):
            if param.grad_dtype != self.low:
                param.grad = None
                self._set_dtype(position, self.low)

    def _set_dtype(self, position: int, dtype: torch.dtype) -> None:
        # After clearing a gradient, a script may set one in the parameter's dtype.
        set_grad_dtype(self.pack.params[position], dtype, is_only=dtype == self.low)

    # -- a lone rank: nothing is sent -------------------------------------------------------------

    def end_alone(self) -> None:
        """Send gradients from now on. What ``.grad`` shows becomes this rank's own gradient."""
        self.show_views(retires=True)
        for position in range(len(self.pack.params)):
            self._part_with(position)
        self.has.clear()
        self.alone = False

    def hide_clip(self) -> None:
        """Show stand-ins, because a clip that the update applies is not in the mean."""
        for position in self.kept():
            param, last = self.pack.params[position], [self._last(position)]
            self._views[position] = nothing
            param.grad = None
            if _compat.is_kept(last, 0):  # it remains ``.grad``
                self._part_with_stand_in(position)
                param.grad = self._stand_ins[position] = stand_in(self, position, last[0])
            self.show(position)
        self.adds = set(self.shown)

    def show_views(self, retires: bool = False) -> None:
        """Show views in place of stand-ins.

        Args:
            retires: stand-ins that a script keeps no longer show the mean.
        """
        self.shown, self.adds = set(), set()
        for position in range(len(self._stand_ins)):
            if self._stand_ins[position] is None:
                continue
            param = self.pack.params[position]
            shows = param.grad is not None and self.holds(position, param.grad)
            if retires:
                self._retire(position)
            if shows:
                param.grad = None
            self._set_dtype(position, self.own.dtype)  # also of those that were cleared
            if shows:
                param.grad = self._view(position, self.own)

    def adopt(self) -> None:
        """Copy gradients from autograd or a script into ``own``, and show views of it."""
        params = self.pack.params
        grads: dict[int, Tensor] = {}
        for position, param in enumerate(params):
            grad = param.grad
            if (
                grad is not None
                and not self.holds(position, grad)
                and self._accepts(position, grad)
            ):
                grads[position] = grad
        if grads:
            own = self.own
            views = [self._view(position, own) for position in grads]
            self._copy(views, [*grads.values()])
            for position, view in zip(grads, views, strict=True):
                self._set_dtype(position, own.dtype)  # a stand-in had ``low``
                params[position].grad = view

    def adopt_all(self) -> None:
        """Copy all gradients of a single rank into ``own``, with zeros for absent ones."""
        self.adopt()
        self.has = {n for n, param in enumerate(self.pack.params) if param.grad is not None}
        for position in range(len(self.pack.params)):
            if position not in self.has:
                self._part_with(position)
                self.part(position).zero_()

    def restart(self) -> None:
        """Start in ``low`` again, if all gradients were cleared one by one.

        A script that keeps other views of cleared ones (PCGrad) keeps their memory. A ``.grad``
        that it keeps gets a copy later, so that a loop's last variable does not keep a whole pack.
        """
        own, is_wide = self.own, self.own.dtype != self.low
        if not (is_wide or _compat.is_shared(own)):
            return
        kept, views = self.kept(), enumerate(self._views)
        if kept and {n for n, view in views if view is not nothing} <= {*kept}:
            return  # none was cleared
        memory = own.untyped_storage().data_ptr()
        shown = [view for it in self._views if (view := it()) is not None]
        known = sum(view.untyped_storage().data_ptr() == memory for view in shown)
        is_shared = _compat.is_shared(own, known)
        if kept:
            if is_shared:
                self._move(own.clone())
            return
        if is_wide or is_shared:
            self._own, self._views = None, [nothing] * len(self._views)
        if is_shared:
            self._mean = None
        for position in range(len(self.pack.params)) if is_wide else ():
            self._set_dtype(position, self.low)

    # -- after a step -----------------------------------------------------------------------------

    def use(self) -> None:
        """Count additions from zero, because a step has used the mean."""
        self.additions = [0] * len(self.owned)

    def forget(self, set_to_none: bool = True) -> None:
        """Drop the mean, because all gradients were cleared.

        Args:
            set_to_none: ``False`` keeps gradients present, as zeros.
        """
        self.adds.clear()
        self.acts.clear()
        self.mistake, self.additions = None, [0] * len(self.owned)
        if set_to_none:
            for position in self.shown:
                self._retire(position)
            self.has.clear()
            self.shown.clear()
            self.held.clear()
            self._own = self._full = self.holders = None
            self.narrow()
            return
        if self.alone:
            self.show_views()  # zeros show no clip
        held, self.held = self.held, {}
        for position in held:
            if self.pack.params[position].grad is not None:  # not cleared before
                self.has.add(position)
                self.show(position)
        if self._own is None:
            return
        if self._full is not None:  # gathered means are at their owners again
            for position in self.kept():
                self.show(position)
            self._own = self._full = None
        if self.alone:
            self.restart()
        for position, param in enumerate(self.pack.params) if self.alone else ():
            if param.grad is not self._views[position]():
                self._part_with(position)
        self.own.zero_()

    def _retire(self, position: int) -> None:
        """Clear a stand-in; one that a script keeps no longer shows the mean if it is put back."""
        param = self.pack.params[position]
        if param.grad is not None and self.holds(position, param.grad):
            param.grad = None
        self._part_with_stand_in(position)

    def hide(self, present: Sequence[bool]) -> None:
        """Show no gradient if no rank had one, as far as is known."""
        for position in [n for n in self.shown if not present[n] and n not in self.has]:
            self._drop(position)

    def free(self) -> None:
        """Free all memory after a clear; the next gradient allocates it again."""
        self.close()
        self._mean = self._own = self._full = None

    def close(self) -> None:
        """Clear every ``.grad`` that shows the mean, and give up what is in flight."""
        self.in_flight = False
        shown = self.kept()
        self.clear(shown)
        for position in shown:
            self._part_with(position)
        self.forget()

    # -- gathered --------------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self, present: Sequence[bool], dtype: torch.dtype) -> None:
        """Gather the means of all owners in ``dtype``; ``.grad``s become views of them.

        Collective: every rank of the pack, after :meth:`settle`.

        Args:
            present: per slot, whether some rank has a gradient.
        """
        pack, own, span, full = self.pack, self.own, self.pack.own, self._full
        if full is None or full.dtype != dtype:  # otherwise views that a script keeps stay valid
            self._full = full = own.new_zeros(pack.layout.numel, dtype=dtype)
            self._own = full[span.start : span.stop].copy_(own)
        self.share()
        for position, param in enumerate(pack.params):
            last = self._last(position)
            param.grad = None  # for a DTensor, a partial gradient, which is whole now
            if not present[position]:
                self._drop(position)
                continue
            self._set_dtype(position, dtype)
            param.grad = self._view(position, full, last)
            self.shown.add(position)
            self.has.add(position)

    @torch.no_grad()
    def share(self) -> None:
        """Send the own span of a gathered mean to all ranks, also after an edit. Collective."""
        full, comm, layout = self._full, self.pack.comm, self.pack.layout
        if full is None:
            return
        if len(layout.lengths) == 1:
            comm.all_gather(full, self.own, layout)
        else:
            pieces = [(part.owner, full[part.start : part.stop]) for part in layout.owned_spans]
            comm.broadcast_all(pieces, layout)

    @property
    def shows(self) -> bool:
        """Whether ``.grad``s must show a clip at once.

        In low precision on one rank the clip waits for the update, because rounding clipped values
        would cost precision, and keeping all of them in fp32 would cost memory. See
        :meth:`hide_clip`.
        """
        return self._full is not None or (self.alone and self.own.dtype == MASTER_DTYPE)

    def multiply(self, factors: Mapping[GroupId, Tensor | None]) -> None:
        """Multiply the mean, and what ``.grad`` shows of it, by a clip's factor for each group.

        They are in fp32 from then on, so that the update computes the same bits.
        """
        self._widen_all()
        for part, factor in with_values(self.shown_ranges, factors):
            if factor is not None:
                self.all_shown[part].mul_(factor)

    def rescale(self, change: float) -> None:
        """Multiply all gradients, in the mean or not, by a number; zeros of a clear stay zeros."""
        for position, param in enumerate(self.pack.params):
            grad = param.grad
            if grad is not None and type(grad) is not StandIn and not self.holds(position, grad):
                grad.mul_(change)
        for held in self.held.values():
            if held is not None:
                _compat.local_tensor(held).mul_(change)
        if self._own is not None and (self.adds or not self.shown):
            self.all_shown.mul_(change)

    @property
    def all_shown(self) -> Tensor:
        """The mean, and after a gather the parts of other owners, 1-d."""
        return self.own if self._full is None else self._full

    @property
    def shown_ranges(self) -> list[tuple[slice, GroupId]]:
        """The parts of :attr:`all_shown` with one group each."""
        layout = self.pack.layout
        return self.pack.ranges if self._full is None else layout.ranges(0, layout.numel)


def own_part(pack: Pack, position: int) -> slice:
    """Return the elements of the own span that belong to one slot."""
    slot, own = pack.layout.slots[position], pack.own
    start = min(max(slot.offset, own.start), own.stop)
    return slice(start - own.start, max(start, min(slot.end, own.stop)) - own.start)


def set_grad_dtype(param: Tensor | LocalParam, dtype: torch.dtype, is_only: bool = True) -> None:
    """Let autograd accumulate the gradient in ``dtype``; cast an existing one.

    Args:
        is_only: refuse gradients of other dtypes. Otherwise a gradient is added to the existing
            one, in the latter's dtype.
    """
    wanted = dtype if is_only else None
    if param.grad_dtype == wanted:
        return
    if isinstance(param, LocalParam):
        param.cast_grad(wanted, dtype)
    else:
        grad, param.grad = param.grad, None
        param.grad_dtype = wanted
        param.grad = None if grad is None else grad.to(dtype)
