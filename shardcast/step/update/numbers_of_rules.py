"""The numbers of rules in a step, computed on the device, where the count of steps is.

The host gives learning rates and other constants, and only where they change: a step launches a few
kernels for all ranges of a rule, or one graph, whatever the number of groups is.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardcast._compat import inductor
from shardcast.step.decide.signal import to_device
from shardcast.step.fallback import or_eager

if TYPE_CHECKING:
    from shardcast.step.update.rules import Term


class StepNumbers:
    """The numbers of a step for ranges of one rule, computed on the device.

    Args:
        groups: of each range, the place of its parameter group among those of a call.
        count: how many numbers a range has.
        steps: the counts of all fragments.
        places: of each range, whose count it has; ``None``: all counts are equal.
        compiled: by one graph, else in four launches.

    Attributes:
        table: those of the last call, ``(ranges, count)``, fp32; the same memory in every step.
    """

    def __init__(
        self, groups: Sequence[int], count: int, steps: Tensor, places: Tensor | None,
        compiled: bool,
    ) -> None:  # fmt: skip
        device = steps.device
        if compiled:  # by one graph, however many ranges and groups there are: for two at least
            groups = [*groups, *[groups[0]] * (2 - len(groups))]
            if places is None:
                places = steps.new_zeros(len(groups), dtype=torch.int64)
            places = torch.cat([places, places[:1]])[: len(groups)]
        self._run = _kernel(len(steps) == 1) if compiled else numbers_
        self._steps, self._places = steps, places
        self._last_call = inductor.KeptCall() if compiled else None
        of_groups = torch.zeros(1 + max(groups), count, 3, dtype=torch.float64, device=device)
        self._of_groups = of_groups
        self._values = [[math.nan] * (3 * count) for _ in of_groups]  # on the device; NaN: tensors
        is_one = len(of_groups) == 1 and not compiled
        self._groups = None if is_one else to_device(groups, torch.int64, device)
        self._of_ranges = of_groups
        self.table = torch.zeros(len(groups), count, device=device)

    def __call__(self, terms: Sequence[Sequence[Term]]) -> None:
        """Compute the numbers of a step.

        Args:
            terms: of each parameter group; none: those of the last call.
        """
        changed = False
        for group, of_group in enumerate(terms):
            known = self._values[group]
            for number, value in enumerate(itertools.chain.from_iterable(of_group)):
                # By kernels, as a rule one or two for another learning rate: a copy from the host
                # would wait, or be read again when a captured graph is replayed.
                if isinstance(value, Tensor):
                    self._of_groups[group].view(-1)[number].fill_(0).add_(value)
                    changed, known[number] = True, math.nan
                elif value != known[number]:
                    self._of_groups[group].view(-1)[number].fill_(value)
                    changed, known[number] = True, value
        if self._groups is not None and changed:
            self._of_ranges = self._of_groups.index_select(0, self._groups)
        call, places, terms_of_ranges = self._last_call, self._places, [self._of_ranges]
        if call is not None and call.serves(None):  # of which kind it is never changes
            call(terms_of_ranges)
            return
        self._run(self._of_ranges, self._steps, places, self.table)
        if call is not None and places is not None:
            call.keep(None, [self._steps, self.table, places], terms_of_ranges)


def numbers_(of_ranges: Tensor, steps: Tensor, places: Tensor | None, table: Tensor) -> None:
    """Overwrite the table of :class:`StepNumbers`.

    Args:
        of_ranges: the terms, fp64 of shape ``(ranges or 1, count, 3)``.
    """
    scales, bases, exponents = of_ranges.unbind(2)
    powers = bases ** (steps[0] if places is None else steps[places][:, None])
    torch.mul(scales.expand_as(table), (1.0 - powers) ** exponents, out=table)


@functools.cache  # one compiled function, so that models of one process share its graph
def _kernel(_is_one_count: bool) -> Callable[..., None]:
    graph = inductor.compiled(numbers_, several=True, notes=True)
    return or_eager(graph, numbers_, "the numbers of a step")
