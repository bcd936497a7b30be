"""What is decided for one step, and the one small all-reduce in which all ranks agree on it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardcast.comm import Grid
from shardcast.memory.gradients import GradPack
from shardcast.memory.pack import Pack
from shardcast.plan.layout import GroupId
from shardcast.step.combine.norm import PNorm
from shardcast.step.combine.options import Options, to_device

EXACT = 53  # bits of the integers that doubles hold, and add up, exactly
UNSCALED = -1  # instead of a position: this rank has gradients of a loss that was not scaled


@dataclass(frozen=True)
class Decision:
    """What all ranks agreed on for one step.

    Attributes:
        norm: 0-dim fp64, the global gradient norm before clipping, loss scale removed.
        skip: 0-dim bool: some gradient somewhere is not finite, or what follows is wrong.
        factors: per optimizer group, 0-dim fp32: what its gradients are to be multiplied with
            (unscale and clip), or ``None`` where that is 1 by construction.
        present: per pack that is reduced, and slot, whether any rank has a gradient; exact for
            the slots that this rank owns a part of.
        bad: fp64, per rank 1 + the position of the first non-finite element, 0 for none, or
            ``UNSCALED``.
        differing: bool, options of groups in which the ranks differ; see :class:`Options`.
    """

    norm: Tensor
    skip: Tensor
    factors: Mapping[GroupId, Tensor | None]
    present: Mapping[Pack, tuple[bool, ...]]
    bad: Tensor
    differing: Tensor


@dataclass(frozen=True)
class Sums:
    """What all ranks told each other, still on the device.

    Attributes:
        powers: per group, over all ranks; see :class:`PNorm`.
        bad: per rank, see :class:`Decision`.
        counts: how many ranks have a gradient for each slot, several to a double.
        joint: the same of slots whose copies' gradients are added up, over all copies.
        differing: in which options of groups ranks differ.
    """

    powers: Tensor
    bad: Tensor
    counts: Tensor
    joint: Tensor
    differing: Tensor


class Control:
    """The control all-reduce: a vector of doubles, of which each rank gets the sum over ranks.

    ::

        powers    one per group (and rank, with norm_type inf: no sum gives a maximum)
        bad       one per rank, which writes its own
        counts    of the ranks with a gradient, per slot; as many to a double as it holds exactly
        joint     per slot whose copies' gradients are added up, the same over all copies
        options   two per option and group: do all ranks have the same learning rate, ...?

    Beside model parallelism one small all-gather over its ranks follows, of what the data-parallel
    ones agreed on.

    That is ``8 * (3 * groups + ranks + slots / (53 // bits of ranks) + 2 * options)`` bytes: 9 KB
    for AdamW with 2 groups and 300 parameters on 1,024 ranks, 400 bytes on 2.

    Args:
        grads: the gradient packs that are reduced; the list may grow.
    """

    def __init__(
        self, grads: Sequence[GradPack], grid: Grid, norm: PNorm, device: torch.device
    ) -> None:
        self._grads, self._grid, self._norm, self._device = grads, grid, norm, device
        self._comm = grid.dp
        self._bits = grid.dp.size.bit_length()  # of a count
        self._known: dict[tuple[bool, ...], Tensor] = {}
        self._nothing = torch.empty(0, dtype=torch.float64, device=device)

    def all_reduce(
        self,
        powers: Sequence[Tensor],
        bad: Tensor | float,
        pattern: tuple[bool, ...],
        digests: Tensor,
        options: Options,
    ) -> Sums:
        """Sum over ranks. Every rank must call it; waits for no device.

        Args:
            powers: per group, of this rank's spans, 0-dim.
            bad: of this rank.
            pattern: whether there is a gradient here, per slot of all packs in order.
            digests: of this rank's ``options``, 1-d.
        """
        size, rank, groups = self._comm.size, self._comm.rank, len(powers)
        rows = size if self._norm.is_maximum else 1
        counts, joint = self._on_device(self._in_lanes(pattern)), self._joint()
        sizes = [rows * groups, size, counts.numel(), joint.numel(), digests.numel()]
        control = torch.zeros(sum(sizes), dtype=torch.float64, device=self._device)
        all_powers, all_bad, all_counts, all_joint, all_digests = control.split(sizes)
        by_row = all_powers.view(rows, groups)
        by_row[rank % rows] = torch.stack(list(powers))
        all_bad[rank].fill_(bad)  # to assign a number would wait for a GPU (torch < 2.13)
        all_counts.copy_(counts)
        if joint.numel():
            all_joint.copy_(joint)
        all_digests.copy_(digests)
        self._comm.all_reduce(control)
        differing = options.differing(all_digests)
        sums = Sums(self._norm.merge(by_row), all_bad, all_counts, all_joint, differing)
        return sums if self._grid.model.size == 1 else self._gather(sums, all_digests, options)

    def _gather(self, sums: Sums, digests: Tensor, options: Options) -> Sums:
        """What the data-parallel ranks found, over all of the ranks of model parallelism."""
        comm = self._grid.model
        parts = [sums.powers, sums.bad, digests, sums.differing.double()]
        mine = torch.cat(parts)
        rows = mine.new_empty(comm.size, mine.numel())  # in the order of ranks, the same on all
        comm.all_gather(rows.view(-1), mine, "the decision")
        powers, bad, pairs, theirs = rows.split([part.numel() for part in parts], 1)
        # Of a pipeline's stages only the last one has the loss to be scaled.
        axes = self._grid.axes
        places = (bad == UNSCALED).view(1, *(axes.sizes[dim] for dim in axes.model), -1)
        if axes.pipeline in axes.model:
            places = places.movedim(1 + axes.model.index(axes.pipeline), 0)
        forgot = places.flatten(1, -2).any(1).all(0)
        kept = torch.where(sums.bad == UNSCALED, 0.0, sums.bad).masked_fill(forgot, UNSCALED)
        differing = theirs.any(0) | options.across(pairs)
        return replace(sums, powers=self._norm.merge(powers), bad=kept, differing=differing)

    def present(self, pattern: tuple[bool, ...], sums: Sums) -> dict[Pack, tuple[bool, ...]]:
        """Slots with a gradient on some rank.

        A gradient that is here is present. Only for a slot of our own span without one do we
        have to look at what the others said, which on an accelerator waits for the all-reduce.
        """
        owned = (mine for grads in self._grads for mine in grads.owned)
        alone = self._comm.size == 1 and not sums.joint.numel()
        needed = not alone and any(
            mine and not here for mine, here in zip(owned, pattern, strict=True)
        )
        wide = self._in_lanes(pattern)
        everywhere = self._unpacked(sums.counts, len(wide)) if needed else wide
        copies = [count > 0 for count in sums.joint.tolist()] if needed else []
        found, start = {}, 0
        for grads in self._grads:
            lanes, here = self._lanes(grads)
            slots = len(grads.owned)
            there = everywhere[start + here * slots :][:slots]
            if needed and grads.pack.layout.sharing.adds:
                among, copies = copies[here * slots :][:slots], copies[lanes * slots :]
                there = tuple(map(operator.or_, there, among))
            found[grads.pack] = there
            start += lanes * slots
        return found

    def _joint(self) -> Tensor:
        """What copies of one data-parallel coordinate told each other, in lanes, 1-d."""
        rows = []
        for grads in self._grads:
            if grads.pack.layout.sharing.adds:
                lanes, here = self._lanes(grads)
                shape = lanes, len(grads.owned)
                row = torch.zeros(shape, dtype=torch.float64, device=self._device)
                if grads.joint is not None:
                    row[here] = grads.joint
                rows.append(row.view(-1))
        return torch.cat(rows) if rows else self._nothing

    def _lanes(self, grads: GradPack) -> tuple[int, int]:
        return self._grid.axes.lanes(grads.pack.layout.sharing)

    def _in_lanes(self, pattern: tuple[bool, ...]) -> tuple[bool, ...]:
        """The pattern with places for packs of experts that other data-parallel ranks hold."""
        if not self._grid.axes.experts:
            return pattern
        wide: list[bool] = []
        start = 0
        for grads in self._grads:
            (lanes, here), slots = self._lanes(grads), len(grads.owned)
            mine = pattern[start : start + slots]
            wide += [False] * (here * slots) + [*mine] + [False] * ((lanes - here - 1) * slots)
            start += slots
        return tuple(wide)

    def _on_device(self, pattern: tuple[bool, ...]) -> Tensor:
        """The doubles that stand for a pattern, of which there are few; made once for each."""
        known = self._known.get(pattern)
        if known is None:
            if len(self._known) > 8:
                self._known.clear()
            known = to_device(self._packed(pattern), torch.float64, self._device)
            self._known[pattern] = known
        return known

    def _packed(self, pattern: Sequence[bool]) -> tuple[float, ...]:
        """0 or 1 per slot, in fields that are wide enough for the number of ranks."""
        each = EXACT // self._bits
        pieces = (pattern[start : start + each] for start in range(0, len(pattern), each))
        return tuple(
            float(sum(here << (self._bits * n) for n, here in enumerate(piece))) for piece in pieces
        )

    def _unpacked(self, counts: Tensor, slots: int) -> tuple[bool, ...]:
        each, mask = EXACT // self._bits, (1 << self._bits) - 1
        fields = [int(value) for value in counts.tolist()]
        return tuple(
            bool(fields[slot // each] >> (self._bits * (slot % each)) & mask)
            for slot in range(slots)
        )
