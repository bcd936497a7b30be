"""What is decided for one step, and the control vector in which all ranks agree on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from shardcast.comm import Comm, ProcessGroups
from shardcast.memory.gradients import Gradients
from shardcast.memory.pack import Pack
from shardcast.plan.layout import GroupId
from shardcast.step.decide.guard import GuardDecision
from shardcast.step.decide.options import to_device


@dataclass(frozen=True)
class Decision:
    """What all ranks agreed on for one step.

    Attributes:
        norm: 0-dim fp64, the global gradient norm before clipping, without loss scale and
            of the mean over tokens where they are counted.
        skip: 0-dim bool: some gradient somewhere is not finite, a rank made a mistake, or the guard
            skips a spike.
        factors: per optimizer group, 0-dim fp32: what its gradients are to be multiplied with
            (unscale and clip), or ``None`` where that is 1 by construction.
        unscale: the part of these factors that removes loss scale and token count.
        verdict: of the guard, if there is one.
        present: per pack that is reduced, and slot, whether any rank has a gradient; exact for
            the slots that this rank owns a part of.
        report: 1-d fp64, what :class:`.SkipReport` counts: 1, 1, per data-parallel rank its first
            pack that is not finite (see :meth:`.SkipReport.first_nonfinite`), and which mistakes
            some rank made, see :meth:`.Decider._agree`.
    """

    norm: Tensor
    skip: Tensor
    factors: Mapping[GroupId, Tensor | None]
    unscale: Tensor | None
    verdict: GuardDecision | None
    present: Mapping[Pack, tuple[bool, ...]]
    report: Tensor


class ControlVector(NamedTuple):
    """The doubles of the one small all-reduce of a step; parts are 1-d.

    That is ``8 * (groups + 2 * ranks + slots + 7)`` bytes: 19 KB for AdamW with 2 groups and 300
    parameters on 1,024 ranks, 2.5 KB on 2.

    Attributes:
        powers: per group, of its norm (and rank, with norm_type inf: no sum gives a maximum).
        first_nonfinite: see :class:`Decision`; each rank fills in its own place.
        unscaled: per data-parallel rank 1 if its loss was not scaled, else 0.
        presence: see :class:`Presence`.
        options: pairs of :class:`.options.OptionCheck`.
        tokens: of all micro-batches; see :class:`.tokens.TokenCount`.
        loss: the sum of the ranks' losses if a guard takes them, else empty.
    """

    powers: Tensor
    first_nonfinite: Tensor
    unscaled: Tensor
    presence: Tensor
    options: Tensor
    tokens: Tensor
    loss: Tensor

    @classmethod
    def summed(cls, comm: Comm, *parts: Tensor) -> ControlVector:
        """The sum over ranks, all of which must call it; waits for no device."""
        vector = torch.cat(parts)
        comm.all_reduce(vector, "the control vector")
        return cls(*vector.split([part.numel() for part in parts]))


class Presence:
    """Which slots have a gradient, on this rank and on any rank.

    The control vector has a place for each slot, where each rank that has a gradient adds 1, and
    slots whose replicas are summed add how many of them have one. Packs of experts differ between
    data-parallel ranks: each has a block of places for every expert that the ranks hold.

    Args:
        grads: the gradient packs that are reduced; the list may grow.
    """

    def __init__(
        self, grads: Sequence[Gradients], process_groups: ProcessGroups, device: torch.device
    ) -> None:
        self._grads, self._process_groups, self._device = grads, process_groups, device
        self._places: list[slice] = []  # per pack, of its slots in the control vector
        self._numel = 0
        self._asks = process_groups.dp.size > 1
        self._uploaded: dict[tuple[bool, ...], Tensor] = {}

    def local(self) -> tuple[bool, ...]:
        """Whether there is a gradient here, per slot of all packs in order."""
        return tuple(is_here for grads in self._grads for is_here in grads.presence())

    def counts(self, local: tuple[bool, ...]) -> Tensor:
        """This rank's part of :attr:`ControlVector.presence`; uploaded once per pattern."""
        if len(self._places) != len(self._grads):
            self._arrange()
        if local not in self._uploaded:
            if len(self._uploaded) > 8:
                self._uploaded.clear()
            has_gradient, slots = [False] * self._numel, iter(local)
            for places in self._places:
                has_gradient[places] = islice(slots, places.stop - places.start)
            self._uploaded[local] = to_device(has_gradient, torch.float64, self._device)
        counts = self._uploaded[local]
        for grads, places in zip(self._grads, self._places, strict=True):
            if grads.joint is not None:
                counts = counts.clone()
                counts[places] += grads.joint
        return counts

    def _arrange(self) -> None:
        """Give each pack its places, in the same order on all ranks."""
        self._places, self._numel = [], 0
        self._uploaded.clear()
        for grads in self._grads:
            pack_groups, slots = grads.pack.layout.pack_groups, len(grads.owned)
            blocks, own_block = self._process_groups.parallel_dims.expert_blocks(pack_groups)
            start = self._numel + own_block * slots
            self._places.append(slice(start, start + slots))
            self._numel += blocks * slots
            self._asks = self._asks or pack_groups.sums_replicas

    def anywhere(
        self, local: tuple[bool, ...], control: ControlVector
    ) -> dict[Pack, tuple[bool, ...]]:
        """Slots with a gradient on some rank, by pack.

        A gradient that is here is present. Only for a slot of an own span without one the counts
        of the other ranks are read, which on an accelerator waits for the all-reduce.
        """
        owned = (owns for grads in self._grads for owns in grads.owned)
        if self._asks and any(owns and not has for owns, has in zip(owned, local, strict=True)):
            present = [count > 0 for count in control.presence.tolist()]
            return {
                grads.pack: tuple(present[places])
                for grads, places in zip(self._grads, self._places, strict=True)
            }
        slots = iter(local)
        return {grads.pack: tuple(islice(slots, len(grads.owned))) for grads in self._grads}
