"""Reduce: send gradients to the owners of their elements during the backward.

One hook per parameter counts gradients; the :class:`ReducePass` sends complete packs. Peers sum in
the wire dtype (DDP, ZeRO) or pre-divide in fp16. Here only the wire is in low precision, and the
mean is rounded once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import Buffers, ProcessGroups, Reduction, warn_first
from shardcast.config import ShardcastConfig
from shardcast.memory.gradients import Act, Gradients, nothing, set_grad_dtype
from shardcast.memory.pack import Pack
from shardcast.plan.precision import MASTER_DTYPE, SHORT_SUM, exact_sums, grad_dtype, wire_dtype
from shardcast.step.decide.decision import Decision
from shardcast.step.decide.options import (
    BACKWARDS,
    CLEARS,
    DROPPED,
    EDITED,
    FAILED,
    NOTHING,
    ORDER,
    listed,
)
from shardcast.step.reduce.bucket import Bucket
from shardcast.step.reduce.mean import Divisor, choose_mean
from shardcast.step.reduce.reduce_pass import Backward, ReducePass

# Open reducers by process group. If there are several, one backward may go through two models.
_REDUCERS: weakref.WeakKeyDictionary[object, weakref.WeakSet[Reducer]] = weakref.WeakKeyDictionary()
# What closed reducers left in flight, by process group. Nobody may free its buffers, and a message
# of a later reducer may have its tag, so that the next reducer of these ranks waits for it.
_LEFT: weakref.WeakKeyDictionary[object, list[Reduction]] = weakref.WeakKeyDictionary()
# Number of passes of all sharded models by process group, in a list of one.
_PASSES: weakref.WeakKeyDictionary[object, list[int]] = weakref.WeakKeyDictionary()
FOLD, LIMIT = 65_599, 1 << 53  # combine the numbers of several passes into one
USED = -1  # in place of the number of the last backward before a clip that a step has used


class Reducer:
    """Reduces the gradients of the packs passed to :meth:`add` to their owners.

    All ranks must run the same number of synchronized backwards; inside :meth:`no_sync` none. Only
    these calls determine which collectives run, never the contents of ``.grad``. An error in a
    backward of one rank is kept, and the next decision raises it on all ranks.

    Attributes:
        grads: gradients of the packs, in the order of :meth:`add`; it grows.
        divisor: number that divides sums over ranks.
        alone: whether there is one rank and its gradients are the means: it sends nothing.
        at_step: whether :meth:`finish` sends instead of backwards, because a pipeline has many in a
            step.
        synchronises: whether DDP would synchronize a backward now: it is not in :meth:`no_sync`.
        counts: whether tokens were counted since the last step, before its backwards.
        last_backward: the engine's number of the last backward with gradients; ``None``: there was
            none since the last step or ``zero_grad``.
        due: whether there are gradients that were not reduced; a step needs a pass before it.
        clip: decision of the last clip of these gradients, without factors that are multiplied in;
            the means lack the others.
        norm_of: returns a norm of the mean of one slot of gradients, for a script.
        counting: the backward whose gradients of open packs are only counted, while no further pack
            is complete.
        history: acts on means since the last step, which must be equal on all ranks.
        buckets: bucket of each pack, in the order of :meth:`add`.
        buffers: free buffers to send from and receive into.
    """

    def __init__(
        self, process_groups: ProcessGroups, config: ShardcastConfig, at_step: bool
    ) -> None:
        self.process_groups, self._config = process_groups, config
        self.at_step, self.synchronises = at_step, not at_step
        self.divisor = Divisor(process_groups.dp.size)
        self.alone = process_groups.everyone.size == 1 and not config.scales_loss
        self.grads: list[Gradients] = []
        self.counts = False
        # whether used means to which gradients are added have values
        self._added: list[Tensor] = []
        self.last_backward: int | None = None
        self.due = True
        self.clip: Decision | None = None
        self._clipped: int | None = None  # the last backward before it
        self.norm_of: Callable[[Gradients, int, float], Tensor | None] = nothing
        self.counting: int | None = None
        self.history: dict[str, Any] = {**NOTHING}
        self.buckets: dict[Pack, Bucket] = {}
        self.buffers = Buffers()
        self._syncs = True
        self._mistake: Exception | None = None  # error of the last finish()
        self._is_captured = False  # the last pass is in a CUDA graph
        self._used: list[int] | None = None  # versions of means that a step has just used
        self._gathered = False  # since the last backward; then all edits are allowed
        # Versions of the means at the last clip; ``None`` if a script edited them since.
        self._seen: list[int] | None = None
        self._told: set[str] = set()  # warnings, and parameters whose hooks were looked at
        self._backward: Backward | None = None  # the running backward
        self._pass: ReducePass | None = None  # pass of the running backward, or of one that failed
        # A backward went through another model, too, so packs are sent at its end. ``None``: no
        # synchronized backward has ended.
        self._meets: bool | None = None
        self._handles: list[Any] = []
        everyone = process_groups.everyone.group
        self._passes = [0] if everyone is None else _PASSES.setdefault(everyone, [0])
        self._passes_before = self._passes[0]  # passes of all models before the last step
        if (group := process_groups.shard.group) is not None:
            _REDUCERS.setdefault(group, weakref.WeakSet()).add(self)
            for reduction in _LEFT.pop(group, ()):
                reduction.wait()

    @property
    def _peers(self) -> list[Reducer]:
        """Other open reducers of these ranks; with one rank nobody waits for them."""
        group = self.process_groups.shard.group
        return (
            [it for it in _REDUCERS.get(group, ()) if it is not self] if group is not None else []
        )

    @property
    def _local(self) -> bool:
        """Whether backwards currently send nothing."""
        return self.at_step or not self._syncs or self.alone

    @property
    def _is_capturing(self) -> bool:
        return any(_compat.is_capturing(pack.data.device) for pack in [*self.buckets][:1])

    @property
    def has_gradients(self) -> bool:
        """Whether there is any gradient."""
        return any(param.grad is not None for grads in self.grads for param in grads.pack.params)

    def add(self, pack: Pack) -> Gradients:
        """Reduce the gradients of ``pack`` from now on. Every rank must add the same packs.

        Existing gradients of its parameters are reduced with this step's.
        """
        self.multiply_in()
        self.clip = None  # which is a decision on other packs
        low = pack.layout.dtype
        me = weakref.ref(self)
        grads = Gradients(
            pack,
            grad_dtype(low, self._config),
            wire_dtype(low, self._config),
            exact_sums(SHORT_SUM + 1, self._config),
            lambda: None if (reducer := me()) is None else reducer.multiply_in(),
            lambda *of: None if (reducer := me()) is None else reducer._norm(*of),
            self.alone,
        )
        for param in pack.params:
            set_grad_dtype(param, grads.low)
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
            None if pack.data.device.type == "cpu" else set(),
        )
        self.grads.append(grads)
        hooks = _hooks(me, bucket, len(pack.in_model))
        self._handles += map(_hook_gradient, pack.in_model, hooks)
        if not self.due:
            ReducePass([bucket], self.buffers).flush()
        return grads

    def divide_by(self, divisor: float | Tensor | None) -> None:
        """Divide sums over ranks by ``divisor``, or by their number."""
        self.divisor.given = divisor
        if divisor is not None:
            self.end_alone()

    def end_alone(self) -> None:
        """Reduce the gradients of a lone rank from now on, as several ranks do.

        They are not the means that the step uses, so a script must not read or clip them.
        """
        if self.alone:
            self.multiply_in()
            self.alone, self._pass = False, None
            self._gathered = True  # what ``.grad`` shows is the mean, unless a backward follows
            for grads in self.grads:
                grads.end_alone()
            if self._used is not None:
                params = [param for grads in self.grads for param in grads.pack.params]
                self._added = [it.grad.any() for it in params if it.grad is not None]

    @contextmanager
    def no_sync(self, sends: bool = False) -> Iterator[None]:
        """Accumulate gradients on this rank inside the block, without a collective.

        Args:
            sends: reduce them nevertheless, because there is no room to accumulate locally.
        """
        before = self._syncs, self.synchronises
        self._syncs, self.synchronises = sends, False
        self.due |= sends  # even without a backward inside, because other ranks may have one
        try:
            yield
        finally:
            self.due |= not self._syncs
            self._syncs, self.synchronises = before

    def close(self) -> None:
        """Remove the hooks from the parameters. Local: it waits for nothing in flight."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        left = [bucket.leave() for bucket in self.buckets.values()]
        shard = self.process_groups.shard
        if shard.is_alive and shard.group is not None:  # a destroyed group has no reducers
            _REDUCERS[shard.group].discard(self)
            _LEFT.setdefault(shard.group, []).extend(it for it in left if it is not None)
        self.buffers.free()
        for grads in self.grads:
            grads.close()

    @_compat.untraced
    def begin(self) -> None:
        """Called when a backward reaches the model's output.

        So the *outermost* backward ends the pass, not one inside it (re-entrant checkpoint). For
        models whose submodules are called directly, the first gradient hook does the same. A
        backward that reaches no trained parameter (an adversarial example, Langevin sampling) makes
        no pass, as under DDP.

        A backward that fails earlier, in the loss, makes none either, because nothing of ours runs
        in it. If all other ranks make one, and this rank has no other in the step, the step sends
        zeros for it. Otherwise ranks wait for one another until the process group's timeout, as
        under DDP, except inside ``attempt()``.
        """
        if not self._local and self._backward is None and _compat.accumulates():
            self._begin()

    def finish(self, call: str) -> None:
        """Finish the means of the own spans; the last call before a step.

        Collective: every rank. It makes the pass for gradients without a synchronized backward (set
        by hand, or accumulated in :meth:`no_sync`). Afterwards :meth:`check` returns errors,
        including a call inside :meth:`no_sync`: other ranks may be outside of it, and wait for this
        rank's gradients.

        Args:
            call: what the script called, for that error.
        """
        if not self._syncs:
            # from here on, as on ranks outside of no_sync()
            self._syncs, self.synchronises = True, not self.at_step
            self._mistake = RuntimeError(
                f"{call}: called inside no_sync(), where gradients are not reduced; leave the "
                "block before the last backward and this call"
            )
        if self._is_captured and not self._is_capturing:
            self._mistake = RuntimeError(
                f"{call}: a backward was captured in a CUDA graph without its step; a replay "
                "then reduces gradients that the optimizer does not know of: capture the step, "
                "too, or use torch.cuda.make_graphed_callables"
            )
        self._complete()
        if self.due or self.alone:  # with one rank no backward makes a pass due
            with self.own_edits():
                self._start(not self.alone)
                self._flush()
        else:
            self.settle()

    def settle(self) -> None:
        """Adopt what a script did to gradients since they were reduced. Local."""
        are_dropped = not any(grads.adds for grads in self.grads)
        if self.clip is not None and any(grads.assigned() for grads in self.grads):
            self.multiply_in()  # now, because the clip is not of what was assigned
        self._copy_assigned()
        with self.own_edits():
            taken = [grads.settle() for grads in self.grads]
        if any(taken) and are_dropped and not self._gathered:
            self._warn_once(
                "gradients were assigned after the script had cleared those of a backward, "
                "without a step: they count as means and are not averaged over ranks; average "
                "them yourself, or first call step() with all .grad None"
            )

    def check(self) -> None:
        """Raise this rank's errors. Local, for a call that shares them with all ranks.

        Raises:
            RuntimeError, TypeError: a backward produced, or a script made, invalid gradients.
        """
        mistake, self._mistake = self._mistake, None
        if mistake is not None:
            raise mistake
        for grads in self.grads:
            if grads.mistake is not None:
                raise grads.mistake

    @torch.no_grad()
    def gather(self) -> None:
        """Show the whole mean in every ``.grad``, not only in own spans. Collective.

        Call it after :meth:`finish`; the next step and backwards continue from there.
        """
        # First: clipped means are in fp32 and are gathered so, because rounding them again would
        # make a step after a gather differ from one without.
        self.multiply_in()
        if self.alone:
            for grads in self.grads:
                grads.show_views()
            return
        with self.own_edits():
            for pack, (*present, is_wide) in self._anywhere("gather_gradients").items():
                grads = self.buckets[pack].grads
                grads.gather(present, MASTER_DTYPE if is_wide else grads.low)
        self._gathered = True

    def anywhere(self, call: str) -> dict[Pack, list[bool]]:
        """Return per pack and slot whether a rank has a gradient, for a ``call``. Collective."""
        return {pack: flags[:-1] for pack, flags in self._anywhere(call).items()}

    @property
    def brings(self) -> bool:
        """Whether there are gradients outside the mean, or that no step has used."""
        has_run = self.last_backward is not None
        return any(
            has_run or not grads.holds(position, grad)
            for grads in self.grads
            for position, param in enumerate(grads.pack.params)
            if (grad := param.grad) is not None
        )

    def _norm(self, grads: Gradients, position: int, p: float) -> Tensor | None:
        """Return a norm for a script, but not in a hook, where not every mean is there."""
        return None if self._backward is not None else self.norm_of(grads, position, p)

    def note_edits(self) -> None:
        """Note that means were edited, here or on other ranks; show gathered ones again.

        Collective: every rank.
        """
        torch.autograd.graph.increment_version([grads.own for grads in self.grads])
        for grads in self.grads:
            grads.share()

    def _anywhere(self, call: str) -> dict[Pack, list[bool]]:
        """Return per pack and slot whether a rank has a gradient, and whether one has fp32 sums."""
        flags = {
            grads.pack: (
                grads.pack.layout.pack_groups,
                [*grads.presence(), grads.own.dtype == MASTER_DTYPE],
            )
            for grads in self.grads
        }
        device = next((pack.data.device for pack in self.buckets), torch.device("cpu"))
        return self.process_groups.anywhere(flags, device, call)

    def _flush(self) -> None:
        """Send everything left, land all means, and note what a script did to earlier ones.

        All means, because a script that edits ``.grad`` in place after a backward edits the mean.
        """
        assert self._pass is not None
        self._pass.flush()
        self._pass = None
        self.due, self._is_captured = False, self._is_capturing and not self.alone
        if not self.history[BACKWARDS]:  # the acts were upon means of the step before
            for grads in self.grads:
                grads.acts.clear()
        self.history[BACKWARDS] += 1
        self._note_order()
        # If it is also summed over model-parallel ranks, x may be partial or whole.
        data = {self.process_groups.parallel_dims.replicas}
        dropped: list[str] = []
        for grads in self.grads:
            layout = grads.pack.layout
            for position, act in sorted(grads.acts.items()):
                name = layout.slots[position].name
                # Both drop the mean. A rank that got a gradient in no_sync() after a clear has
                # noted the clear, and replaces only its own gradient.
                dropped.append(name)
                if act is Act.ASSIGNED and not data.issuperset(layout.pack_groups.reduce):
                    grads.refuse(
                        RuntimeError(
                            f".grad of {name!r} was assigned between two backwards of a step, and "
                            "is summed over model-parallel ranks: the value may be a part of that "
                            "sum, or all of it. Assign after the last backward of a step, or call "
                            "optimizer.gather_gradients() and edit .grad in place"
                        )
                    )
        if dropped:
            self.history[DROPPED] = listed(dropped)

    def _note_order(self) -> None:
        """Note how many passes other models made before this one.

        A model of equal shapes has messages of equal lengths. Ranks that make the passes of two
        such models in different orders mix their gradients, and the next decision names it.
        """
        self._passes[0] += 1
        others = self._passes[0] - self._passes_before - self.history[BACKWARDS]
        self.history[ORDER] = (self.history[ORDER] * FOLD + others) % LIMIT

    def used(self, is_edited: bool) -> None:
        """Called when a step has used the gradients; the next step needs its own pass.

        Args:
            is_edited: they had been edited after the clip.
        """
        self.due, self.last_backward, self._clipped = True, None, USED
        self._passes_before, self._is_captured = self._passes[0], False
        self.history.update({**NOTHING, EDITED: is_edited})
        self._added, self._used, self.counts = [], self.versions(), False
        for grads in self.grads:
            grads.use()

    def cleared(self, set_to_none: bool = True) -> None:
        """Called when gradients are cleared. Needs no pass, because one rank may clear its own."""
        if self._pass is not None and self._backward is None:
            for bucket in self._pass.left if set_to_none else ():
                # Zeros are sent, because there may be no memory for more.
                bucket.grads.clear(range(len(bucket.grads.owned)))
            self._complete()
        self.clip, self._used = None, None
        self._added, self._is_captured = [], False
        if self.history[BACKWARDS]:
            # Of means that the script cleared already, only some ranks have noted it by now.
            self.history[CLEARS] += any(grads.adds or grads.acts for grads in self.grads)
        self.history.update({FAILED: 0, ORDER: 0, DROPPED: ""})
        for grads in self.grads:
            grads.forget(set_to_none)

    def still_present(
        self, present: Mapping[Pack, tuple[bool, ...]]
    ) -> dict[Pack, tuple[bool, ...]]:
        """Return ``present`` with a script's later assignments and clears, see :meth:`settle`."""
        return {
            pack: tuple(
                (was or slot in grads.has) and slot not in grads.gone
                for slot, was in enumerate(present[pack])
            )
            for pack, grads in ((pack, bucket.grads) for pack, bucket in self.buckets.items())
        }

    def show(self, present: Mapping[Pack, Sequence[bool]]) -> None:
        """Hide means after a step for slots without a gradient on any rank.

        Args:
            present: per pack and slot, whether some rank has a gradient.
        """
        for pack, bucket in self.buckets.items():
            if not all(present[pack]):
                bucket.grads.hide(present[pack])

    @property
    def shows(self) -> bool:
        """Whether ``.grad``s have values that a script can read."""
        return any(grads.shows for grads in self.grads)

    def note_clip(self, clip: Decision) -> None:
        """Note the decision of a clip, whose factors the means lack."""
        self.clip, self._clipped, self._seen = clip, self.last_backward, self.versions()
        if self.alone and not self.shows:  # otherwise it is multiplied in next
            for grads in self.grads:
                grads.hide_clip()

    @property
    def is_clipped(self) -> bool:
        """Whether there was a clip since the last step or ``zero_grad``."""
        return self.clip is not None and self._clipped != USED

    @property
    def pending(self) -> Decision | None:
        """The decision of a clip for the coming step, if no backward came after it."""
        return self.clip if self.is_clipped and self.last_backward == self._clipped else None

    @torch.no_grad()
    def multiply_in(self) -> None:
        """Multiply a clip into the means that lack it, once.

        Called before a script reads or edits a mean, and before a backward adds to one. Otherwise
        only the update applies the factors.
        """
        clip = self.clip
        if clip is None or all(factor is clip.unscale for factor in clip.factors.values()):
            return
        self.clip = clip.without_factors()
        known: dict[Tensor | None, Tensor | None] = {None: None, clip.unscale: None}
        for factor in clip.factors.values():
            if factor is not None and factor not in known:
                scaled = factor if clip.unscale is None else factor / clip.unscale
                # If the norm is not finite there is no factor, and the step is skipped. A NaN
                # factor would also reach the padding, which is never cleared.
                known[factor] = scaled.nan_to_num(1.0, 1.0, 1.0)
        factors = {group: known[factor] for group, factor in clip.factors.items()}
        with self.own_edits():
            for grads in self.grads:
                if any(factors[group] is not None for group in grads.pack.layout.groups):
                    grads.multiply(factors)

    @contextmanager
    def own_edits(self) -> Iterator[None]:
        """Edit means inside the block; :meth:`is_edited` is about a script's edits only."""
        is_edited = self.is_edited()
        yield
        self._seen = None if is_edited else self.versions()

    def adds_used(self) -> bool:
        """Return whether gradients were added to a mean that an earlier step used; not to zeros."""
        return any(map(bool, self._added))

    def versions(self) -> list[int]:
        """Return numbers that change when a mean is edited in place."""
        return [grads.version for grads in self.grads]

    def is_edited(self) -> bool:
        """Return whether a script edited, assigned or cleared gradients since the last clip."""
        if self._seen is None or self.versions() != self._seen:
            return True
        return any(grads.replaced() for grads in self.grads)

    def refuse_edits(self) -> None:
        """Raise RuntimeError if a script edited means that lack the clip, by what it kept."""
        seen = [-1] * len(self.grads) if self._seen is None else self._seen
        for grads, version in zip(self.grads, seen, strict=True):
            if self.alone and not grads.shows and grads.version != version:
                raise RuntimeError(
                    "step: the script edited a .grad that it kept from before clip_grad_norm_, "
                    "which does not show the clip; read param.grad again after the clip"
                )

    def state(self) -> Any:
        """Return a value that changes when a gradient comes, is edited, replaced or cleared."""
        grads = [param.grad for pack in self.buckets for param in pack.in_model]
        known = [None if grad is None else (id(grad), grad._version) for grad in grads]
        return self.last_backward, self.versions(), known

    # -- the running backward -------------------------------------------------------------------

    def _begin(self) -> Backward:
        """Note the running backward, and end the pass with it.

        From here on it is one pass, whatever happens: ranks on which it fails, before the first
        gradient or later, send zeros for absent gradients.

        Two models in one backward launch at its end, in the order in which it reached them, because
        the first complete pack depends on a rank's gradients.
        """
        self._complete()
        sends, peers, me = not self._local, self._peers, weakref.ref(self)
        first = sends and self._meets is None
        waits = first and (bool(peers) or _compat.reaches_checkpoint())

        def failed(number: int) -> None:
            if (reducer := me()) is not None:
                reducer._failed(number)

        backward = self._backward = Backward(sends, waits, self._end, failed)
        for peer in peers if sends else ():
            other = peer._backward
            if other is not None and other.sends and other.number == backward.number:
                self._meets = peer._meets = True
        return backward

    def _start(self, sends: bool) -> None:
        """Start to accumulate and send: the first gradient is about to come, or there is none."""
        if self._used is not None and self.counts:
            edited = self.versions() != self._used
            if not self.has_gradients:  # cleared by the model's zero_grad, since end_alone()
                self._added = []
            # Zeros that a script wrote changed the version, except by ``.grad.data``; through a
            # stand-in, ``adds``, except by a factor. Read later: a step waits for the device then.
            self._added += [  # to those of end_alone()
                grads.part(n).any()
                for grads in self.grads
                if not (edited and grads.shows)
                for n in grads.kept()
                if n in grads.adds
            ]
        self._used = None
        if self.clip is not None:
            if any(grads.kept() for grads in self.grads):
                self.multiply_in()  # now, while no mean is on its way
            self.clip = None if self.due else self.clip.without_factors()
        self._copy_assigned()
        self.due = True  # stays true if a backward fails
        self._gathered = False
        for grads in self.grads:
            grads.begin(refuses=sends and self.history[BACKWARDS] > 0)
        self.counting = None
        if sends or self.alone:
            self._pass = ReducePass(self.buckets.values(), self.buffers)

    def _copy_assigned(self) -> None:
        """Read assigned gradients before one is written: a script may have swapped their memory."""
        if memory := [grads.readable for grads in self.grads if grads.readable]:
            for grads in self.grads:
                grads.copy_assigned(memory)

    def arrive(self, bucket: Bucket, position: int, running: int) -> None:
        """Called for a gradient that the hook cannot simply count.

        It sends packs that were already complete. It does not send a pack when its last gradient
        comes, because the script's hooks on that parameter, which may clip or replace ``.grad``,
        run later.
        """
        backward = self._backward
        if backward is None:
            if not _compat.accumulates():  # results of autograd.grad are not accumulated
                return
            backward = self._begin()
        elif running != backward.number and not backward.accumulates(running):
            return
        try:
            if not backward.started:
                if torch.is_grad_enabled():
                    self.warn_of_graph()
                self._open(backward)
            reduce_pass = self._pass
            if reduce_pass is not None and not (backward.waits or self._meets):
                reduce_pass.advance(bucket.grads.pack.data.device, self._syncs)
            is_sent = backward.sends and reduce_pass is not None and bucket not in reduce_pass.left
            is_outer = running == backward.number
            is_complete = bucket.arrive(position, backward.sends, is_outer, is_sent)
            if position in bucket.grads.adds:
                self._warn_of_hooks(bucket.grads, position)
            # A full pack is sent when the next gradient arrives, whichever pack that belongs to.
            self.counting = running if is_outer and not is_complete else None
        except BaseException:
            self._failed(backward.number)
            raise

    def _open(self, backward: Backward) -> None:
        """Start to take the gradients of a backward. Local."""
        backward.started, self.last_backward = True, backward.number
        self._start(backward.sends)
        for grads in self.grads:
            if self.alone:
                grads.show_views(retires=True)
            grads.widen()

    def _failed(self, number: int) -> None:
        """Called when a backward fails, possibly by one of our own errors, or after it has ended.

        An error that is raised here is lost, because the engine drops a callback.
        """
        backward = self._backward
        if backward is None or backward.number != number:
            return
        self._backward = None
        if backward.sends and not backward.started:
            self._open(backward)
        waiting = self._pass.left if backward.sends and self._pass is not None else ()
        for bucket in self.buckets.values():
            bucket.failed(bucket in waiting)

    @_compat.untraced
    def _end(self, backward: Backward) -> None:
        """Called when the engine ends a backward."""
        self._backward = None  # a thread of the engine may keep the callback a moment longer
        if not backward.started:
            return
        if backward.sends:
            self._meets = bool(self._meets)
            if self._pass is not None:  # false if step() was called in a hook
                self._flush()
                return
        left = {} if self._pass is None else self._pass.left
        self._pass = None
        for bucket in self.buckets.values():
            bucket.end_local(self._syncs and bucket in left)

    def complete(self) -> None:
        """End the pass of a failed backward, before another call that all ranks make.

        Collective: every rank.
        """
        if self._backward is None:
            self._complete()

    def _complete(self) -> None:
        """Send what a failed backward left, because ranks may have sent different packs.

        A gradient that the script cleared since is shown until then, and cleared on all ranks
        afterwards: some may have sent it before. One that the script assigned since is refused, as
        other ranks may have averaged what it replaces. In a hook of a running backward, the rest of
        its own pass is sent, and gradients that are not the mean have just come.
        """
        if self._pass is None or self.alone:
            return
        self.history[FAILED] += 1
        for grads in self.grads if self._backward is None else ():
            if assigned := grads.assigned():
                names = listed([grads.pack.layout.slots[n].name for n in assigned])
                grads.refuse(
                    RuntimeError(
                        f"gradients were assigned after a backward that failed: {names}; ranks may "
                        "already have averaged its other gradients. Call optimizer.zero_grad() on "
                        "every rank before you assign gradients"
                    )
                )
        cleared = {grads: grads.cleared() for grads in self.grads}
        for grads, positions in cleared.items():
            for position in positions if not grads.in_flight else ():
                grads.show(position)
        self._flush()
        for grads, positions in cleared.items():
            grads.clear(positions)

    def warn_of_graph(self) -> None:
        """Warn about gradients with their own graph, which the mean does not have."""
        self._warn_once(
            "backward(create_graph=True): .grad becomes the mean over ranks, which has no graph, "
            "so a loss that is computed from .grad trains nothing; take the gradients for it from "
            "torch.autograd.grad(..., create_graph=True)"
        )

    def _warn_of_hooks(self, grads: Gradients, position: int) -> None:
        name = grads.pack.layout.slots[position].name
        if name in self._told or not _compat.has_hooks_of_grad(grads.pack.in_model[position]):
            return
        self._told.add(name)  # asked once, because it waits for the device
        if not grads.is_zeroed(position):
            self._warn_once(
                "backward: a hook of register_post_accumulate_grad_hook gets the gradient of this "
                "backward alone, while .grad under DDP would include the earlier ones, which were "
                "reduced; run earlier backwards inside no_sync(), with accumulate 'local', or edit "
                ".grad after the last one"
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            warn_first(message)


def left_in_flight(process_groups: ProcessGroups) -> int:
    """Return the number of packs that closed reducers of this rank left in flight."""
    group = process_groups.shard.group
    return 0 if group is None else len(_LEFT.get(group, ()))


def is_reduced(param: Tensor) -> bool:
    """Return whether the gradients of ``param`` are reduced, by any optimizer."""
    hooks = _compat.gradient_hooks(param)
    return any(getattr(hook, "__module__", "") == __name__ for hook in hooks)


def _hook_gradient(param: Tensor, hook: Callable[[Tensor], None]) -> object:
    """``param.register_hook``, also for a frozen one, which torch refuses; it may be unfrozen."""
    requires_grad = param.requires_grad
    try:
        return param.requires_grad_(True).register_hook(hook)
    finally:
        param.requires_grad_(requires_grad)


def _hooks(me: weakref.ref[Reducer], bucket: Bucket, count: int) -> Iterator[Callable[[Any], None]]:
    """Run before a gradient is accumulated, one per parameter: so they do next to nothing."""
    for number in range(count):

        @_compat.untraced
        def hook(grad: Tensor | None, position: int = number) -> None:
            reducer, running = me(), _compat.current_backward()
            if reducer is None:
                return
            grads = bucket.grads
            if (arrived := grads.arrived) and not grads.shown and reducer.counting == running:
                arrived[position] = arrived.get(position, 0) + 1
                bucket.note_stream()
                if len(arrived) == count:
                    reducer.counting = None
            elif grad is not None:  # as a function may give, which autograd does not accumulate
                reducer.arrive(bucket, position, running)

        yield hook
