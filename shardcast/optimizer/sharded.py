"""The sharded optimizer; one step is reduce, combine, update and cast, sync."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.config import ShardcastConfig
from shardcast.optimizer import setup
from shardcast.optimizer.copies import check_copies
from shardcast.optimizer.engine import Engine
from shardcast.optimizer.original import OptimizerHandle, StepTogether, retire, take_hooks
from shardcast.optimizer.stages import overlap_stages
from shardcast.optimizer.state_dict import StateDict
from shardcast.optimizer.state_view import StateView, apart
from shardcast.plan import validate
from shardcast.plan.layout import Layout
from shardcast.step.combine.decision import Decision


class Clip(NamedTuple):
    """A clip that the coming step is to fold in, and the gradients that it saw."""

    decision: Decision
    grad_version: int


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose fp32 masters and state are sharded over data-parallel ranks.

    Made by :func:`shardcast.shard`. ``param_groups`` hold the *model* parameters and are shared
    with the optimizer it was made from, so schedulers built on either work; a group may have a
    ``max_grad_norm`` of its own. ``step``, ``clip_grad_norm_``, ``clip_grad_value_``,
    ``add_param_group`` and ``load_state_dict`` are collective: every rank must call them.

    Attributes:
        optimizers: a handle for each optimizer that was given, for schedulers and for loops over
            them: ``step()`` of the last handle makes the one step of all. With one optimizer it is
            this object itself.
        engine: what it works with; for this library's own adapters and checkpoints.
    """

    # torch.amp.GradScaler then always calls step(), on every rank, where we refuse; otherwise it
    # would skip the step on the ranks that saw an infinity and leave the others waiting.
    _step_supports_amp_scaling = True
    _ready = False  # the base class fills in groups and state before ours are there

    def __init__(self, engine: Engine) -> None:
        originals = engine.originals
        self.engine = engine
        self._states = StateDict(engine)
        self._clip: Clip | None = None
        self._last_norm: Tensor | None = None
        several = len(originals.optimizers) > 1
        super().__init__(originals.groups, {} if several else originals.optimizers[0].defaults)
        self._ready = True
        state: dict[Any, Any] = {}
        for original in originals.optimizers:
            take_hooks(self, original)
            state.update(original.state)
        if state:
            self._states.apply(self._states.plan_plain(state))
        self._together = StepTogether(
            originals, lambda: engine.reduce.grad_version, self.step, self._add_group,
            self._states.gather,
        )  # fmt: skip
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (self,)
        if several:
            places = range(len(originals.optimizers))
            self.optimizers = tuple(OptimizerHandle(self._together, place) for place in places)
        for original in originals.optimizers:
            retire(original)

    @property
    def layout(self) -> Layout:
        """All packs, slots and spans; equal on all ranks."""
        return self.engine.layout

    @property
    def config(self) -> ShardcastConfig:
        """The options that hold."""
        return self.engine.config

    # -- the step ---------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """One optimizer step: unscale, clip, update, cast, broadcast. Every rank must call it.

        Waits for no device; a step with a non-finite gradient on any rank changes nothing.

        Args:
            closure: reevaluates the model, runs backward and returns the loss.

        Returns:
            What ``closure`` returned, else ``None``.

        Raises:
            TypeError: there are ``options``.
            RuntimeError: inside :meth:`no_sync`; or after ``max_skipped_steps`` skips in a row; or,
                on all ranks, if one of them did not scale its loss though a scale is in use, or
                they differ in options of the groups (on an accelerator a step or two later, all
                steps until then are skipped).
        """
        engine = self.engine
        self._together.check_whole()
        loss = _evaluated(closure, options)
        clip = self._pending_clip()  # it has reduced and combined already
        decision = clip.decision if clip else self._reduce_and_combine(self.config.max_grad_norm)
        engine.sync.wait()  # what an overlapped one still sends is what the update writes
        engine.update(decision, engine.present(decision))  # casts into the packs
        engine.send()  # owners -> everybody
        self._conclude(decision)
        return loss

    def _reduce_and_combine(self, max_norm: float | None, clip: Clip | None = None) -> Decision:
        """Have the mean in the own spans, and agree on norm, skip and clip factors."""
        engine = self.engine
        self._prepare()
        engine.reduce.finish()
        return engine.combine.decide(max_norm, clip.decision if clip else None)

    def _prepare(self) -> None:
        self._check_call()
        self.engine.hooks.resync()  # weights that were loaded
        self.engine.wake()  # packs that were unfrozen
        self.engine.combine.before_reduce(self.engine.reduce.touched)

    def _conclude(self, decision: Decision) -> None:
        engine = self.engine
        engine.note_writes(decision)
        engine.combine.conclude(decision)  # tally, loss scale
        self._last_norm = decision.norm
        engine.reduce.show(decision.present)
        engine.reduce.used()
        engine.comm.steps += 1
        self._clip = None
        for scheduled in (*engine.originals.optimizers, *self.optimizers):
            _compat.note_step_called(scheduled)
        engine.combine.skips.poll(self.param_groups)  # last: it may raise

    def _pending_clip(self) -> Clip | None:
        """A clip of the gradients that are there now.

        Raises:
            RuntimeError: they were edited since.
        """
        if self._clip is not None and self.engine.reduce.touched:
            self._clip = None
            warnings.warn(
                "a backward came after clip_grad_norm_, so that this clip is lost: it would have "
                "been folded into the step; clip once, after the last backward of a step",
                stacklevel=3,
            )
        if self._clip is not None and self.engine.reduce.grad_version != self._clip.grad_version:
            raise RuntimeError(
                "step: gradients were edited, replaced or cleared after clip_grad_norm_, which "
                "clips them within the step; do it before you clip, or call optimizer.zero_grad()"
            )
        return self._clip

    def _check_call(self) -> None:
        by_scaler = self.__dict__.pop("found_inf", None) is not None
        self.__dict__.pop("grad_scale", None)
        if by_scaler:
            raise RuntimeError(
                "step() was called by torch.amp.GradScaler, whose infinity check is local to a "
                "rank: remove the GradScaler and call optimizer.scale_loss(loss).backward(), "
                "optimizer.step(); shardcast scales the loss and skips steps on all ranks itself"
            )
        for shard in self.engine.shards:
            shard.pack.check()

    # -- gradients --------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as ``torch.optim.Optimizer.zero_grad``. Local."""
        self._clip = None
        self.engine.reduce.cleared()
        super().zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, backwards accumulate locally and nothing is sent (unless grads: sharded).

        Put all micro-batches of a step but the last in it, on every rank alike.
        """
        return self.engine.reduce.no_sync()

    def overlap_reduce(self, stages: Sequence[Any]) -> None:
        """Reduce each stage of a pipeline as soon as its own backwards of a schedule are done.

        Without it all are reduced in :meth:`step`. ``scale_grads`` of the schedule is then part of
        the mean, instead of a pass over the gradients. Call it once, before the first schedule, on
        every rank; afterwards call :meth:`step` after each run of a schedule.

        Args:
            stages: the ``torch.distributed.pipelining.PipelineStage`` of all modules that are
                sharded here.

        Raises:
            ValueError: they hold other modules.
        """
        overlap_stages(self.engine, stages)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss`` times the loss scale; call ``backward()`` on the result.

        Needed with fp16 (``loss_scale``); elsewhere it returns ``loss`` itself, so a script may
        call it always. Local.
        """
        return self.engine.combine.loss_scale.apply(loss)

    def clip_grad_norm_(self, *args: Any, **options: Any) -> Tensor:
        """Clip the global gradient norm in the coming step; every rank must call it.

        ``clip_grad_norm_(max_norm)``, or as the function of ``torch.nn.utils``, with all trained
        parameters and the configuration's ``norm_type``. Finishes the reduction now; the clipping
        itself is folded into the update. Wins over ``max_grad_norm`` for this step. Called again
        it clips what is clipped already.

        Returns:
            The global norm before clipping, 0-dim, loss scale removed; equal on all ranks.

        Raises:
            TypeError, ValueError: ``max_norm``, or a group's ``max_grad_norm``, is not a number
                above 0; other parameters or another norm; ``error_if_nonfinite=True``.
        """
        norm_type, groups = self.config.norm_type, self.param_groups
        bound = validate.clip_bound("clip_grad_norm_", groups, norm_type, args, options)
        for number, owner, group in self.engine.originals.numbered():
            validate.check_limit(group, owner.defaults, number)
        decision = self._reduce_and_combine(bound, self._pending_clip())
        self._clip = Clip(decision, self.engine.reduce.grad_version)
        return decision.norm.float()

    def clip_grad_value_(self, *args: Any, **options: Any) -> None:
        """Clamp every element of the averaged gradients; every rank must call it.

        ``clip_grad_value_(clip_value)``, or as the function of ``torch.nn.utils``.
        Finishes the reduction now. Non-finite gradients still skip the step.

        Raises:
            TypeError, ValueError: ``clip_value`` is not a number above 0; other parameters.
        """
        bound = validate.clip_bound("clip_grad_value_", self.param_groups, 2.0, args, options)
        engine, clip = self.engine, self._pending_clip()
        self._prepare()
        engine.reduce.finish()
        engine.combine.clip_value(bound, clip.decision if clip else None)
        if clip:
            self._clip = Clip(clip.decision, engine.reduce.grad_version)

    @property
    def divisor(self) -> float | Tensor:
        """What the sum of gradients over the data-parallel ranks is divided by; their number.

        Assign another number, or a 0-dim tensor on the device, such as the tokens of all ranks,
        before the first synchronised backward of a step, on every rank the same; ``None`` for the
        number of ranks again.
        """
        return self.engine.reduce.divisor.value

    @divisor.setter
    def divisor(self, value: float | Tensor | None) -> None:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        if not (value is None or number or (isinstance(value, Tensor) and value.dim() == 0)):
            raise ValueError(
                f"divisor: expected a number above 0, a 0-dim tensor or None, got {value!r}"
            )
        if self.engine.reduce.averaged:
            raise RuntimeError("divisor: DDP averages the gradients of this model itself")
        self.engine.reduce.divisor.given = value

    @property
    def grad_norm(self) -> Tensor | None:
        """Global gradient norm of the last step before clipping, 0-dim; ``None`` before any."""
        return None if self._last_norm is None else self._last_norm.float()

    @property
    def loss_scale(self) -> Tensor | None:
        """The present loss scale, 0-dim, or ``None`` where none is in use."""
        return self.engine.combine.loss_scale.value

    @property
    def skipped_steps(self) -> int:
        """Steps skipped for non-finite gradients. Reading it waits for the device."""
        return self.engine.combine.skips.skipped_steps

    # -- groups and state -------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer that it was made from, by the model's parameters.

        What is assigned goes into them: other options for the same parameters, and further groups,
        which are added; every rank must then assign the same.
        """
        return self.engine.originals.groups

    @param_groups.setter
    def param_groups(self, value: Sequence[dict[str, Any]]) -> None:
        if not self._ready:
            return
        groups = self.param_groups
        known, further = value[: len(groups)], value[len(groups) :]
        theirs, mine = ([[*map(id, g["params"])] for g in some] for some in (known, groups))
        if theirs != mine:
            raise ValueError(
                "param_groups: expected the present groups with their parameters in order, got "
                "other parameters, which have no place in the packs; change options or add groups"
            )
        for group, options in zip(groups, [dict(options) for options in known], strict=True):
            group.clear()
            group.update(options)
        for group in further:
            self.add_param_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of model parameters; every rank must add the same one.

        Packs of their own are made for it; masters start from the parameters' present values.

        Raises:
            ValueError: a parameter that is not the model's, or is in a group already, or cannot
                be sharded; nothing is added.
            RuntimeError: the ranks add different groups; nothing is added.
        """
        if not self._ready:  # the original optimizers' own have been checked
            return
        if len(self.optimizers) > 1:
            raise RuntimeError(
                f"add_param_group: {self.engine.originals.name} are sharded together; add the "
                "group to one of optimizer.optimizers"
            )
        self._add_group(0, param_group)

    def _add_group(self, place: int, group: dict[str, Any]) -> None:
        """Add a group to the original optimizer at ``place``."""
        super().add_param_group(group)  # checks it, and fills in defaults
        engine = self.engine

        def planned() -> setup.Plan:
            plan = setup.plan_for(
                engine.model, engine.originals, engine.config, engine.grid.axes, engine.stages,
                engine.layout,
            )  # fmt: skip
            validate.check_memory(plan.params)
            return plan

        with torch.no_grad(), engine.originals.added(place):
            plan = engine.grid.everyone.together(planned, engine.device, "add_param_group")
            plan = setup.check(plan, engine.grid, engine.device)
            engine.extend(plan, setup.allocate(plan, engine.grid))

    def check_copies(self) -> None:
        """Look whether what several ranks hold is equal, bit by bit; every rank must call it.

        To find out why a run went wrong, not for a loop: it reads all parameters to the host.
        Copies over tensor-parallel ranks and of tied weights are compared, too.

        Raises:
            RuntimeError: on every rank; names the parameters that differ.
        """
        check_copies(self.engine)

    @property
    def state(self) -> Any:
        """Per model parameter, this rank's part of torch's state: 1-d tensors, 0-dim ``step``.

        What is assigned or removed, here or in the state of one parameter, is so from the next
        step on; do the same on every rank. ``state.clear()`` has all moments begin anew. Edits of
        a tensor in place count where moments are kept in fp32 on the device.
        """
        return StateView(self.engine.shards, self.engine.update)

    @state.setter
    def state(self, value: Mapping[Tensor, Any]) -> None:
        if self._ready:
            # They may be views of what is cleared, as in state = dict(state).
            new = {param: apart(values) for param, values in value.items()}
            found = self.state
            found.clear()
            found.update(new)

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard: local, without collectives, tensors and plain scalars only.

        ``state`` maps the index of each parameter that this rank owns a part of to torch's state
        of that part and its ``master`` (1-d fp32). Load it on the same rank of an equal layout;
        for anything else there are checkpoints, and :meth:`full_state_dict`.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        result = self._states.dump()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, result) or result
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load this rank's :meth:`state_dict`, or a plain state of the unsharded optimizer.

        Every rank must call it: its own part, or the same plain state; of several optimizers a
        list, as :meth:`full_state_dicts` gives. The masters of a local state are published and
        synced; a plain state has none, the present ones stay.

        Raises:
            ValueError: on every rank, if the state of one is another rank's, or of another layout,
                format or model, or plain where another's is local; nothing is changed then.
        """
        self.wait_sync()
        loaded: Any = dict(state_dict) if isinstance(state_dict, Mapping) else list(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = hook(self, loaded) or loaded
        self._states.apply(self._states.plan(loaded))
        self._clip = None
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def full_parameters(self) -> dict[str, Tensor]:
        """The fp32 values of the parameters by name, tied ones under each; on rank 0's host.

        Every rank must call it; the others get an empty one. What ``model.state_dict()`` has is
        the cast of it.
        """
        return self._states.gather_masters()

    def full_state_dict(self) -> dict[str, Any]:
        """The state as the unsharded optimizer's own ``state_dict`` would be; on rank 0.

        Every rank must call it; the others get an empty one. Loads into the plain optimizer,
        whose next step on the masters' values is then identical. Groups of several optimizers are
        numbered through; :meth:`full_state_dicts` has one state for each.
        """
        return self._states.gather()

    def full_state_dicts(self) -> list[dict[str, Any]]:
        """:meth:`full_state_dict` of each of the optimizers that were given; empty off rank 0."""
        places = range(len(self.engine.originals.optimizers))
        return [state for state in map(self._states.gather, places) if state]

    # -- the rest ---------------------------------------------------------------------------

    def wait_sync(self) -> None:
        """With ``overlap_sync``: have the updated parameters here. Local; else it does nothing.

        Call it before you read or write parameters by hand, outside of a forward (an EMA, weight
        norms, a copy of a part of the model). Forwards, ``state_dict()`` and ``load_state_dict()``
        of the model, a copy of all of it, and everything of this optimizer and of checkpoints
        wait by themselves. On a GPU it is the current stream that waits, not the host: call it
        before forwards on other streams branch off.

        Raises:
            RuntimeError: from the process group, where another rank was lost on the way.
        """
        self.engine.sync.wait()

    def resync_masters(self) -> None:
        """Take model parameters that were changed by hand (surgery, EMA swap) as masters. Local.

        Without it the next step overwrites the change by the update of the old masters.
        ``model.load_state_dict`` is noticed by itself. Unchanged ones keep their full precision;
        changed ones have what ``param_dtype`` can hold.
        """
        self.engine.absorb()

    def memory_report(self) -> dict[str, int]:
        """Bytes that this rank holds, by kind: parameters, gradients, masters and state.

        With ``offload`` masters and state are in host memory, the others on the device.
        """
        return self.engine.memory()

    def train(self, mode: bool = True) -> None:
        """Switch optimizers that have a ``train`` and an ``eval`` mode (schedule-free ones).

        Every rank must call it; the parameters are published and synced. Others ignore it.
        """
        self.wait_sync()
        if self.engine.update.switch("train" if mode else "eval"):
            self.engine.sync()

    def eval(self) -> None:
        """The evaluation mode of :meth:`train`."""
        self.train(False)

    def close(self) -> None:
        """Remove all hooks from the model, which may then be sharded anew. Local.

        The optimizer must not be used afterwards; the parameters stay as they are.
        """
        self.engine.close()

    def __repr__(self) -> str:
        """The optimizer's class, its groups and the layout's summary."""
        return f"Sharded{self.engine.originals.name}: {self.layout.lines()[0]}"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ShardedOptimizer cannot be pickled or copied: its masters belong to this process "
            "and process group; use state_dict(), or shardcast.checkpoint.save"
        )


def _evaluated(closure: Callable[[], Any] | None, options: Mapping[str, Any]) -> Any:
    if options:
        raise TypeError(
            f"step: expected nothing but a closure, got {', '.join(options)}=; shardcast "
            "makes the update: set loss scale, clipping and learning rate in its options and groups"
        )
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
