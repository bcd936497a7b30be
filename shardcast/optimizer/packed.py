"""An optimizer over packs, from ``shard()`` to ``close()``.

Scripts see :class:`shardcast.ShardedOptimizer`, which holds it. This library's options, checkpoints
and adapters work with it directly.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from shardcast.comm import ProcessGroups
from shardcast.config import ShardcastConfig
from shardcast.memory import packed_param
from shardcast.memory.aliases import tie
from shardcast.memory.codecs import shown
from shardcast.memory.shard import Shard, take_moved
from shardcast.messages import warn
from shardcast.optimizer.forwards import LowForward, install_casts
from shardcast.optimizer.model import (
    ModelHooks,
    Tree,
    called_by_script,
    forget_model,
    note_model,
    restore_rest,
)
from shardcast.optimizer.setup import Plan
from shardcast.option_values import CALLS
from shardcast.plan.layout import Layout
from shardcast.plan.precision import MASTER_DTYPE, Precision
from shardcast.step.decide.decider import Decider
from shardcast.step.decide.signal import Signal
from shardcast.step.reduce.reducer import Reducer
from shardcast.step.step_hook import StepHook
from shardcast.step.sync.sync import Sync
from shardcast.step.update import Update, updates_of

T = TypeVar("T")


class PackedOptimizer:
    """The sharded training; its step is in :mod:`.sharded`, its end is :func:`close`.

    Attributes:
        config: the options in effect.
        layout: all packs, slots and spans; equal on all ranks.
        precision: the dtype of each parameter.
        originals: the optimizers that were passed to ``shard``; they hold the current groups.
        model: the root module without wrappers; for several pipeline stages, their container.
        stages: the called modules: the root, or the stages.
        process_groups: the ranks; ``comm`` are the data-parallel ones.
        shards: this rank's part of every pack, in the order of ``layout.packs``.
        reduce, decider, updates, sync: the phases of a step; one update per optimizer.
        called: modules that the script calls.
        device: device of the packs.
        given_dtypes: original dtypes of parameters and buffers by name, for each stage.
        aliases: views of parameters that modules hold.
        step_hooks: hooks of the options in order, then hooks that calls asked for.
        is_closed: ``close()`` was called.
        in_no_sync: the script accumulated in ``no_sync()`` since the last step or ``zero_grad()``.
        tree: the modules, to detect replaced ones.
        block: what to do before other calls, inside ``averaged()``, ``owned()`` or ``whole()``,
            where the model or the state is temporarily another one.
        plain_names: names that stand for all ranks' state inside ``as_plain()``, because DCP asks
            only for names.
        saving: the latest save in the background, if any.
    """

    is_closed = in_no_sync = False
    block = ""
    saving: Any = None
    plain_names: dict[nn.Parameter, dict[str, None]] | None = None

    def __init__(
        self,
        plan: Plan,
        shards: Sequence[Shard],
        process_groups: ProcessGroups,
        dtypes: Sequence[Mapping[str, torch.dtype]],
    ) -> None:
        self.given_dtypes, self.aliases = dtypes, plan.aliases
        originals = self.originals = plan.originals
        self.model, self.stages = plan.model, plan.stages
        self.called = [root for stage in self.stages for root in called_by_script(stage)]
        self.layout: Layout = plan.layout
        self.config: ShardcastConfig = plan.config
        self.precision: Precision = plan.precision
        self.process_groups, self.comm = process_groups, process_groups.dp
        self.device = shards[0].pack.data.device
        self.shards: list[Shard] = []
        # Stages wait for one another in their backwards, and a step has many.
        at_step = len(self.stages) > 1 or process_groups.parallel_dims.in_pipeline
        self.reduce = Reducer(process_groups, plan.config, at_step)
        self.decider = Decider(self.reduce, process_groups, plan.config, self.device, originals)
        self.sync = Sync()
        self.updates = updates_of(originals, plan.config, process_groups.dp, self.sync.begin)
        self.add(shards)
        self._hooks_by_option: dict[str, StepHook] = {}
        self.step_hooks: tuple[StepHook, ...] = ()
        self.outside = plan.outside
        for module in {*self.stages, *self.called}:
            note_model(module)
        given = {name: dtype for of_stage in dtypes for name, dtype in of_stage.items()}
        for name, param in plan.outside.items():
            if given[name] != param.dtype:
                packed_param.note(param, given[name], self.sync.wait, is_held=False)
        self.install_hooks()

    # -- groups -----------------------------------------------------------------------------

    def add(self, shards: Sequence[Shard]) -> None:
        """Add these packs and shards."""
        self.shards += shards
        for shard in shards:
            for param, dtype in zip(shard.pack.in_model, shard.given_dtypes, strict=True):
                copied = MASTER_DTYPE if shard.in_place else dtype
                packed_param.note(param, copied, self.sync.wait)
            if shard.pack.layout.requires_grad:
                self.activate(shard)

    def activate(self, shard: Shard) -> None:
        """Reduce, update and sync this pack from now on."""
        shard.grads = self.reduce.add(shard.pack)
        shard.home.follow(shard.grads)
        self.update_of(shard).add(shard)
        self.sync.add(shard.pack)

    def update_of(self, shard: Shard) -> Update:
        """Return the update that has the parameters of ``shard``."""
        return self.updates[shard.pack.layout.optimizer]

    def names(self) -> dict[nn.Parameter, str]:
        """Return the name of each parameter in a pack."""
        packs = [shard.pack for shard in self.shards]
        params = (param for pack in packs for param in pack.in_model)
        return dict(zip(params, (s.name for p in packs for s in p.layout.slots), strict=True))

    def together(self, act: Callable[[], T], call: str) -> T:
        """Return the result of ``act`` if it succeeds on all ranks; else all raise. Collective.

        Like :meth:`.Comm.together`, but with a message in the form of a step's if possible. So
        ranks that are in a step, or in another call, raise as well.

        Args:
            call: name of the call on all ranks.
        """
        if not self.decider.meets:
            self.reduce.complete()
            return self.process_groups.everyone.together(act, self.device, call)
        done: list[T] = []
        with self.decider.refusal.held():
            done.append(act())
        self.decider.meet(call)
        return done[0]

    # -- masters and parameters -------------------------------------------------------------

    def publish(self) -> None:
        """Cast all masters into their packs and sync these. Collective: every rank."""
        self.refuse_inside("publish")
        self.sync.wait()
        sync = Sync()  # includes packs that are still frozen
        for shard in self.shards:
            shard.publish()
            shard.home.send()
            sync.add(shard.pack)
        sync()

    def ready_to_read(self) -> None:
        """Wait for parameters, and adopt memory that a script assigned. Local.

        It does not change masters. Readers get the values that the model shows, by
        :meth:`.Shard.exact`; only the update turns these into masters.
        """
        self.need_masters("masters")
        self.sync.wait()
        is_lent = any(shard.is_lent for shard in self.shards)  # the model holds an average
        if self.is_closed or is_lent:  # the model is independent of the masters
            return
        take_moved(self.shards)

    def need_masters(self, call: str) -> None:
        """Raise RuntimeError if an option has moved masters and state away."""
        for hook in self.step_hooks:
            hook.refuse(call)

    def refuse_inside(self, call: str) -> None:
        """Raise RuntimeError inside a :attr:`block`, and like :meth:`need_masters`."""
        self.need_masters(call)
        if self.block:
            raise RuntimeError(f"{call}: {self.block}")

    def hook_of(self, name: str) -> Any:
        """Return the step hook of an option; ``None`` if it has none."""
        return self._hooks_by_option.get(name)

    def hook_for(self, call: str) -> Any:
        """Return the step hook with the method ``call``, made on demand; ``None``: no hook."""
        if (name := CALLS.get(call)) is None:
            return None
        if name not in self._hooks_by_option:
            make = self.config.declared(name).hook
            assert make is not None  # otherwise the table of calls is wrong
            # Before the options' hooks, which must not see a step that it refuses.
            self._hooks_by_option = {name: make(self), **self._hooks_by_option}
            self.step_hooks = (*self._hooks_by_option.values(),)
        return self._hooks_by_option[name]

    def install_hooks(self) -> None:
        """Install the hooks on the model and of the options; again after each added group."""
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
        self.tree = Tree(self.stages, self.names())
        self._casts: list[LowForward] = [
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
        self.sync.wait()  # last, because it raises if another rank was lost


# kinds of memory that are where the masters are
APART = ("masters", "state", "averages", "offload")


class MemoryReport(dict[str, int]):
    """Bytes on this rank, by kind; ``print`` shows them in one line, with the total.

    Attributes:
        host: part of the total in host memory, with ``offload``.
    """

    host = 0

    @property
    def total(self) -> int:
        """Sum of all kinds, in bytes."""
        return sum(self.values())

    def __str__(self) -> str:
        scale, unit = (1e9, "GB") if self.total >= 1e9 else (1e6, "MB")
        rows = [*self.items(), ("total", self.total)]
        if self.host:
            rows.append(("of it in host memory", self.host))
        return ", ".join(f"{kind} {nbytes / scale:.3f} {unit}" for kind, nbytes in rows)


def report_of(packed: PackedOptimizer) -> MemoryReport:
    """Return the bytes on this rank, by kind. Local."""
    report = MemoryReport(parameters=0, gradients=0, masters=0, state=0)
    for shard in packed.shards:
        report["parameters"] += shard.pack.data.nbytes
        if shard.grads is not None:
            report["gradients"] += shard.grads.nbytes
        report["masters"] += shard.nbytes
    report["state"] = sum(update.nbytes() for update in packed.updates)
    if under_way := packed.sync.nbytes:
        report["encoded"] = under_way
    parts: list[StepHook | Signal] = [*packed.step_hooks, *packed.decider.signals]
    report.update({hook.name: nbytes for hook in parts if (nbytes := hook.nbytes()) is not None})
    if any(shard.home.is_apart for shard in packed.shards):
        report.host = sum(report.get(kind, 0) for kind in APART)
    return report


def summary_of(packed: PackedOptimizer) -> str:
    """Return one line about what was sharded and how much this rank holds. Local."""
    packs, comm = packed.layout.packs, packed.process_groups.shard
    numels: Counter[torch.dtype] = Counter()
    for pack in packs:
        numels[pack.dtype] += sum(slot.numel for slot in pack.slots)
    dtypes = ", ".join(f"{n:,} in {str(d).removeprefix('torch.')}" for d, n in numels.items())
    frozen = packed.precision.frozen_bytes(packed.outside.values())
    trained = [shard for shard in packed.shards if shard.pack.layout.requires_grad]
    owned = sum(shard.pack.own.numel for shard in trained)
    total = sum(numels.values())
    gradients = sum(shard.pack.own.numel * shard.pack.layout.dtype.itemsize for shard in trained)
    report = report_of(packed)
    held = report["parameters"] + report["masters"] + gradients
    count = sum(slot.numel for shard in trained for slot in shard.pack.layout.slots)
    ddp, share = MASTER_DTYPE.itemsize * (total + count), owned / max(1, count)
    beside = f"; in addition, {_size(frozen)} of parameters that are not trained stay in fp32, "
    beside += "which convert_rest=True halves"
    return (
        f"sharded {sum(len(pack.slots) for pack in packs)} parameters ({dtypes}) of "
        f"{packed.originals.name} in {len(packs)} packs over {comm.size} of {packed.comm.size} "
        f"data-parallel ranks; weights, gradients and masters take {_size(held)} per rank "
        f"(DDP: {_size(ddp)}), the optimizer's state {share:.0%} of DDP's"
        f"{beside * bool(frozen)}{_rounded(packed)}"
    )


def _rounded(packed: PackedOptimizer) -> str:
    """Return a text on how many masters start from a lower dtype, in which the model came."""
    numels: Counter[torch.dtype] = Counter()
    for shard in packed.shards:
        for slot, given in zip(shard.pack.layout.slots, shard.given_dtypes, strict=True):
            if given != MASTER_DTYPE and shard.pack.layout.requires_grad:
                numels[given] += slot.numel
    came = " and ".join(f"{n:,} in {str(d).removeprefix('torch.')}" for d, n in numels.items())
    text = f"; {came} were given, and their masters start from these values: if the checkpoint "
    text += "has fp32 values, load those before shard()"
    return text * bool(numels)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.3f} MB"


def close(packed: PackedOptimizer, restore: bool) -> None:
    """See :meth:`shardcast.ShardedOptimizer.close`."""
    packed.refuse_inside("close")
    restores = restore and sys.exc_info()[0] is None
    try:
        if not packed.is_closed:
            if restores:
                packed.reduce.complete()
            _end(packed)
        if restores:
            if packed.shards and packed.comm.is_alive:
                packed.decider.meet("close")
            _restore(packed)
    finally:
        packed.process_groups.end_watch()


def _end(packed: PackedOptimizer) -> None:
    """Release the model, whose masters wait to be restored."""
    packed.is_closed = True
    later = partial(_restore, packed, MASTER_DTYPE)
    for module in {*packed.stages, *packed.called}:
        note_model(module, restore=later)
    for param in _params(packed):
        note = packed_param.note_of(param)
        if note is not None and note.is_held:
            note.restore = later
    try:
        packed.remove_hooks()
    finally:
        packed.reduce.close()


def _restore(packed: PackedOptimizer, dtype: torch.dtype | None = None) -> None:
    """Restore parameters and buffers, in ``dtype`` or their original dtypes. Collective."""
    for module in {*packed.stages, *packed.called}:
        forget_model(module)
    for param in _params(packed):
        packed_param.forget(param)
    if not all(shard.pack.comm.is_alive for shard in packed.shards):
        warn(
            "the process group of a sharded model was destroyed before its masters were "
            "gathered, so its weights stay in low precision: call optimizer.close() first"
        )
        return
    # All are read before the first is written: a script may have swapped two parameters' memory.
    moved = [
        (view, param.data.clone())
        for pack in (shard.pack for shard in packed.shards if shard.in_blocks)
        for view, param in zip(pack.views(pack.data), pack.params, strict=True)
        if param.dtype == view.dtype
        and not (param.is_contiguous() and param.data_ptr() == view.data_ptr())
    ]
    for view, values in moved:
        view.copy_(values)
    for shard in packed.shards:
        _restore_shard(shard, [dtype or given for given in shard.given_dtypes])
    packed.shards.clear()
    packed.updates.clear()  # frees operands and state even if a script keeps this object
    restore_rest(packed.stages, packed.given_dtypes)
    tie(packed.aliases)


def _params(packed: PackedOptimizer) -> list[nn.Parameter]:
    """Return the parameters with notes of this optimizer."""
    held = [param for shard in packed.shards for param in shard.pack.in_model]
    return [*held, *packed.outside.values()]


@torch.no_grad()
def _restore_shard(shard: Shard, dtypes: Sequence[torch.dtype]) -> None:
    """Restore parameters from all ranks' masters, outside their pack. Collective.

    Every rank of the pack must call it. Parameters that the script changed since the last step,
    including moves and conversions, keep their values.
    """
    pack, low = shard.pack, shard.pack.layout.dtype
    if shard.in_blocks:  # the owner's copy counts
        shard.absorb()
    full = pack.data
    if not shard.in_place:
        full = torch.zeros(pack.layout.numel, dtype=MASTER_DTYPE, device=pack.data.device)
        full[pack.own.start : pack.own.stop] = shard.read(slice(None))
        pieces = [(span.owner, full[span.start : span.stop]) for span in pack.layout.owned_spans]
        if pack.comm.size > 1 and pieces:
            pack.comm.broadcast_all(pieces, pack.layout)
    for slot, param, view, dtype in zip(
        pack.layout.slots, pack.params, pack.views(full), dtypes, strict=True
    ):
        values, exact = param.data, view.to(param.device)
        if values.dtype == low and not shard.in_place:
            values = exact if shard.in_blocks else shown(exact, values)
        elif not shard.in_place:  # it was converted since
            published = shard.rounded(slot, exact.reshape(-1)).view(exact.shape)
            same = published.to(values.dtype) == values
            values = torch.where(same, exact, values.to(MASTER_DTYPE))
        param.data = values.to(dtype)
        param.grad = None
        if param.grad_dtype != dtype:
            param.grad_dtype = dtype
    pack.data = pack.own_data = pack.data[:0]
