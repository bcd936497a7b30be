"""What is decided for one step, and the control vector in which all ranks agree on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardcast.comm import Comm, ProcessGroups
from shardcast.memory.gradients import Gradients
from shardcast.memory.pack import Pack
from shardcast.plan.layout import GroupId
from shardcast.step.decide.guard import Verdict
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
        report: 1-d fp64, what :class:`.SkipReport` counts: 1, 1, per data-parallel rank the first
            non-finite element of its spans (counted over all packs from the last one; 0 for
            none), and which mistakes some rank made, see :meth:`.Decider._agree`.
    """

    norm: Tensor
    skip: Tensor
    factors: Mapping[GroupId, Tensor | None]
    unscale: Tensor | None
    verdict: Verdict | None
    present: Mapping[Pack, tuple[bool, ...]]
    report: Tensor


class ControlVector(NamedTuple):
    """The doubles of the one small all-reduce of a step; parts are 1-d.

    That is ``8 * (groups + 2 * ranks + slots + 8)`` bytes: 19 KB for AdamW with 2 groups and 300
    parameters on 1,024 ranks, 2.5 KB on 2.

    Attributes:
        powers: per group, of its norm (and rank, with norm_type inf: no sum gives a maximum).
        first_nonfinite: see :class:`Decision`; each rank fills in its own place.
        unscaled: per data-parallel rank 1 if its loss was not scaled, else 0.
        presence: per slot, how many ranks have a gradient.
        copies: the same over all copies, of slots whose copies' gradients are added up.
        options: pairs of :class:`.options.OptionCheck`.
        unseen: how many ranks have weights that were written unseen; see :class:`WeightEdits`.
        tokens: of all micro-batches; see :class:`.tokens.TokenCount`.
        loss: the sum of the ranks' losses if a guard takes them, else empty.
    """

    powers: Tensor
    first_nonfinite: Tensor
    unscaled: Tensor
    presence: Tensor
    copies: Tensor
    options: Tensor
    unseen: Tensor
    tokens: Tensor
    loss: Tensor

    @classmethod
    def summed(cls, comm: Comm, *parts: Sequence[Tensor]) -> ControlVector:
        """The sum over ranks, all of which must call it; waits for no device.

        Args:
            parts: of this rank, each in 1-d pieces.
        """
        vector = torch.cat([piece for part in parts for piece in part])
        comm.all_reduce(vector, "the control vector")
        return cls(*vector.split([sum(piece.numel() for piece in part) for part in parts]))


class Presence:
    """Which slots have a gradient, on this rank and on any rank.

    Packs of experts differ between data-parallel ranks: each of them has a block of slots for
    every expert that the ranks hold, and fills in its own.

    Args:
        grads: the gradient packs that are reduced; the list may grow.
    """

    def __init__(
        self, grads: Sequence[Gradients], process_groups: ProcessGroups, device: torch.device
    ) -> None:
        self._grads, self._process_groups, self._device = grads, process_groups, device
        self._blocks_of: list[tuple[int, int, int]] = []  # see _blocks()
        self._copying: list[bool] = []  # packs whose copies' gradients are added up
        self._uploaded: dict[tuple[bool, ...], Tensor] = {}
        self._none = torch.empty(0, dtype=torch.float64, device=device)

    def local(self) -> tuple[bool, ...]:
        """Whether there is a gradient here, per slot of all packs in order."""
        return tuple(is_here for grads in self._grads for is_here in grads.presence())

    def counts(self, local: tuple[bool, ...]) -> Tensor:
        """This rank's part of :attr:`ControlVector.presence`; uploaded once per pattern."""
        if local not in self._uploaded:
            if len(self._uploaded) > 8:
                self._uploaded.clear()
            counts: list[bool] = []
            position = 0
            for blocks, own_block, slots in self._blocks():
                counts += [False] * (own_block * slots)
                counts += local[position : position + slots]
                counts += [False] * ((blocks - own_block - 1) * slots)
                position += slots
            self._uploaded[local] = to_device(counts, torch.float64, self._device)
        return self._uploaded[local]

    def copies(self) -> Tensor:
        """This rank's part of :attr:`ControlVector.copies`."""
        rows = []
        blocks_of = self._blocks()
        for number, grads in enumerate(self._grads if any(self._copying) else ()):
            if self._copying[number]:
                blocks, own_block, slots = blocks_of[number]
                row = torch.zeros(blocks, slots, dtype=torch.float64, device=self._device)
                if grads.joint is not None:
                    row[own_block] = grads.joint
                rows.append(row.view(-1))
        return torch.cat(rows) if rows else self._none

    def anywhere(
        self, local: tuple[bool, ...], control: ControlVector
    ) -> dict[Pack, tuple[bool, ...]]:
        """Slots with a gradient on some rank, by pack.

        A gradient that is here is present. Only for a slot of an own span without one the counts
        of the other ranks are read, which on an accelerator waits for the all-reduce.
        """
        owned = (owns for grads in self._grads for owns in grads.owned)
        others = self._process_groups.dp.size > 1 or bool(control.copies.numel())
        wanted = others and any(owns and not has for owns, has in zip(owned, local, strict=True))
        counts = control.presence.tolist() if wanted else []
        copies = control.copies.tolist() if wanted else []
        present = {}
        position = start = copies_start = 0
        for number, (blocks, own_block, slots) in enumerate(self._blocks()):
            slot_present = local[position : position + slots]
            if wanted:
                first = start + own_block * slots
                slot_present = tuple(count > 0 for count in counts[first : first + slots])
            if wanted and self._copying[number]:
                first = copies_start + own_block * slots
                of_copies = copies[first : first + slots]
                slot_present = tuple(
                    has or count > 0 for has, count in zip(slot_present, of_copies, strict=True)
                )
                copies_start += blocks * slots
            present[self._grads[number].pack] = slot_present
            position, start = position + slots, start + blocks * slots
        return present

    def _blocks(self) -> list[tuple[int, int, int]]:
        """Per pack, its blocks, which of them is this rank's, and the slots of a block."""
        if len(self._blocks_of) != len(self._grads):
            expert_blocks = self._process_groups.parallel_dims.expert_blocks
            groups = [grads.pack.layout.pack_groups for grads in self._grads]
            self._blocks_of = [
                (*expert_blocks(of_pack), len(grads.owned))
                for of_pack, grads in zip(groups, self._grads, strict=True)
            ]
            self._copying = [of_pack.sums_replicas for of_pack in groups]
        return self._blocks_of
