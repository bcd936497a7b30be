"""Adam, AdamW and SGD over flat memory: unscale, clip, update and cast the own spans."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.memory.codecs import moment_codec
from shardcast.memory.pack import Pack
from shardcast.memory.shard import Shard
from shardcast.plan.layout import GroupId
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.decide.decision import Decision
from shardcast.step.decide.options import is_constant
from shardcast.step.decide.signal import to_device
from shardcast.step.update import rules
from shardcast.step.update.epilogues import Epilogue
from shardcast.step.update.fusion import Executor, UpdateNumbers, choose_executor
from shardcast.step.update.rules import NoRule, Rule
from shardcast.step.update.state import Key, Range, Ready, ShardState, Update

ALIGNED = 4  # fp32 numbers in 16 bytes; a GPU graph copies operands with another alignment


@dataclass
class _Plan:
    """A plan that holds for every step until gradients or groups change.

    Attributes:
        counting: views of the step counts that grow.
        is_steady: after another such step the same fragments have equal counts.
        ranges: ranges of each shard.
        numbers: numbers of each key, if they are on the device.
        tables: table of each rule, on the device.
    """

    present: Mapping[Pack, Sequence[bool]]
    rules: Sequence[Rule]
    counting: list[Tensor]
    is_steady: bool
    keys: list[Key]
    ranges: dict[Shard, list[Range]]
    numbers: list[UpdateNumbers] = field(default_factory=list)
    tables: list[RuleTable] = field(default_factory=list)

    def serves(self, present: Mapping[Pack, Sequence[bool]], rules: Sequence[Rule]) -> bool:
        """Return whether the plan holds for this step."""
        return self.is_steady and rules == self.rules and present == self.present


class FusedUpdate(Update):
    """An update by one kernel per pack, or for several packs.

    The state is allocated when the first gradient comes. Step counts of fragments are on the
    device, because a skipped step does not count. The host knows which fragments had gradients in
    the same steps and so have equal counts. Fragments with one *history* are updated together.
    Usually that is the whole shard; if gradients were absent, it is runs of it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: ShardcastConfig,
        epilogues: tuple[Epilogue, ...],
        ready: Ready,
    ) -> None:
        super().__init__(optimizer, config, epilogues, ready)
        self._kind = type(optimizer)
        self._steps = torch.zeros(0, dtype=MASTER_DTYPE)  # per fragment, for all shards
        self._histories: list[Hashable] = []  # parallel to the steps; None before the first step
        self._group_of: list[GroupId] = []  # parallel to the steps
        self._groups: list[GroupId] = []  # the same, without repetitions
        self._execute = Executor(on_host=True)
        self._plan: _Plan | None = None

    @property
    def state_names(self) -> tuple[str, ...]:
        names = rules.rule_of(self._kind, self._optimizer.param_groups[0]).state
        return names if self._kind is torch.optim.SGD else ("step", *names)

    def add(self, shard: Shard) -> None:
        self._shards.append(shard)
        if shard.fragments:
            if not self._states:
                home = shard.home
                self._execute = choose_executor(self._config, home.device, home.is_apart)
                self._steps = self._steps.to(home.device)
            state = ShardState(shard, self._config, self.epilogues, len(self._histories))
            self._states[shard] = state
            self._steps = torch.cat([self._steps, self._steps.new_zeros(len(shard.fragments))])
            self._histories += [None] * len(shard.fragments)
            self._group_of += [fragment.slot.group for fragment in shard.fragments]
            self._groups = [*dict.fromkeys(self._group_of)]
            self._plan = None

    @torch.no_grad()
    def __call__(self, decision: Decision) -> None:
        on_host = self._execute.on_host
        if not self._states:  # no state yet: this rank counts like the others
            self._begin_epilogues(decision.taken)
            if self._is_apart and not bool(decision.skip):
                for shard in self._shards:
                    self._finish(shard)
            return
        if (on_host or self._is_apart) and bool(decision.skip):
            for shard in self._states:
                shard.settle()
            return
        for shard in self._states:
            if shard.in_blocks:
                shard.absorb(publishes=True)
        taken = decision.taken
        self._begin_epilogues(taken)
        rules, plan = self._rules(), self._plan
        if plan is None or not plan.serves(decision.present, rules):
            plan = self._plan = self._arranged(decision.present, rules)
        for steps in plan.counting:
            steps.add_(taken)
        self._run(plan, decision, None if on_host else decision.skip)

    def _run(self, plan: _Plan, decision: Decision, skip: Tensor | None) -> None:
        behind = self._behind_rules(self._execute.on_host)
        all_numbers = self._numbers(plan, behind)
        factors, execute = decision.factors, self._execute
        tables = {numbers.rule: numbers for numbers in plan.tables}
        of_tables: dict[Rule, Tensor | None] = {}
        for shard in self._shards:
            shard.home.arrive()
            for one in plan.ranges.get(shard, ()):
                numbers, key = all_numbers[one.key], plan.keys[one.key]
                factor = factors[key.group]
                if one.places is not None:
                    table = tables[key.rule]
                    if key.rule not in of_tables:
                        of_tables[key.rule] = _of_rows([factors[group] for group in table.groups])
                    numbers, factor = numbers._replace(rule=table.table), of_tables[key.rule]
                operands = one.state.operands(one.part, one.fusion, one.places)
                execute(one.fusion, operands, numbers, factor, skip)
            if shard.in_blocks and shard in self._states:
                shard.publish()  # also in a skipped step, with unchanged masters
            self._finish(shard)

    def _rules(self) -> list[Rule]:
        """Return the rule of each group in the shards."""
        groups, on_host = self._optimizer.param_groups, self._execute.on_host
        options = [groups[of.position] for of in self._groups]
        found = [
            rules.rule_of(self._kind, group, fused=on_host and self._by_torch(group))
            for group in options
        ]
        if not on_host and any(rule.decays for rule in found):  # so that they share one kernel
            return [rules.decaying(rule) for rule in found]
        return [*found]

    def _numbers(self, plan: _Plan, behind: Any) -> list[UpdateNumbers]:
        """Return each key's numbers in this step."""
        groups = self._optimizer.param_groups
        for table in plan.tables:
            table.compute(groups)
        if not self._execute.on_host:
            if not self.epilogues:
                return plan.numbers
            return [UpdateNumbers(step, of_rule, *behind) for step, of_rule, *_ in plan.numbers]
        found = []
        for rule, of, place in plan.keys:
            step, group = self._steps[place], groups[of.position]
            numeric = {key: _plain(value) for key, value in group.items() if key != "params"}
            found.append(UpdateNumbers(step, rule.numbers(numeric, float(step)), *behind))
        return found

    def _arranged(self, present: Mapping[Pack, Sequence[bool]], rules: Sequence[Rule]) -> _Plan:
        """Return a plan for a step with these gradients."""
        here = {shard: shard.present(present[shard.pack]) for shard in self._states}
        counting, is_steady = self._count(here)
        keys: dict[Any, int] = {}
        known: list[Key] = []
        ranges: dict[Shard, list[Range]] = {}
        rule_of = dict(zip(self._groups, rules, strict=True))
        for shard, state in self._states.items():
            of_shard = ranges.setdefault(shard, [])
            for run, members, is_present in self._runs(state, here[shard]):
                if not (is_present or self.epilogues):  # epilogues see all ranges
                    continue
                place = state.first + members[0]
                group = self._group_of[place]
                rule = rule_of[group] if is_present else NoRule()
                fusion = state.prepare(rule)
                state.use(members, rule.state)
                key = keys.setdefault((group, self._histories[place], is_present), len(keys))
                if key == len(known):
                    known.append(Key(rule, group, place))
                of_shard.append(Range(state, run, fusion, key))
        plan = _Plan(present, rules, counting, is_steady, known, ranges)
        if not self._execute.on_host:
            steps, uniform = self._steps, len(set(self._histories)) == 1
            for rule in dict.fromkeys(key.rule for key in known):
                plan.tables.append(RuleTable(rule, known, steps, uniform, self._execute.keep))
            found = {n: it for table in plan.tables for n, it in table.numbers.items()}
            plan.numbers = [found[number] for number in range(len(known))]
            plan.ranges = {shard: self._merged(each, plan) for shard, each in ranges.items()}
        return plan

    def _merged(self, ranges: Sequence[Range], plan: _Plan) -> list[Range]:
        """Return ranges, with neighbors of several groups joined if one kernel updates them."""
        row_of = {number: row for it in plan.tables for number, row in it.row_of.items()}
        runs = list[list[Range]]()
        for one in ranges:
            if runs and self._are_alike(runs[-1][-1], one, plan):
                runs[-1].append(one)
            else:
                runs.append([one])
        merged = list[Range]()
        for first, *others in runs:
            if not others or not first.fusion.rule.options:
                merged += [first, *others]
                continue
            row = first.fusion.row
            of_rows = [
                row_of[one.key]
                for one in (first, *others)
                for _ in range(one.part.start, one.part.stop, row)
            ]
            places = to_device(of_rows, torch.int32, self._steps.device)
            part = slice(first.part.start, others[-1].part.stop)
            fusion = replace(first.fusion, by_row=True)
            merged.append(Range(first.state, part, fusion, first.key, places))
        return merged

    def _are_alike(self, one: Range, other: Range, plan: _Plan) -> bool:
        """Return whether the second range continues the first, with an equal step count."""
        if one.part.stop != other.part.start or one.fusion != other.fusion:
            return False
        first, second = plan.keys[one.key].place, plan.keys[other.key].place
        return self._histories[first] == self._histories[second]

    def _runs(
        self, state: ShardState, present: Sequence[bool]
    ) -> Sequence[tuple[slice, range, bool]]:
        """Return maximal ranges of one group and history, with all gradients present or all absent.

        Each comes with the numbers of its fragments within the shard. A run ends where the
        next fragment begins: padding in between is zero in gradient, master and state, and stays
        zero.
        """
        own, fragments = state.shard.pack.own, state.shard.fragments
        places = slice(state.first, state.first + len(fragments))
        kinds = [*zip(present, self._group_of[places], self._histories[places], strict=True)]
        begins = [n for n, kind in enumerate(kinds) if n == 0 or kind != kinds[n - 1]]
        runs = []
        for begin, end in itertools.pairwise([*begins, len(kinds)]):
            stop = fragments[end].start if end < len(kinds) else own.stop
            run = state.shard.local(fragments[begin].start, stop)
            runs.append((run, range(begin, end), present[begin]))
        return runs

    def _by_torch(self, group: Mapping[str, Any]) -> bool:
        """Return whether torch's fused CPU kernel runs, by the group's option, else by ``fuse``."""
        if group.get("fused") is not None or group.get("foreach"):
            return bool(group.get("fused"))
        return self._config.fuse == "auto"

    def _count(self, present: Mapping[Shard, Sequence[bool]]) -> tuple[list[Tensor], bool]:
        """Note the fragments in which a step counts.

        SGD counts only while it has momentum, because its first step with a buffer is special.

        Returns:
            Views of their counts; and whether after another such step the same fragments are equal.
        """
        groups = self._optimizer.param_groups
        counts_in = {of: bool(groups[of.position].get("momentum", True)) for of in self._groups}
        here = itertools.chain.from_iterable(present[shard] for shard in self._states)
        counted = [
            counts_in[group] and is_here
            for group, is_here in zip(self._group_of, here, strict=True)
        ]
        counting, start = [], 0
        for counts, members in itertools.groupby(counted):  # usually one; each takes a launch
            stop = start + len(list(members))
            if counts:
                counting.append(self._steps[start:stop])
            start = stop
        self._histories = _grown(self._histories, counted)
        return counting, _grown(self._histories, counted) == self._histories

    def nbytes(self) -> int:
        return sum(state.nbytes(averages=False) for state in self._states.values())

    def fragment_state(self, shard: Shard, number: int, decode: bool = True) -> dict[str, object]:
        """Return state as :meth:`Update.fragment_state`: 1-d fp32, and ``step``; empty at first."""
        averages = super().fragment_state(shard, number, decode)
        state = self._states.get(shard)
        if state is None or self._histories[state.first + number] is None:
            return averages
        # fragments with one history share a count, so it must not be edited
        with torch.inference_mode():
            step = self._steps[state.first + number].clone()
        sgd = self._kind is torch.optim.SGD
        if sgd and not float(step):
            return averages
        # torch keeps no step for SGD. Stochastic rounding needs it for the same bits after a
        # resume.
        without_step = sgd and not moment_codec(self._config, "").by_chance
        views = state.read(number, rules.STATE_NAMES[self._kind], decode)
        return {**({} if without_step else {"step": step}), **views, **averages}

    def begin_state(self) -> None:
        for shard, own in self._states.items():
            for number in range(len(shard.fragments)):
                group = self._optimizer.param_groups[self._group_of[own.first + number].position]
                if names := rules.rule_of(self._kind, group).state:
                    self._load_state(shard, number, {"step": 1.0})
                    own.use([number], names)

    def _load_state(self, shard: Shard, number: int, state: Mapping[str, Any]) -> None:
        own = self._states[shard]
        own.take(number, rules.STATE_NAMES[self._kind], state)
        # torch's SGD saves no step; if it has a buffer, the first step is done.
        sgd, buffer = self._kind is torch.optim.SGD, state.get("momentum_buffer")
        steps = float(state.get("step", 0.0 if sgd and buffer is None else 2.0)) if state else 0.0
        self._steps[own.first + number] = steps
        self._histories[own.first + number] = ("loaded", steps) if state else None
        self._plan = None


