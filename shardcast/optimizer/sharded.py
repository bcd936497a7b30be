"""The sharded optimizer. One step is reduce, decide, update and cast, sync.

This module also has the handles of several optimizers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from itertools import compress
from numbers import Real
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import warn_first
from shardcast.config import ShardcastConfig
from shardcast.memory.gradients import nothing
from shardcast.memory.shard import take_moved
from shardcast.messages import GRAD_SCALER, page
from shardcast.optimizer import doors
from shardcast.optimizer.groups import activate_together, add_group, assign_groups
from shardcast.optimizer.model import name_unheld
from shardcast.optimizer.norms import ParameterNorms
from shardcast.optimizer.packed import MemoryReport, PackedOptimizer, close, report_of
from shardcast.optimizer.state import (
    FullState,
    RankPart,
    StateDict,
    StateView,
    called_by_dcp,
    caller_of,
    outside_as_plain,
    refuse_write,
)
from shardcast.plan import validate
from shardcast.plan.layout import Layout
from shardcast.plan.originals import Group, OptimizerList, ParamGroup
from shardcast.step.decide.decision import Decision
from shardcast.step.decide.options import BACKWARDS

P = ParamSpec("P")
T = TypeVar("T")
Parameters = Iterable[Tensor] | Tensor
# Name of such a step when ranks compare their calls.
STEP_AFTER_EDIT = "step (gradients were edited, replaced or cleared after the clip)"

REASON = "it no longer owns gradients and state"
AFTER_CLOSE = ", or after its close() make a new torch optimizer"
LOSSES = (
    "If each optimizer has its own loss, shard the models separately (GAN). Within one model "
    "(DARTS), set .grad to None for parameters that must not change, and call step() of the "
    f"optimizer that shardcast.shard returned ({page('optimizers')})"
)
# Callers that load a rank's part on the same rank; AcceleratedOptimizer() does so at once.
KEEP_PARTS = ("shardcast", "accelerate.optimizer")


def _parameters_once(clip: Callable[P, T]) -> Callable[P, T]:
    """Name a bound that is given where parameters belong, and ``parameters=`` besides."""

    @wraps(clip)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if len(args) > 1 and "parameters" in kwargs:
            name, bound = clip.__name__, args[1]
            raise TypeError(
                f"{name}: expected parameters once, got {bound!r} in their place and parameters=; "
                f"write {name}(parameters, {bound!r})"
            )
        return clip(*args, **kwargs)

    return checked


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose fp32 masters and state are sharded over data-parallel ranks.

    :func:`shardcast.shard` creates it. ``param_groups`` hold the *model* parameters and are shared
    with the original optimizer, so schedulers built on either one work. A group may have its own
    ``max_grad_norm``.

    Attributes:
        optimizers: a handle for each optimizer that was passed to ``shard()``, for schedulers and
            for loops over optimizers. ``step()`` of the last handle steps all of them. With one
            optimizer it is this object itself.
    """

    # Makes torch.amp.GradScaler call step() on every rank, which raises. Otherwise it would skip
    # the step on ranks that saw an infinity, and the other ranks would wait.
    _step_supports_amp_scaling = True
    _warned_of_schedules = False
    _ready = False  # torch's __init__ must not fill in groups and state; ours exist already

    def __init__(self, packed: PackedOptimizer) -> None:
        self._packed = packed
        self._norms = ParameterNorms(packed, self._land)
        self._states, self._full = StateDict(packed), FullState(packed)
        originals = packed.originals.optimizers
        defaults = originals[0].defaults if len(originals) == 1 else {}
        super().__init__(packed.originals.groups, defaults)
        self._ready = True
        self._last_norm: Tensor | None = None
        self._last_skip: Tensor | None = None
        state: dict[Any, Any] = {}
        for original in originals:
            take_hooks(self, original)
            state.update(original.state)
        call = f"shard() with state: {bool(state)}"  # as a rank that has stepped before has it
        if not packed.process_groups.everyone.agree(call, packed.device) or state:
            self._states.apply(self._states.plan_plain(state))
        places = range(len(originals)) if len(originals) > 1 else ()
        self._handles = [OptimizerHandle(self, place) for place in places]
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

        With Adam, AdamW and SGD it waits for the device only with ``offload``, ``replica_check``,
        missing gradients or frozen parameters in the optimizer; other classes wait once per step.
        If any rank has a non-finite gradient, the step changes nothing. On several accelerators
        ``clip_grad_norm_`` makes this decision; gradients that a script writes after it are used
        even if they are not finite.

        Collective: every rank.

        Args:
            closure: evaluates the model, runs the backward and returns the loss.
            loss: unscaled loss of this rank, for a ``guard`` on losses: a number or a 0-dim tensor
                on the device. Every rank must pass one. By default the closure's result.

        Returns:
            The result of ``closure``, or ``None``.

        Raises:
            TypeError: on all ranks, if any rank passed ``options``, or a loss that no guard uses.
            RuntimeError: after ``max_skipped_steps`` skips in a row. On all ranks, if any rank is
                inside :meth:`no_sync`, or did not scale its loss although there is a loss scale.
                On all ranks, if only some of them edited gradients after a clip, or if they loaded
                different weights or have different group options. On an accelerator these errors
                come one or two steps later. Until then such steps are skipped, unless
                ``clip_grad_norm_`` already decided them.
        """
        packed = self._packed
        if packed.is_closed:
            raise RuntimeError(
                "step: the optimizer is closed; build a new optimizer over the model, and pass "
                "both to shardcast.shard to shard them again"
            )
        if self._handles:
            check_stepped(self._handles)
        if packed.block:
            packed.refuse_inside("step")
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
        decision = packed.reduce.pending  # a clip has reduced and decided already
        if decision is None:
            self._reduce("step")
            is_loss = isinstance(result, (float, Tensor))  # a closure may return other things
            if loss is None and is_loss and packed.decider.takes_loss:
                loss = result
            decision = packed.decider.decide(packed.config.max_grad_norm, None, loss)
        else:
            is_edited = packed.reduce.is_edited()
            with packed.decider.refusal.held():
                _refuse_loss(loss)
                if is_edited:
                    packed.reduce.refuse_edits()
                take_moved(packed.shards)
            packed.decider.meet(STEP_AFTER_EDIT if is_edited else "step")
            if is_edited:
                packed.reduce.multiply_in()
                decision = self._decided_again()
        packed.sync.wait()  # the update overwrites what an overlapped sync still sends
        for shard in packed.shards:
            shard.forget_before_load()
        for hook in packed.step_hooks:
            hook.before_update(decision)
        apart = any(shard.home.is_apart for shard in packed.shards[:1])
        read = decision.on_host if apart else decision
        for update in packed.updates:  # unscale, clip, rule, cast into the packs: one fused pass
            update(read)
        for hook in packed.step_hooks:
            hook.after_update(decision)
        (packed.sync.by or packed.sync)()  # owners -> all ranks
        for hook in packed.step_hooks:
            hook.after_sync()
        self._conclude(decision, is_edited)
        return result

    def _optimizer_step_code(self) -> None:
        """Do nothing: in torch's method of this name a profiler with stacks reads all state."""

    def _decided_again(self) -> Decision:
        """Return the decision on gradients that a script has edited after the clip.

        On accelerators the ranks do not meet here. A rank with edits does not know whether the
        others have edits, so it sends nothing. The next decision compares them.
        """
        packed, clip = self._packed, self._packed.reduce.clip
        assert clip is not None
        if packed.process_groups.everyone.size > 1 and not packed.decider.meets:
            with packed.decider.refusal.held():
                packed.reduce.settle()
                packed.reduce.check()
            return dataclasses.replace(clip, present=packed.reduce.still_present(clip.present))
        self._reduce("step")
        decision = packed.decider.decide(None, clip)
        return dataclasses.replace(decision, norm=clip.norm)  # the norm before the clip

    def _reduce(self, call: str) -> None:
        """Finish the reduction, so that each span has its mean. Collective."""
        packed = self._packed
        for hook in packed.step_hooks:
            hook.before_reduce()
        with packed.decider.refusal.held():
            packed.originals.check()
            take_moved(packed.shards)
            if packed.decider.tokens.counted and packed.reduce.adds_used():
                raise RuntimeError(
                    "count: gradients were added to those of the last step, which this step would "
                    "divide by its own tokens; call optimizer.zero_grad() after each step"
                )
        several = packed.process_groups.everyone.size > 1
        packed.decider.left = packed.tree.left() if several else ""
        if several and not packed.reduce.at_step:
            self._warn_of_local_steps()
        frozen = [shard for shard in packed.shards if shard.grads is None]
        scale, has_run = packed.decider.loss_scale, packed.reduce.last_backward is not None
        if scale is not None:
            scale.look(packed.reduce.grads, has_run)
        packed.reduce.finish(call)
        if frozen:
            # After the reduction, which other ranks started in their backward. This reduces packs
            # that now have a gradient on some rank. Ranks in another call would issue another
            # all-reduce, so ranks first compare calls. With model parallelism, ranks without frozen
            # packs do not get here.
            if packed.process_groups.model.size == 1:
                packed.decider.meet(call)
            has_gradient = [any(p.grad is not None for p in s.pack.params) for s in frozen]
            activated = activate_together(packed, frozen, has_gradient)
            if scale is not None:
                scale.look([s.grads for s in activated if s.grads is not None], has_run, more=True)

    def _conclude(self, decision: Decision, is_edited: bool) -> None:
        """Count the step, update the loss scale, and set what ``.grad`` and schedulers see.

        Args:
            is_edited: gradients were edited after the clip that made the decision.
        """
        # Makes autograd refuse a backward through a graph from before this step, which would
        # combine new weights with old activations. torch itself does not see that the parameters
        # changed, because the update writes to the packs' storage.
        torch.autograd.graph.increment_version(
            [
                param
                for pack, slots in decision.present.items()
                for param in compress(pack.in_model, slots)
            ]
        )
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
        """Clear the gradients, as ``torch.optim.Optimizer.zero_grad`` does.

        Local, except after a failed backward: then it waits until the other ranks also clear
        theirs, or make another collective call.
        """
        self._drop_tokens()
        self._packed.in_no_sync &= not self._packed.reduce.synchronises  # still inside it
        self._packed.decider.cleared()
        self._packed.reduce.cleared(set_to_none)
        super().zero_grad(set_to_none)  # zeroes the mean behind a stand-in, not its own element

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients on this rank, for all micro-batches of a step except the last.

        ``with optimizer.no_sync(): loss.backward()``. With ``accumulate="sharded"`` every backward
        is still reduced. Unlike under DDP, ``step()`` averages over all ranks even if no backward
        ran outside the block; it warns about that once.

        Collective: every rank must enter it.
        """
        self._packed.in_no_sync = True
        return self._packed.reduce.no_sync(self.config.accumulate == "sharded")

    def _warn_of_local_steps(self) -> None:
        reduce = self._packed.reduce
        if not reduce.synchronises:  # still inside it: an error follows
            return
        has_run = reduce.last_backward is not None
        if self._packed.in_no_sync and has_run and not reduce.history[BACKWARDS]:
            warn_first(
                "no_sync: all backwards of a step ran inside it, and the step averages their "
                "gradients over the ranks; under DDP each rank would step with its own "
                "gradients (local SGD). Leave no_sync() before the last backward, or use DDP "
                "for local SGD"
            )

    @_compat.uncompiled
    def count(self, tokens: float | Tensor) -> None:
        """Count the tokens of a micro-batch, so that the step uses the mean over all tokens.

        Call it before the backward of every micro-batch, with 0 on a rank without a batch. The loss
        must then be a sum over tokens. The total is reduced together with the norm, without an
        extra collective, except in ``clip_grad_value_``. ``gather_gradients`` shows the sum divided
        by :attr:`divisor`.

        Local, but every rank must call it. Does not wait for the device.

        Args:
            tokens: number of tokens (or other summands of the loss) in this micro-batch on this
                rank: a number, or a 0-dim tensor (on the device if captured in a CUDA graph).
                Tensor-parallel ranks and pipeline stages pass the same number. Context-parallel
                ranks count as data-parallel, and each passes its own.

        Raises:
            ValueError: in :meth:`step`, on all ranks: a number is negative, or not a number.
            RuntimeError: in :meth:`step`, on all ranks: an earlier backward of this step was not
                counted, or its gradients were added to the last step's; the call came after
                ``clip_grad_norm_``; some ranks did not call it; or the total is 0.

        Example::

            optimizer.count(mask.sum())
            (per_token_loss * mask).sum().backward()
        """
        with self._packed.decider.refusal.held():
            self._count(tokens)

    def _count(self, tokens: float | Tensor) -> None:
        reduce = self._packed.reduce
        reduce.end_alone()
        if reduce.last_backward is not None and not reduce.has_gradients:
            reduce.clip = None
            self._drop_tokens()  # gradients were cleared by the model's zero_grad, or one by one
        if reduce.is_clipped:
            raise RuntimeError(
                "count: called after clip_grad_norm_, which has divided by the tokens of this "
                "step; count each micro-batch before its backward, and clip after the last one"
            )
        if reduce.at_step and not self._warned_of_schedules:
            self._warned_of_schedules = True
            warn_first(
                "count: torch's schedules divide gradients by the number of micro-batches, and "
                "count() divides them again, by tokens; build the schedule with scale_grads=False"
            )
        self._packed.decider.tokens.add(tokens, reduce.last_backward is not None)
        reduce.counts = True

    def _drop_tokens(self) -> None:
        """Forget tokens whose gradients were dropped, but not those of a coming batch."""
        packed = self._packed
        if packed.reduce.last_backward is not None:
            packed.decider.tokens.clear()
        packed.reduce.last_backward = None

    @_compat.uncompiled
    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the loss scale, if there is one, for ``backward()``. Local."""
        scale = self._packed.decider.loss_scale
        return loss if scale is None else scale.apply(loss)

    @_compat.uncompiled
    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Gather the mean gradient over all ranks into every ``.grad``.

        Without it a rank holds only the elements of the mean that it owns: ``.grad`` can be edited
        elementwise, and reading it raises. Call it after the last backward of a step, before you
        read gradients (SAM, PCGrad, your own norm). As under DDP, all ranks must make the same
        edits. In fp16 ``.grad`` includes :attr:`loss_scale`. With model parallelism it is the
        data-parallel mean of this rank's part.

        Collective: every rank.

        Raises:
            RuntimeError: on all ranks, if any rank is inside :meth:`no_sync`.
        """
        self._land("gather_gradients")
        self._packed.reduce.gather()

    def _land(self, call: str, check: Callable[[], None] = nothing) -> None:
        """Finish the reduction before a script reads the means. Collective: every rank.

        Args:
            check: raises if this rank must not read them; then all ranks raise.
        """

        def checks() -> None:
            self._packed.reduce.check()
            check()

        self._reduce(call)
        self._packed.together(checks, call)

    @_compat.uncompiled
    def owned(self) -> AbstractContextManager[list[doors.Part]]:
        """Edit the elements that this rank owns: ``with optimizer.owned() as parts:``.

        Each part has the ``name`` of a parameter, ``start`` and ``stop`` in the flattened
        parameter, and 1-d fp32 tensors: ``master``, ``grad`` (the values of
        :meth:`gather_gradients`, or ``None``) and ``state`` with torch's names
        (``part.state["exp_avg"]``). When the block ends, changed elements are written, cast and
        sent to all ranks. All other elements keep their bits. If several ranks own an element
        (replicas), the first one's edit counts.

        Each tensor is read at its first use, and then takes twice its size in fp32. Between a
        backward and its step, the block first finishes the reduction. If any rank raises inside,
        nothing is written and all ranks raise.

        Collective: every rank must enter and leave it, even if it owns nothing.

        Raises:
            RuntimeError: on every rank: the optimizer is asleep, or inside :meth:`averaged`,
                :meth:`as_plain` or another such block, or inside :meth:`no_sync` after a backward.
                :meth:`step` raises inside it.
        """
        return doors.owned(self._packed, self._land)

    @_compat.uncompiled
    def whole(
        self, *wanted: str | torch.nn.Parameter
    ) -> AbstractContextManager[dict[str, doors.Values]]:
        """Edit whole parameters: ``with optimizer.whole("*.attn.weight") as params:``.

        Maps names to ``master``, ``grad`` and ``state`` as in :meth:`owned`, but in the parameter's
        shape (a DTensor for a DTensor). State of another shape is left out. When the block ends,
        owners write the changed elements, cast them and send them to all ranks. All other elements
        keep their bits.

        Each rank holds master, gradient and state of these parameters in fp32, plus the tensors
        that the script reads. Otherwise it works like :meth:`owned`.

        Collective: every rank must enter and leave it, with the same edits.

        Args:
            wanted: glob patterns of names, or parameters of the model.

        Raises:
            TypeError, ValueError: on every rank: an argument is neither of these, a pattern matches
                nothing, or ranks want different parameters.
            RuntimeError: on every rank, as in :meth:`owned`. Also at the end of the block, if ranks
                made different edits; nothing is written then.
        """
        return doors.whole(self._packed, wanted, self._land)

    @_compat.uncompiled
    @_parameters_once
    def clip_grad_norm_(
        self,
        parameters: Parameters | float | None = None,
        max_norm: float | Tensor | None = None,
        norm_type: float | None = None,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the global gradient norm in the coming step.

        Finishes the reduction now; the update does the clipping. This bound replaces
        ``max_grad_norm`` for one step. A second call clips the gradients again.

        Collective: every rank.

        Args:
            parameters: all trained parameters, as for ``torch.nn.utils.clip_grad_norm_``. Or pass
                only ``max_norm``: ``clip_grad_norm_(1.0)``.
            max_norm: bound of the norm, above 0.
            norm_type: must equal the option ``norm_type``, if given.
            error_if_nonfinite: must be ``False``; steps with non-finite gradients are skipped.
            foreach: has no effect.

        Returns:
            The global norm before clipping, without the loss scale: 0-dim, equal on all ranks.

        Raises:
            TypeError, ValueError: on all ranks: ``max_norm``, or a group's ``max_grad_norm``, is
                not a number above 0; ``parameters`` are not all trained ones; ``norm_type`` is
                not the option's; or ``error_if_nonfinite=True``.
        """
        call, packed, bound = "clip_grad_norm_", self._packed, None
        with packed.decider.refusal.held():
            bound = clip_bound(call, packed.originals, parameters, "max_norm", max_norm)
            check_norm(call, norm_type, packed.config.norm_type, error_if_nonfinite)
        self._reduce(call)
        clip = packed.reduce.pending  # its factors may be multiplied in now
        decision = packed.decider.decide(bound, clip, call=call)
        packed.reduce.note_clip(decision)
        if packed.reduce.shows:
            packed.reduce.multiply_in()
        return decision.norm.float()

    @_compat.uncompiled
    @_parameters_once
    def clip_grad_value_(
        self,
        parameters: Parameters | float | None = None,
        clip_value: float | Tensor | None = None,
        foreach: bool | None = None,
    ) -> None:
        """Clamp every element of the averaged gradients.

        Non-finite gradients still skip the step. If ranks disagree, :meth:`step` raises the error.

        Collective: every rank.

        Args:
            parameters: as for :meth:`clip_grad_norm_`. Or pass only ``clip_value``.
            clip_value: bound of the absolute value, above 0.
            foreach: has no effect.

        Raises:
            TypeError, ValueError: as in :meth:`clip_grad_norm_`.
        """
        call, packed, bound = "clip_grad_value_", self._packed, math.inf
        with packed.decider.refusal.held():
            bound = clip_bound(call, packed.originals, parameters, "clip_value", clip_value)
        self._reduce(call)
        with packed.reduce.own_edits():
            packed.decider.clip_value(bound, packed.reduce.pending)

    @property
    def divisor(self) -> float | Tensor:
        """Divisor of the sum of gradients over data-parallel ranks; by default their number.

        Assign a number, or a 0-dim tensor on the device (the tokens of all ranks), on every rank
        before the first backward of a step outside :meth:`no_sync`. ``None`` restores the default.
        A single rank then reduces its gradients too, as after :meth:`count` and in fp16: gather
        them before you read ``.grad``.
        """
        return self._packed.reduce.divisor.value

    @divisor.setter
    def divisor(self, value: float | Tensor | None) -> None:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        if value is None or number or (isinstance(value, Tensor) and value.dim() == 0):
            self._packed.reduce.divide_by(value)
            return
        with self._packed.decider.refusal.held():
            raise ValueError(
                f"divisor: expected a number above 0, a 0-dim tensor or None, got {value!r}"
            )

    @property
    def grad_norm(self) -> Tensor | None:
        """Unscaled global gradient norm of the last step before clipping; 0-dim, or ``None``."""
        return None if self._last_norm is None else self._last_norm.float()

    @property
    def loss_scale(self) -> Tensor | None:
        """Current loss scale, 0-dim; ``None`` if there is none."""
        scale = self._packed.decider.loss_scale
        return None if scale is None else scale.value

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped, for any reason. Waits for the device."""
        return self._packed.decider.skips.skipped_steps

    @property
    def last_step_skipped(self) -> Tensor | None:
        """Whether the last step was skipped: 0-dim bool, equal on all ranks; ``None`` at first."""
        return self._last_skip

    # -- groups and state --------------------------------------------------------------------

    @property
    def config(self) -> ShardcastConfig:
        """Options in effect. Local."""
        return self._packed.config

    @property
    def layout(self) -> Layout:
        """All packs, slots and spans, equal on all ranks; ``print`` it. Local."""
        return self._packed.layout

    @property
    def param_groups(self) -> list[Group]:
        """Groups of the original optimizers, which share them.

        Assign to it to change options, or to add groups; every rank must make the same assignment.
        If you remove a group or some of its parameters, the next step raises.
        """
        return self._packed.originals.groups

    @param_groups.setter
    def param_groups(self, value: Sequence[Group]) -> None:
        if self._ready:
            for group in assign_groups(self._packed, value):
                self.add_param_group(group)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of model parameters, in packs of its own.

        Collective: every rank, with the same group.

        Args:
            param_group: as for ``torch.optim.Optimizer.add_param_group``.

        Raises:
            TypeError, ValueError, RuntimeError: on every rank, as in ``shard()``; nothing is added.
        """
        if not self._ready:  # the original optimizers' groups are already checked
            return
        originals = self._packed.originals
        if len(originals.optimizers) > 1:
            raise RuntimeError(
                f"add_param_group: {originals.name} are sharded together; add the group to "
                "one of optimizer.optimizers"
            )
        add_group(self._packed, 0, param_group)

    def memory_report(self) -> MemoryReport:
        """Return bytes on this rank by kind: parameters, gradients, masters, state, averages.

        Local. The result is a dictionary: ``print`` shows one line, ``.total`` is the sum.
        """
        return report_of(self._packed)

    def close(self, restore: bool = True) -> None:
        """End training: restore the model's own dtype, with the fp32 masters as values.

        Do not use this optimizer afterwards. You can train the model without it, or shard it again.
        Values that ``convert_rest`` or ``cast_buffers`` rounded stay rounded.

        Collective: every rank, unless ``restore=False``.

        Args:
            restore: ``False`` gathers nothing and waits for no other rank, except for weights that
                ``overlap_sync`` still sends. The model then stays in low precision, and this rank
                keeps the fp32 masters, from which a later ``shard()`` of the model continues. While
                an exception is handled, as in ``finally:``, ``close()`` always does this.
        """
        close(self._packed, restore)

    @property
    def state(self) -> Any:
        """Read-only view of torch's state by model parameter.

        With the classes of ``torch.optim``, every rank can read ``step``, the number of updates of
        a parameter. Reading tensors, or numbers that only owners have, raises an error on every
        rank: use :meth:`whole`, or :meth:`owned` for this rank's part. :meth:`load_state_dict`
        replaces the state. Local.
        """
        if self._packed.plain_names is not None:
            return self._packed.plain_names
        if called_by_dcp("state"):
            raise outside_as_plain("state")
        self._packed.need_masters("state")
        return StateView(self._packed)

    @state.setter
    def state(self, value: Any) -> None:
        if self._ready:
            refuse_write()

    @contextmanager
    def as_plain(self) -> Iterator[None]:
        """Present all ranks' state as a plain optimizer's to ``torch.distributed.checkpoint``.

        Use it as ``with optimizer.as_plain(): state = get_optimizer_state_dict(model, optimizer)``,
        and likewise for ``set_optimizer_state_dict``, ``dcp.save`` and ``dcp.load``. Inside,
        :meth:`state_dict` returns the full state on every rank, in host memory. It includes masters
        of low-precision parameters. Before the first step the state is that of a step with zero
        gradients, which is how DCP initializes a plain optimizer. It is discarded at the end unless
        a state was loaded.

        Collective: every rank must enter and leave it.

        Raises:
            RuntimeError: on every rank, with model parallelism or inside :meth:`averaged`.
                :meth:`step` raises inside it.
        """
        self._packed.refuse_inside("as_plain")
        with self._full.as_plain():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard: tensors and plain numbers.

        For each parameter that this rank owns a part of, it has torch's state of that part and its
        ``master`` (1-d, fp32). It loads only on the same rank of an equal layout; use
        :mod:`shardcast.checkpoint` for anything else. In a run of several ranks, saving it warns
        once, because the file lacks the other ranks' parts.

        Local. Inside :meth:`as_plain` it is collective and returns the full state.

        Raises:
            RuntimeError: ``torch.distributed.checkpoint`` called it outside :meth:`as_plain`.
        """
        if self._packed.plain_names is None and called_by_dcp("state_dict"):
            raise outside_as_plain("state_dict")
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        if self._packed.plain_names is not None:
            result = self._full.gather_on_all()
        else:
            result = self._states.dump()
            size = self._packed.process_groups.everyone.size
            if size > 1 and not caller_of("state_dict").startswith(KEEP_PARTS):
                result = RankPart(result, size)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, result) or result
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load this rank's :meth:`state_dict`, or a plain state of the unsharded optimizer.

        If the state has no masters, the current ones stay.

        Collective: every rank.

        Args:
            state_dict: this rank's own part, or the same plain state on all ranks. For several
                optimizers a list, as :meth:`full_state_dicts` returns.

        Raises:
            ValueError: on every rank, if any rank cannot load its state; nothing changes.
        """
        self._packed.refuse_inside("load_state_dict")
        self.wait_sync()
        loaded: Any
        if isinstance(state_dict, RankPart):
            loaded = state_dict.plain()
        else:
            loaded = dict(state_dict) if isinstance(state_dict, Mapping) else list(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = hook(self, loaded) or loaded
        self._states.apply(self._states.plan(loaded))
        self._full.note_loaded()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def full_parameters(self, average: str | None = None) -> dict[str, Tensor]:
        """Return the fp32 parameters by name, on rank 0's host; other ranks get an empty dict.

        Tied parameters are listed under each of their names.

        Collective: every rank.

        Args:
            average: name of an average to return instead of the parameters.

        Raises:
            ValueError: on every rank, if there is no average of this name.
        """
        return self._full.masters(average)

    def full_state_dict(self, place: int | None = None) -> dict[str, Any]:
        """Return the unsharded optimizer's ``state_dict`` on rank 0; other ranks get an empty dict.

        Averages of weights are part of the state.

        Collective: every rank.

        Args:
            place: index of one optimizer, in the order given to ``shard()``. By default the groups
                of all optimizers are numbered consecutively.
        """
        return self._full.gather(place)

    def full_state_dicts(self) -> list[dict[str, Any]]:
        """Return :meth:`full_state_dict` of each optimizer on rank 0; others get an empty list.

        Collective: every rank.
        """
        places = range(len(self._packed.originals.optimizers))
        return [state for state in map(self._full.gather, places) if state]

    def wait_sync(self) -> None:
        """Wait for updated parameters that ``overlap_sync`` is still sending. Local.

        Call it before you read or write parameters outside a forward (an EMA, weight norms).
        Forwards, state dicts, ``copy.deepcopy`` and this optimizer's methods wait by themselves. On
        a GPU the current stream waits, so call it before other streams branch off.
        """
        self._packed.sync.wait()

    # -- the rest ---------------------------------------------------------------------------

    def train(self, mode: bool = True) -> None:
        """Switch optimizers that have modes (schedule-free ones) to training.

        Collective: every rank.

        Args:
            mode: ``False`` switches to evaluation.
        """
        to = "train" if mode else "eval"
        self._packed.need_masters(to)
        self.wait_sync()
        switched = [update.switch(to) for update in self._packed.updates]
        if any(switched):  # the switch may have changed masters
            self._packed.decider.meet(to)
            self._packed.sync()

    def eval(self) -> None:
        """Switch schedule-free optimizers to evaluation, like :meth:`train` with ``False``.

        Collective: every rank.
        """
        self.train(False)

    def __getattr__(self, name: str) -> Any:
        packed = self.__dict__.get("_packed")
        if packed is None:
            raise AttributeError(name)
        if (hook := packed.hook_for(name)) is not None:
            return getattr(hook, name)
        raise _without(name, packed.originals.optimizers)

    def __repr__(self) -> str:
        return f"Sharded{self._packed.originals.name}: {self.layout.lines()[0]}"

    def __getstate__(self) -> dict[str, object]:
        raise TypeError(
            "a ShardedOptimizer cannot be pickled or copied: its masters belong to this process "
            "and process group; use state_dict(), or shardcast.checkpoint.save"
        )

    __setstate__ = refuse_write  # torch's writes to ``__dict__``, behind the property ``state``


def _refuse_options(options: Mapping[str, Any]) -> None:
    if options:
        raise TypeError(
            f"step: expected only a closure, got {', '.join(options)}=; set loss scale, clipping "
            "and learning rate in the options and parameter groups"
        )


def _refuse_loss(loss: object) -> None:
    if loss is not None:
        raise TypeError(
            "step: expected no loss= after clip_grad_norm_, which has already decided whether to "
            "skip the step; set max_grad_norm in the configuration instead of the call"
        )


def _without(name: str, originals: Sequence[torch.optim.Optimizer]) -> AttributeError:
    """Return the error for a method that only an original optimizer's class has."""
    owners = [type(original).__name__ for original in originals if hasattr(type(original), name)]
    if not owners:
        return AttributeError(f"'ShardedOptimizer' object has no attribute {name!r}")
    return AttributeError(
        f"{name}: {owners[0]} has this method, but the sharded optimizer does not, because each "
        "rank has only its own part of gradients and state; edit them in `with "
        "optimizer.owned() as parts:`, or use an optimizer that updates in step()"
    )


def clip_bound(
    call: str,
    originals: OptimizerList,
    parameters: Parameters | float | None,
    name: str,
    bound: Any,
) -> float:
    """Return the bound of a clip of all trained parameters; the call may pass the bound alone.

    Args:
        name: name of the bound, for errors.

    Raises:
        TypeError, ValueError: the bound, or that of a group, is not a number above 0.
        ValueError: ``parameters`` are not all trained ones.
    """
    is_value = isinstance(parameters, Tensor) and not isinstance(parameters, nn.Parameter)
    if bound is None and (is_value or isinstance(parameters, (Real, str))):
        parameters, bound = None, parameters
    for number, optimizer, group in originals.numbered():
        validate.check_limit(group, optimizer.defaults, number)
    if parameters is not None:
        params: Any = [parameters] if isinstance(parameters, Tensor) else parameters
        if isinstance(params, (Real, str)):
            raise TypeError(
                f"{call}: expected parameters, got {params!r} besides {name} {bound!r}; write "
                f"{call}(parameters, {bound!r}) or {call}({bound!r})"
            )
        _check_clipped(call, originals.groups, params)
    return validate.bound_of(name, bound)


def check_norm(call: str, asked: float | None, norm_type: float, error_if_nonfinite: bool) -> None:
    """Raise ValueError for another norm, or for a clip that should raise on NaN."""
    if asked not in (None, norm_type):
        raise ValueError(
            f"{call}: expected norm_type {norm_type}, got {asked}; set norm_type: {asked} in the "
            "shardcast configuration"
        )
    if error_if_nonfinite:
        raise ValueError(
            f"{call}: expected error_if_nonfinite=False, got True; a step with a non-finite "
            "gradient is skipped on all ranks, and max_skipped_steps of them in a row raise"
        )


def _check_clipped(call: str, groups: Iterable[ParamGroup], given: Iterable[Tensor]) -> None:
    """Raise ValueError unless ``given`` are exactly the trained parameters of ``groups``."""
    own, params = {param for group in groups for param in group["params"]}, set(given)
    left_out = sum(param.requires_grad for param in own - params)
    if left_out:
        raise ValueError(
            f"{call}: expected all trained parameters, got all but {left_out} of {len(own)}; "
            "pass model.parameters(), or clip a group by itself with a max_grad_norm key in its "
            "optimizer group"
        )
    foreign = sum(param.requires_grad for param in params - own)
    if foreign:
        raise ValueError(
            f"{call}: expected the optimizer's own parameters, got {foreign} others that require "
            "gradients, which are not averaged over the ranks; add them to the optimizer, or "
            "freeze them with requires_grad_(False)"
        )


class OptimizerHandle(torch.optim.Optimizer):
    """Stands for one of several optimizers that were sharded together.

    Schedulers accept it. A loop that steps every handle works as it did with plain optimizers:
    ``step()`` of the last handle steps all of them. Each uses the options that its groups had at
    its own ``step()``, and ``zero_grad()`` in between is deferred until then. ``state_dict`` and
    ``load_state_dict`` raise, because only the sharded optimizer has the state.

    Attributes:
        name: class of the optimizer.
    """

    _ready = False  # the base class fills in the groups

    def __init__(self, sharded: ShardedOptimizer, place: int) -> None:
        self._sharded, self._packed, self._place = sharded, packed_of(sharded), place
        self._stepped_with: object = None  # gradients at the first step, until all have stepped
        self._options: list[Group] = []  # of its groups, at that step
        self._versions: list[int] = []  # of its parameters, likewise
        self._zero_grad_after: bool | None = None  # set_to_none of a deferred zero_grad
        original = self._packed.originals.optimizers[place]
        self.name = type(original).__name__
        super().__init__(original.param_groups, original.defaults)
        for call in ("state_dict", "load_state_dict"):
            reason = "optimizers that are sharded together have one state"
            setattr(self, call, refused(call, f"the handle of {self.name}", reason))
        self._ready = True

    @property
    def param_groups(self) -> list[Group]:
        """The groups of the original optimizer; see :attr:`ShardedOptimizer.param_groups`."""
        return self._packed.originals.optimizers[self._place].param_groups

    @param_groups.setter
    def param_groups(self, value: Sequence[Group]) -> None:
        if self._ready:
            for group in assign_groups(self._packed, value, self._place):
                self.add_param_group(group)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to this optimizer; see :meth:`ShardedOptimizer.add_param_group`."""
        if self._ready:
            add_group(self._packed, self._place, param_group)

    @_compat.uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Record this step; the last handle steps all. Every rank must call all of them."""
        if closure is not None:
            raise TypeError(
                f"step: the handle of {_named(self)} takes no closure, which each handle would "
                "run again; pass it to step() of the optimizer that shardcast.shard returned"
            )
        handles = self._sharded._handles
        waiting = [handle for handle in handles if handle._stepped_with is None]
        if self not in waiting:
            raise RuntimeError(
                f"step() of the handle of {_named(self)} was called twice before step() of "
                f"{_names(waiting)}: the optimizers step together; call step() of every handle "
                "once, or step() of the optimizer that shardcast.shard returned; to leave one out "
                "of a step, set .grad of its parameters to None before the step"
            )
        state = self._packed.reduce.state()
        if any(handle._stepped_with not in (None, state) for handle in handles):
            raise RuntimeError(
                f"step() of the handle of {_named(self)} came after a backward, a clip or "
                "zero_grad() that followed the step() of another one: the optimizers step "
                "together, with the same gradients; call step() of all handles after the last "
                f"backward. {LOSSES}"
            )
        self._stepped_with = state
        self._options = [options_of(group) for group in self.param_groups]
        self._versions = self._versions_now()
        if waiting == [self]:
            for handle in handles:
                handle._stepped_with = None
            if written := [each for each in handles if each._versions != each._versions_now()]:
                raise RuntimeError(
                    f"step() of the handle of {_named(self)}: weights of {_names(written)} were "
                    "written after its step(), but the optimizers step together, after that; "
                    "write weights (clamps, norms, masks) after step() of all handles"
                )
            with ExitStack() as stack:  # a scheduler may have set the next step's rate since
                for handle in handles:
                    for group, options in zip(handle.param_groups, handle._options, strict=False):
                        stack.enter_context(having(group, options))
                self._sharded.step()
            for handle in handles:
                set_to_none, handle._zero_grad_after = handle._zero_grad_after, None
                if set_to_none is not None:
                    handle.zero_grad(set_to_none)

    _optimizer_step_code = ShardedOptimizer._optimizer_step_code

    @_compat.uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of its own parameters, after they are used. Local."""
        stepped = [each for each in self._sharded._handles if each._stepped_with is not None]
        if self in stepped:  # other handles have not stepped yet
            self._zero_grad_after = set_to_none
            return
        if stepped:
            raise RuntimeError(
                f"zero_grad() of the handle of {_named(self)} was called before its own step(), "
                f"but after step() of {_names(stepped)}: the optimizers step together, with the "
                f"gradients of the same backwards. {LOSSES}"
            )
        super().zero_grad(set_to_none)

    def _versions_now(self) -> list[int]:
        return [param._version for group in self.param_groups for param in group["params"]]

    def full_state_dict(self) -> dict[str, Any]:
        """Return this optimizer's full state on rank 0. Collective: every rank."""
        return self._sharded.full_state_dict(self._place)

    @property
    def state(self) -> Any:
        """State of its own parameters; see :attr:`ShardedOptimizer.state`."""
        if called_by_dcp("state"):
            raise outside_as_plain("state")
        self._packed.need_masters("state")
        return StateView(self._packed, self._place)

    @state.setter
    def state(self, value: Any) -> None:
        if self._ready:
            refuse_write()

    __setstate__ = refuse_write


def options_of(group: ParamGroup) -> Group:
    """Return a copy of its options, which later edits of the group do not change."""
    options = {name: value for name, value in group.items() if name != "params"}
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in options.items()}


