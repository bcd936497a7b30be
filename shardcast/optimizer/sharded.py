"""The sharded optimizer; one step is reduce, decide, update and cast, sync."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import warn_first
from shardcast.memory.shard import take_moved
from shardcast.messages import GRAD_SCALER
from shardcast.optimizer import doors
from shardcast.optimizer.clipping import EDITED, Parameters, check_norm, clip_bound
from shardcast.optimizer.groups import activate_trained
from shardcast.optimizer.handles import OptimizerHandle, check_stepped, retire, take_hooks
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.optimizer.rest import name_unheld
from shardcast.optimizer.stateful import StatefulOptimizer
from shardcast.step.decide.decision import Decision
from shardcast.step.history import BACKWARDS
from shardcast.step.update.state import OwnMethod


class ShardedOptimizer(StatefulOptimizer):
    """A torch optimizer whose fp32 masters and state are sharded over data-parallel ranks.

    Made by :func:`shardcast.shard`. ``param_groups`` hold the *model* parameters and are shared
    with the optimizer it was made from, so schedulers built on either work; a group may have a
    ``max_grad_norm`` of its own.

    Attributes:
        optimizers: a handle for each optimizer that was given, for schedulers and for loops over
            them: ``step()`` of the last handle makes the one step of all. With one optimizer it is
            this object itself.
    """

    # torch.amp.GradScaler then always calls step(), on every rank, where we refuse; otherwise it
    # would skip the step on the ranks that saw an infinity and leave the others waiting.
    _step_supports_amp_scaling = True
    _warned_of_schedules = False

    def __init__(self, packed: PackedOptimizer) -> None:
        super().__init__(packed)
        self._last_norm: Tensor | None = None
        self._last_skip: Tensor | None = None
        state: dict[Any, Any] = {}
        originals = packed.originals.optimizers
        for original in originals:
            take_hooks(self, original)
            state.update(original.state)
        if state:
            self._states.apply(self._states.plan_plain(state))
        places = range(len(originals)) if len(originals) > 1 else ()
        self._handles: list[OptimizerHandle] = []
        self._handles += [OptimizerHandle(self, packed, self._handles, place) for place in places]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (*self._handles,) or (self,)
        for original in originals:
            retire(original)

    # -- the step ---------------------------------------------------------------------------

    @_compat.uncompiled
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        loss: float | Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Make one optimizer step: unscale, clip, update, cast and sync.

        Does not wait for the device. A step with a non-finite gradient on any rank changes nothing.
        On several accelerators ``clip_grad_norm_`` makes this decision: gradients that a script
        writes after it are trained as they are, finite or not.

        Collective: every rank.

        Args:
            closure: reevaluates the model, runs backward and returns the loss.
            loss: unscaled loss of this rank, for a ``guard`` that uses it; a number, or 0-dim on
                the device. Every rank must give one. By default that of the closure.

        Returns:
            What ``closure`` returned, else ``None``.

        Raises:
            TypeError: on all ranks, if one gave ``options``, or a loss that no guard takes.
            RuntimeError: inside :meth:`no_sync`; after ``max_skipped_steps`` skips in a row. On all
                ranks, if one did not scale its loss though a scale is in use, edited gradients
                after a clip, loaded other weights, or has other options in its groups. On an
                accelerator these come a step or two later; until then such steps are skipped,
                except one that was already decided by ``clip_grad_norm_``.
        """
        packed = self._packed
        if self._handles:
            check_stepped(self._handles)
        if packed.average_in_model is not None or packed.door:
            packed.refuse_averaged("step")
        if packed.plain_names is not None:
            raise RuntimeError("step: leave `with optimizer.as_plain():` first")
        with packed.decider.refusal.held():
            _refuse_options(options)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        with packed.decider.refusal.held():
            self._refuse_scaler()
        is_edited = False
        decision = self._clip.pending()  # which has reduced and decided already
        if decision is None:
            self._reduce("step")
            is_loss = isinstance(result, (float, Tensor))  # a closure may return other things
            if loss is None and is_loss and packed.decider.takes_loss:
                loss = result
            decision = packed.decider.decide(packed.config.max_grad_norm, None, loss)
        else:
            is_edited = self._clip.is_edited()
            with packed.decider.refusal.held():
                _refuse_loss(loss)
                if is_edited:
                    packed.reduce.refuse_edits()
            packed.decider.meet(EDITED if is_edited else "step")
            take_moved(packed.shards)  # what was assigned after the clip
            if is_edited:
                self._clip.apply()
                decision = self._decided_again()
        packed.sync.wait()  # what an overlapped one still sends is what the update writes
        for shard in packed.shards:
            shard.forget_before_load()
        for hook in packed.step_hooks:
            hook.before_update(decision)
        for update in packed.updates:  # unscale, clip, rule, cast into the packs: one fused pass
            update(decision)
        for hook in packed.step_hooks:
            hook.after_update(decision)
        (packed.sync.by or packed.sync)()  # owners -> everybody
        for hook in packed.step_hooks:
            hook.after_sync()
        self._conclude(decision, is_edited)
        return result

    def _decided_again(self) -> Decision:
        """The decision on gradients that a script has edited after the clip.

        On accelerators ranks do not meet, so that one which has edited does not know whether the
        others have: it sends nothing. The next decision compares them.
        """
        packed, clip = self._packed, self._clip.decision
        assert clip is not None
        if packed.process_groups.everyone.size > 1 and not packed.decider.meets:
            with packed.decider.refusal.held():
                packed.reduce.settle()
                packed.reduce.check()
            return dataclasses.replace(clip, present=packed.reduce.still_present(clip.present))
        self._reduce("step")
        decision = packed.decider.decide(None, clip)
        return dataclasses.replace(decision, norm=clip.norm)  # that of before the clip

    def _reduce(self, call: str) -> None:
        """Have the mean of all gradients in the own spans, for a ``call`` of all ranks."""
        packed = self._packed
        for hook in packed.step_hooks:
            hook.before_reduce()
        with packed.decider.refusal.held():
            packed.originals.check()
        take_moved(packed.shards)
        several = packed.process_groups.everyone.size > 1
        packed.decider.left = packed.tree.left() if several else ""
        if several and not packed.reduce.at_step:
            self._warn_of_local_steps()
        frozen = [shard for shard in packed.shards if shard.grads is None]
        scale, touched = packed.decider.loss_scale, packed.reduce.touched
        if scale is not None:
            scale.look(packed.reduce.grads, touched)
        packed.reduce.finish()
        if frozen:
            # Behind the reduction, which other ranks have begun in their backward; packs that are
            # activated are reduced then. Ranks of another call would bring another all-reduce. With
            # model parallelism some ranks have none that are frozen, and do not come here.
            if packed.process_groups.model.size == 1:
                packed.decider.meet(call)
            activated = activate_trained(packed, frozen)
            if scale is not None:
                scale.look([s.grads for s in activated if s.grads is not None], touched, more=True)

    def _conclude(self, decision: Decision, is_edited: bool) -> None:
        """Tally, loss scale, what ``.grad`` shows, what schedulers look at.

        Args:
            is_edited: gradients were edited after the clip that made the decision.
        """
        # Autograd is to refuse a backward through a graph that was made before this step: it would
        # use the new weights with the old activations. Packs have storages of their own, so torch
        # does not see that the parameters are written.
        torch.autograd.graph.increment_version(
            [
                param
                for pack, slots in decision.present.items()
                for param in compress(pack.in_model, slots)
            ]
        )
        self._clip.note(None)
        self._packed.in_no_sync = False
        self._last_norm, self._last_skip = decision.norm, decision.skip
        packed = self._packed
        packed.decider.conclude(decision)
        packed.reduce.show(decision.present)
        packed.reduce.used(is_edited)
        packed.comm.steps += 1
        if packed.outside and packed.comm.size > 1 and packed.comm.steps == 1:
            name_unheld(packed.outside)
        for optimizer in (*packed.originals.optimizers, *self.optimizers):
            _compat.note_step_called(optimizer)
        packed.decider.skips.poll()  # last: it may raise

    def _refuse_scaler(self) -> None:
        by_scaler = self.__dict__.pop("found_inf", None) is not None
        self.__dict__.pop("grad_scale", None)
        if by_scaler:
            raise RuntimeError(GRAD_SCALER)

    # -- gradients --------------------------------------------------------------------------

    @_compat.uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as ``torch.optim.Optimizer.zero_grad`` does. Local."""
        self._clip.note(None)
        self._drop_tokens()
        self._packed.in_no_sync = False
        self._packed.decider.cleared()
        self._packed.reduce.cleared(set_to_none)
        super().zero_grad(set_to_none)  # of a stand-in zeroes the mean, and not its own element

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients on this rank, for all micro-batches of a step except the last.

        ``with optimizer.no_sync(): loss.backward()``. With ``accumulate="sharded"`` gradients are
        reduced all the same. ``step()`` averages over all ranks even if no backward was
        synchronized, which DDP would not do; it warns of that once.

        Collective: every rank must enter it.
        """
        self._packed.in_no_sync = True
        return self._packed.reduce.no_sync(self.config.accumulate == "sharded")

    def _warn_of_local_steps(self) -> None:
        reduce = self._packed.reduce
        if self._packed.in_no_sync and reduce.touched and not reduce.history[BACKWARDS]:
            warn_first(
                "no_sync: all backwards of a step ran inside it, and the step averages their "
                "gradients over the ranks; under DDP each rank would step by its own ones (local "
                "SGD). Leave no_sync() before the last backward, or train by DDP for local SGD"
            )

    @_compat.uncompiled
    def count(self, tokens: float | Tensor) -> None:
        """Count the tokens of a micro-batch: the step then trains the mean over all tokens.

        Call it before the backward of every micro-batch, with 0 on a rank without one; the loss is
        then a sum over tokens. The total travels with the norm, without a further collective except
        in ``clip_grad_value_``. ``gather_gradients`` shows the sum divided by :attr:`divisor`.

        Local, but every rank must call it. Does not wait for the device.

        Args:
            tokens: number of tokens (or of whatever the loss is a sum of) of this micro-batch on
                this rank; a number, or a 0-dim tensor (on the device, in a CUDA graph).
                Tensor-parallel ranks and pipeline stages give the same number; context-parallel
                ranks are data-parallel here, and each gives its own.

        Raises:
            ValueError: in :meth:`step`, on all ranks: a negative number, or no number.
            RuntimeError: in :meth:`step`, on all ranks: called after a backward of this step that
                was not counted, or after ``clip_grad_norm_``; some ranks did not call it; or there
                are no tokens at all.

        Example::

            optimizer.count(mask.sum())
            (per_token_loss * mask).sum().backward()
        """
        with self._packed.decider.refusal.held():
            self._count(tokens)

    def _count(self, tokens: float | Tensor) -> None:
        reduce = self._packed.reduce
        if reduce.backwards and not reduce.has_gradients:
            self._clip.note(None)
            self._drop_tokens()  # cleared by the model's zero_grad, or one by one
        if self._clip.decision is not None:
            raise RuntimeError(
                "count: called after clip_grad_norm_, which has divided by the tokens of this "
                "step; count each micro-batch before its backward, and clip after the last one"
            )
        if reduce.at_step and not self._warned_of_schedules:
            self._warned_of_schedules = True
            warn_first(
                "count: torch's schedules divide gradients by the micro-batches, and the tokens "
                "divide them again; build the schedule with scale_grads=False"
            )
        self._packed.decider.tokens.add(tokens, reduce.backwards)

    def _drop_tokens(self) -> None:
        """Forget the tokens whose gradients are dropped; not those of a batch that is to come."""
        packed = self._packed
        if packed.reduce.backwards:
            packed.decider.tokens.clear()
        packed.reduce.backwards = 0

    @_compat.uncompiled
    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the loss scale, if there is one; for ``backward()``. Local."""
        scale = self._packed.decider.loss_scale
        return loss if scale is None else scale.apply(loss)

    @_compat.uncompiled
    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Gather the mean gradient over all ranks into every ``.grad``.

        Without it a rank holds only its own elements of the mean: ``.grad`` can be edited element
        by element, and reading it raises. Call it after the last backward of a step, before you
        read gradients (SAM, PCGrad, a norm by hand). Edits count as under DDP if all ranks make the
        same. In fp16 ``.grad`` includes :attr:`loss_scale`. With model parallelism it is the
        data-parallel mean of this rank's part.

        Collective: every rank.

        Raises:
            RuntimeError: inside :meth:`no_sync`.
        """
        clip = self._clip.pending()
        self._land("gather_gradients")
        self._packed.reduce.gather()
        if clip is not None:
            self._clip.note(self._clip.decision)

    def _land(self, call: str) -> None:
        """Have the means in the own spans, for a script that looks at them. Collective."""
        self._clip.pending()
        self._reduce(call)
        self._packed.together(self._packed.reduce.check, call)

    @_compat.uncompiled
    def owned(self) -> AbstractContextManager[list[doors.Part]]:
        """Edit the elements that this rank owns: ``with optimizer.owned() as parts:``.

        Every rank must enter and leave it, whatever it owns. Each part has the ``name`` of a
        parameter, ``start`` and ``stop`` in the flattened parameter, and 1-d fp32 tensors:
        ``master``, ``grad`` (as :meth:`gather_gradients` has it, or ``None``) and ``state``, by
        torch's names (``part.state["exp_avg"]``). What has changed when the block ends is written,
        cast and sent to all ranks; no other element changes a bit. Where several ranks hold an
        element (replicas, copies) the first one's edit counts.

        A tensor is decoded when it is first asked for, and held twice. After a backward, and before
        a step, the reduction is finished at the beginning. An exception writes nothing, and is
        raised on all ranks.

        Raises:
            RuntimeError: on every rank, asleep, inside :meth:`averaged`, :meth:`as_plain` or
                another such block; of :meth:`step` inside it.
        """
        return doors.owned(self._packed, self._land)

    @_compat.uncompiled
    def whole(
        self, *wanted: str | torch.nn.Parameter
    ) -> AbstractContextManager[dict[str, doors.Values]]:
        """Edit whole parameters: ``with optimizer.whole("*.attn.weight") as params:``.

        Every rank must enter and leave it, and make the same edits. By name there are ``master``,
        ``grad`` and ``state`` of each parameter as in :meth:`owned`, in its shape, and a DTensor
        for a DTensor; state of another shape is left out. What has changed when the block ends is
        written at its owners, cast and sent to all ranks; no other element changes a bit.

        Each rank holds master, gradient and state of these parameters in fp32 meanwhile, and once
        more what it asks for. The rest is as in :meth:`owned`.

        Args:
            wanted: patterns of names, as in a shell, or parameters of the model.

        Raises:
            TypeError, ValueError: on every rank: something else; a pattern that matches nothing;
                other parameters on some ranks.
            RuntimeError: on every rank, as of :meth:`owned`; at the end if ranks have made
                different edits, of which nothing is written.
        """
        return doors.whole(self._packed, wanted, self._land)

    @_compat.uncompiled
    def clip_grad_norm_(
        self,
        parameters: Parameters | float | None = None,
        max_norm: float | Tensor | None = None,
        norm_type: float | None = None,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the global gradient norm in the coming step.

        Finishes the reduction now; the clipping itself is part of the update. It replaces
        ``max_grad_norm`` for this step. A second call clips gradients that are clipped already.

        Collective: every rank.

        Args:
            parameters: all trained parameters, as for ``torch.nn.utils.clip_grad_norm_``, or
                ``max_norm`` alone: ``clip_grad_norm_(1.0)``.
            max_norm: bound of the norm, above 0.
            norm_type: must be that of the configuration if given.
            error_if_nonfinite: must be ``False``; steps with such gradients are skipped.
            foreach: has no effect.

        Returns:
            The global norm before clipping, 0-dim, without the loss scale; equal on all ranks.

        Raises:
            TypeError, ValueError: on all ranks: ``max_norm``, or a group's ``max_grad_norm``, is
                not a number above 0; other parameters or another norm; ``error_if_nonfinite=True``.
        """
        call, packed, bound = "clip_grad_norm_", self._packed, None
        with packed.decider.refusal.held():
            bound = clip_bound(call, packed.originals, parameters, "max_norm", max_norm)
            check_norm(call, norm_type, packed.config.norm_type, error_if_nonfinite)
        clip = self._clip.pending()
        self._reduce(call)
        decision = packed.decider.decide(bound, clip, call=call)
        self._clip.note(decision)
        if packed.reduce.shows:
            self._clip.apply()
        return decision.norm.float()

    @_compat.uncompiled
    def clip_grad_value_(
        self,
        parameters: Parameters | float | None = None,
        clip_value: float | Tensor | None = None,
        foreach: bool | None = None,
    ) -> None:
        """Clamp every element of the averaged gradients.

        Non-finite gradients still skip the step. :meth:`step` raises errors of several ranks.

        Collective: every rank.

        Args:
            parameters: as for :meth:`clip_grad_norm_`, or ``clip_value`` alone.
            clip_value: bound of the absolute value, above 0.
            foreach: has no effect.

        Raises:
            TypeError, ValueError: as of :meth:`clip_grad_norm_`.
        """
        call, packed, bound = "clip_grad_value_", self._packed, math.inf
        with packed.decider.refusal.held():
            bound = clip_bound(call, packed.originals, parameters, "clip_value", clip_value)
        clip = self._clip.pending()
        self._reduce(call)
        packed.decider.clip_value(bound, clip)
        if clip is not None:
            self._clip.note(clip)

    @property
    def divisor(self) -> float | Tensor:
        """Divisor of the sum of gradients over data-parallel ranks; by default their number.

        Assign a number, or a 0-dim tensor on the device (the tokens of all ranks), before the first
        synchronized backward of a step, on every rank; ``None`` restores the default.
        """
        return self._packed.reduce.divisor.value

    @divisor.setter
    def divisor(self, value: float | Tensor | None) -> None:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        if value is None or number or (isinstance(value, Tensor) and value.dim() == 0):
            self._packed.reduce.divisor.given = value
            return
        with self._packed.decider.refusal.held():
            raise ValueError(
                f"divisor: expected a number above 0, a 0-dim tensor or None, got {value!r}"
            )

    @property
    def grad_norm(self) -> Tensor | None:
        """Global gradient norm of the last step before clipping, 0-dim; ``None`` before it."""
        return None if self._last_norm is None else self._last_norm.float()

    @property
    def loss_scale(self) -> Tensor | None:
        """Present loss scale, 0-dim; ``None`` if there is none."""
        scale = self._packed.decider.loss_scale
        return None if scale is None else scale.value

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped, for any reason. Waits for the device."""
        return self._packed.decider.skips.skipped_steps

    @property
    def guarded_steps(self) -> int:
        """Number of spikes that the ``guard`` skipped or clipped. Waits for the device."""
        guard = self._packed.decider.signal_of("guard")
        return 0 if guard is None else int(guard.numbers[0])

    @property
    def last_step_skipped(self) -> Tensor | None:
        """Flag of the last step: 0-dim bool, equal on all ranks; ``None`` before any step."""
        return self._last_skip

    # -- the rest ---------------------------------------------------------------------------

    def train(self, mode: bool = True) -> None:
        """Switch optimizers that have modes (schedule-free ones).

        Collective: every rank.

        Args:
            mode: ``True`` for training.
        """
        to = "train" if mode else "eval"
        self._packed.need_masters(to)
        self.wait_sync()
        switched = [update.switch(to) for update in self._packed.updates]
        if any(switched):  # masters may have changed and were published
            self._packed.decider.meet(to)
            self._packed.sync()

    def eval(self) -> None:
        """Switch schedule-free optimizers to evaluation, as :meth:`train` with ``False``.

        Collective: every rank.
        """
        self.train(False)

    def __getattr__(self, name: str) -> Any:
        packed = self.__dict__.get("_packed")
        if packed is None:
            raise AttributeError(name)
        if (hook := packed.hook_for(name)) is not None:
            return getattr(hook, name)
        return _own_method(packed, name, self._decision)

    def _decision(self) -> Decision:
        """A decision on the present gradients that no signal judges. Every rank must call it."""
        decision = self._clip.pending()
        if decision is None:
            self._reduce("step")
            decision = self._packed.decider.decide(None, judges=False)
        return decision

    def __repr__(self) -> str:
        return f"Sharded{self._packed.originals.name}: {self.layout.lines()[0]}"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ShardedOptimizer cannot be pickled or copied: its masters belong to this process "
            "and process group; use state_dict(), or shardcast.checkpoint.save"
        )


