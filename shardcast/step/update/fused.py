"""Adam, AdamW and SGD over flat memory: unscale, clip, update and cast the own spans."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.memory.codecs import moment_codec
from shardcast.memory.shard import Shard
from shardcast.plan.layout import GroupId
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.decide.decision import Decision
from shardcast.step.update import rules
from shardcast.step.update.epilogues import Epilogue
from shardcast.step.update.fusion import Executor, Fusion, UpdateScalars, choose_executor
from shardcast.step.update.rules import NoRule, Rule, StepNumbers
from shardcast.step.update.state import ShardState, Update

WINDOW = 1 << 22  # elements that are on the device at a time where masters and state are not


class _Range(NamedTuple):
    """A part of a shard, and how it is updated."""

    state: ShardState
    part: slice
    fusion: Fusion
    numbers: UpdateScalars
    factor: Tensor | None


def _transfers(config: ShardcastConfig, device: torch.device) -> Callable[..., None] | None:
    """How windows travel beside each other, if an option has them do so on this device."""
    options = config.extensions().values()
    asked = (it.transfers(device) for it in options if it.transfers is not None)
    return next(filter(None, asked), None)


class FusedUpdate(Update):
    """One kernel per pack.

    The state is allocated when the first gradient comes. How many steps a fragment has taken is
    counted on the device, for a skipped one does not count. The host knows which fragments had
    gradients in the same steps, and so have equal counts: fragments with one *history* are updated
    together. Usually that is the whole shard; where gradients were absent it is runs of it.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, config: ShardcastConfig,
        epilogues: tuple[Epilogue, ...] = (),
    ) -> None:  # fmt: skip
        super().__init__(optimizer, config, epilogues)
        self._kind = type(optimizer)
        self._steps = torch.zeros(0, dtype=MASTER_DTYPE)  # per fragment of all shards
        self._histories: list[Hashable] = []  # parallel to the steps; None before the first one
        self._uniform = True  # whether all histories are equal
        self._step_numbers: dict[GroupId, StepNumbers] = {}
        self._execute = Executor(compiled=False, on_host=True)
        self._state_on_host = self._config.state_on_host
        self._transfer: Callable[..., None] | None = None

    def add(self, shard: Shard) -> None:
        if shard.fragments:
            device = shard.published.device
            if not self._states:
                self._execute = choose_executor(self._config, device)
                self._transfer = _transfers(self._config, device)
                self._steps = self._steps.to(device)
            state = ShardState(shard, self._config, self.epilogues, len(self._histories))
            self._states[shard] = state
            self._steps = torch.cat([self._steps, self._steps.new_zeros(len(shard.fragments))])
            self._histories += [None] * len(shard.fragments)
            self._uniform = len(set(self._histories)) == 1

    @torch.no_grad()
    def __call__(self, decision: Decision) -> None:
        on_host = self._execute.on_host
        if not self._states:  # yet: this rank counts as the others do
            self._begin_epilogues(~decision.skip)
            return
        if on_host and bool(decision.skip):
            for shard in self._states:
                shard.settle()
            return
        behind = [shard for shard in self._states if shard.pack.cast is not None]
        for shard in behind:
            shard.absorb(publishes=True)
        present = {shard: shard.present(decision.present[shard.pack]) for shard in self._states}
        taken = ~decision.skip
        self._count(taken, present)
        self._begin_epilogues(taken)
        skip = None if on_host else decision.skip

        def fetch(one: _Range) -> list[Tensor]:
            return one.state.fetch(one.part, one.fusion)

        def update(one: _Range, operands: list[Tensor]) -> None:
            self._execute(one.fusion, operands, one.numbers, one.factor, skip)

        def send(one: _Range, operands: list[Tensor]) -> None:
            one.state.send(one.part, one.fusion, operands)

        if self._transfer is not None:
            self._transfer(self._ranges(decision, present), fetch, update, send)
        else:
            for one in self._ranges(decision, present):
                operands = fetch(one)
                update(one, operands)
                send(one, operands)
        for shard in behind:  # also in a skipped step: of masters as they were
            shard.publish()

    def _ranges(
        self, decision: Decision, present: Mapping[Shard, Sequence[bool]]
    ) -> Iterator[_Range]:
        """What is updated at a time: runs of present fragments, cut where copies are made.

        Epilogues see the others too.
        """
        known: dict[tuple[GroupId, Hashable, bool], tuple[Rule, UpdateScalars]] = {}
        on_host = self._execute.on_host
        epilogues = self._active
        of_all = bool(epilogues) and any(not epilogue.follows for epilogue in epilogues)
        for shard, state in self._states.items():
            group = shard.pack.layout.group
            for run, number, is_present in self._runs(state, present[shard]):
                if not (is_present or of_all):
                    continue
                key = group, self._histories[number], is_present
                if key not in known:
                    step = self._steps[number]
                    rule, of_rule = self._numbers(group, step) if is_present else (NoRule(), ())
                    known[key] = rule, self._numbers_of(step, of_rule, on_host)
                rule, numbers = known[key]
                fusion = state.prepare(rule, epilogues)
                for part in _windows(run) if self._state_on_host else (run,):
                    yield _Range(state, part, fusion, numbers, decision.factors[group])

    def _runs(
        self, state: ShardState, present: Sequence[bool]
    ) -> Sequence[tuple[slice, int, bool]]:
        """Maximal ranges of the own span with one history, all present or all absent.

        Each with the place of a fragment in it among those of all shards.

        A run ends where the next fragment begins: the padding between is zero in gradient, master
        and state, and stays so.
        """
        own, fragments = state.shard.pack.own, state.shard.fragments
        if self._uniform and all(present):
            return ((slice(0, own.stop - own.start), state.first, True),)
        histories = self._histories[state.first : state.first + len(fragments)]
        pairs = list(zip(present, histories, strict=True))
        begins = [n for n, pair in enumerate(pairs) if n == 0 or pair != pairs[n - 1]]
        runs = []
        for begin, end in itertools.pairwise([*begins, len(pairs)]):
            stop = fragments[end].start if end < len(pairs) else own.stop
            run = state.shard.local(fragments[begin].start, stop)
            runs.append((run, state.first + begin, present[begin]))
        return runs

    def _numbers(self, of: GroupId, step: Tensor) -> tuple[Rule, tuple[Any, ...]]:
        """The rule of a group, and its numbers of a step."""
        group = self._optimizer.param_groups[of.position]
        if not self._execute.on_host:
            rule = rules.rule_of(self._kind, group)
            if of not in self._step_numbers:
                self._step_numbers[of] = StepNumbers()
            return rule, self._step_numbers[of](rule.terms(group), step)
        rule = rules.rule_of(self._kind, group, fused=self._by_torch(group))
        numeric = {key: _plain(value) for key, value in group.items() if key != "params"}
        return rule, rule.numbers(numeric, float(step))

    def _by_torch(self, group: Mapping[str, Any]) -> bool:
        """Whether torch's fused CPU kernel runs: as the group says, else as ``fuse`` does."""
        if group.get("fused") is not None or group.get("foreach"):
            return bool(group.get("fused"))
        return self._config.fuse == "auto"

    def _count(self, taken: Tensor, present: Mapping[Shard, Sequence[bool]]) -> None:
        """Count the step for the fragments that take part in it, without asking the device.

        Args:
            taken: 0-dim, 0 if the step is skipped, else 1.

        SGD counts only while it has momentum: the first step with a buffer is special.
        """
        groups, counted = self._optimizer.param_groups, list[bool]()
        for shard in self._states:
            counts = bool(groups[shard.pack.layout.group.position].get("momentum", True))
            counted += [counts and here for here in present[shard]]
        start = 0
        for counts, members in itertools.groupby(counted):  # usually one: a launch for each
            stop = start + len(list(members))
            if counts:
                self._steps[start:stop].add_(taken)
            start = stop
        if self._uniform and all(counted) and self._histories[0] is not None:
            return
        numbers: dict[Hashable, int] = {}
        for place, counts in enumerate(counted):
            if counts or self._histories[place] is not None:
                history = (self._histories[place], counts)
                self._histories[place] = numbers.setdefault(history, len(numbers))
        self._uniform = len(set(self._histories)) == 1

    def nbytes(self) -> int:
        return sum(state.nbytes(averages=False) for state in self._states.values())

    def fragment_state(self, shard: Shard, number: int, decode: bool = True) -> dict[str, Any]:
        """See :meth:`Update.fragment_state`: 1-d fp32 and a 0-dim ``step``; empty before use."""
        averages = super().fragment_state(shard, number, decode)
        state = self._states.get(shard)
        if state is None or self._histories[state.first + number] is None:
            return averages
        with torch.inference_mode():  # fragments with one history share a count: not to be edited
            step = self._steps[state.first + number].clone()
        sgd = self._kind is torch.optim.SGD
        if sgd and not float(step):
            return averages
        # torch keeps none for SGD; chance needs it for the same bits after a resume.
        without_step = sgd and not moment_codec(self._config, "").by_chance
        views = state.read(number, rules.STATE_NAMES[self._kind], decode)
        return {**({} if without_step else {"step": step}), **views, **averages}

    def begin_state(self) -> None:
        for shard, own in self._states.items():
            group = self._optimizer.param_groups[shard.pack.layout.group.position]
            if names := rules.rule_of(self._kind, group).state:
                for name in names:
                    own.encoded(name)
                for number in range(len(shard.fragments)):
                    self._load_state(shard, number, {"step": 1.0})

    def _load_state(self, shard: Shard, number: int, state: Mapping[str, Any]) -> None:
        own = self._states[shard]
        own.take(number, rules.STATE_NAMES[self._kind], state)
        # SGD keeps no step: with a buffer it is past the first one.
        sgd, buffer = self._kind is torch.optim.SGD, state.get("momentum_buffer")
        steps = float(state.get("step", 0.0 if sgd and buffer is None else 2.0)) if state else 0.0
        self._steps[own.first + number] = steps
        self._histories[own.first + number] = ("loaded", steps) if state else None
        self._uniform = False  # until the next step has looked


def _windows(run: slice) -> Iterator[slice]:
    for start in range(run.start, run.stop, WINDOW):
        yield slice(start, min(start + WINDOW, run.stop))


def _plain(value: Any) -> Any:
    """A learning rate or betas given as tensors, as numbers of the host."""
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value.item() if isinstance(value, Tensor) else value
