"""The sharded optimizer; one step is reduce, combine, update and cast, sync."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import Comm, same_everywhere
from shardcast.config import ShardcastConfig
from shardcast.memory.shard import Shard, build_shard
from shardcast.optimizer.contract import StatefulOptimizer
from shardcast.optimizer.model_hooks import Watch, mark, unmark
from shardcast.plan import validate as checks
from shardcast.plan.layout import Layout
from shardcast.plan.packing import describe, plan_packs
from shardcast.plan.precision import Precision
from shardcast.step.combine.combine import Combine
from shardcast.step.combine.decision import Decision
from shardcast.step.reduce.reducer import Reducer
from shardcast.step.sync.in_step import Sync
from shardcast.step.sync.overlap import Overlap
from shardcast.step.update.fused import make_update


class ShardedOptimizer(StatefulOptimizer):
    """A torch optimizer whose fp32 masters and state are sharded over data-parallel ranks.

    Made by :func:`shardcast.shard`. ``param_groups`` hold the *model* parameters and are shared
    with the optimizer it was made from, so schedulers built on either work; a group may have a
    ``max_grad_norm`` of its own. ``step``, ``clip_grad_norm_``, ``clip_grad_value_``,
    ``add_param_group`` and ``load_state_dict`` are collective: every rank must call them.
    """

    # torch.amp.GradScaler then always calls step(), on every rank, where we refuse; otherwise it
    # would skip the step on the ranks that saw an infinity and leave the others waiting.
    _step_supports_amp_scaling = True
    _last_norm: Tensor | None = None
    _overlap: Overlap | None = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        layout: Layout,
        masters: Sequence[Shard],
        comm: Comm,
        precision: Precision,
        config: ShardcastConfig,
    ) -> None:
        self._masters: list[Shard] = []
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.layout = layout
        self.config = config
        self._original, self._model = optimizer, _compat.unwrapped(model)
        self._comm, self._precision = comm, precision
        self._decision: Decision | None = None
        self._clipped: list[tuple[int, int]] = []  # the gradients when clip_grad_norm_ saw them
        self._reduce = Reducer(comm, precision, config, _compat.is_ddp(model))
        self._combine = Combine(self._reduce.grads, comm, config, masters[0].pack.data.device)
        self._update = make_update(optimizer, config, comm)
        self._sync = Sync(comm, config)
        self._adopt(masters)
        mark(self._model)
        self._hook()
        self._take_over(optimizer)

    def _adopt(self, masters: Sequence[Shard]) -> None:
        self._masters += masters
        for master in masters:
            if master.pack.layout.requires_grad:
                self._activate(master)

    def _activate(self, master: Shard) -> None:
        """Reduce, update and sync this pack from now on."""
        master.grads = self._reduce.add(master.pack)
        self._update.add(master)
        self._sync.add(master.pack)

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
            RuntimeError: inside :meth:`no_sync`; or with a loss scale in use and a loss that was
                not scaled; or after ``max_skipped_steps`` skips in a row.
        """
        if options:
            raise TypeError(
                f"step: expected nothing but a closure, got {', '.join(options)}=; the update is "
                "shardcast's: loss scale, clipping and learning rate are its options and groups"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decision = self._pending()
        if decision is None:
            decision = self._decide(self.config.max_grad_norm)
        elif self._reduce.edits.seen() != self._clipped:
            raise RuntimeError(
                "step: gradients were edited, replaced or cleared after clip_grad_norm_, which "
                "clips them within the step; do it before you clip, or call optimizer.zero_grad()"
            )
        self._sync.wait()  # what an overlapped one still sends is what the update writes
        self._update(decision, self._present(decision))
        self._note_writes(decision)
        self._combine.conclude(decision)
        if self.config.broadcast_buffers:
            self._broadcast_buffers()
        if self._overlap is None:
            self._sync()
        else:
            self._overlap()
        self._last_norm = decision.norm
        self._reduce.show(decision.present)
        self._reduce.used()
        self._decision = None
        _compat.note_step_called(self._original)
        self._combine.skips.poll()
        return loss

    def _decide(self, max_norm: float | None, pending: Decision | None = None) -> Decision:
        self._check_call()
        self._watch.resync()
        self._wake()
        self._reduce.finish()
        own = "max_grad_norm" in self.defaults  # then it is an option of the optimizer's class
        limits = [None if own else group.get("max_grad_norm") for group in self.param_groups]
        return self._combine.decide(max_norm, limits, pending)

    def _pending(self) -> Decision | None:
        """What a clip found of the gradients that are there now."""
        if self._decision is not None and self._reduce.touched:
            self._decision = None
            warnings.warn(
                "a backward came after clip_grad_norm_, so that this clip is lost: it would have "
                "been folded into the step; clip once, after the last backward of a step",
                stacklevel=3,
            )
        return self._decision

    def _wake(self) -> None:
        """Activate packs that were frozen from the start and have a gradient on some rank now.

        One more small all-reduce, whose result the host waits for, in models that have such
        packs; parameters that stay frozen are better left out of the optimizer.
        """
        frozen = [master for master in self._masters if master.grads is None]
        if frozen:
            here = [any(p.grad is not None for p in master.pack.params) for master in frozen]
            flags = torch.tensor(here, dtype=torch.float32).to(frozen[0].pack.data.device)
            self._comm.all_reduce(flags)
            for master, count in zip(frozen, flags.tolist(), strict=True):
                if count:
                    self._activate(master)

    def _broadcast_buffers(self) -> None:
        for buffer in self._model.buffers():
            self._comm.broadcast(buffer, 0)

    def _present(self, decision: Decision) -> dict[Shard, list[bool]]:
        """Per master and fragment, whether some rank has a gradient."""
        return {
            master: [
                there
                for there, mine in zip(
                    decision.present[master.pack], master.grads.owned, strict=True
                )
                if mine
            ]
            for master in self._masters
            if master.grads is not None
        }

    def _note_writes(self, decision: Decision) -> None:
        """Have autograd refuse a backward through a graph that was made before this step.

        It would use the new weights with the old activations. Packs have storages of their own,
        so torch does not see that the parameters are written.
        """
        torch.autograd.graph.increment_version(
            [
                param
                for pack, slots in decision.present.items()
                for param, there in zip(pack.params, slots, strict=True)
                if there
            ]
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as ``torch.optim.Optimizer.zero_grad``. Local."""
        self._decision = None
        self._reduce.cleared()
        # The marks of sharded gradients have no memory that could be zeroed.
        super().zero_grad(set_to_none or self.config.grads == "sharded")

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, backwards accumulate locally and nothing is sent (unless grads: sharded).

        Put all micro-batches of a step but the last in it, on every rank alike.
        """
        return self._reduce.no_sync()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss`` times the loss scale; call ``backward()`` on the result.

        Needed with fp16 (``loss_scale``); elsewhere it returns ``loss`` itself, so a script may
        call it always. Local.
        """
        return self._combine.loss_scale.apply(loss)

    def clip_grad_norm_(self, *args: Any, **options: Any) -> Tensor:
        """Clip the global gradient norm in the coming step; every rank must call it.

        ``clip_grad_norm_(max_norm)``, or as the function of ``torch.nn.utils``, with all trained
        parameters and the configuration's ``norm_type``. Finishes the reduction now; the clipping
        itself is folded into the update. Wins over
        ``max_grad_norm`` for this step. Called again it clips what is clipped already.

        Returns:
            The global norm before clipping, 0-dim, loss scale removed; equal on all ranks.

        Raises:
            TypeError, ValueError: ``max_norm``, or a group's ``max_grad_norm``, is not a number
                above 0; other parameters or another norm; ``error_if_nonfinite=True``.
        """
        norm_type, groups = self.config.norm_type, self.param_groups
        bound = checks.clip_bound("clip_grad_norm_", groups, norm_type, args, options)
        self._check_limits()
        self._decision = self._decide(bound, self._pending())
        self._clipped = self._reduce.edits.seen()
        return self._decision.norm.float()

    def clip_grad_value_(self, *args: Any, **options: Any) -> None:
        """Clamp every element of the averaged gradients; every rank must call it.

        ``clip_grad_value_(clip_value)``, or as the function of ``torch.nn.utils``.
        Finishes the reduction now. Non-finite gradients still skip the step.

        Raises:
            TypeError, ValueError: ``clip_value`` is not a number above 0; other parameters.
        """
        bound = checks.clip_bound("clip_grad_value_", self.param_groups, 2.0, args, options)
        self._check_call()
        self._wake()
        pending = self._pending()
        self._reduce.finish()
        self._combine.clip_value(bound, pending)
        self._clipped = self._reduce.edits.seen()

    def _check_limits(self) -> None:
        for number, group in enumerate(self.param_groups):
            checks.check_limit(group, self.defaults, number)

    @property
    def grad_norm(self) -> Tensor | None:
        """Global gradient norm of the last step before clipping, 0-dim; ``None`` before any."""
        return None if self._last_norm is None else self._last_norm.float()

    @property
    def loss_scale(self) -> Tensor | None:
        """The present loss scale, 0-dim, or ``None`` where none is in use."""
        return self._combine.loss_scale.value

    @property
    def skipped_steps(self) -> int:
        """Steps skipped for non-finite gradients. Reading it waits for the device."""
        return self._combine.skips.skipped_steps

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of model parameters; every rank must add the same one.

        Packs of their own are made for it; masters start from the parameters' present values.

        Raises:
            ValueError: a parameter that is not the model's, or is in a group already, or cannot
                be sharded; nothing is added.
            RuntimeError: the ranks add different groups; nothing is added.
        """
        if not self._masters:  # called by the base class for the groups of the original
            super().add_param_group(param_group)
            return
        super().add_param_group(param_group)
        try:
            self._extend(len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def _extend(self, number: int) -> None:
        group = self.param_groups[number]
        wanted = set(group["params"])
        named = self._model.named_parameters()
        added = {name: param for name, param in named if param in wanted}
        if len(added) != len(wanted):
            raise ValueError(
                "param_group: it holds a parameter that is not the model's; add the new module "
                "to the model first"
            )
        checks.check_params(added)
        checks.check_limit(group, self.defaults, number)
        precision = Precision(self._model, self.config)
        checks.check_embeddings(self._model, wanted, precision.storage_dtype, self.config)
        groups = dict.fromkeys(added.values(), number)
        infos = describe(added, self.config, groups, precision.storage_dtype)
        new = plan_packs(infos, self._comm.size, self.layout.partition, self.config)
        first = len(self.layout.packs)
        packs = tuple(dataclasses.replace(pack, index=first + pack.index) for pack in new.packs)
        layout = dataclasses.replace(self.layout, packs=self.layout.packs + packs)
        facts = layout.lines() + checks.describe_groups(self._original, [group], number)
        device = self._masters[0].pack.data.device
        same_everywhere(self._comm, facts, device)  # before anything is changed
        if added:
            self._look_again()
        params = ([added[slot.name] for slot in pack.slots] for pack in packs)
        masters = [
            build_shard(pack, theirs, self._comm, self.config)
            for pack, theirs in zip(packs, params, strict=True)
        ]
        self.layout = layout
        self._original.param_groups.append(group)
        self._adopt(masters)

    def _look_again(self) -> None:
        """Apply precision and watch to modules that the model got since."""
        self._watch.resync()
        self._unhook()
        self._precision = Precision(self._model, self.config)
        self._hook()

    def _hook(self) -> None:
        averaged, begin = self._reduce.averaged, self._reduce.begin
        if self.config.overlap_sync and self._comm.size > 1:
            self._overlap = Overlap(self._model, self._sync)
            begin = self._overlap.noting(begin)
        self._watch = Watch(self._model, self._masters, begin, averaged)
        self._handles = self._precision.install_casts(self._model)

    def _unhook(self) -> None:
        if self._overlap is not None:
            self._overlap.close()
        self._watch.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._sync.wait()  # last: it raises where another rank was lost

    def _publish(self) -> None:
        self._sync.wait()
        everything = Sync(self._comm, self.config)  # packs that are still frozen too
        for master in self._masters:
            master.publish()
            everything.add(master.pack)
        everything()
        self._decision = None

    # -- the rest ---------------------------------------------------------------------------

    def close(self) -> None:
        """Remove all hooks from the model, which may then be sharded anew. Local.

        The optimizer must not be used afterwards; the parameters stay as they are.
        """
        self._reduce.close()
        unmark(self._model)
        self._unhook()

    def _check_call(self) -> None:
        by_scaler = self.__dict__.pop("found_inf", None) is not None
        self.__dict__.pop("grad_scale", None)
        if by_scaler:
            raise RuntimeError(
                "step() was called by torch.amp.GradScaler, whose infinity check is local to a "
                "rank: remove the GradScaler and call optimizer.scale_loss(loss).backward(), "
                "optimizer.step(); shardcast scales the loss and skips steps on all ranks itself"
            )
        scale = self._combine.loss_scale
        if scale.value is not None and not scale.applied:
            raise RuntimeError(
                "step(): a loss scale is in use but the loss was not scaled; call "
                "optimizer.scale_loss(loss).backward()"
            )
        for master in self._masters:
            master.pack.check()
