"""Adam, AdamW and SGD over flat memory: unscale, clip, update and cast the own spans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.memory.forms import Rounded, moment, row_of
from shardcast.memory.shard import Shard
from shardcast.memory.stores import Place, Store
from shardcast.plan.layout import GroupId
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.decide.decision import Decision
from shardcast.step.update import rules
from shardcast.step.update.execute import ChunkedKernel, Kernel, choose_kernel
from shardcast.step.update.offload import Lanes, StreamLanes, through
from shardcast.step.update.operands import SALT, Draw, Flat, Forms
from shardcast.step.update.rules import Rule

WINDOW = 1 << 22  # elements that are on the device at a time where masters and state are not


class ShardState:
    """What the update keeps for one shard.

    Attributes:
        cohorts: per fragment, the number of its cohort: the fragments, of all shards, that have
            taken the same steps; ``None`` before the first one.
        stores: torch's state by name, parallel to the master; made when first used, zeros.
    """

    def __init__(self, shard: Shard, config: ShardcastConfig) -> None:
        self.shard = shard
        self.cohorts: list[int | None] = [None] * len(shard.fragments)
        self.stores: dict[str, Store] = {}
        self._config = config
        self._row = row_of(config.alignment, shard.pack.layout.dtype)
        self._origins: dict[int, Tensor] = {}

    def store(self, name: str) -> Store:
        """One state tensor."""
        if name not in self.stores:
            pack = self.shard.pack
            place = Place(pack.data.device, self._config.offload)
            form = moment(self._config.moments, signed=not name.endswith("_sq"))
            self.stores[name] = Store(form, pack.own.numel, self._row, place)
        return self.stores[name]

    def windows(self, part: slice) -> Iterator[slice]:
        """Parts of ``part`` that are on the device at a time; one, where all is there anyway."""
        size = WINDOW if self._config.offload else max(1, part.stop - part.start)
        for start in range(part.start, part.stop, size):
            yield slice(start, min(start + size, part.stop))

    def operands(self, part: slice, rule: Rule, step: Tensor) -> Flat:
        """The operands of the update of ``part`` of the own span."""
        shard = self.shard
        assert shard.grads is not None
        stores = [self.store(name) for name in rule.state]
        forms = Forms(shard.store.form, tuple(store.form for store in stores), self._row)
        drawn = any(isinstance(form, Rounded) for form in forms.state)
        return Flat(
            shard.store.window(part), shard.grads.own[part],
            tuple(store.window(part) for store in stores),
            shard.published[part] if shard.casts else None, forms,
            Draw(self._origin(part.start), step) if drawn else None,
        )  # fmt: skip

    def keep(self, part: slice, rule: Rule, flat: Flat) -> None:
        """Give updated operands back; for those that are the memory itself nothing is done."""
        self.shard.store.keep(part, flat.master)
        for name, raw in zip(rule.state, flat.state, strict=True):
            self.store(name).keep(part, raw)

    def _origin(self, start: int) -> Tensor:
        """Of :class:`.operands.Draw`; filled on the device, for a copy from the host might wait."""
        if start not in self._origins:
            pack = self.shard.pack
            salt = pack.layout.index * 4 * SALT % (1 << 31)
            first = (pack.own.start + start + (1 << 31)) % (1 << 32) - (1 << 31)
            origin = torch.full((2,), first, dtype=torch.int32, device=pack.data.device)
            origin[1:].fill_(salt)
            self._origins[start] = origin
        return self._origins[start]

    def runs(self, present: Sequence[bool]) -> Iterator[tuple[slice, int]]:
        """Maximal ranges of the own span that belong to one cohort.

        A run ends where the next fragment begins: the padding between is zero in gradient, master
        and state, and stays so.
        """
        fragments = self.shard.fragments
        begin: int | None = None
        for position, fragment in enumerate(fragments):
            if not present[position]:
                begin = None
                continue
            cohort, start = self.cohorts[position], fragment.start
            assert cohort is not None
            begin = self.shard.local(start, start).start if begin is None else begin
            last = position + 1 == len(fragments)
            if last or not present[position + 1] or self.cohorts[position + 1] != cohort:
                stop = self.shard.pack.own.stop if last else fragments[position + 1].start
                yield slice(begin, self.shard.local(start, stop).stop), cohort
                begin = None


class _Window(NamedTuple):
    """A part of a shard, and how it is updated."""

    state: ShardState
    part: slice
    rule: Rule
    numbers: tuple[Any, ...]
    step: Tensor


def make_lanes(config: ShardcastConfig, device: torch.device) -> Lanes | None:
    """For transfers beside the update, where there are any."""
    return StreamLanes(device) if config.offload and device.type == "cuda" else None


class FusedUpdate:
    """One call per run of present parameters of a pack; see :class:`.several.Updates`.

    The state is allocated when the first gradient comes. Of the steps that a fragment has taken
    the number is on the device, for a skipped one is not counted; fragments that have always had
    gradients in the same steps share one, and which ones do is known here. Usually all.
    """

    elementwise = True  # state tensors have one element per element of the parameter

    def __init__(self, optimizer: torch.optim.Optimizer, config: ShardcastConfig) -> None:
        self._optimizer, self._kind = optimizer, type(optimizer)
        self._config = config
        self._states: dict[Shard, ShardState] = {}
        self._steps: dict[int, Tensor] = {}  # by cohort, 0-dim fp32
        self._common: int | None = None  # the cohort, where all fragments are in one
        self._kernel: Kernel = ChunkedKernel()
        self._lanes: Lanes | None = None

    def add(self, shard: Shard) -> None:
        """Update ``shard`` too, from now on."""
        if shard.fragments:
            if not self._states:
                self._kernel = choose_kernel(self._config, shard.published.device)
                self._lanes = make_lanes(self._config, shard.published.device)
            self._states[shard] = ShardState(shard, self._config)
            self._common = None

    @torch.no_grad()
    def __call__(self, decision: Decision, present: Mapping[Shard, Sequence[bool]]) -> None:
        """See :class:`.several.Updates`."""
        if not self._states or (self._kernel.on_host and bool(decision.skip)):
            return
        everything = all(all(present[shard]) for shard in self._states)
        self._advance(decision, present, everything)

        def fetch(window: _Window) -> Flat:
            return window.state.operands(window.part, window.rule, window.step)

        def update(window: _Window, flat: Flat) -> None:
            factor = decision.factors[window.state.shard.pack.layout.group]
            self._kernel(window.rule, flat, window.numbers, factor, decision.skip)

        def send(window: _Window, flat: Flat) -> None:
            window.state.keep(window.part, window.rule, flat)

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
        known: dict[tuple[GroupId, int], tuple[Rule, tuple[Any, ...]]] = {}
        for shard, state in self._states.items():
            group = shard.pack.layout.group
            runs = state.runs(present[shard])
            if everything and self._common is not None:
                runs = iter([(slice(0, shard.pack.own.numel), self._common)])
            for run, cohort in runs:
                step = self._steps[cohort]
                if (group, cohort) not in known:
                    known[group, cohort] = self._prepared(group, step)
                rule, numbers = known[group, cohort]
                for part in state.windows(run):
                    yield _Window(state, part, rule, numbers, step)

    def _prepared(self, number: GroupId, step: Tensor) -> tuple[Rule, tuple[Any, ...]]:
        """The rule of a group, and its numbers in this step."""
        group = self._optimizer.param_groups[number.position]
        if not self._kernel.on_host:
            rule = rules.rule_of(self._kind, group)
            return rule, rules.as_tensors(rule.numbers(group, step.double()), step)
        rule = rules.rule_of(self._kind, group, fused=self._by_torch(group))
        numeric = {key: _plain(value) for key, value in group.items() if key != "params"}
        return rule, rule.numbers(numeric, float(step))

    def _by_torch(self, group: Mapping[str, Any]) -> bool:
        """Whether torch's fused CPU kernel runs: as the group says, else as ``fuse`` does."""
        if not isinstance(self._kernel, ChunkedKernel):
            return False
        if group.get("fused") is not None or group.get("foreach"):
            return bool(group.get("fused"))
        return self._config.fuse == "auto"

    def _advance(
        self, decision: Decision, present: Mapping[Shard, Sequence[bool]], everything: bool
    ) -> None:
        """Count the step for the fragments that take part in it, without asking the device.

        A cohort of which some fragments take part and others do not is split. SGD counts only
        while it has momentum: the first step with a buffer is special.
        """
        groups = self._optimizer.param_groups
        counted = [
            bool(groups[shard.pack.layout.group.position].get("momentum", True))
            for shard in self._states
        ]
        taken = 1.0 - decision.skip.float()
        if everything and self._common is not None and len(set(counted)) == 1:
            if counted[0]:
                self._steps[self._common] += taken
            return
        fresh = next(number for number in range(len(self._steps) + 1) if number not in self._steps)
        moving: dict[int, list[tuple[ShardState, int]]] = {}
        staying: set[int] = set()
        for (shard, state), counts in zip(self._states.items(), counted, strict=True):
            for position, here in enumerate(present[shard]):
                cohort = state.cohorts[position]
                if here and cohort is None:
                    cohort = state.cohorts[position] = fresh
                if cohort is not None and here and counts:
                    moving.setdefault(cohort, []).append((state, position))
                elif cohort is not None:
                    staying.add(cohort)
        if fresh in moving or fresh in staying:
            self._steps[fresh] = torch.zeros((), dtype=MASTER_DTYPE, device=decision.skip.device)
        for cohort, members in moving.items():
            if cohort in staying:
                number = max(self._steps) + 1
                self._steps[number] = self._steps[cohort] + taken
                for state, position in members:
                    state.cohorts[position] = number
            else:
                self._steps[cohort] += taken
        cohorts = {cohort for state in self._states.values() for cohort in state.cohorts}
        for cohort in self._steps.keys() - cohorts:  # was loaded over
            del self._steps[cohort]
        self._common = cohorts.pop() if len(cohorts) == 1 else None

    def switch(self, _mode: str) -> bool:
        """These classes have no ``train`` and ``eval``."""
        return False

    def nbytes(self) -> int:
        """See :class:`.several.Updates`."""
        return sum(s.nbytes for state in self._states.values() for s in state.stores.values())

    def fragment_state(self, shard: Shard, number: int, decode: bool = True) -> dict[str, Tensor]:
        """torch's state of one fragment: 1-d fp32 and a 0-dim ``step``; empty before use."""
        state = self._states.get(shard)
        cohort = None if state is None else state.cohorts[number]
        if state is None or cohort is None:
            return {}
        step = self._steps[cohort]
        fragment = shard.fragments[number]
        part = shard.local(fragment.start, fragment.stop)
        unread = torch.empty(fragment.numel, dtype=MASTER_DTYPE, device="meta")
        views = {n: store.read(part) if decode else unread for n, store in state.stores.items()}
        if self._kind is torch.optim.SGD:  # torch keeps no step for it
            return views if float(step) else {}
        return {"step": step, **views}

    def load_fragment(self, shard: Shard, number: int, state: Mapping[str, Any]) -> None:
        """See :class:`.several.Updates`."""
        mine = self._states.get(shard)
        if mine is None:  # frozen: it has none
            return
        self._common = None
        fragment, device = shard.fragments[number], shard.published.device
        part = shard.local(fragment.start, fragment.stop)
        if not state:
            mine.cohorts[number] = None
            for store in mine.stores.values():
                store.write(part, torch.zeros(fragment.numel, device=device))
            return
        for name in rules.STATE_NAMES[self._kind]:
            value = state.get(name)
            if value is not None:
                mine.store(name).write(part, value.reshape(-1).to(device, MASTER_DTYPE))
        started = 2.0  # of SGD, which keeps no step: its buffer is past the first one
        if self._kind is torch.optim.SGD and state.get("momentum_buffer") is None:
            started = 0.0
        mine.cohorts[number] = self._cohort_of(float(state.get("step", started)), device)

    def _cohort_of(self, value: float, device: torch.device) -> int:
        """The cohort of the fragments that have taken as many steps."""
        for number, step in self._steps.items():
            if float(step) == value:
                return number
        number = max(self._steps, default=-1) + 1
        self._steps[number] = torch.tensor(value, dtype=MASTER_DTYPE, device=device)
        return number


def _plain(value: Any) -> Any:
    """A learning rate or betas given as tensors, as numbers of the host."""
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value.item() if isinstance(value, Tensor) else value
