"""Update: unscale, clip, update and cast the own spans.

:class:`FusedUpdate` runs Adam, AdamW and SGD over flat memory; ``any_optimizer`` hands masters to
any other torch optimizer. Both leave absent gradients untouched, as ``torch.optim`` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.memory.shard import Shard
from shardcast.memory.stores import (
    Bf16Store,
    Blocks8Store,
    ExactStore,
    Place,
    Store,
    block_of,
    chances,
)
from shardcast.plan.partition import ELEMENTWISE
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.combine.decision import Decision
from shardcast.step.update import rules
from shardcast.step.update.any_optimizer import AnyOptimizerUpdate
from shardcast.step.update.execute import ChunkedKernel, Kernel, choose_kernel
from shardcast.step.update.offload import Lanes, StreamLanes, through
from shardcast.step.update.rules import Flat, Rule


def make_update(optimizer: torch.optim.Optimizer, config: ShardcastConfig, comm: Comm) -> Update:
    """The update for the class of ``optimizer``, whose groups it reads in every step."""
    if type(optimizer) in rules.STATE_NAMES:
        return FusedUpdate(optimizer, config)
    plain = ShardcastConfig()
    for name in ("master", "moments", "offload"):
        if getattr(config, name) != getattr(plain, name):
            raise ValueError(
                f"{name}: {getattr(config, name)!r} needs Adam, AdamW or SGD of torch.optim, got "
                f"{type(optimizer).__name__}, which keeps its state itself; use the default "
                f"{getattr(plain, name)!r}"
            )
    elementwise = type(optimizer) in ELEMENTWISE
    return AnyOptimizerUpdate(optimizer, comm, elementwise)


@dataclass
class _State:
    """What is updated together: one master, its state and its steps.

    Attributes:
        steps: per fragment, a 0-dim fp32 count of its steps, ``None`` before the first one.
        flat: torch's state by name, parallel to the master; made when first used.
    """

    master: Shard
    config: ShardcastConfig
    steps: list[Tensor | None]
    flat: dict[str, Store] = field(default_factory=dict)

    def state(self, name: str) -> Store:
        """One state tensor, zeros at first."""
        if name not in self.flat:
            self.flat[name] = self._store(name)
        return self.flat[name]

    def _store(self, name: str) -> Store:
        pack, config = self.master.pack, self.config
        place = Place(pack.data.device, config.offload)
        if config.moments == "bf16":
            return Bf16Store(pack.own.numel, place)
        if config.moments == "int8":
            block = block_of(config.alignment, pack.layout.dtype)
            return Blocks8Store(pack.own.numel, block, not name.endswith("_sq"), place)
        return ExactStore(place.zeros(pack.own.numel, MASTER_DTYPE), place)

    def windows(self, part: slice, rule: Rule, size: int) -> Iterator[slice]:
        """Parts of ``part`` of which fp32 copies may be held; one, where there are none."""
        stores = [self.master.store, *(self.state(name) for name in rule.state)]
        if all(store.direct for store in stores):
            yield part
            return
        for start in range(part.start, part.stop, size):
            yield slice(start, min(start + size, part.stop))

    def operands(self, part: slice, rule: Rule) -> Flat:
        """The operands of the update of ``part`` of the own span."""
        master = self.master
        assert master.grads is not None
        return Flat(
            master.store.read(part), master.grads.own[part],
            tuple(self.state(name).read(part) for name in rule.state),
            master.published[part] if master.casts else None,
        )  # fmt: skip

    def keep(self, part: slice, rule: Rule, flat: Flat, step: Tensor) -> None:
        """Give updated operands back; for those that are the memory itself nothing is done."""
        self.master.store.write(part, flat.master)
        chance: list[Tensor] = []
        for number, (name, values) in enumerate(zip(rule.state, flat.state, strict=True)):
            if self.config.moments == "bf16" and not chance:
                chance += chances(self.master.pack.own.start + part.start, values.numel(),
                                  self._seed(step, number))  # fmt: skip
            self.state(name).write(part, values, chance.pop() if chance else None)

    def _seed(self, step: Tensor, number: int) -> Tensor:
        """Another one for each step, pack and state tensor; never the host's, for it may wait."""
        salt = (self.master.pack.layout.index * 4 + number) * 0x27D4EB2F % (1 << 31)
        return step.to(torch.int32) * 0x165667B1 + salt

    def runs(self, present: Sequence[bool]) -> Iterator[tuple[slice, Tensor]]:
        """Maximal ranges of the own span that take one and the same step.

        A run ends where the next fragment begins: the padding between is zero in gradient, master
        and state, and stays so.
        """
        begin: int | None = None
        for position, fragment in enumerate(self.master.fragments):
            if not present[position]:
                begin = None
                continue
            step, start = self.steps[position], fragment.start
            assert step is not None
            begin = self.master.local(start, start).start if begin is None else begin
            last = position + 1 == len(self.master.fragments)
            if last or not present[position + 1] or self.steps[position + 1] is not step:
                own = self.master.pack.own.stop
                stop = own if last else self.master.fragments[position + 1].start
                yield slice(begin, self.master.local(start, stop).stop), step
                begin = None


