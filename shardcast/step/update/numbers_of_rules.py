"""The numbers of rules in a step, computed on the device, where the count of steps is.

The host gives learning rates and other constants, and only where they change: a step launches a few
kernels for a rule, whatever the number of groups is.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast.step.decide.options import is_constant
from shardcast.step.decide.signal import to_device
from shardcast.step.update.fusion import UpdateScalars
from shardcast.step.update.rules import Rule
from shardcast.step.update.state import Key

ALIGNED = 4  # fp32 numbers in 16 bytes: a graph for a GPU would copy what begins elsewhere


class RuleNumbers:
    """The numbers of one rule: a table with a row for each key that has the rule.

    Args:
        keys: of the whole update.
        steps: the counts of all fragments.
        uniform: whether these are equal.
        keep: :meth:`.Executor.keep`.

    Attributes:
        rule: the rule.
        scalars: of each key of this rule, by its place among all; the same memory in every step.
        table: the same for all of these keys, and ``groups`` of its rows.
        row_of: the row of each of these keys.
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
        self._known = [[math.nan] * (3 * count) for _ in self._groups]  # there; NaN: of tensors
        self._terms = self._of_groups  # of each row, or one for all
        rows = torch.zeros(len(own), -(-count // ALIGNED) * ALIGNED, device=device)
        self._table = rows[:, :count]
        self.table = keep(rows) if len(own) > 1 else rows
        self.groups = [key.group for key in own.values()]
        self.row_of = {number: row for row, number in enumerate(own)}
        self._options: list[Any] = []  # of all groups, in the last step
        self._are_constants = False
        self.scalars: dict[int, UpdateScalars] = {}
        for number, place, row in zip(own, places, self._table.unbind(), strict=True):
            of_rule = keep(row) if count else ()
            self.scalars[number] = UpdateScalars(keep(steps[place]), of_rule)

    def compute(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Compute the numbers of this step."""
        if not self._table.numel():
            return
        groups = [param_groups[of.position] for of in self._groups]
        options = [group[name] for group in groups for name in self.rule.options]
        # By identity: to compare a tensor with a number would wait for its device.
        if not (self._are_constants and all(map(operator.is_, options, self._options))):
            self._options, self._are_constants = options, all(map(is_constant, options))
            self._upload(groups)
        scales, bases, exponents = self._terms.unbind(2)
        steps = self._steps[0] if self._places is None else self._steps[self._places][:, None]
        powers = (1.0 - bases**steps) ** exponents
        torch.mul(scales.expand_as(self._table), powers, out=self._table)

    def _upload(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Have the terms of rows on the device as they are in ``groups``."""
        changed = False
        for known, there, group in zip(self._known, self._of_groups, groups, strict=True):
            for number, value in enumerate(itertools.chain.from_iterable(self.rule.terms(group))):
                # By kernels, as a rule one or two for another learning rate: a copy from the host
                # would wait, or be read again when a captured graph is replayed.
                if isinstance(value, Tensor):
                    there.view(-1)[number].fill_(0).add_(value)
                    changed, known[number] = True, math.nan
                elif value != known[number]:
                    there.view(-1)[number].fill_(value)
                    changed, known[number] = True, value
        if changed and self._of_rows is not None:
            self._terms = self._of_groups.index_select(0, self._of_rows)
