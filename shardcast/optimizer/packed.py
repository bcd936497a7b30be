"""An optimizer over packs, from ``shard()`` to ``close()``: what is sharded.

Scripts see :class:`shardcast.ShardedOptimizer`, which holds it; options, checkpoints and adapters
of this library work with this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from shardcast.comm import ProcessGroups
from shardcast.config import ShardcastConfig
from shardcast.memory import packed_param
from shardcast.memory.shard import Shard, take_moved
from shardcast.optimizer.forwards import install_casts
from shardcast.optimizer.model import ModelHooks, Tree, called_by_script, note_model
from shardcast.optimizer.setup import Plan
from shardcast.option_values import CALLS
from shardcast.plan.layout import Layout
from shardcast.plan.precision import MASTER_DTYPE, Precision
from shardcast.step.decide.decider import Decider
from shardcast.step.reduce.reducer import Reducer
from shardcast.step.step_hook import StepHook
from shardcast.step.sync.sync import Sync
from shardcast.step.update import Update, updates_of

if TYPE_CHECKING:
    from shardcast.memory.aliases import Alias

T = TypeVar("T")


class PackedOptimizer:
    """The sharded training; its step is in :mod:`.sharded`, its end in :mod:`.closing`.

    Attributes:
        config: the options that hold.
        layout: all packs, slots and spans; equal on all ranks.
        precision: the dtype of each parameter.
        originals: what was given to ``shard``; its groups are the present ones.
        model: the root module, without wrappers; of several pipeline stages what holds them.
        stages: what is called: that module, or the stages.
        process_groups: the ranks; ``comm`` are the data-parallel ones of them.
        shards: this rank's part of every pack, in the order of ``layout.packs``.
        reduce, decider, updates, sync: the stages of a step; an update for each optimizer.
        called: the modules that the script calls.
        buffers_of_training: inside ``averaged()``, what the model's buffers were before, by name.
        device: of the packs.
        given_dtypes: of parameters and buffers by name, for each stage, as the model was given.
        aliases: views of parameters that modules hold.
        step_hooks: of the options in their order, and behind them those that calls asked for.
        is_closed: ``close()`` was called.
        in_no_sync: the script accumulated in ``no_sync()`` since the last step or ``zero_grad()``.
        tree: the modules, to see one that a rank replaced.
        average_in_model: name of the average that the model has, inside ``averaged()``.
        door: inside a block that edits what is sharded, its name: ``owned``, ``whole``.
        plain_names: inside ``as_plain()``, what stands for the state of all ranks, of which DCP
            asks for names alone.
    """

    is_closed = in_no_sync = False
    average_in_model: str | None = None
    door = ""
    plain_names: dict[nn.Parameter, dict[str, None]] | None = None

    def __init__(
        self,
        plan: Plan,
        shards: Sequence[Shard],
        process_groups: ProcessGroups,
        dtypes: Sequence[Mapping[str, torch.dtype]],
        aliases: Sequence[Alias],
    ) -> None:
        self.given_dtypes, self.aliases = dtypes, aliases
        originals = self.originals = plan.originals
        self.model, self.stages = plan.model, plan.stages
        self.called = [root for stage in self.stages for root in called_by_script(stage)]
        self.layout: Layout = plan.layout
        self.config: ShardcastConfig = plan.config
        self.precision: Precision = plan.precision
        self.process_groups, self.comm = process_groups, process_groups.dp
        self.device = shards[0].pack.data.device
        self.shards: list[Shard] = []
        # Stages wait for one another in their backwards, of which a step has many.
        at_step = len(self.stages) > 1 or process_groups.parallel_dims.in_pipeline
        if at_step and plan.config.accumulate == "sharded":
            raise ValueError(
                "accumulate: expected 'local' in a pipeline, whose backwards accumulate on each "
                "rank until step(), got 'sharded'"
            )
        self.reduce = Reducer(process_groups, plan.config, at_step)
        self.decider = Decider(
            self.reduce.grads,
            process_groups,
            plan.config,
            self.device,
            originals,
            self.reduce.divisor,
            self.reduce.history,
        )
        self.decider.check = self.reduce.check
        self.sync = Sync()
        self.buffers_of_training: dict[str, Tensor] = {}
        self.updates = updates_of(originals, plan.config, process_groups.dp, self.sync.begin)
        self.add(shards)
        self._hooks_by_option: dict[str, StepHook] = {}
        self.step_hooks: tuple[StepHook, ...] = ()
        self.outside = plan.outside
        for module in {*self.stages, *self.called}:
            note_model(module)
        given = self.given_dtype_of()
        for param in plan.outside.values():
            if given.get(param, param.dtype) != param.dtype:
                packed_param.note(param, given[param], self.sync.wait, is_held=False)
        self.install_hooks()

    # -- groups -----------------------------------------------------------------------------

    def add(self, shards: Sequence[Shard]) -> None:
        """Hold these too."""
        self.shards += shards
        given = self.given_dtype_of()
        for shard in shards:
            for param, dtype in zip(shard.pack.in_model, shard.given_dtypes, strict=True):
                copied = MASTER_DTYPE if shard.in_place else given.get(param, dtype)
                packed_param.note(param, copied, self.sync.wait)
            if shard.pack.layout.requires_grad:
                self.activate(shard)

    def activate(self, shard: Shard) -> None:
        """Reduce, update and sync this pack from now on."""
        shard.grads = self.reduce.add(shard.pack)
        self.update_of(shard).add(shard)
        self.sync.add(shard.pack)

    def update_of(self, shard: Shard) -> Update:
        """The update of the optimizer that has the parameters of ``shard``."""
        return self.updates[shard.pack.layout.optimizer]

    def together(self, act: Callable[[], T], call: str) -> T:
        """Return what ``act`` does here, if it succeeds on all ranks; else all raise. Collective.

        :meth:`.Comm.together` by a message of a step's form, where there is one: so ranks that are
        in a step, or in another call, raise as well.

        Args:
            call: the call that all ranks are in.
        """
        if not self.decider.meets:
            return self.process_groups.everyone.together(act, self.device, call)
        done: list[T] = []
        with self.decider.refusal.held():
            done.append(act())
        self.decider.meet(call)
        return done[0]

    def given_dtype_of(self) -> dict[nn.Parameter, torch.dtype]:
        """Return the dtype of each parameter that the model had at ``shard()``, as it was given."""
        return {
            param: of_stage.get(name, param.dtype)
            for stage, of_stage in zip(self.stages, self.given_dtypes, strict=True)
            for name, param in stage.named_parameters()
        }

    # -- masters and parameters -------------------------------------------------------------

    def publish(self) -> None:
        """Cast all masters into their packs and sync these. Every rank must call it."""
        self.refuse_averaged("publish")
        self.sync.wait()
        sync = Sync()  # of packs that are still frozen too
        for shard in self.shards:
            shard.publish()
            sync.add(shard.pack)
        sync()

    def ready_to_read(self) -> None:
        """Wait for parameters, and take what a script assigned, before masters are read. Local.

        Masters stay as they are. Readers get those that the model shows, by :meth:`.Shard.exact`;
        only the update makes them the masters.
        """
        self.need_masters("masters")
        self.sync.wait()
        if self.is_closed or self.average_in_model is not None:  # the model goes its own way
            return
        take_moved(self.shards)

    def need_masters(self, call: str) -> None:
        """Raise RuntimeError where an option has masters and state elsewhere."""
        for hook in self.step_hooks:
            hook.refuse(call)

    def refuse_averaged(self, call: str) -> None:
        """Raise RuntimeError inside ``averaged()`` or a door, and as :meth:`need_masters`."""
        self.need_masters(call)
        if self.door:
            raise RuntimeError(
                f"{call}: leave `with optimizer.{self.door}(...):` first, whose edits are written "
                "at its end"
            )
        if self.average_in_model is not None:
            raise RuntimeError(
                f"{call}: the average {self.average_in_model!r} is in the model; leave "
                f"`with optimizer.averaged({self.average_in_model!r}):` first"
            )

    def hook_of(self, name: str) -> Any:
        """The step hook of an option; ``None`` where it has none."""
        return self._hooks_by_option.get(name)

    def hook_for(self, call: str) -> Any:
        """The step hook that has the method ``call``, made if no option did; ``None``: none has."""
        if (name := CALLS.get(call)) is None:
            return None
        if name not in self._hooks_by_option:
            make = self.config.declared(name).hook
            assert make is not None  # or the table of calls is wrong
            # Before those of options: a step that it refuses must not have been seen by them.
            self._hooks_by_option = {name: make(self), **self._hooks_by_option}
            self.step_hooks = (*self._hooks_by_option.values(),)
        return self._hooks_by_option[name]

    def install_hooks(self) -> None:
        """Have the model and the options take part; again after each added group."""
        for name, asked in self.config.extensions(self.stages).items():
            if asked.hook is not None and name not in self._hooks_by_option:
                self._hooks_by_option[name] = asked.hook(self)
        self.step_hooks = (*self._hooks_by_option.values(),)
        begins = [self.reduce.begin]
        for hook in self.step_hooks:
            if type(hook).begin_backward is not StepHook.begin_backward:
                begins.append(hook.begin_backward)
        loads = self.decider.refusal.loads
        self.hooks = ModelHooks(self.called, self.shards, begins, self.sync, loads)
        for step_hook in self.step_hooks:
            step_hook.attach()
        names = {
            param: slot.name
            for shard in self.shards
            for slot, param in zip(shard.pack.layout.slots, shard.pack.in_model, strict=True)
        }
        self.tree = Tree(self.stages, names)
        self._casts: list[Any] = [
            handle for root in self.called for handle in install_casts(root, self.precision)
        ]

    def remove_hooks(self) -> None:
        """Undo :meth:`install_hooks`."""
        for step_hook in self.step_hooks:
            step_hook.close()
        self.hooks.close()
        for handle in self._casts:
            handle.remove()
        self._casts.clear()
        self.sync.wait()  # last: it raises where another rank was lost
