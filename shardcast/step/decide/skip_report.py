"""Counts skipped steps, and says why they were skipped, without waiting for the device.

The host reads the numbers when they have arrived: at once on CPU, a step or two later on an
accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import Comm
from shardcast.memory.gradients import Gradients
from shardcast.messages import warn
from shardcast.plan.layout import Slot
from shardcast.step.decide.decision import Decision
from shardcast.step.decide.options import to_device

MISTAKES = 5  # in Decision.report, before those of each rank
ELSEWHERE = "on other model-parallel ranks, which name it"


class HostCopy:
    """The latest numbers of the device on the host, without waiting for the device.

    Numbers that are sent before the last ones were read are dropped, so they should be totals. On
    a CPU they arrive at once; on an accelerator when their copy is done, usually in the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def send(self, numbers: Tensor) -> None:
        """Start to copy a 1-d tensor; it may be overwritten afterwards."""
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self._copied is not None and not capturing:
            return
        if self._numbers is None or self._numbers.numel() != numbers.numel():
            pinned = self._device.type == "cuda"
            self._numbers = torch.zeros_like(numbers, device="cpu", pin_memory=pinned)
        self._numbers.copy_(numbers, non_blocking=True)
        if self._device.type == "cuda" and not capturing:
            # Of the model's device: another one may be the current one.
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._device))

    def read(self) -> list[float] | None:
        """The numbers, or ``None`` while they are under way."""
        if self._copied is not None:
            if torch.cuda.is_current_stream_capturing() or not self._copied.query():
                return None
            self._copied = None
        return None if self._numbers is None else self._numbers.tolist()


