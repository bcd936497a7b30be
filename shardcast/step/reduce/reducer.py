"""Reduce: gradients of every rank to the owner of their span, while backward runs.

One hook per parameter tells the :class:`ReducePass` of the running backward what comes. Peers sum
in the wire dtype (DDP, ZeRO) or pre-divide in fp16; here low precision is only on the wire, and
the mean is rounded once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import Buffers, ProcessGroups
from shardcast.config import ShardcastConfig
from shardcast.memory.gradients import Gradients, nothing, set_grad_dtype
from shardcast.memory.pack import Pack
from shardcast.plan.precision import exact_sums, grad_dtype, wire_dtype
from shardcast.step.history import ASSIGNED, BACKWARDS, CLEARS, NOTHING, STALE, SUMMED
from shardcast.step.reduce.bucket import BEGUN, Bucket, State, assigned_in, land_all
from shardcast.step.reduce.mean import Divisor, choose_mean
from shardcast.step.reduce.reduce_pass import ReducePass
from shardcast.step.reduce.user_edits import GradientEdits


class Reducer:
    """Reduces the gradients of the packs given to :meth:`add` to their owners.

    All ranks must run the same number of synchronized backwards; inside :meth:`no_sync` none.

    Attributes:
        grads: the gradients of the packs, in the order of :meth:`add`; it grows.
        cannot_gather: as of :class:`.Gradients`, of the kind that an option asks for.
        divisor: the number that divides sums over ranks.
        at_step: whether :meth:`finish` sends, not backwards: a pipeline has many in a step.
        touched: whether a gradient arrived since :meth:`finish`.
        backwards: how many of them brought gradients since the last step or ``zero_grad``.
        due: whether gradients are here that were not reduced; a step needs a pass before it.
        at_end: whether packs are launched at the end of a backward from now on: one backward ran
            inside another, or through two models.
        has_ended: whether a synchronized backward has ended: later ones launch packs while they
            run, unless ``at_end``.
        counting: the backward whose gradients of open packs are counted and no more, as long as no
            further pack is complete.
        history: the acts on means since the last step, which all ranks must do alike.
        buckets: the bucket of each pack, in the order of :meth:`add`.
    """

    def __init__(
        self, process_groups: ProcessGroups, config: ShardcastConfig, at_step: bool
    ) -> None:
        self.process_groups, self._config = process_groups, config
        self.at_step = at_step
        self.divisor = Divisor(process_groups.dp.size)
        self.grads: list[Gradients] = []
        self.touched, self.backwards = False, 0
        self.due = True
        options = config.extensions().values()
        kind: type[Gradients] = next((it.gradients for it in options if it.gradients), Gradients)
        self.cannot_gather: str = kind.cannot_gather
        kind = kind if process_groups.shard.size > 1 else Gradients
        self.sharded = kind is not Gradients
        self._storage = kind
        self.at_end = self.has_ended = False
        self.counting: int | None = None
        self.edits = GradientEdits(self.grads)
        self.history: dict[str, Any] = {**NOTHING}
        self.buckets: dict[Pack, Bucket] = {}
        self._syncs = True
        self._reduce_pass: Callable[[], ReducePass | None] = nothing  # weak: the engine holds it
        self._handles: list[Any] = []

    @property
    def alone(self) -> bool:
        """Return whether gradients are means as they come."""
        return self.process_groups.everyone.size == 1 and self.divisor.given is None

    @property
    def beside(self) -> bool:
        """Return whether packs are launched while a backward runs, not at its end.

        Full gradients wait for the end of the first backward: a re-entrant checkpoint may bring one
        twice. Sharded ones would need the memory that they are to save.
        """
        return not self.at_end and (self.has_ended or self.sharded)

    @property
    def synchronises(self) -> bool:
        """Return whether a backward would be synchronized now, as DDP counts: not in no_sync."""
        return self._syncs and not self.at_step

    @property
    def _local(self) -> bool:
        """Return whether backwards send nothing at present."""
        return not self._syncs or self.at_step or self.alone

    @property
    def has_gradients(self) -> bool:
        """Return whether there is any gradient."""
        return any(any(grads.presence()) for grads in self.grads)

    def add(self, pack: Pack) -> Gradients:
        """Reduce the gradients of ``pack`` from now on; every rank must add the same packs.

        Gradients that its parameters have already are reduced with this step's.
        """
        low = pack.layout.dtype
        grads = self._storage(pack, grad_dtype(low, self._config), wire_dtype(low, self._config))
        set_grad_dtype(pack, grads.dtype)
        parallel_dims, pack_groups = self.process_groups.parallel_dims, pack.layout.pack_groups
        bucket = self.buckets[pack] = Bucket(
            grads,
            choose_mean(self._config, pack.comm.size, pack.data.device),
            self.divisor,
            self.process_groups.comms(pack_groups.reduce),
            [
                dim
                for dim in pack_groups.reduce
                if dim in parallel_dims.model and parallel_dims.coordinate[dim] > 0
            ],
        )
        self.grads.append(grads)
        hooks = _hooks(weakref.ref(self), bucket, len(pack.in_model))
        self._handles += map(_hook_gradient, pack.in_model, hooks)
        if not self.due:
            bucket.collect()
            if not self.alone:
                bucket.send(Buffers())
                land_all([bucket])
        return grads

    def nbytes(self, pack: Pack) -> int:
        """Return the bytes of the gradients of ``pack``."""
        return self.buckets[pack].grads.nbytes

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Have backwards accumulate locally inside it, without a collective.

        It changes nothing for sharded gradients, which have no room to accumulate locally.
        """
        syncs, self._syncs = self._syncs, self.sharded
        self.due = True
        try:
            yield
        finally:
            self._syncs = syncs

    def close(self) -> None:
        """Remove the hooks from the parameters, and wait for what a failed backward has sent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        land_all(self.buckets.values())  # last: it raises where a rank was lost

    def begin(self) -> None:
        """Have the pass flushed when the running backward ends, if it brings gradients.

        A backward that reaches no trained parameter (an adversarial example, Langevin sampling)
        makes no pass, as under DDP. Called when a backward reaches the model's output, so that it
        is the *outermost* backward that flushes, not one that a re-entrant checkpoint runs inside;
        the first gradient hook does the same for models whose submodules are called directly.
        """
        if not self._local and self._running() is None and _compat.accumulates():
            self._begin()

    def finish(self) -> None:
        """Have all gradients of the own spans here; the last call of this stage before a step.

        Every rank must call it. Runs the pass itself for gradients that no synchronized
        backward brought (set by hand, or accumulated under :meth:`no_sync`).

        Raises:
            RuntimeError: inside :meth:`no_sync`.
        """
        if not self._syncs:
            raise RuntimeError(
                "step() was called inside no_sync(): the gradients were not reduced; leave the "
                "context before the last backward and the step"
            )
        self.touched = False
        reduced = not (self.due or self.alone)  # alone no backward makes a pass due
        if reduced:
            land_all(self.buckets.values())
            for bucket in self.buckets.values():
                bucket.drop_cleared()
        else:
            self._new_pass().flush()
        # One replaced by hand after the reduction is final, as with DDP.
        replaced = [bucket for bucket in self.buckets.values() if bucket.grads.adopt()]
        if reduced and any(bucket.state is State.USED for bucket in replaced):
            self.edits.warn_of_set()

    @torch.no_grad()
    def gather(self) -> None:
        """Have the mean in every ``.grad``, not in the own spans alone. Collective.

        To be called after :meth:`finish`; the next step and backwards go on from there.
        """
        from shardcast.step.reduce.gathering import gather_all

        if not self.alone:
            gather_all(self.buckets, self.process_groups)
            self.edits.gathered()

    def passed(self) -> None:
        """Hear that a pass has brought all means here."""
        self.due = False
        self.history[BACKWARDS] += 1
        self.history.update(assigned_in(self.buckets.values(), self.process_groups))

    def used(self) -> None:
        """Hear that a step used the gradients: the next one needs a pass of its own."""
        self.due, self.backwards = True, 0
        self.history.update(NOTHING)
        for bucket in self.buckets.values():
            bucket.use()
            bucket.assigned.clear()

    def cleared(self, set_to_none: bool = True) -> None:
        """Hear of cleared gradients. No pass is due for it: one rank alone may clear its own."""
        land_all(self.buckets.values())  # of a failed backward, before it is zeroed
        self.note_clear()
        self.history.update({STALE: 0, ASSIGNED: "", SUMMED: ""})
        self.edits.changed()
        for bucket in self.buckets.values():
            bucket.forget()
            bucket.grads.zero(set_to_none)

    def note_clear(self) -> None:
        """Note that means of this step, if there are any, are cleared."""
        landed = any(bucket.state is State.LANDED for bucket in self.buckets.values())
        self.history[CLEARS] += landed and not self.due

    def show(self, present: Mapping[Pack, Sequence[bool]]) -> None:
        """Have the mean stay visible as ``.grad`` where only other ranks had a gradient.

        As DDP does; so it is cleared, or added to, like every other gradient. Where nobody had one
        there is none.

        Args:
            present: per pack and slot, whether some rank has a gradient.
        """
        for pack, bucket in self.buckets.items():
            for position in [*bucket.absent]:
                if present[pack][position] and bucket.grads.owned[position]:
                    bucket.grads.lent.discard(position)
                    bucket.grads.show(position)
                    bucket.absent.remove(position)
            bucket.grads.take_back()

    # -- the pass of the running backward -----------------------------------------------------

    def drop_assigned(self) -> None:
        """Drop, as a pass begins, means that a script replaced (``p.grad = x``)."""
        for bucket in self.buckets.values():
            if bucket.state is not State.USED:
                bucket.drop_assigned()

    def drop_cleared(self, more_come: bool) -> None:
        """Drop, as a pass begins, means of earlier ones of this step that a script cleared.

        Args:
            more_come: in a backward, else the step comes next.

        Raises:
            RuntimeError: more come and some were cleared; which ones, other ranks cannot know.
        """
        buckets = self.buckets.values()
        if any(it.state in BEGUN or it.grads.carry is not None for it in buckets):
            from shardcast.step.reduce.cleared import drop_cleared

            drop_cleared(self, more_come)

    def _running(self) -> ReducePass | None:
        reduce_pass = self._reduce_pass()
        return None if reduce_pass is None or reduce_pass.over else reduce_pass

    def _new_pass(self) -> ReducePass:
        reduce_pass = ReducePass(self, not self._local)
        self._start(reduce_pass)
        return reduce_pass

    def _start(self, reduce_pass: ReducePass) -> None:
        self.due = True  # and stays so where a backward fails
        self.edits.begin()
        reduce_pass.start()

    def _begin(self) -> ReducePass:
        reduce_pass = ReducePass(self, not self._local)
        if not self.sharded and exact_sums(self.backwards + 1, self._config):
            for grads in self.grads:
                grads.widen()
        self._reduce_pass = weakref.ref(reduce_pass)
        reduce_pass.begin()
        return reduce_pass

    def arrive(self, bucket: Bucket, position: int, running: int) -> None:
        """Hear of a gradient that the hook cannot simply count."""
        reduce_pass = self._running()
        if reduce_pass is None:
            if not _compat.accumulates():  # what autograd.grad returns is no gradient of ours yet
                return
            reduce_pass = self._begin()
        elif running != reduce_pass.backward and not reduce_pass.accumulates(running):
            return
        self.touched = True
        try:
            if not reduce_pass.started:
                self.backwards += 1
                self.edits.changed()
                self._start(reduce_pass)
            reduce_pass.arrive(bucket, position, running)
        except BaseException:
            reduce_pass.over = True
            raise


def is_reduced(param: Tensor) -> bool:
    """Return whether the gradients of ``param`` are reduced, for whichever optimizer."""
    hooks = _compat.gradient_hooks(param)
    return any(getattr(hook, "__module__", "") == __name__ for hook in hooks)


def _hook_gradient(param: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """``param.register_hook``, also of a frozen one, which torch refuses: it may be unfrozen."""
    requires_grad = param.requires_grad
    try:
        return param.requires_grad_(True).register_hook(hook)
    finally:
        param.requires_grad_(requires_grad)


def _hooks(me: weakref.ref[Reducer], bucket: Bucket, count: int) -> Iterator[Callable[[Any], None]]:
    """Run before a gradient is accumulated, one per parameter: so they do next to nothing."""
    for number in range(count):

        def hook(grad: Tensor | None, position: int = number) -> None:
            reducer, running = me(), _compat.current_backward()
            if reducer is None:
                return
            if bucket.counts and reducer.counting == running:
                bucket.arrived.add(position)
                if len(bucket.arrived) == count:
                    reducer.counting = None
            elif grad is not None:  # as a function may give, which autograd does not accumulate
                reducer.arrive(bucket, position, running)

        yield hook
