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
        refuse: raises for ``Decision.mistakes``.
        bound: steps skipped in a row that raise.
        usual: a skip now and then is the normal work of a dynamic loss scale: no warning.
    """

    def __init__(
        self,
        grads: Sequence[Gradients],
        comm: Comm,
        device: torch.device,
        refuse: Callable[[Sequence[float]], None],
        bound: int,
        usual: bool,
    ) -> None:
        self._grads, self._comm, self._device = grads, comm, device
        self._refuse, self._bound, self._usual = refuse, bound, usual
        # Steps skipped so far and in a row; of the last skipped one Decision.first_nonfinite; of
        # any step since they were reported Decision.mistakes.
        sizes = [1, 1, comm.size, 4 + comm.size]
        self._totals = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self._skipped, self._in_row, self._nonfinite, self._mistakes = self._totals.split(sizes)
        self._host = HostCopy(device)
        self._reported = 0.0
        self._starts = torch.empty(0, dtype=torch.float64, device=device)

    def first_nonfinite(self, powers: Sequence[Tensor]) -> Tensor | float:
        """1 + position, counted over all packs, of the first non-finite element; 0 for none.

        On CPU the element, on an accelerator (where looking for it would be another pass over
        the gradients) the first element of the span that holds it.

        Args:
            powers: of the own span of each pack, see :class:`PNorm`.
        """
        if not powers:
            return 0.0
        nonfinite = ~torch.stack(list(powers)).isfinite()
        if not _compat.is_host(self._device):
            if self._starts.numel() != len(self._grads):  # not in every step
                self._starts = to_device(self._own_starts(), torch.float64, self._device)
            # Not starts[index]: to index by a tensor of no dimension is to ask for its value.
            first = torch.where(nonfinite, self._starts, math.inf).amin()
            return torch.where(nonfinite.any(), first, 0.0)
        for number, is_nonfinite in enumerate(nonfinite.tolist()):
            if is_nonfinite:
                own = self._grads[number].own
                return self._own_starts()[number] + int(
                    torch.argmax((~own.isfinite()).to(torch.uint8))
                )
        return 0.0

    def _own_starts(self) -> list[float]:
        """Per pack, 1 + the position of the first element of its own span."""
        ends = accumulate((grads.pack.layout.numel for grads in self._grads), initial=1)
        return [end + g.pack.own.start for end, g in zip(ends, self._grads, strict=False)]

    def count(self, decision: Decision) -> None:
        """Note whether the step is skipped; some later :meth:`poll` reports it."""
        skip = decision.skip
        self._skipped += skip
        self._in_row.copy_((self._in_row + 1) * skip)
        self._nonfinite.copy_(torch.where(skip, decision.first_nonfinite, self._nonfinite))
        self._mistakes.copy_(torch.maximum(self._mistakes, decision.mistakes))
        self._host.send(self._totals)

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
        nonfinite, mistakes = totals[2 : 2 + self._comm.size], totals[2 + self._comm.size :]
        is_news, self._reported = skipped != self._reported, skipped
        if any(mistakes) and not _compat.is_host(
            self._device
        ):  # on a CPU they were refused at once
            self._mistakes.zero_()
            self._refuse(mistakes)
        if not is_news:
            return
        raising = in_row >= self._bound
        if self._usual and not raising:
            return
        where = self._locate([int(position) - 1 for position in nonfinite]) or ELSEWHERE
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

    def state_dict(self) -> dict[str, float]:
        """Plain numbers; waits for the device."""
        skipped, in_row = self._totals[:2].tolist()
        return {"skipped": skipped, "in_row": in_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._skipped.fill_(state["skipped"])
        self._in_row.fill_(state["in_row"])
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
