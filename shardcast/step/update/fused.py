"""Adam, AdamW and SGD over flat memory: unscale, clip, update and cast the own spans."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.memory.chance import row_keys
from shardcast.memory.codecs import Encoded, moment_codec, row_of
from shardcast.memory.shard import Shard
from shardcast.plan.layout import GroupId
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.decide.decision import Decision
from shardcast.step.update import rules
from shardcast.step.update.fusion import Epilogue, Executor, Fusion, Numbers, choose_executor
from shardcast.step.update.offload import Lanes, StreamLanes, through
from shardcast.step.update.rules import Rule

WINDOW = 1 << 22  # elements that are on the device at a time where masters and state are not


class ShardState:
    """The state of one shard, and the operands of its update.

    Attributes:
        first: the place of its first fragment among those of all shards.
        stored: torch's state and that of epilogues by name, parallel to the master; made when
            first used, zeros.
    """

    def __init__(
        self, shard: Shard, config: ShardcastConfig, epilogues: tuple[Epilogue, ...], first: int
    ) -> None:
        self.shard, self.first = shard, first
        self.stored: dict[str, Encoded] = {}
        self._config, self._epilogues = config, epilogues
        self._row = row_of(config, shard.pack.layout.dtype)
        self._codecs = {name: e.codec(name) for e in epilogues for name in e.state}
        self._keys: Tensor | None = None
        self._row_sums: dict[str, Tensor] = {}

    def encoded(self, name: str) -> Encoded:
        """One state tensor."""
        if name not in self.stored:
            codec = self._codecs.get(name) or moment_codec(self._config, name)
            pack = self.shard.pack
            self.stored[name] = Encoded(
                codec, pack.own.numel, self._row, pack.data.device, on_host=self._config.offload
            )
        return self.stored[name]

    def prepare(self, rule: Rule) -> Fusion:
        """What is fused for ``rule``; allocates what it needs."""
        names = (*rule.state, *self._codecs)
        state = tuple(self.encoded(name).codec for name in names)
        master, casts = self.shard.master.codec, self.shard.casts
        fusion = Fusion(rule, master, state, casts, self._row, self._epilogues)
        if fusion.by_chance and self._keys is None:
            self._keys = row_keys(self.shard, self._row)
        for name in (name for epilogue in self._epilogues for name in epilogue.sums):
            if name not in self._row_sums:
                rows = -(-self.shard.pack.own.numel // self._row)
                device = self.shard.published.device
                self._row_sums[name] = torch.zeros(rows, dtype=MASTER_DTYPE, device=device)
        return fusion

    def fetch(self, part: slice, fusion: Fusion) -> list[Tensor]:
        """The operands of the update of ``part`` of the own span; see :class:`.Fusion`."""
        shard = self.shard
        assert shard.grads is not None
        operands = [shard.grads.own[part]]
        if fusion.casts:
            operands.append(shard.published[part])
        for encoded in self._all(fusion):
            operands += encoded.fetch(part)
        rows = slice(part.start // self._row, -(-part.stop // self._row))
        if fusion.by_chance:
            assert self._keys is not None
            operands.append(self._keys[rows])
        return operands + [sums[rows] for sums in self._row_sums.values()]

    def send(self, part: slice, fusion: Fusion, operands: Sequence[Tensor]) -> None:
        """Take updated operands back; nothing is done for those that are the memory itself."""
        for encoded, pieces in zip(self._all(fusion), fusion.parts(operands).stored, strict=True):
            encoded.send(part, pieces)

    def _all(self, fusion: Fusion) -> Iterator[Encoded]:
        """Masters and state in the order of operands."""
        yield self.shard.master
        for name in (*fusion.rule.state, *self._codecs):
            yield self.stored[name]

    def sums(self) -> dict[str, Tensor]:
        """By name, for each fragment the sum that an epilogue gave in its last update."""
        parts = [self.shard.local(part.start, part.stop) for part in self.shard.fragments]
        return {
            name: torch.stack(
                [rows[p.start // self._row : -(-p.stop // self._row)].sum() for p in parts]
            )
            for name, rows in self._row_sums.items()
        }

    @property
    def nbytes(self) -> int:
        keys = 0 if self._keys is None else self._keys.nbytes
        sums = sum(rows.nbytes for rows in self._row_sums.values())
        return keys + sums + sum(encoded.nbytes for encoded in self.stored.values())


class _Range(NamedTuple):
    """A part of a shard, and how it is updated."""

    state: ShardState
    part: slice
    fusion: Fusion
    numbers: Numbers
    factor: Tensor | None


def make_lanes(config: ShardcastConfig, device: torch.device) -> Lanes | None:
    """For transfers beside the update, where there are any."""
    return StreamLanes(device) if config.offload and device.type == "cuda" else None


class FusedUpdate:
    """One kernel per pack.

    The state is allocated when the first gradient comes. How many steps a fragment has taken is
    counted on the device, for a skipped one does not count. The host knows which fragments had
    gradients in the same steps, and so have equal counts: fragments with one *history* are updated
    together. Usually that is the whole shard; where gradients were absent it is runs of it.
    """

    elementwise = True  # state tensors have one element per element of the parameter

    def __init__(
        self, optimizer: torch.optim.Optimizer, config: ShardcastConfig,
        epilogues: tuple[Epilogue, ...] = (),
    ) -> None:  # fmt: skip
        self._optimizer, self._kind = optimizer, type(optimizer)
        self._config, self._epilogues = config, epilogues
        self._states: dict[Shard, ShardState] = {}
        self._steps = torch.zeros(0, dtype=MASTER_DTYPE)  # per fragment of all shards
        self._histories: list[Hashable] = []  # parallel to the steps; None before the first one
        self._uniform = True  # whether all histories are equal
        self._execute = Executor(compiled=False, on_host=True)
        self._lanes: Lanes | None = None

    def add(self, shard: Shard) -> None:
        """Update ``shard`` too, from now on."""
        if shard.fragments:
            device = shard.published.device
            if not self._states:
                self._execute = choose_executor(self._config, device)
                self._lanes = make_lanes(self._config, device)
                self._steps = self._steps.to(device)
            state = ShardState(shard, self._config, self._epilogues, len(self._histories))
            self._states[shard] = state
            self._steps = torch.cat([self._steps, self._steps.new_zeros(len(shard.fragments))])
            self._histories += [None] * len(shard.fragments)
            self._uniform = len(set(self._histories)) == 1

    @torch.no_grad()
    def __call__(self, decision: Decision) -> None:
        """Unscale, clip, update and cast the own spans; leave absent gradients untouched."""
        on_host = self._execute.on_host
        if not self._states or (on_host and bool(decision.skip)):
            return
        present = {shard: shard.present(decision.present[shard.pack]) for shard in self._states}
        self._count(decision, present)
        ranges, skip = self._ranges(decision, present), None if on_host else decision.skip
        if self._lanes is None:
            for one in ranges:
                operands = one.state.fetch(one.part, one.fusion)
                self._execute(one.fusion, operands, one.numbers, one.factor, skip)
                one.state.send(one.part, one.fusion, operands)
            return

        def update(one: _Range, operands: list[Tensor]) -> None:
            self._execute(one.fusion, operands, one.numbers, one.factor, skip)

        through(
            self._lanes, ranges, lambda one: one.state.fetch(one.part, one.fusion), update,
            lambda one, operands: one.state.send(one.part, one.fusion, operands),
        )  # fmt: skip

    def _ranges(
        self, decision: Decision, present: Mapping[Shard, Sequence[bool]]
    ) -> Iterator[_Range]:
        """What is updated at a time: runs of present fragments, cut where copies are made."""
        known: dict[tuple[GroupId, Hashable], tuple[Rule, Numbers]] = {}
        for shard, state in self._states.items():
            group = shard.pack.layout.group
            for run, number in self._runs(state, present[shard]):
                key = group, self._histories[number]
                if key not in known:
                    known[key] = self._numbers(group, self._steps[number])
                rule, numbers = known[key]
                fusion = state.prepare(rule)
                size = WINDOW if self._config.offload else max(1, run.stop - run.start)
                for start in range(run.start, run.stop, size):
                    part = slice(start, min(start + size, run.stop))
                    yield _Range(state, part, fusion, numbers, decision.factors[group])

    def _runs(self, state: ShardState, present: Sequence[bool]) -> Iterator[tuple[slice, int]]:
        """Maximal ranges of the own span with one history, and the number of a fragment in each.

        A run ends where the next fragment begins: the padding between is zero in gradient, master
        and state, and stays so.
        """
        own, fragments = state.shard.pack.own, state.shard.fragments
        if self._uniform and all(present):
            yield slice(0, own.numel), state.first
            return
        histories = self._histories[state.first : state.first + len(fragments)]
        pairs = list(zip(present, histories, strict=True))
        begins = [n for n, pair in enumerate(pairs) if n == 0 or pair != pairs[n - 1]]
        for begin, end in itertools.pairwise([*begins, len(pairs)]):
            if present[begin]:
                stop = fragments[end].start if end < len(pairs) else own.stop
                yield state.shard.local(fragments[begin].start, stop), state.first + begin

    def _numbers(self, of: GroupId, step: Tensor) -> tuple[Rule, Numbers]:
        """The rule of a group, and the numbers of a step."""
        group = self._optimizer.param_groups[of.position]
        if not self._execute.on_host:
            rule = rules.rule_of(self._kind, group)
            count = step.double()

            def tensors(numbers: tuple[Any, ...]) -> tuple[Any, ...]:
                return rules.as_tensors(numbers, step)

            epilogues = tuple(tensors(e.numbers(count)) for e in self._epilogues)
            return rule, Numbers(step, tensors(rule.numbers(group, count)), epilogues)
        rule = rules.rule_of(self._kind, group, fused=self._by_torch(group))
        numeric = {key: _plain(value) for key, value in group.items() if key != "params"}
        steps = float(step)
        epilogues = tuple(epilogue.numbers(steps) for epilogue in self._epilogues)
        return rule, Numbers(step, rule.numbers(numeric, steps), epilogues)

    def _by_torch(self, group: Mapping[str, Any]) -> bool:
        """Whether torch's fused CPU kernel runs: as the group says, else as ``fuse`` does."""
        if group.get("fused") is not None or group.get("foreach"):
            return bool(group.get("fused"))
        return self._config.fuse == "auto"

    def _count(self, decision: Decision, present: Mapping[Shard, Sequence[bool]]) -> None:
        """Count the step for the fragments that take part in it, without asking the device.

        SGD counts only while it has momentum: the first step with a buffer is special.
        """
        groups, counted = self._optimizer.param_groups, list[bool]()
        for shard in self._states:
            counts = bool(groups[shard.pack.layout.group.position].get("momentum", True))
            counted += [counts and here for here in present[shard]]
        taken = 1.0 - decision.skip.to(MASTER_DTYPE)
        start = 0
        for counts, members in itertools.groupby(counted):  # usually one: a launch for each
            stop = start + len(list(members))
            if counts:
                self._steps[start:stop] += taken
            start = stop
        if self._uniform and all(counted) and self._histories[0] is not None:
            return
        numbers: dict[Hashable, int] = {}
        for place, counts in enumerate(counted):
            if counts or self._histories[place] is not None:
                history = (self._histories[place], counts)
                self._histories[place] = numbers.setdefault(history, len(numbers))
        self._uniform = len(set(self._histories)) == 1

    def switch(self, _mode: str) -> bool:
        """These classes have no ``train`` and ``eval``."""
        return False

    def nbytes(self) -> int:
        """Bytes of the state, 0-dim tensors aside."""
        return sum(state.nbytes for state in self._states.values())

    def sums(self, shard: Shard) -> dict[str, Tensor]:
        """The sums of epilogues by name: per fragment, of its last update; see :class:`.Epilogue`.

        They are of this rank's part of a parameter; a skipped step leaves them as they were.
        """
        return self._states[shard].sums() if shard in self._states else {}

    def fragment_state(self, shard: Shard, number: int, decode: bool = True) -> dict[str, Tensor]:
        """torch's state of one fragment: 1-d fp32 and a 0-dim ``step``; empty before use."""
        state = self._states.get(shard)
        if state is None or self._histories[state.first + number] is None:
            return {}
        step = self._steps[state.first + number]
        fragment = shard.fragments[number]
        part = shard.local(fragment.start, fragment.stop)
        unread = torch.empty(fragment.numel, dtype=MASTER_DTYPE, device="meta")
        views = {n: one.read(part) if decode else unread for n, one in state.stored.items()}
        if self._kind is torch.optim.SGD:  # torch keeps no step for it
            return views if float(step) else {}
        return {"step": step, **views}

    def load_fragment(self, shard: Shard, number: int, state: Mapping[str, Any]) -> None:
        """Overwrite the state of one fragment by tensors of its length."""
        own = self._states.get(shard)
        if own is None:  # frozen: it has none
            return
        fragment, device = shard.fragments[number], shard.published.device
        part = shard.local(fragment.start, fragment.stop)
        steps, history = 0.0, None
        if state:
            names = (*rules.STATE_NAMES[self._kind], *(n for e in self._epilogues for n in e.state))
            for name in names:
                value = state.get(name)
                if value is not None:
                    own.encoded(name).write(part, value.reshape(-1).to(device, MASTER_DTYPE))
            # SGD keeps no step: with a buffer it is past the first one.
            sgd, buffer = self._kind is torch.optim.SGD, state.get("momentum_buffer")
            steps = float(state.get("step", 0.0 if sgd and buffer is None else 2.0))
            history = ("loaded", steps)
        else:
            for encoded in own.stored.values():
                encoded.write(part, torch.zeros(fragment.numel, device=device))
        self._steps[own.first + number] = steps
        self._histories[own.first + number] = history
        self._uniform = False  # until the next step has looked


def _plain(value: Any) -> Any:
    """A learning rate or betas given as tensors, as numbers of the host."""
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value.item() if isinstance(value, Tensor) else value
