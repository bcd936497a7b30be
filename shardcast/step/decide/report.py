"""The report of a decision, and the number of skipped steps with their reasons.

The host reads the numbers when they have arrived: at once on a CPU, one or two steps later on an
accelerator. Then it warns with the reason, or raises after too many skipped steps in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import Comm, warn_once_for
from shardcast.memory.gradients import Gradients
from shardcast.step.decide.decision import Decision
from shardcast.step.decide.norm import GradientNorm
from shardcast.step.decide.signal import Signal, to_device


class Counts(NamedTuple):
    """The parts of a report after its norm, and of the totals that count them.

    Attributes:
        made: steps made so far; 1 in a report.
        skipped, in_row: skipped steps, in all and in a row; 1 in a report.
        last: mistakes of signals that do not add theirs up: those of the last skipped step.
        mistakes: those of all other signals, see :meth:`Report.by_signal`.
    """

    made: Any
    skipped: Any
    in_row: Any
    last: Any
    mistakes: Any


class Report:
    """The layout of reports, 1-d fp64: the norm, then :class:`Counts`. Only this class slices them.

    Args:
        signals: signals whose mistakes it has: first those that do not add them up, which all skip
            a step, then those of other signals that skip a step.

    Attributes:
        length: length of the counts.
    """

    def __init__(self, signals: Sequence[Signal], device: torch.device) -> None:
        last, adding = ([it for it in signals if it.adds_up is adds] for adds in (False, True))
        self._adding = [*_mistakes(adding, True), *_mistakes(adding, False)]
        self._places = [*_mistakes(last, True), *self._adding]
        of_last = sum(len(signal.skips) for signal in last)
        skips_step = sorted((it for signal in adding for it in signal.skips), reverse=True)
        mistakes = len(skips_step)
        self._ends = [*accumulate([1, 1, 1, of_last, mistakes], initial=0)]
        self.length = self._ends[-1]
        self._one_each = torch.ones(3, dtype=torch.float64, device=device)
        # A report skips a step if this product is not 0; a non-finite norm makes it NaN.
        skips_if = [0.0, 0.0, 0.0, 0.0, *[0.0] * of_last, *map(float, skips_step)]
        self._skips_if = to_device(skips_if, torch.float64, device)
        made = [
            [1, 1, 0, *[1] * (of_last + mistakes), 1],
            [1, 0, 0, *[0] * of_last, *[1] * mistakes, 1],
        ]
        skipped = [
            [1, 1, 1, *[0] * of_last, *[1] * mistakes, 0],
            [0, *[1] * (self.length - 1), 0],
        ]
        self._if_made = to_device(made, torch.float64, device)
        self._if_skipped = to_device(skipped, torch.float64, device)

    def of(self, norm: Tensor, readings: Mapping[Signal, Tensor]) -> Tensor:
        """Return the report of one decision.

        Args:
            readings: reading of each signal, which starts with its mistakes.
        """
        mistakes = [readings[signal][part] for signal, part in self._places]
        return torch.cat([norm.view(1), self._one_each, *mistakes])

    def skips(self, report: Tensor) -> Tensor:
        """Return whether it skips the step, 0-dim bool."""
        return (report * self._skips_if).any()

    def tally(self, skip: Tensor, report: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``taken``, ``multiplier`` and ``increment`` of a decision."""
        # Factors of totals and report; each row ends with 1, or 0 for a skipped step. So one launch
        # computes everything that depends on it.
        weights = torch.where(skip, self._if_skipped, self._if_made)
        multiplier, of_report = weights[:, :-1].unbind()
        return weights[0, -1], multiplier, report[1:] * of_report

    def counts(self, totals: Any) -> Counts:
        """Return the parts of totals, a tensor or a list."""
        return Counts(*(totals[start:stop] for start, stop in pairwise(self._ends)))

    def mistakes(self, report: Tensor) -> list[float]:
        """Return the mistakes in a report; waits for the device."""
        mistakes: list[float] = self.counts(report[1:]).mistakes.tolist()
        return mistakes

    def by_signal(self, mistakes: Sequence[float]) -> Iterator[tuple[Signal, list[float]]]:
        """Yield each signal that adds up its mistakes, with its own."""
        own = {signal: [0.0] * len(signal.skips) for signal, _ in self._adding}
        numbers = iter(mistakes)
        for signal, part in self._adding:
            own[signal][part] = islice(numbers, part.stop - part.start)
        yield from own.items()