def _refuse_options(options: Mapping[str, Any]) -> None:
    if options:
        raise TypeError(
            f"step: expected nothing but a closure, got {', '.join(options)}=; shardcast makes "
            "the update: set loss scale, clipping and learning rate in its options and groups"
        )


def _refuse_loss(loss: object) -> None:
    if loss is not None:
        raise TypeError(
            "step: expected no loss= after clip_grad_norm_, which has decided already; set "
            "max_grad_norm in the configuration in place of the call"
        )


def _own_method(
    packed: PackedOptimizer, name: str, decide: Callable[[], Decision]
) -> Callable[..., None]:
    """Return the method of that name which one of the optimizers has, as all ranks may call it.

    Args:
        decide: gives the decision on the present gradients, on all ranks.

    Raises:
        AttributeError: none has it, or it cannot be called on masters of one rank alone.
    """
    offered = (update.own_method(name) for update in packed.updates)
    methods = [method for method in offered if method is not None]
    if len(methods) == 1:
        return partial(_call, packed, methods[0], name, decide)
    raise _without(name, packed.originals.optimizers)


@torch.no_grad()
def _call(
    packed: PackedOptimizer,
    method: OwnMethod,
    name: str,
    decide: Callable[[], Decision],
    /,
    *args: Any,
    **named: Any,
) -> None:
    """Call a method that the optimizer's class adds, on masters with the mean in ``.grad``.

    Every rank must call it, with the same arguments.

    Raises:
        AttributeError: on all ranks: the method lets parameters meet, or returns something.
    """

    def check() -> None:
        if not method.fits(args, named):
            raise _without(name, packed.originals.optimizers)

    packed.together(check, name)
    decision = decide()
    packed.sync.wait()
    method.call(decision, args, named)
    packed.sync()


def _without(name: str, originals: Sequence[torch.optim.Optimizer]) -> AttributeError:
    """The error of a method that only the class of an original optimizer has."""
    owners = [type(original).__name__ for original in originals if hasattr(type(original), name)]
    if not owners:
        return AttributeError(f"'ShardedOptimizer' object has no attribute {name!r}")
    return AttributeError(
        f"{name}: {owners[0]} has it, the sharded optimizer has not: each rank has gradients and "
        "state of its own parameters alone, on which a method can work that takes each parameter "
        "by itself, under partition 'whole', and returns nothing; use DDP, or an optimizer that "
        "updates in step()"
    )
