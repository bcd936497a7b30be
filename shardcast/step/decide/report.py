"""The report of a decision: numbers that the host reads when they have arrived."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardcast.step.decide.signal import Signal, to_device


class Counts(NamedTuple):
    """The parts of a report behind its norm, and of the totals that are counted of them.

    Attributes:
        skipped, in_row: the skipped steps, so far and in a row; in a report 1.
        last: the mistakes of signals that do not add theirs up: of the norm, in the last skipped
            step.
        mistakes: those of all other signals, see :meth:`Report.by_signal`.
    """

    skipped: Any
    in_row: Any
    last: Any
    mistakes: Any


class Report:
    """The layout of reports, 1-d fp64: the norm, then :class:`Counts`. Nobody else slices one.

    Args:
        signals: whose mistakes it has: first of those that do not add them up, which all skip a
            step, then what skips a step of the others.
        norm_is_finite: the norm of finite powers is, unless there is a scale.

    Attributes:
        length: of the counts.
    """

    def __init__(
        self, signals: Sequence[Signal], device: torch.device, norm_is_finite: bool
    ) -> None:
        last, adding = ([it for it in signals if it.adds_up is adds] for adds in (False, True))
        self._norm_is_finite = norm_is_finite
        self._adding = [*_mistakes(adding, True), *_mistakes(adding, False)]
        self._places = [*_mistakes(last, True), *self._adding]
        of_last = sum(len(signal.skips) for signal in last)
        skips_step = sorted((it for signal in adding for it in signal.skips), reverse=True)
        mistakes = len(skips_step)
        self._ends = [*accumulate([1, 1, of_last, mistakes], initial=0)]
        self.length = self._ends[-1]
        self._one_each = torch.ones(2, dtype=torch.float64, device=device)
        self._skipping = slice(3, 3 + of_last + sum(skips_step))
        # A report skips a step if this product is not 0: with a norm that is not finite it is NaN.
        skips_if = [0.0, 0.0, 0.0, *[0.0] * of_last, *map(float, skips_step)]
        self._skips_if = to_device(skips_if, torch.float64, device)
        made = [[1, 0, *[1] * (of_last + mistakes), 1], [0, 0, *[0] * of_last, *[1] * mistakes, 1]]
        skipped = [[1, 1, *[0] * of_last, *[1] * mistakes, 0], [*[1] * self.length, 0]]
        self._if_made = to_device(made, torch.float64, device)
        self._if_skipped = to_device(skipped, torch.float64, device)

    def of(self, norm: Tensor, readings: Mapping[Signal, Tensor]) -> Tensor:
        """Return the report of one decision.

        Args:
            readings: of each signal, which begin with its mistakes.
        """
        mistakes = [readings[signal][part] for signal, part in self._places]
        return torch.cat([norm.view(1), self._one_each, *mistakes])

    def skips(self, report: Tensor, is_scaled: bool) -> Tensor:
        """Return whether it skips the step, 0-dim bool."""
        if self._norm_is_finite and not is_scaled:  # a loss scale of 0 makes a norm that is not
            return report[self._skipping].any()
        return (report * self._skips_if).any()

    def tally(self, skip: Tensor, report: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``taken``, ``multiplier`` and ``increment`` of a decision."""
        # Rows by which totals and report are multiplied; each ends with 1, or 0 for a skipped step:
        # one launch for all that follows from it.
        weights = torch.where(skip, self._if_skipped, self._if_made)
        multiplier, of_report = weights[:, :-1].unbind()
        return weights[0, -1], multiplier, report[1:] * of_report

    def counts(self, totals: Any) -> Counts:
        """Return the parts of totals, a tensor or a list."""
        return Counts(*(totals[start:stop] for start, stop in pairwise(self._ends)))

    def mistakes(self, report: Tensor) -> list[float]:
        """Return the mistakes of a report; waits for the device."""
        mistakes: list[float] = self.counts(report[1:]).mistakes.tolist()
        return mistakes

    def by_signal(self, mistakes: Sequence[float]) -> Iterator[tuple[Signal, list[float]]]:
        """Give each signal that adds its mistakes up with its own."""
        own = {signal: [0.0] * len(signal.skips) for signal, _ in self._adding}
        numbers = iter(mistakes)
        for signal, part in self._adding:
            own[signal][part] = islice(numbers, part.stop - part.start)
        yield from own.items()


def _mistakes(signals: Sequence[Signal], skips: bool) -> Iterator[tuple[Signal, slice]]:
    """Give the mistakes of readings that skip a step, or that do not, in runs."""
    for signal in signals:
        for does_skip, run in groupby(range(len(signal.skips)), key=signal.skips.__getitem__):
            first, *others = run
            if does_skip == skips:
                yield signal, slice(first, first + 1 + len(others))