@contextmanager
def having(group: Group, options: ParamGroup) -> Iterator[None]:
    """Give the group earlier options, where they differ, until the block ends."""
    changed = {
        name: group[name]
        for name, value in options.items()
        if name in group and (isinstance(value, Tensor) or group[name] is not value)
    }
    group.update((name, options[name]) for name in changed)
    try:
        yield
    finally:
        group.update(changed)


def check_stepped(handles: Sequence[OptimizerHandle]) -> None:
    """Raise RuntimeError if some handles have stepped and others have not."""
    stepped = [handle for handle in handles if handle._stepped_with is not None]
    if stepped:
        raise RuntimeError(
            f"step(): the handle of {_names(stepped)} was stepped, others were not, so this step "
            "would count twice for it; call step() of all handles, or of none"
        )


def _names(handles: Sequence[OptimizerHandle]) -> str:
    return ", ".join(map(_named, handles))


def _named(handle: OptimizerHandle) -> str:
    """Return its class, with its number if several have the same class."""
    names = [each.name for each in handle._sharded._handles]
    place = f" (optimizers[{handle._place}])" if names.count(handle.name) > 1 else ""
    return f"{handle.name}{place}"


def take_hooks(optimizer: torch.optim.Optimizer, original: torch.optim.Optimizer) -> None:
    """Move the hooks that were registered on ``original`` to ``optimizer``."""
    for name, hooks in vars(original).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            getattr(optimizer, name).update(hooks)


