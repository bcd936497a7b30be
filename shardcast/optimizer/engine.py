"""The stages of a step, and the shards that they work on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardcast import _compat
from shardcast.comm import Grid
from shardcast.config import ShardcastConfig
from shardcast.memory.shard import Shard
from shardcast.memory.weight_edits import WeightEdits
from shardcast.messages import warn
from shardcast.optimizer.model_hooks import ModelHooks, mark, unmark
from shardcast.optimizer.setup import Plan, agreed, allocate, plan_for, restore_rest
from shardcast.optimizer.stages import called_by_script
from shardcast.plan.activations import install_casts
from shardcast.plan.layout import GroupId, Layout
from shardcast.plan.originals import Originals
from shardcast.plan.precision import MASTER_DTYPE, Precision
from shardcast.step.decide.decider import Decider
from shardcast.step.decide.decision import Decision
from shardcast.step.reduce.reducer import Reducer
from shardcast.step.sync.buffers import Buffers
from shardcast.step.sync.overlap import Overlap
from shardcast.step.sync.sync import Sync
from shardcast.step.update.several import Updates


class Engine:
    """What a :class:`shardcast.ShardedOptimizer` works with.

    Not for scripts: this library's adapters, checkpoints and tests use it.

    Attributes:
        originals: what was given to ``shard``; its groups are the present ones.
        model: the root module, without wrappers; of several pipeline stages what holds them.
        stages: what is called: that module, or the stages.
        grid: the ranks; ``comm`` are the data-parallel ones of them.
        shards: this rank's part of every pack, in the order of ``layout.packs``.
        reduce, decider, update, sync: the stages of a step.
    """

    _overlap: Overlap | None = None
    _closed = False

    def __init__(
        self, plan: Plan, stages: Sequence[nn.Module], shards: Sequence[Shard], grid: Grid,
        originals: Originals, dtypes: Sequence[Mapping[str, torch.dtype]],
    ) -> None:  # fmt: skip
        self._given_dtypes = dtypes
        self.originals, self.model, self.stages = originals, plan.model, tuple(stages)
        self._called = [root for stage in stages for root in called_by_script(stage)]
        self.layout: Layout = plan.layout
        self.config: ShardcastConfig = plan.config
        self.precision: Precision = plan.precision
        self.grid, self.comm = grid, grid.dp
        self.device = shards[0].pack.data.device
        self.shards: list[Shard] = []
        # Stages wait for one another in their backwards, of which a step has many.
        at_step = len(self.stages) > 1 or grid.axes.in_pipeline
        self.reduce = Reducer(grid, plan.config, at_step)
        self.edits = WeightEdits(self.shards, self.device)
        self.decider = Decider(
            self.reduce.grads, grid, plan.config, self.device, originals, self.reduce.divisor,
            self.edits,
        )  # fmt: skip
        self.sync, self._buffers = Sync(), Buffers(self.stages, grid.dp)
        self.update = Updates(originals, plan.config, grid.dp, self.sync.begin)
        self._add(shards)
        self.edits.note()
        for module in {*self.stages, *self._called}:
            mark(module)
            self.reduce.watch(module)
        self._hook()

    def extend(self, added: GroupId) -> None:
        """Take in a new group of ``originals``, in further packs. Every rank must call it.

        Raises:
            TypeError, ValueError, RuntimeError: on every rank, as of ``shard``; nothing is changed.
        """
        plan = agreed(
            lambda: plan_for(
                self.model, self.originals, self.config, self.grid.axes, self.stages, self.layout,
                added,
            ),
            self.grid, self.device, "add_param_group",
        )  # fmt: skip
        shards = allocate(plan, self.grid)
        self.absorb()
        self._unhook()  # modules that the model got since take part too
        self.layout, self.precision = plan.layout, plan.precision
        self._add(shards)
        self.edits.note()
        self._hook()

    def _add(self, shards: Sequence[Shard]) -> None:
        self.shards += shards
        for shard in shards:
            if shard.pack.layout.requires_grad:
                self.activate(shard)

    def activate(self, shard: Shard) -> None:
        """Reduce, update and sync this pack from now on."""
        shard.grads = self.reduce.add(shard.pack)
        self.update.add(shard)
        self.sync.add(shard.pack)

    def activate_packs(self, indices: Collection[int]) -> None:
        """Activate those of these packs that are frozen still."""
        for shard in self.shards:
            if shard.grads is None and shard.pack.layout.index in indices:
                self.activate(shard)

    def _wake(self) -> None:
        """Activate packs that were frozen from the start and have a gradient on some rank now.

        One more small all-reduce, whose result the host waits for, in models that have such
        packs; parameters that stay frozen are better left out of the optimizer.
        """
        frozen = [shard for shard in self.shards if shard.grads is None]
        if frozen:
            here = [any(p.grad is not None for p in shard.pack.params) for shard in frozen]
            flags = torch.tensor(here, dtype=torch.float32).to(self.device)
            for number, shard in enumerate(frozen):
                if shard.pack.layout.sharing.adds:  # copies must be active on all ranks alike
                    for comm in self.grid.groups(shard.pack.layout.sharing.sums):
                        comm.all_reduce(flags[number])
            self.comm.all_reduce(flags)
            for shard, count in zip(frozen, flags.tolist(), strict=True):
                if count:
                    self.activate(shard)

    def present(self, decision: Decision) -> dict[Shard, list[bool]]:
        """Per shard and fragment, whether some rank has a gradient."""
        return {
            shard: [
                there
                for there, mine in zip(decision.present[shard.pack], shard.grads.owned, strict=True)
                if mine
            ]
            for shard in self.shards
            if shard.grads is not None
        }

    def send(self) -> None:
        """Sync the packs, and the buffers that forwards write. Every rank must call it."""
        if self.config.broadcast_buffers:
            self._buffers()
        if self._overlap is None:
            self.sync()
        else:
            self._overlap()

    def finish_reduce(self) -> None:
        """Have the mean of all gradients in the own spans. Every rank must call it."""
        self.originals.check()
        self.edits.take()
        self._wake()  # packs that were unfrozen
        self.decider.before_reduce(self.reduce.touched)
        self.reduce.finish()

    def conclude(self, decision: Decision, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """After a step: tally, loss scale, ``.grad``; what schedulers of ``optimizers`` look at."""
        # Autograd is to refuse a backward through a graph that was made before this step: it would
        # use the new weights with the old activations. Packs have storages of their own, so torch
        # does not see that the parameters are written.
        torch.autograd.graph.increment_version(
            [
                param
                for pack, slots in decision.present.items()
                for param, there in zip(pack.in_model, slots, strict=True)
                if there
            ]
        )
        self.edits.note()
        self.hooks.watch_copies()
        self.decider.conclude(decision)
        self.reduce.show(decision.present)
        self.reduce.used()
        self.comm.steps += 1
        for optimizer in (*self.originals.optimizers, *optimizers):
            _compat.note_step_called(optimizer)
        self.decider.skips.poll(self.originals.groups)  # last: it may raise

    def publish(self) -> None:
        """Cast all masters into their packs and sync these. Every rank must call it."""
        self.sync.wait()
        everything = Sync()  # packs that are still frozen too
        for shard in self.shards:
            shard.publish()
            everything.add(shard.pack)
        everything()

    def absorb(self) -> None:
        """Take parameters that were changed by hand as masters. Local."""
        self.sync.wait()
        if self._closed:  # the model goes its own way
            return
        for shard in self.shards:
            shard.pack.take_moved()
            shard.absorb()
        self.edits.note()

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds, by kind."""
        report = {"parameters": 0, "gradients": 0, "masters": 0, "state": 0}
        for shard in self.shards:
            report["parameters"] += shard.pack.data.nbytes
            if shard.grads is not None:
                report["gradients"] += shard.grads.nbytes
            if not shard.in_place:
                report["masters"] += shard.master.nbytes
        report["state"] = self.update.nbytes()
        return report

    def close(self, restore: bool) -> None:
        """Remove all hooks from the model and its parameters.

        Args:
            restore: give the model back as it was given; every rank must do it. Without it the
                model has what the next ``shard()``, which is collective, restores it by.
        """
        if not self._closed:
            self._closed = True
            later = partial(self.restore, MASTER_DTYPE)
            for module in {*self.stages, *self._called}:
                mark(module, later)
            try:
                self._unhook()
            finally:
                self.reduce.close()
        if restore:
            self.restore()

    def restore(self, dtype: torch.dtype | None = None) -> None:
        """Give parameters and buffers back, in ``dtype`` or as they were given. Collective."""
        for module in {*self.stages, *self._called}:
            unmark(module)
        if not all(shard.pack.comm.is_alive for shard in self.shards):
            warn(
                "the process group of a sharded model was destroyed before its masters were "
                "gathered, so that its weights stay in low precision: call optimizer.close() first"
            )
            return
        for shard in self.shards:
            shard.restore([dtype or given for given in shard.given_dtypes])
        self.shards.clear()
        restore_rest(self.stages, self._given_dtypes)

    def _hook(self) -> None:
        begin = self.reduce.begin
        if self.config.overlap_sync and self.comm.size > 1:
            self._overlap = Overlap(self.model, self.sync)
            begin = self._overlap.noting(begin)
        self.hooks = ModelHooks(self._called, self.shards, self.edits, begin)
        self._casts: list[Any] = [
            handle for root in self._called for handle in install_casts(root, self.precision)
        ]

    def _unhook(self) -> None:
        if self._overlap is not None:
            self._overlap.close()
        self.hooks.close()
        for handle in self._casts:
            handle.remove()
        self._casts.clear()
        self.sync.wait()  # last: it raises where another rank was lost
