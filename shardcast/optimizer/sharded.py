"""The sharded optimizer; one step is reduce, decide, update and cast, sync."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import ProcessGroups
from shardcast.memory.shard import Shard
from shardcast.messages import DCP_STATE, caller_of, warn
from shardcast.optimizer.averages import Averages
from shardcast.optimizer.digest import digest
from shardcast.optimizer.full_state import FullState
from shardcast.optimizer.model_hooks import watch_copies
from shardcast.optimizer.original import OptimizerHandle, check_stepped, retire, take_hooks
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.optimizer.setup import Plan
from shardcast.optimizer.stages import overlap_stages
from shardcast.optimizer.state_dict import StateDict
from shardcast.optimizer.state_view import StateView
from shardcast.plan import validate
from shardcast.plan.originals import Originals
from shardcast.step.decide.decision import Decision

# Those that load a rank's part on that rank: AcceleratedOptimizer() does so at once.
KEEP_PARTS = ("shardcast", "accelerate.optimizer")


class ShardedOptimizer(PackedOptimizer):
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
    _warned = False

    def __init__(
        self, plan: Plan, stages: Sequence[nn.Module], shards: Sequence[Shard],
        process_groups: ProcessGroups,
        originals: Originals, dtypes: Sequence[Mapping[str, torch.dtype]],
    ) -> None:  # fmt: skip
        super().__init__(plan, stages, shards, process_groups, originals, dtypes)
        self._states, self._full = StateDict(self), FullState(self)
        self._averages = Averages(self)
        self._clipped: Decision | None = None  # by a clip, on the gradients of this version
        self._clipped_version = 0
        self._last_norm: Tensor | None = None
        state: dict[Any, Any] = {}
        for original in originals.optimizers:
            take_hooks(self, original)
            state.update(original.state)
        if state:
            self._states.apply(self._states.plan_plain(state))
        self._handles: list[OptimizerHandle] = []
        several = len(originals.optimizers) > 1
        for place in range(len(originals.optimizers)) if several else ():
            handle = OptimizerHandle(self, place, self._handles, self._add_group, self._full.gather)
            self._handles.append(handle)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (*self._handles,) or (self,)
        for original in originals.optimizers:
            retire(original)

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
            RuntimeError: inside :meth:`no_sync`; after ``max_skipped_steps`` skips in a row; on all
                ranks, if one did not scale its loss though a scale is in use, or if they differ in
                options of the groups (on an accelerator after a step or two, which are skipped).
        """
        if self._handles:
            check_stepped(self._handles)
        self.refuse_averaged("step")
        if options:
            raise TypeError(
                f"step: expected nothing but a closure, got {', '.join(options)}=; shardcast makes "
                "the update: set loss scale, clipping and learning rate in its options and groups"
            )
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._refuse_scaler()
        decision = self._pending_clip()  # which has reduced and decided already
        if decision is None:
            self._reduce()
            decision = self.decider.decide(self.config.max_grad_norm, None)
        else:
            self.edits.take()  # what was written after the clip
        self.sync.wait()  # what an overlapped one still sends is what the update writes
        for update in self.updates:  # unscale, clip, rule, cast into the packs: one fused pass
            update(decision)
        self.send()  # owners -> everybody
        self._conclude(decision)
        return loss

    def _reduce(self) -> None:
        """Have the mean of all gradients in the own spans."""
        self.originals.check()
        self.edits.take()
        frozen = [shard for shard in self.shards if shard.grads is None]
        if frozen:
            self._wake(frozen)
        self.decider.before_reduce(self.reduce.touched)
        self.reduce.finish()

    def send(self) -> None:
        """Sync the packs, and the buffers that forwards write. Every rank must call it."""
        if self._buffers is not None:
            self._buffers()
        (self._overlap or self.sync)()

    def _conclude(self, decision: Decision) -> None:
        """Tally, loss scale, what ``.grad`` shows, what schedulers look at."""
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
        self.edits.note()
        self._note_clip(None)
        self._last_norm = decision.norm
        if self._copies:
            watch_copies(self._copies)
        self.decider.conclude(decision)
        self.reduce.show(decision.present)
        self.reduce.used()
        self.comm.steps += 1
        for optimizer in (*self.originals.optimizers, *self.optimizers):
            _compat.note_step_called(optimizer)
        self.decider.skips.poll()  # last: it may raise

    def _refuse_scaler(self) -> None:
        by_scaler = self.__dict__.pop("found_inf", None) is not None
        self.__dict__.pop("grad_scale", None)
        if by_scaler:
            raise RuntimeError(
                "step() was called by torch.amp.GradScaler, whose infinity check is local to a "
                "rank: remove the GradScaler and call optimizer.scale_loss(loss).backward(), "
                "optimizer.step(); shardcast scales the loss and skips steps on all ranks itself"
            )

    # -- gradients --------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as ``torch.optim.Optimizer.zero_grad``. Local."""
        self._note_clip(None)
        self._drop_tokens()
        self.reduce.cleared(set_to_none)
        super().zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """For all micro-batches but a step's last, on every rank: full gradients stay here."""
        return self.reduce.no_sync()

    def micro_batch(self, index: int) -> None:
        """Say of which micro-batch of the step the next backwards are; with ``reproducible``.

        Local. Without it each backward is the next micro-batch of this rank, and a step has to have
        all of them; with it several backwards may be of one, and a step may have fewer. Gradients
        are reduced in :meth:`step` then.

        Args:
            index: over all ranks of the step, one of this rank's, which has ``reproducible`` over
                the number of ranks in a row: rank 1 of 2 has 4 to 7 of 8.

        Raises:
            ValueError: it is another rank's, or other micro-batches came since it was.
            RuntimeError: ``reproducible`` is off.
        """
        self.reduce.micro_batch(index)

    def overlap_reduce(self, stages: Sequence[Any]) -> None:
        """Reduce each stage of a pipeline as soon as its own backwards of a schedule are done.

        Without it all are reduced in :meth:`step`. ``scale_grads`` of the schedule becomes part of
        the mean. Call it once, before the first schedule, on every rank, and :meth:`step` after
        each run of a schedule.

        Args:
            stages: the ``PipelineStage`` of all modules that are sharded here, and no others.
        """
        overlap_stages(self, stages)

    def _note_clip(self, decision: Decision | None) -> None:
        """Keep a decision on the present gradients; ``None`` forgets the last one."""
        self._clipped = decision
        self._clipped_version = self.reduce.grad_version if decision else 0

    def _pending_clip(self) -> Decision | None:
        """The last clip, as long as the gradients are those that it saw."""
        if self._clipped is not None and self.reduce.touched:
            self._clipped = None
            warn(
                "a backward came after clip_grad_norm_, so that this clip is lost: it would have "
                "been folded into the step; clip once, after the last backward of a step"
            )
        if self._clipped is not None and self.reduce.grad_version != self._clipped_version:
            raise RuntimeError(
                "step: gradients were edited, replaced or cleared after clip_grad_norm_, which "
                "clips them within the step; do it before you clip, or call optimizer.zero_grad()"
            )
        return self._clipped

    def count(self, tokens: float | Tensor) -> None:
        """Have the coming step train the mean over all tokens of all ranks and micro-batches.

        Every rank must call it, in each micro-batch before its backward, with 0 where it has no
        batch; the loss is then a sum over tokens. The total travels with the norm, so that there is
        no further collective but in ``clip_grad_value_``, and norm, clipping and loss scale see the
        mean. ``gather_gradients`` shows the sum over :attr:`divisor`. Local; waits for no device.

        Args:
            tokens: of this micro-batch on this rank, or of what else the loss is a sum; a number,
                or a 0-dim tensor (on the device, in a CUDA graph). Tensor-parallel ranks and
                pipeline stages give the same; context-parallel ranks, which are data-parallel
                here, each its own.

        Raises:
            ValueError: a negative number, or no number.
            RuntimeError: after a backward of this step that was not counted, or after
                ``clip_grad_norm_``. In :meth:`step`, on all ranks: some ranks did not call it, or
                there are no tokens at all.
        """
        if self.reduce.backwards and not any(any(g.presence()) for g in self.reduce.grads):
            self._note_clip(None)
            self._drop_tokens()  # cleared by the model's zero_grad, or one by one
        if self._clipped is not None:
            raise RuntimeError(
                "count: called after clip_grad_norm_, which has divided by the tokens of this "
                "step; count each micro-batch before its backward, and clip after the last one"
            )
        if self.reduce.backwards and not self.decider.tokens.counted:
            raise RuntimeError(
                "count: called after a backward of this step that was not counted; count each "
                "micro-batch before its backward, or call optimizer.zero_grad() to drop gradients "
                "of another step"
            )
        self.decider.tokens.add(tokens)

    def _drop_tokens(self) -> None:
        """Forget the tokens whose gradients are dropped; not those of a batch that is to come."""
        if self.reduce.backwards:
            self.decider.tokens.clear()
        self.reduce.backwards = 0

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss`` times the loss scale, if there is one; for ``backward()``. Local."""
        return self.decider.loss_scale.apply(loss)

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Have the mean over ranks in every ``.grad``; every rank must call it.

        Without it ``.grad`` is the mean only where this rank owns the parameter. Call it after the
        last backward of a step, before you look at gradients (SAM, PCGrad, a norm by hand); edits
        count as under DDP then, if all ranks make the same. In fp16 ``.grad`` is multiplied by
        :attr:`loss_scale`. Beside model parallelism it is the data-parallel mean of what is here.

        Raises:
            RuntimeError: inside :meth:`no_sync`; ``grads`` is ``sharded``.
        """
        if self.config.grads == "sharded":
            raise RuntimeError(
                "gather_gradients: with grads 'sharded' a rank has no room for all gradients; use "
                "grads 'full'"
            )
        clip = self._pending_clip()
        self._reduce()
        self.reduce.gather()
        if clip is not None:
            self._note_clip(clip)

    def clip_grad_norm_(
        self,
        parameters: validate.Parameters | float | None = None,
        max_norm: float | Tensor | None = None,
        norm_type: float | None = None,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the global gradient norm in the coming step; every rank must call it.

        Finishes the reduction now; the clipping itself is folded into the update. It wins over
        ``max_grad_norm`` for this step. Called again it clips what is clipped already.

        Args:
            parameters: all trained parameters, as for ``torch.nn.utils.clip_grad_norm_``, or
                ``max_norm`` alone: ``clip_grad_norm_(1.0)``.
            max_norm: bound of the norm, above 0.
            norm_type: that of the configuration, or left out.
            error_if_nonfinite: must be False; steps with such gradients are skipped.
            foreach: has no effect.

        Returns:
            The global norm before clipping, 0-dim, loss scale removed; equal on all ranks.

        Raises:
            TypeError, ValueError: ``max_norm``, or a group's ``max_grad_norm``, is not a number
                above 0; other parameters or another norm; ``error_if_nonfinite=True``.
        """
        call = "clip_grad_norm_"
        params, max_norm = validate.clip_arguments(parameters, max_norm)
        bound = validate.clip_bound(call, self.originals, params, "max_norm", max_norm)
        validate.check_norm(call, norm_type, self.config.norm_type, error_if_nonfinite)
        clip = self._pending_clip()
        self._reduce()
        decision = self.decider.decide(bound, clip)
        self._note_clip(decision)
        return decision.norm.float()

    def clip_grad_value_(
        self,
        parameters: validate.Parameters | float | None = None,
        clip_value: float | Tensor | None = None,
        foreach: bool | None = None,
    ) -> None:
        """Clamp every element of the averaged gradients; every rank must call it.

        Args and errors are those of :meth:`clip_grad_norm_`, with ``clip_value`` for ``max_norm``.
        Non-finite gradients still skip the step.
        """
        params, clip_value = validate.clip_arguments(parameters, clip_value)
        bound = validate.clip_bound(
            "clip_grad_value_", self.originals, params, "clip_value", clip_value
        )
        clip = self._pending_clip()
        self._reduce()
        self.decider.clip_value(bound, clip)
        if clip is not None:
            self._note_clip(clip)

    @property
    def divisor(self) -> float | Tensor:
        """What the sum of gradients over the data-parallel ranks is divided by; their number.

        Assign another one, or a 0-dim tensor on the device, such as the tokens of all ranks, before
        the first synchronised backward of a step, on every rank; ``None`` for the usual.
        """
        return self.reduce.divisor.value

    @divisor.setter
    def divisor(self, value: float | Tensor | None) -> None:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        if not (value is None or number or (isinstance(value, Tensor) and value.dim() == 0)):
            raise ValueError(
                f"divisor: expected a number above 0, a 0-dim tensor or None, got {value!r}"
            )
        self.reduce.divisor.given = value

    @property
    def grad_norm(self) -> Tensor | None:
        """Of the last step, before clipping; 0-dim, ``None`` before any."""
        return None if self._last_norm is None else self._last_norm.float()

    @property
    def loss_scale(self) -> Tensor | None:
        """0-dim; ``None`` where none is in use."""
        return self.decider.loss_scale.value

    @property
    def skipped_steps(self) -> int:
        """Steps skipped for non-finite gradients. Reading it waits for the device."""
        return self.decider.skips.skipped_steps

    # -- groups and state -------------------------------------------------------------------

    def digest(self) -> str:
        """A hash of all masters and optimizer state, 16 hexadecimal digits; all ranks must call it.

        It depends neither on the number of ranks nor on packs and partition, so it says whether two
        runs are equal bit for bit, or whether a checkpoint was loaded as it was saved. Costs a pass
        over the own masters and state, and waits for the device.
        """
        self.wait_sync()
        return digest(self)

    def check_copies(self) -> None:
        """Raise a RuntimeError on every rank, which must call it, if copies differ in a bit.

        To find out why a run went wrong: it reads all parameters to the host. Copies over
        tensor-parallel ranks and of tied weights are compared, too.
        """
        self._full.check_copies()

    @property
    def state(self) -> Any:
        """Per model parameter, this rank's part of torch's state: 1-d tensors, 0-dim ``step``.

        What is assigned or removed in it is so from the next step on; do the same on every rank.
        Edits of a tensor in place count where moments are kept in fp32 on the device.
        """
        module, function = caller_of("state")
        if module == DCP_STATE:
            return self._full.names_for_dcp(begins=function == "_init_optim_state")
        return StateView(self.shards, self.update_of)

    @state.setter
    def state(self, value: Mapping[Tensor, Any]) -> None:
        if self._ready:
            self.state.replace(value)

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard: local, without collectives, tensors and plain scalars only.

        Per parameter of which this rank owns a part, torch's state of that part and its ``master``
        (1-d fp32). Load it on the same rank of an equal layout; else there are checkpoints. Warns
        once where a script calls it on one of several ranks: a file of it has no other rank's part.

        ``torch.distributed.checkpoint`` gets the full state, with names instead of the mark of this
        rank; every rank must then call it, and all of it is in every rank's host memory.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        module, _ = caller_of("state_dict")
        if module.startswith(DCP_STATE.rpartition(".")[0]):
            result = self._full.gather_on_all()
        else:
            self._warn_of_a_part(module)
            result = self._states.dump()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, result) or result
        return result

    def _warn_of_a_part(self, module: str) -> None:
        comm = self.process_groups.everyone
        if comm.size > 1 and not self._warned and not module.startswith(KEEP_PARTS):
            self._warned = True
            warn(
                f"state_dict: this is the part of rank {comm.rank} of {comm.size} alone, without "
                "which the others cannot resume: save with shardcast.checkpoint.save, or call "
                "full_state_dict() on every rank, which gives rank 0 the state of all"
            )

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load this rank's :meth:`state_dict`, or a plain state of the unsharded optimizer.

        Every rank must call it: its own part, or the same plain state; of several optimizers a
        list, as :meth:`full_state_dicts` gives. Without masters in it the present ones stay.

        Raises:
            ValueError: on every rank, if one cannot load its state; nothing is changed then.
        """
        self.refuse_averaged("load_state_dict")
        self.wait_sync()
        loaded: Any = dict(state_dict) if isinstance(state_dict, Mapping) else list(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = hook(self, loaded) or loaded
        self._states.apply(self._states.plan(loaded))
        self._note_clip(None)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def full_parameters(self, average: str | None = None) -> dict[str, Tensor]:
        """The fp32 parameters by name, tied ones under each, on rank 0's host; empty elsewhere.

        Every rank must call it.

        Args:
            average: the name of an average, which is given in place of the parameters.

        Raises:
            ValueError: on every rank, for the name of no average.
        """
        return self._full.masters(average)

    def averaged(self, name: str) -> AbstractContextManager[None]:
        """Have an average in the model: ``with optimizer.averaged("ema"): evaluate(model)``.

        Every rank must enter and leave it. One sync publishes the average, cast as parameters are;
        another one restores the very same bits. Inside, :meth:`step` and what loads or changes
        weights are refused; state dicts and checkpoints hold the training's weights as ever.
        Needs room for the own span once more.

        Raises:
            ValueError: on every rank, for the name of no average.
            RuntimeError: on every rank, if an average is in the model already.
        """
        return self._averages.switched(name)

    def load_average(self, name: str, weights: Mapping[str, Tensor], steps: int = 0) -> None:
        """Go on from an existing average; every rank must call it.

        Args:
            name: of an average of the configuration.
            weights: full tensors by parameter name, such as ``AveragedModel.module.state_dict()``;
                what is no trained parameter is left out.
            steps: how many it has averaged, for its warm-up.

        Raises:
            ValueError: on every rank, for another name, and a parameter that is missing or has
                another shape; nothing is changed then.
        """
        self._averages.load(name, weights, steps)

    def full_state_dict(self) -> dict[str, Any]:
        """The unsharded optimizer's ``state_dict``, on rank 0; empty elsewhere. All must call it.

        Groups of several optimizers are numbered through; :meth:`full_state_dicts` has one state
        for each.
        """
        return self._full.gather()

    def full_state_dicts(self) -> list[dict[str, Any]]:
        """:meth:`full_state_dict` of each of the optimizers that were given; empty off rank 0."""
        places = range(len(self.originals.optimizers))
        return [state for state in map(self._full.gather, places) if state]

    # -- the rest ---------------------------------------------------------------------------

    def wait_sync(self) -> None:
        """With ``overlap_sync``: have the updated parameters here. Local.

        Call it before you read or write parameters by hand, outside of a forward (an EMA, weight
        norms, a copy of a part of the model). Forwards, state dicts, a copy of the whole model, and
        everything of this optimizer and of checkpoints wait by themselves. On a GPU it is the
        current stream that waits: call it before forwards on other streams branch off.
        """
        self.sync.wait()

    def train(self, mode: bool = True) -> None:
        """Switch optimizers that have modes (schedule-free ones); every rank must call it."""
        self.wait_sync()
        switched = [update.switch("train" if mode else "eval") for update in self.updates]
        if any(switched):  # masters may have changed and were published
            self.sync()

    def eval(self) -> None:
        """The evaluation mode of :meth:`train`."""
        self.train(False)

    def __repr__(self) -> str:
        return f"Sharded{self.originals.name}: {self.layout.lines()[0]}"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ShardedOptimizer cannot be pickled or copied: its masters belong to this process "
            "and process group; use state_dict(), or shardcast.checkpoint.save"
        )