def _grown(histories: Sequence[Hashable], counted: Sequence[bool]) -> list[Hashable]:
    """Return histories after one more step; equal histories stay equal."""
    numbers: dict[Hashable, int] = {}
    return [
        numbers.setdefault((history, counts), len(numbers))
        if counts or history is not None
        else history
        for history, counts in zip(histories, counted, strict=True)
    ]


def _of_rows(factors: Sequence[Tensor | None]) -> Tensor | None:
    """Return factors as one tensor, 0-dim if all are the same."""
    if all(factor is factors[0] for factor in factors):
        return factors[0]
    some = next(factor for factor in factors if factor is not None)
    return torch.stack([torch.ones_like(some) if it is None else it for it in factors])


def _plain(value: object) -> object:
    """Return a learning rate or betas as host numbers if they are tensors."""
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value.item() if isinstance(value, Tensor) else value


class RuleTable:
    """The numbers of one rule: a table with a row for each key with that rule.

    Args:
        keys: keys of the whole update.
        steps: step counts of all fragments.
        uniform: whether these are equal.
        keep: :meth:`.Executor.keep`.

    Attributes:
        rule: the rule.
        numbers: numbers of each key of this rule, by its index among all keys; always in the same
            memory.
        table: the numbers of all of these keys, and ``groups`` of its rows.
        row_of: row of each of these keys.
    """

    def __init__(
        self,
        rule: Rule,
        keys: Sequence[Key],
        steps: Tensor,
        uniform: bool,
        keep: Callable[[Tensor], Tensor],
    ) -> None:
        self.rule, self._steps, device = rule, steps, steps.device
        own = {number: key for number, key in enumerate(keys) if key.rule == rule}
        self._groups = [*dict.fromkeys(key.group for key in own.values())]
        count = rule.count
        places = [key.place for key in own.values()]
        self._places = None if uniform else to_device(places, torch.int64, device)
        of_rows = [self._groups.index(key.group) for key in own.values()]
        several = len(self._groups) > 1
        self._of_rows = to_device(of_rows, torch.int64, device) if several else None
        self._of_groups = torch.zeros(
            len(self._groups), count, 3, dtype=torch.float64, device=device
        )
        # values on the device; NaN if they come from tensors
        self._known = [[math.nan] * (3 * count) for _ in self._groups]
        self._coefficients = self._of_groups  # coefficients of each row, or one for all rows
        rows = torch.zeros(len(own), -(-count // ALIGNED) * ALIGNED, device=device)
        self._table = rows[:, :count]
        self.table = keep(rows) if len(own) > 1 else rows
        self.groups = [key.group for key in own.values()]
        self.row_of = {number: row for row, number in enumerate(own)}
        self._options: list[object] = []  # options of all groups in the last step
        self._are_constants = False
        self.numbers: dict[int, UpdateNumbers] = {}
        for number, place, row in zip(own, places, self._table.unbind(), strict=True):
            of_rule = keep(row) if count else ()
            self.numbers[number] = UpdateNumbers(keep(steps[place]), of_rule)

    def compute(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Compute the numbers of this step."""
        if not self._table.numel():
            return
        groups = [param_groups[of.position] for of in self._groups]
        options = [group[name] for group in groups for name in self.rule.options]
        # By identity, because comparing a tensor with a number would wait for its device.
        if not (self._are_constants and all(map(operator.is_, options, self._options))):
            self._options, self._are_constants = options, all(map(is_constant, options))
            self._upload(groups)
        scales, bases, exponents = self._coefficients.unbind(2)
        steps = self._steps[0] if self._places is None else self._steps[self._places][:, None]
        powers = (1.0 - bases**steps) ** exponents
        torch.mul(scales.expand_as(self._table), powers, out=self._table)

    def _upload(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Copy the coefficients of rows in ``groups`` to the device."""
        changed = False
        for known, there, group in zip(self._known, self._of_groups, groups, strict=True):
            values = itertools.chain.from_iterable(self.rule.coefficients(group))
            for number, value in enumerate(values):
                # By kernels, usually one or two for a new learning rate. A copy from the host would
                # wait, or be read again when a captured graph is replayed.
                if isinstance(value, Tensor):
                    there.view(-1)[number].fill_(0).add_(value)
                    changed, known[number] = True, math.nan
                elif value != known[number]:
                    there.view(-1)[number].fill_(value)
                    changed, known[number] = True, value
        if changed and self._of_rows is not None:
            self._coefficients = self._of_groups.index_select(0, self._of_rows)