class _Window(NamedTuple):
    """A part of a shard, and how it is updated."""

    shard: _State
    part: slice
    rule: Rule
    numbers: tuple[Any, ...]
    step: Tensor


def make_lanes(config: ShardcastConfig, device: torch.device) -> Lanes | None:
    """For transfers beside the update; split masters wait for the device and take turns."""
    if config.offload and config.master == "fp32" and device.type == "cuda":
        return StreamLanes(device)
    return None


class FusedUpdate:
    """Adam, AdamW or SGD over flat memory: one call per run of present parameters of a pack.

    The state is flat fp32 like the masters, allocated when the first gradient comes. Fragments
    that have had gradients in the same steps share one ``step`` tensor; usually that is all.
    """

    elementwise = True  # state tensors have one element per element of the parameter

    def __init__(self, optimizer: torch.optim.Optimizer, config: ShardcastConfig) -> None:
        self._optimizer = optimizer
        self._kind = type(optimizer)
        self._config = config
        self._shards: dict[Shard, _State] = {}
        self._common: Tensor | None = None  # the step that all fragments of all masters share
        self._kernel: Kernel = ChunkedKernel()
        self._lanes: Lanes | None = None

    def add(self, master: Shard) -> None:
        """Update ``master`` too, from now on."""
        if master.fragments:
            if not self._shards:
                self._kernel = choose_kernel(self._config, master.published.device)
                self._lanes = make_lanes(self._config, master.published.device)
            self._shards[master] = _State(master, self._config, [None] * len(master.fragments))
            self._common = None

    @torch.no_grad()
    def __call__(self, decision: Decision, present: Mapping[Shard, Sequence[bool]]) -> None:
        """Update, cast and publish the own spans.

        Args:
            present: per master and fragment, whether some rank has a gradient.
        """
        if not self._shards or (self._kernel.on_host and bool(decision.skip)):
            return
        everything = all(all(present[master]) for master in self._shards)
        self._advance(decision, None if everything else present)

        def fetch(window: _Window) -> Flat:
            return window.shard.operands(window.part, window.rule)

        def update(window: _Window, flat: Flat) -> None:
            factor = decision.factors[window.shard.master.pack.layout.group]
            self._kernel(window.rule, flat, window.numbers, factor, decision.skip)

        def send(window: _Window, flat: Flat) -> None:
            window.shard.keep(window.part, window.rule, flat, window.step)

        windows = self._windows(present, everything)
        if self._lanes is not None:
            through(self._lanes, windows, fetch, update, send)
            return
        for window in windows:
            flat = fetch(window)
            update(window, flat)
            send(window, flat)

    def _windows(
        self, present: Mapping[Shard, Sequence[bool]], everything: bool
    ) -> Iterator[_Window]:
        """What is updated at a time: runs of present parameters, cut where copies are made."""
        known: dict[tuple[int, int], tuple[Rule, tuple[Any, ...]]] = {}
        for master, shard in self._shards.items():
            number = master.pack.layout.group
            if everything and self._common is not None:
                runs = iter([(slice(0, master.pack.own.numel), self._common)])
            else:
                runs = shard.runs(present[master])
            for part, step in runs:
                key = (number, id(step))
                if key not in known:
                    known[key] = self._prepared(number, step)
                rule, numbers = known[key]
                for window in shard.windows(part, rule, self._kernel.window):
                    yield _Window(shard, window, rule, numbers, step)

    def _prepared(self, number: int, step: Tensor) -> tuple[Rule, tuple[Any, ...]]:
        """The rule of a group, and its numbers in this step."""
        group = self._optimizer.param_groups[number]
        if not self._kernel.on_host:
            rule = rules.rule_of(self._kind, group)
            return rule, rules.as_tensors(rule.numbers(group, step.double()), step)
        rule = rules.rule_of(self._kind, group, fused=self._by_torch(group))
        numeric = {key: _plain(value) for key, value in group.items() if key != "params"}
        return rule, rule.numbers(numeric, float(step))

    def _by_torch(self, group: Mapping[str, Any]) -> bool:
        """Whether torch's fused CPU kernel runs: as the group says, else as ``fuse`` does."""
        if group.get("fused") is not None or group.get("foreach"):
            return bool(group.get("fused"))
        return self._config.fuse == "auto"

    def _advance(self, decision: Decision, present: Mapping[Shard, Sequence[bool]] | None) -> None:
        """Count the step for the fragments that take part in it, without asking the device.

        A step tensor shared by fragments that take part and others is split first. SGD counts
        only while it has momentum: the first step with a buffer is special.

        Args:
            present: as for a call, or ``None`` for all.
        """
        taken = 1.0 - decision.skip.float()
        groups = self._optimizer.param_groups
        counts = {m: bool(groups[m.pack.layout.group].get("momentum", True)) for m in self._shards}
        uniform = len(set(counts.values())) == 1
        if present is None and self._common is not None and uniform:
            if all(counts.values()):
                self._common += taken
            return
        fresh = torch.zeros((), dtype=torch.float32, device=decision.skip.device)
        moving: dict[int, Tensor] = {}
        staying: dict[int, Tensor] = {}
        for master, shard in self._shards.items():
            for position, step in enumerate(shard.steps):
                if present is None or present[master][position]:
                    step = shard.steps[position] = fresh if step is None else step
                    if counts[master]:
                        moving[id(step)] = step
        for master, shard in self._shards.items():
            for position, step in enumerate(shard.steps):
                absent = present is not None and not present[master][position]
                still = absent or not counts[master]
                if still and step is not None and id(step) in moving:
                    if id(step) not in staying:
                        staying[id(step)] = step.clone()
                    shard.steps[position] = staying[id(step)]
        for step in moving.values():
            step += taken
        used = {id(step): step for shard in self._shards.values() for step in shard.steps}
        self._common = used.popitem()[1] if len(used) == 1 and uniform else None

    def switch(self, _mode: str) -> bool:
        """These classes have no ``train`` and ``eval``."""
        return False

    def nbytes(self) -> int:
        """Bytes of the flat state; the 0-dim steps aside."""
        return sum(s.nbytes for shard in self._shards.values() for s in shard.flat.values())

    def fragment_state(self, master: Shard, position: int) -> dict[str, Tensor]:
        """torch's state of one fragment: 1-d fp32 and a 0-dim ``step``; empty before use."""
        shard = self._shards.get(master)
        step = None if shard is None else shard.steps[position]
        if shard is None or step is None:
            return {}
        fragment = master.fragments[position]
        part = master.local(fragment.start, fragment.stop)
        views = {name: store.read(part) for name, store in shard.flat.items()}
        if self._kind is torch.optim.SGD:  # torch keeps no step for it
            return views if float(step) else {}
        return {"step": step, **views}

    def load_fragment(self, master: Shard, position: int, state: Mapping[str, Any]) -> None:
        """Overwrite the state of one fragment by 1-d tensors of its length."""
        shard = self._shards.get(master)
        if shard is None:  # frozen: it has none
            return
        self._common = None
        fragment = master.fragments[position]
        part = master.local(fragment.start, fragment.stop)
        if not state:
            shard.steps[position] = None
            for store in shard.flat.values():
                store.write(part, torch.zeros(fragment.numel, device=master.published.device))
            return
        for name in rules.STATE_NAMES[self._kind]:
            value = state.get(name)
            if value is not None:
                exact = value.reshape(-1).to(master.published.device, MASTER_DTYPE)
                shard.state(name).write(part, exact)
        started = 2.0  # of SGD, which keeps no step: its buffer is past the first one
        if self._kind is torch.optim.SGD and state.get("momentum_buffer") is None:
            started = 0.0
        shard.steps[position] = self._shared_step(float(state.get("step", started)), master)

    def _shared_step(self, value: float, master: Shard) -> Tensor:
        """A step tensor of this value, shared with the fragments that have the same."""
        for shard in self._shards.values():
            for step in shard.steps:
                if step is not None and float(step) == value:
                    return step
        return torch.tensor(value, dtype=torch.float32, device=master.published.device)


def _plain(value: Any) -> Any:
    """A learning rate or betas given as tensors, as numbers of the host."""
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value.item() if isinstance(value, Tensor) else value


Update = FusedUpdate | AnyOptimizerUpdate