class SkipReport:
    """Skipped steps of all ranks.

    Args:
        grads: the gradient packs that are reduced; the list may grow.
        refuse: raises for mistakes of ``Decision.report``.
        bound: steps skipped in a row that raise.
        usual: a skip now and then is the normal work of a dynamic loss scale: no warning.
        signals: what a guard judges steps by.
    """

    def __init__(
        self,
        grads: Sequence[Gradients],
        comm: Comm,
        device: torch.device,
        refuse: Callable[[Sequence[float]], None],
        bound: int,
        usual: bool,
        signals: Sequence[str] = (),
    ) -> None:
        self._grads, self._comm, self._device = grads, comm, device
        self._refuse, self._bound, self._usual, self._signals = refuse, bound, usual, signals
        # Steps skipped so far and in a row; of the last skipped one the first non-finite
        # elements; of all steps since they were reported the mistakes. As in Decision.report.
        ranks, skipping = comm.size, MISTAKES - 1 + comm.size  # mistakes that skip a step
        sizes = [1, 1, ranks, 1 + skipping]
        # Of a guard: spikes so far, whether one was the last skipped step, its values and bounds.
        self._counted = sum(sizes)
        guarded = 2 + 2 * len(signals) if signals else 0
        self._sent = torch.zeros(self._counted + guarded, dtype=torch.float64, device=device)
        self._totals, self._guarded = self._sent.split([self._counted, guarded])
        self._skipped, self._in_row, _, self._mistakes = self._totals.split(sizes)
        # By what totals, and by what a report, are multiplied in a step that is skipped, and in one
        # that is made: in it only the first mistake can be, which skips none.
        made = [[1, 0, *[1] * (ranks + 1 + skipping)], [0, 0, *[0] * ranks, 1, *[0] * skipping]]
        skipped = [[1, 1, *[0] * ranks, *[1] * (1 + skipping)], [1] * sum(sizes)]
        self._if_made = to_device(made, torch.float64, device)
        self._if_skipped = to_device(skipped, torch.float64, device)
        self._none = torch.zeros((), dtype=torch.float64, device=device)
        self._host = HostCopy(device)
        self._reported = 0.0
        self._back = torch.empty(0, dtype=torch.float64, device=device)

    def first_nonfinite(self, powers: Tensor) -> Tensor | float:
        """The first non-finite element, counted over all packs from the last one; 0 for none.

        On CPU the element, on an accelerator (where looking for it would be another pass over
        the gradients) the first element of the span that holds it. Counted back, for what comes
        first is the largest then.

        Args:
            powers: of the own span of each pack, see :class:`PNorm`.
        """
        if not powers.numel():
            return 0.0
        if not _compat.is_host(self._device):
            if self._back.numel() != len(self._grads):  # not in every step
                self._back = to_device(self._own_back(), torch.float64, self._device)
            # Not back[index]: to index by a tensor of no dimension is to ask for its value.
            return torch.where(powers < math.inf, self._none, self._back).amax()
        for number, power in enumerate(powers.tolist()):
            if not math.isfinite(power):
                own = self._grads[number].own
                index = int(torch.argmax((~own.isfinite()).to(torch.uint8)))
                return self._own_back()[number] - index
        return 0.0

    def _own_back(self) -> list[float]:
        """Per pack, elements of all packs from the first one of its own span on."""
        numels = [grads.pack.layout.numel for grads in self._grads]
        starts = accumulate(numels, initial=0)
        total = float(sum(numels))
        return [total - n - g.pack.own.start for n, g in zip(starts, self._grads, strict=False)]

    def count(self, decision: Decision) -> None:
        """Note whether the step is skipped; some later :meth:`poll` reports it."""
        of_totals, of_report = torch.where(decision.skip, self._if_skipped, self._if_made)
        self._totals.mul_(of_totals).addcmul_(decision.report, of_report)
        if (verdict := decision.verdict) is not None:
            spikes, by_guard, spike = self._guarded.split([1, 1, len(self._guarded) - 2])
            latest = torch.cat([verdict.values, verdict.bounds])
            spikes += verdict.is_spike
            by_guard.copy_(torch.where(decision.skip, verdict.is_spike, by_guard))
            spike.copy_(torch.where(verdict.is_spike, latest, spike))
        self._host.send(self._sent)

    def poll(self) -> None:
        """Report skipped steps whose numbers have arrived; never waits for the device.

        Raises:
            RuntimeError: as many steps in a row as the bound were skipped; names the first
                non-finite element. On an accelerator also for mistakes of some ranks, for which
                all steps since were skipped.
        """
        totals = self._host.read()
        if totals is None:
            return
        skipped, in_row = totals[:2]
        nonfinite = totals[2 : 2 + self._comm.size]
        mistakes, guarded = totals[2 + self._comm.size : self._counted], totals[self._counted :]
        is_news, self._reported = skipped != self._reported, skipped
        if any(mistakes) and not _compat.is_host(self._device):  # on a CPU refused at once
            self._mistakes.zero_()
            self._refuse(mistakes)
        if not is_news:
            return
        raising = in_row >= self._bound
        if guarded and guarded[1]:
            count = len(self._signals)
            spike = zip(self._signals, guarded[2 : 2 + count], guarded[2 + count :], strict=True)
            exceeding = ", ".join(
                f"{name} {value:.4g}" + f" (bound {bound:.4g})" * math.isfinite(bound)
                for name, value, bound in spike
            )
            if raising:
                raise RuntimeError(
                    f"{int(in_row)} steps in a row were skipped (max_skipped_steps), the last one "
                    f"by the guard: {exceeding}. Lower the learning rate, look at the data of "
                    "these steps, or widen the guard: its bound does not follow what it skips."
                )
            warn(f"step skipped by the guard: {exceeding}")
            return
        if self._usual and not raising:
            return
        total = sum(grads.pack.layout.numel for grads in self._grads)
        where = self._locate([total - int(n) if n else -1 for n in nonfinite]) or ELSEWHERE
        if raising:
            raise RuntimeError(
                f"{int(in_row)} steps in a row were skipped because of non-finite gradients "
                f"(max_skipped_steps); first: {where}. Lower the learning rate or the loss scale, "
                "or look at the data of these steps."
            )
        warn(f"step skipped, non-finite gradient: {where}")

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far. Reading it waits for the device."""
        return int(self._skipped.item())

    @property
    def guarded_steps(self) -> int:
        """Spikes so far that the guard skipped or clipped. Reading it waits for the device."""
        return int(self._guarded[0]) if self._signals else 0

    def state_dict(self) -> dict[str, float]:
        """Plain numbers; waits for the device."""
        skipped, in_row = self._totals[:2].tolist()
        spikes = {"spikes": float(self._guarded[0])} if self._signals else {}
        return {"skipped": skipped, "in_row": in_row, **spikes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._skipped.fill_(state["skipped"])
        self._in_row.fill_(state["in_row"])
        self._guarded[:1].fill_(state.get("spikes", 0))
        self._reported = state["skipped"]

    def _locate(self, positions: list[int]) -> str:
        """Name the first non-finite element of each rank's spans, and the ranks it came from.

        Outside its own span a rank still has its own gradients; of sharded ones the owner noted
        whose they were, where it added them up itself. All ranks are here in the same step on CPU,
        so they can ask each other; on an accelerator the owner's span is named.

        Args:
            positions: per owner, -1 for none.
        """
        elements = [(owner, *self._element(at)) for owner, at in enumerate(positions) if at >= 0]
        if not _compat.is_host(self._device):
            return "; ".join(
                f"in the span of rank {owner} that begins in parameter {slot.name!r}"
                for owner, _, slot, _ in elements
            )
        culprits: dict[int, list[int]] = {}  # ranks by owner
        for owner, grads, _, offset in elements:
            if owner == self._comm.rank:
                culprits[owner] = list(grads.culprits)
            elif grads.allocated and not bool(grads.data[offset].isfinite()):
                culprits[owner] = [self._comm.rank]
        exchanged = self._comm.exchange(culprits, self._device)
        return "; ".join(
            f"{_who(owner, [rank for row in exchanged for rank in row.get(owner, ())], grads)}, "
            f"parameter {slot.name!r}, element {offset - slot.offset}"
            for owner, grads, slot, offset in elements
        )

    def _element(self, position: int) -> tuple[Gradients, Slot, int]:
        """Pack, slot and offset in the pack of an element counted over all packs."""
        for grads in self._grads:
            layout = grads.pack.layout
            if position < layout.numel:
                slots = (slot for slot in layout.slots if position < slot.end)
                return grads, next(slots, layout.slots[-1]), position
            position -= layout.numel
        raise AssertionError("a position beyond the last pack")


def _who(owner: int, culprits: list[int], grads: Gradients) -> str:
    if culprits:
        return f"rank {', '.join(map(str, culprits))}"
    if grads.allocated:  # full ones, of which the owner's own are the mean by now
        return f"rank {owner}"
    return f"the sum over ranks, at its owner {owner}"
