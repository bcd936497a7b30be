"""Ranges of an update, and batches of them: one compiled call updates all ranges of a batch.

A call of a compiled function costs the host as much as 40 or 100 microseconds, and 10 for each
range, whatever is in it, and for a GPU a batch is one kernel (Inductor's combo kernels). A batch
has :data:`BATCH` ranges: with a number of its own for each model, the graph would be compiled again
whenever a gradient is absent, and the more ranges it has, the longer that takes. Where ranges do
not make full batches the longest ones are cut in two, which changes no bit.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast._compat import inductor
from shardcast.plan.layout import GroupId
from shardcast.step.decide.options import is_constant
from shardcast.step.decide.signal import to_device
from shardcast.step.fallback import or_eager
from shardcast.step.update.fusion import Fusion, UpdateScalars, in_pieces, update_
from shardcast.step.update.numbers_of_rules import StepNumbers
from shardcast.step.update.rules import Rule
from shardcast.step.update.state import Key, Range

BATCH, FEWEST = 8, 4  # fewer ranges than these are called one by one: not worth a graph of its own
LEAST = 2  # rows of a range in a batch: one graph serves all numbers of rows but 0 and 1


@dataclass
class Batch:
    """The ranges of one :class:`.Fusion`, with operands of equal dtypes, that a call updates.

    The first call is made by Dynamo, which sees that a graph serves; the others go to the graph
    themselves, as long as tensors that are others in each step are like the first ones.

    Attributes:
        operands: of each range in the shape of :func:`.fusion.update_`.
        numbers: of the rule for each range, ``(BATCH, numbers)``, no view to a compiler; the same
            memory in every step.
        factors: of each range, where these have several, in the same way.
        moves: whether gradients have other memory in each step, and must not be kept.
    """

    fusion: Fusion
    operands: list[list[Tensor]]
    numbers: Tensor
    factors: Tensor
    moves: bool = False
    _last_call: inductor.KeptCall = field(default_factory=inductor.KeptCall)

    def __call__(self, of_step: StepTensors) -> None:
        """Update the ranges, see :func:`update_all_`."""
        grads, tensors = [operands[0] for operands in self.operands], of_step.tensors
        if self.moves:
            tensors, of_grads = [*tensors, *grads], inductor.kinds(grads)
        else:
            of_grads = (*map(id, grads),)  # which are kept, so that no other one has such a number
        kind = of_step.kinds, of_grads
        if self._last_call.serves(kind):
            self._last_call(tensors)
            return
        bound = [tensor for operands in self.operands for tensor in operands[self.moves :]]
        bound.append(self.numbers)
        epilogues, steps, factor, skip, of_ranges = of_step.arguments
        if of_ranges:
            bound.append(factor := self.factors)
        dtypes = tuple(operand.dtype for operand in self.operands[0])
        absent = tuple(None if scalar is None else scalar.dim() for scalar in (steps, factor))
        kernel = _kernel(self.fusion, dtypes, absent)
        kernel(self.fusion, self.operands, self.numbers, epilogues, steps, factor, skip)
        self._last_call.keep(kind, bound, tensors)


class StepTensors:
    """The numbers of one step for the batches of a rule.

    Args:
        behind: numbers of the epilogues, and their counts of steps.
        factor: 0-dim of all ranges.
        of_ranges: each range has a factor of its own, in the memory of its batch.

    Attributes:
        arguments: these.
        tensors, kinds: those tensors that are others in the next step, and of which kinds they are.
    """

    def __init__(
        self, behind: tuple[tuple[tuple[Any, ...], ...], Tensor | None], factor: Tensor | None,
        skip: Tensor, of_ranges: bool,
    ) -> None:  # fmt: skip
        epilogues, steps = behind
        self.arguments = epilogues, steps, factor, skip, of_ranges
        numbers = itertools.chain.from_iterable(epilogues)
        tensors = (steps, factor, skip, *numbers)
        self.tensors = [tensor for tensor in tensors if tensor is not None]
        absent = steps is None, factor is None, of_ranges
        self.kinds = *absent, *map(len, epilogues), *inductor.kinds(self.tensors)


def update_all_(
    fusion: Fusion, ranges: Sequence[Sequence[Tensor]], numbers: Tensor,
    epilogues: tuple[tuple[Any, ...], ...], epilogue_steps: Tensor | None,
    factor: Tensor | None, skip: Tensor,
) -> None:  # fmt: skip
    """Run :func:`.fusion.update_` on each of several ranges.

    Args:
        ranges: of each its operands.
        numbers: of each those of the rule, ``(ranges, numbers)``.
        epilogues, epilogue_steps: as in :class:`.UpdateScalars`.
        factor: 0-dim for all ranges, or 1-d for each.
    """
    for operands, scalars, its_factor in _each(ranges, numbers, epilogues, epilogue_steps, factor):
        update_(fusion, operands, scalars, its_factor, skip)


def _each(
    ranges: Sequence[Sequence[Tensor]], numbers: Tensor,
    epilogues: tuple[tuple[Any, ...], ...], epilogue_steps: Tensor | None, factor: Tensor | None,
) -> Iterator[tuple[Sequence[Tensor], UpdateScalars, Tensor | None]]:  # fmt: skip
    """Give operands, numbers and factor of each range. Light fusions ask for no count of steps."""
    shared = factor is None or factor.dim() == 0
    factors = [factor] * len(ranges) if shared else factor.unbind()  # type: ignore[union-attr]
    for operands, row, its_factor in zip(ranges, numbers.unbind(), factors, strict=True):
        scalars = UpdateScalars(None, row.unbind(), epilogues, epilogue_steps)  # type: ignore[arg-type]
        yield operands, scalars, its_factor


def _one_by_one(
    fusion: Fusion, ranges: Sequence[Sequence[Tensor]], numbers: Tensor,
    epilogues: tuple[tuple[Any, ...], ...], epilogue_steps: Tensor | None,
    factor: Tensor | None, skip: Tensor,
) -> None:  # fmt: skip
    """Run :func:`update_all_` eagerly, a piece at a time."""
    for operands, scalars, its_factor in _each(ranges, numbers, epilogues, epilogue_steps, factor):
        in_pieces(fusion, operands, scalars, its_factor, skip)


@functools.cache  # one compiled function, so that models of one process share its graph
def _kernel(fusion: Fusion, dtypes: tuple[torch.dtype, ...], *_: Any) -> Callable[..., None]:
    name = f"the update of several ranges by {fusion.rule} of gradients in {dtypes[0]}"
    return or_eager(inductor.compiled(update_all_, several=True, notes=True), _one_by_one, name)


def in_batches(ranges: Sequence[Range]) -> tuple[list[list[Range]], list[Range]]:
    """Sort the ranges of one rule into batches, and ranges that are called one by one: few of a
    kind, and ends that are no whole rows."""
    kinds: dict[Any, list[Range]] = {}
    for part in ranges:
        shard = part.state.shard
        assert shard.grads is not None
        # Dtypes of all other operands follow from these.
        kind = part.fusion, shard.grads.own.dtype, shard.published.dtype
        kinds.setdefault(kind, []).append(part)
    batches: list[list[Range]] = []
    alone: list[Range] = []
    for members in kinds.values():
        whole: list[Range] = []
        ends: list[Range] = []
        for member in members:
            rows, row = member.rows, member.fusion.row
            stop = member.part.start + rows * row
            if rows < LEAST or len(members) < FEWEST or not _is_light(member.fusion):
                ends.append(member)
            elif stop < member.part.stop:
                first, end = member.cut(stop)
                whole.append(first)
                ends.append(end)
            else:
                whole.append(member)
        _fill_up(whole)
        count = len(whole) // BATCH * BATCH
        batches += [whole[start : start + BATCH] for start in range(0, count, BATCH)]
        alone += [*ends, *whole[count:]]
    return batches, alone


def _is_light(fusion: Fusion) -> bool:
    """Return whether a graph of several is compiled in time: other codecs take it minutes."""
    compares = any(epilogue.compares for epilogue in fusion.epilogues)
    return not compares and all(codec.plain for codec in (fusion.master, *fusion.state))


def _fill_up(whole: list[Range]) -> None:
    """Cut the longest ranges in two until they make full batches, if they are long enough."""
    while len(whole) % BATCH:
        number = max(range(len(whole)), key=lambda n: whole[n].rows)
        longest = whole[number]
        if longest.rows < 2 * LEAST:
            return
        half = longest.part.start + longest.rows // 2 * longest.fusion.row
        whole[number : number + 1] = longest.cut(half)


class RuleNumbers:
    """The numbers of one rule on the device, in every step of a plan, and its batches.

    Args:
        keys: of all rules.
        batches: of all rules.
        param_groups: of the optimizer.
        steps: the counts of all fragments.
        uniform: whether they are equal.
        compiled: whether numbers are computed by a graph, which takes a C++ compiler as long as the
            whole update.

    Attributes:
        scalars: of each key of this rule, by its place; in the same memory in every step.
    """

    def __init__(
        self, rule: Rule, keys: Sequence[Key], batches: Sequence[Sequence[Range]],
        param_groups: Sequence[Mapping[str, Any]], steps: Tensor, uniform: bool, compiled: bool,
    ) -> None:  # fmt: skip
        self._rule, device = rule, steps.device
        numbers = [number for number, key in enumerate(keys) if key.rule == rule]
        own = [batch for batch in batches if keys[batch[0].key].rule == rule]
        # A row for each range of the batches, and behind them for each key. What a batch has begins
        # at a multiple of 16 bytes then; Inductor would copy on a GPU what does not, in each call.
        of_batches = [keys[part.key] for batch in own for part in batch]
        rows = of_batches + [keys[number] for number in numbers]
        self._groups = [*dict.fromkeys(key.group for key in rows)]
        of = [self._groups.index(key.group) for key in rows]
        self._of = to_device(of, torch.int64, device) if len(self._groups) > 1 else None
        fragments = [key.place for key in rows]
        self._places = None if uniform else to_device(fragments, torch.int64, device)
        count = len(rule.terms(param_groups[self._groups[0].position]))
        table = StepNumbers(of, count, steps, self._places, compiled)
        self._table = table if count else None
        self._options: list[Any] = []  # of all groups, in the last step
        self._are_constants = False
        self._factors = torch.ones(len(rows), device=device)
        # Kept apart from what they are views of: a compiled graph would be bound to that, too.
        self.scalars: dict[int, UpdateScalars] = {}
        for row, number in enumerate(numbers, len(of_batches)):
            step = _compat.own_storage(steps[fragments[row]])
            of_rule = _compat.own_storage(table.table[row]).unbind() if count else ()
            self.scalars[number] = UpdateScalars(step, tuple(of_rule))
        self._batches: list[Batch] = []
        start = 0
        for batch in own:
            places = slice(start, start := start + len(batch))
            operands = [part.fetch_in_rows() for part in batch]
            in_batch, factors = (
                _compat.own_storage(of_all[places]) for of_all in (table.table, self._factors)
            )
            moves = not all(grads.stays for part in batch if (grads := part.state.shard.grads))
            self._batches.append(Batch(batch[0].fusion, operands, in_batch, factors, moves))

    def compute(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Compute the numbers of this step."""
        if self._table is None:
            return
        groups = [param_groups[of.position] for of in self._groups]
        options = [group[name] for group in groups for name in self._rule.options]
        # By identity: to compare a tensor with a number would wait for its device.
        if self._are_constants and all(map(operator.is_, options, self._options)):
            self._table(())
            return
        self._options, self._are_constants = options, all(map(is_constant, options))
        self._table([self._rule.terms(group) for group in groups])

    def run(
        self, factors: Mapping[GroupId, Tensor | None],
        behind: tuple[tuple[tuple[Any, ...], ...], Tensor | None], skip: Tensor | None,
    ) -> None:  # fmt: skip
        """Update the batches.

        Args:
            behind: numbers of the epilogues, and their counts of steps.
        """
        if not self._batches:
            return
        assert skip is not None
        of_groups = [factors[group] for group in self._groups]
        factor = of_groups[0]
        shared = all(other is factor for other in of_groups)
        if not shared:
            assert self._of is not None
            without = torch.ones_like(self._factors[0])
            several = torch.stack([without if it is None else it for it in of_groups])
            torch.index_select(several, 0, self._of, out=self._factors)
        of_step = StepTensors(behind, factor if shared else None, skip, not shared)
        for batch in self._batches:
            batch(of_step)