def _mistakes(signals: Sequence[Signal], skips: bool) -> Iterator[tuple[Signal, slice]]:
    """Yield runs of the mistakes in readings, either those that skip a step or the others."""
    for signal in signals:
        for does_skip, run in groupby(range(len(signal.skips)), key=signal.skips.__getitem__):
            first, *others = run
            if does_skip == skips:
                yield signal, slice(first, first + 1 + len(others))


ELSEWHERE = "on other model-parallel ranks, which name it"


class HostCopy:
    """The latest device numbers on the host, without waiting for the device.

    A send replaces earlier numbers that were not read yet, so they should be totals. On a CPU they
    arrive at once; on an accelerator when their copy is done, usually in the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def send(self, numbers: Tensor) -> None:
        """Start to copy a 1-d tensor; it may be overwritten afterwards."""
        capturing = _compat.is_capturing(self._device)
        if self._copied is not None and not capturing:
            return
        if self._numbers is None or self._numbers.numel() != numbers.numel():
            pinned = self._device.type == "cuda"
            self._numbers = torch.zeros_like(numbers, device="cpu", pin_memory=pinned)
        self._numbers.copy_(numbers, non_blocking=True)
        if self._device.type == "cuda" and not capturing:
            # On the model's device, which may not be the current one.
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._device))

    def read(self) -> list[float] | None:
        """Return the numbers, or ``None`` if they are still in flight."""
        if self._copied is not None:
            if _compat.is_capturing(self._device) or not self._copied.query():
                return None
            self._copied = None
        return None if self._numbers is None else self._numbers.tolist()


class SkipReport:
    """The skipped steps of all ranks.

    Args:
        norm: knows which packs are not finite.
        refuse: raises for mistakes in a report.
        report: the layout of reports.
        bound: number of skipped steps in a row that raises.
        usual: occasional skips are normal (a dynamic loss scale), so do not warn.
        signals: may have their own numbers for the host, and know why a step was skipped.
        everyone: ranks for which a signal skips steps; other skips concern those of ``comm``.

    Attributes:
        made: number of steps made, ``(1,)`` on the device; updated in place.
    """

    def __init__(
        self,
        norm: GradientNorm,
        comm: Comm,
        device: torch.device,
        refuse: Callable[[Sequence[float]], None],
        report: Report,
        bound: int,
        usual: bool,
        signals: Sequence[Signal],
        everyone: Comm,
    ) -> None:
        self._everyone = everyone
        self._norm, self._comm, self._device = norm, comm, device
        self._refuse, self._bound, self._usual = refuse, bound, usual
        self._report = report
        self._noting = [signal for signal in signals if signal.noted]
        # Laid out like reports: steps made; steps skipped in all and in a row; for the last skipped
        # step, each rank's first non-finite pack; and the mistakes of all steps since the last
        # report.
        self._sizes = [report.length, *(signal.noted for signal in self._noting)]
        self._sent = torch.zeros(sum(self._sizes), dtype=torch.float64, device=device)
        self._totals, *noted = self._sent.split(self._sizes)
        for signal, numbers in zip(self._noting, noted, strict=True):
            signal.numbers = numbers
        self.made, self._skipped, self._in_row, _, self._mistakes = report.counts(self._totals)
        self._host = HostCopy(device)
        self._reported = 0.0

    def count(self, decision: Decision) -> None:
        """Note whether the step is skipped; a later :meth:`poll` reports it."""
        torch.addcmul(decision.increment, self._totals, decision.multiplier, out=self._totals)
        for signal in self._noting:
            signal.note(decision)
        self._host.send(self._sent)

    def poll(self) -> None:
        """Report skipped steps whose numbers have arrived; never waits for the device.

        Raises:
            RuntimeError: ``bound`` steps in a row were skipped; names the first non-finite element.
                On an accelerator also for mistakes of some ranks, after which all steps were
                skipped.
        """
        totals = self._host.read()
        if totals is None:
            return
        _, (skipped,), (in_row,), last, mistakes = self._report.counts(totals)
        is_news, self._reported = skipped != self._reported, skipped
        if any(mistakes) and not _compat.is_host(self._device):  # on a CPU they raise at once
            self._mistakes.zero_()
            self._refuse(mistakes)
        if not is_news:
            return
        too_many = int(in_row) if in_row >= self._bound else 0
        reasons = (signal.reason(of_signal) for signal, of_signal in self._noted(totals))
        if (told := next(filter(None, reasons), None)) is not None:
            tell_of_signal(self._everyone, *told, too_many)
        elif too_many or not self._usual:
            packs = dict(self._norm.packs(last))
            tell_of_gradients(self._comm, packs, self._device, too_many)

    @property
    def skipped_steps(self) -> int:
        """Number of skipped steps. Reading it waits for the device."""
        return int(self._skipped.item())

    def _noted(self, totals: Sequence[float]) -> Iterator[tuple[Signal, Sequence[float]]]:
        start = self._report.length
        for signal in self._noting:
            yield signal, totals[start : start + signal.noted]
            start += signal.noted

    def state_dict(self) -> dict[str, float]:
        """Return plain numbers; waits for the device."""
        return {"skipped": float(self._skipped), "in_row": float(self._in_row)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self._skipped.fill_(state["skipped"])
        self._in_row.fill_(state["in_row"])
        self._reported = state["skipped"]


def tell_of_signal(comm: Comm, reason: str, remedy: str, too_many: int) -> None:
    """Warn with a signal's reason, or raise RuntimeError.

    Args:
        comm: ranks that know the reason and all call this.
        too_many: number of skipped steps in a row if that is an error, else 0.
    """
    if too_many:
        raise RuntimeError(
            f"{too_many} steps in a row were skipped (max_skipped_steps), the last one {reason}. "
            f"{remedy}"
        )
    warn_once_for(comm, f"step skipped {reason}")


def tell_of_gradients(
    comm: Comm, packs: Mapping[int, Gradients], device: torch.device, too_many: int
) -> None:
    """Warn about the first non-finite gradients, or raise RuntimeError.

    Args:
        comm, too_many: see :func:`tell_of_signal`.
        packs: by owner, the first pack with such an element.
    """
    where = "; ".join(_locate(comm, packs, device)) or ELSEWHERE
    if too_many:
        raise RuntimeError(
            f"{too_many} steps in a row were skipped because of non-finite gradients "
            f"(max_skipped_steps); first: {where}. Lower the learning rate or the loss scale, "
            "or look at the data of these steps; if the script reads .grad, call "
            "optimizer.gather_gradients() before"
        )
    reads = "; if the script reads .grad, call optimizer.gather_gradients() before"
    warn_once_for(comm, f"step skipped, non-finite gradient: {where}{reads * (comm.size > 1)}")


def _locate(comm: Comm, packs: Mapping[int, Gradients], device: torch.device) -> list[str]:
    """Name each owner's first non-finite element, and the ranks it came from.

    The owner noted the ranks if it summed the pieces itself. On a CPU all ranks are here in the
    same step, so they can exchange this. On an accelerator only the owner's span is named.
    """
    if not _compat.is_host(device):
        return [
            f"in the span of rank {owner} of the pack that begins with parameter "
            f"{grads.pack.layout.slots[0].name!r}"
            for owner, grads in packs.items()
        ]
    own = packs.get(comm.rank)
    elements = comm.exchange("" if own is None else _element(own), device)
    culprits = comm.exchange(None if own is None else [*own.culprits], device)
    return [
        f"{_who(owner, culprits[owner] or [], comm.size)}, {elements[owner]}" for owner in packs
    ]


def _element(grads: Gradients) -> str:
    """Name the first non-finite element of an own span."""
    offset = grads.pack.own.start + int((~grads.own.isfinite()).to(torch.uint8).argmax())
    slot = next(slot for slot in grads.pack.layout.slots if offset < slot.end)
    return f"parameter {slot.name!r}, element {offset - slot.offset}"


def _who(owner: int, culprits: list[int], ranks: int) -> str:
    if culprits:
        return f"rank {', '.join(map(str, culprits))}"
    if ranks == 1:
        return f"rank {owner}"
    return f"the sum over ranks, at its owner {owner}"