def retire(original: torch.optim.Optimizer) -> None:
    """Free its state, and make every method raise, including those that its class adds.

    Groups and defaults stay. Schedulers read them, and the sharded optimizer shares the groups.
    """
    original.state = GoneState()  # type: ignore[assignment]
    for name in dir(type(original)):
        if not name.startswith("_") and callable(getattr(type(original), name)):
            refuse = refused(name, "the original optimizer", REASON)
            # A scheduler on the original looks for the mark of its own wrapper, and would warn.
            refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
            setattr(original, name, refuse)


class GoneState:
    """State of an optimizer that was passed to ``shard()``; any use of it raises."""

    def _refuse(self, *_args: object, **_named: object) -> NoReturn:
        raise RuntimeError(
            f"state of the original optimizer was used: {REASON}; use the optimizer that "
            f"shardcast.shard returned{AFTER_CLOSE}"
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse
    __reduce__ = _refuse  # copies and pickles of the optimizer

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # looked up by Python itself
            raise AttributeError(name)
        self._refuse()


def refused(call: str, owner: str, reason: str) -> Callable[..., NoReturn]:
    """Return a replacement for ``owner``'s method ``call`` that raises RuntimeError."""

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"{call}() of {owner} was called: {reason}; call {call}() of the optimizer that "
            f"shardcast.shard returned{AFTER_CLOSE}"
        )

    return refuse


def packed_of(optimizer: ShardedOptimizer) -> PackedOptimizer:
    """Return the internals of ``optimizer``, for this library's adapters and checkpoints."""
    return optimizer._packed
