"""Counts skipped steps, and tells why they were, without waiting for the device.

The host hears of it when the numbers have arrived: at once on CPU, a step or two later on an
accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardcast.comm import Comm
from shardcast.memory.gradients import GradPack
from shardcast.messages import warn
from shardcast.plan.layout import Slot
from shardcast.step.combine.decision import UNSCALED, Decision
from shardcast.step.combine.loss_scale import unscaled_error
from shardcast.step.combine.mailbox import Mailbox
from shardcast.step.combine.options import Groups, Options

ELSEWHERE = "on other model-parallel ranks, which name it"


class SkipReport:
    """Skipped steps of all ranks.

    Args:
        grads: the gradient packs that are reduced; the list may grow.
        bound: steps skipped in a row that raise.
        usual: a skip now and then is the normal work of a dynamic loss scale, and not told.
    """

    def __init__(
        self,
        grads: Sequence[GradPack],
        comm: Comm,
        device: torch.device,
        options: Options,
        bound: int,
        usual: bool,
    ) -> None:
        self._grads, self._comm, self._device = grads, comm, device
        self._options, self._bound, self._usual = options, bound, usual
        # skipped so far, skipped in a row, then Decision.bad of the last skipped step
        self._tally = torch.zeros(2 + comm.size, dtype=torch.float64, device=device)
        self._differing = torch.empty(0, dtype=torch.bool, device=device)  # in some step
        self._mailbox = Mailbox(device)
        self._reported = 0.0
        self._starts = torch.empty(0, dtype=torch.float64, device=device)

    def first_bad(self, powers: Sequence[Tensor]) -> Tensor | float:
        """1 + position, counted over all packs, of the first non-finite element; 0 for none.

        On CPU the element, on an accelerator (where looking for it would be another pass over
        the gradients) the first element of the span that holds it.

        Args:
            powers: of the own span of each pack, see :class:`PNorm`.
        """
        if not powers:
            return 0.0
        bad = ~torch.stack(list(powers)).isfinite()
        if self._device.type != "cpu":
            if self._starts.numel() != len(self._grads):  # a copy waits: not in every step
                self._starts = torch.tensor(self._own_starts(), dtype=torch.float64).to(
                    self._device
                )
            # Not starts[index]: to index by a tensor of no dimension is to ask for its value.
            found = torch.where(bad, self._starts, math.inf).amin()
            return torch.where(bad.any(), found, 0.0)
        for number, is_bad in enumerate(bad.tolist()):
            if is_bad:
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
        """Note whether the step is skipped; the host hears of it in some later :meth:`poll`."""
        self._tally[0] += decision.skip
        self._tally[1] = (self._tally[1] + 1) * decision.skip
        self._tally[2:] = torch.where(decision.skip, decision.bad, self._tally[2:])
        self._differing = _either(self._differing, decision.differing)
        self._mailbox.post(torch.cat([self._tally, self._differing.double()]))

    def poll(self, groups: Groups) -> None:
        """Report skipped steps that the host has heard of; never waits for the device.

        Raises:
            RuntimeError: as many steps in a row as the bound were skipped; names the first
                non-finite element. On an accelerator also: a loss was not scaled, or the ranks
                differ in options of ``groups``, for which nothing was changed since.
        """
        letter = self._mailbox.read()
        if letter is None:
            return
        skipped, in_row, *rest = letter
        bad, differing = rest[: self._comm.size], rest[self._comm.size :]
        news, self._reported = skipped != self._reported, skipped
        if self._device.type != "cpu" and any(differing):
            self._differing.zero_()
            self._options.report([bool(wrong) for wrong in differing], groups)
        if not news:
            return
        if ranks := [rank for rank, position in enumerate(bad) if position == UNSCALED]:
            raise unscaled_error(ranks)
        raising = in_row >= self._bound
        if self._usual and not raising:
            return
        where = self._locate([int(position) - 1 for position in bad]) or ELSEWHERE
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
        return int(self._tally[0].item())

    def state_dict(self) -> dict[str, float]:
        """Plain numbers; waits for the device."""
        skipped, in_row = self._tally[:2].tolist()
        return {"skipped": skipped, "in_row": in_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._tally[0], self._tally[1] = state["skipped"], state["in_row"]
        self._reported = state["skipped"]

    def _locate(self, bad: list[int]) -> str:
        """Name the first bad element of each rank's span, and the ranks that it came from.

        Outside its own span a rank still has its own gradients; of sharded ones the owner noted
        whose they were, where it added them up itself. All ranks are here in the same step on CPU,
        so they can ask each other; on an accelerator the owner's span is named.
        """
        found = [(owner, *self._element(at)) for owner, at in enumerate(bad) if at >= 0]
        if self._device.type != "cpu":
            return "; ".join(
                f"in the span of rank {owner} that begins in parameter {slot.name!r}"
                for owner, _, slot, _ in found
            )
        known: dict[int, list[int]] = {}  # culprits by owner
        for owner, grads, _, offset in found:
            if owner == self._comm.rank:
                known[owner] = list(grads.culprits)
            elif grads.allocated and not bool(grads.data[offset].isfinite()):
                known[owner] = [self._comm.rank]
        told = self._comm.exchange(known, self._device)
        return "; ".join(
            f"{_who(owner, [rank for there in told for rank in there.get(owner, ())], grads)}, "
            f"parameter {slot.name!r}, element {offset - slot.offset}"
            for owner, grads, slot, offset in found
        )

    def _element(self, position: int) -> tuple[GradPack, Slot, int]:
        """Pack, slot and offset in the pack of an element counted over all packs."""
        for grads in self._grads:
            layout = grads.pack.layout
            if position < layout.numel:
                after = (slot for slot in layout.slots if position < slot.end)
                return grads, next(after, layout.slots[-1]), position
            position -= layout.numel
        raise AssertionError("a position beyond the last pack")


def _either(before: Tensor, now: Tensor) -> Tensor:
    """Flags that were or are set; those of other groups are forgotten."""
    return before | now if before.shape == now.shape else now


def _who(owner: int, culprits: list[int], grads: GradPack) -> str:
    if culprits:
        return f"rank {', '.join(map(str, culprits))}"
    if grads.allocated:  # full ones, of which the owner's own are the mean by now
        return f"rank {owner}"
    return f"the sum over ranks, at its owner {owner}"
