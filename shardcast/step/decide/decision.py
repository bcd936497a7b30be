"""The decision for one step, the gradients that take part in it, and its arithmetic.

The arithmetic leads from the norms of packs to a control vector, and from the sum of all ranks'
vectors to the tensors of a decision. None of its operations looks at a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import ProcessGroups
from shardcast.memory.gradients import Gradients
from shardcast.memory.pack import Pack
from shardcast.messages import by_rank
from shardcast.plan.layout import GroupId
from shardcast.step.decide.norm import PNorm, clip_factors, product
from shardcast.step.decide.report import Report
from shardcast.step.decide.signal import Signal, Verdict, defining, known, to_device

if TYPE_CHECKING:  # it imports this module
    from shardcast.step.decide.skip_report import SkipReport

CLEARED = 1 << 32  # more than there are ranks; sums of it are exact in fp64


@dataclass(frozen=True)
class Decision:
    """The outcome that all ranks agreed on for one step.

    Attributes:
        norm: 0-dim fp64, the global gradient norm before clipping, without loss scale and
            of the mean over tokens where they are counted.
        skip: 0-dim bool: some gradient somewhere is not finite, a rank made a mistake, or a verdict
            skips it.
        factors: per optimizer group, 0-dim fp32: what its gradients are to be multiplied with
            (unscale and clip), or ``None`` where that is 1 by construction.
        unscale: the part of these factors that removes loss scale and token count.
        verdicts: of the signals that have one.
        declined: 0-dim bool, a verdict skips the step; ``None`` where none does.
        present: per pack that is reduced, and slot, whether any rank has a gradient; exact for
            the slots that this rank owns a part of.
        taken: 1 where the step is made, 0 where it is skipped; 0-dim fp64.
        multiplier, increment: 1-d fp64: a step multiplies the totals of :class:`.SkipReport` by the
            first, and adds the second.
    """

    norm: Tensor
    skip: Tensor
    factors: Mapping[GroupId, Tensor | None]
    unscale: Tensor | None
    verdicts: Mapping[Signal, Verdict]
    declined: Tensor | None
    present: Mapping[Pack, tuple[bool, ...]]
    taken: Tensor
    multiplier: Tensor
    increment: Tensor


class Presence(Signal):
    """The slots that have a gradient, on this rank and on any rank.

    Each slot has a place, from which each rank that has a gradient takes 1, and slots whose
    replicas are summed take how many of them have one; a rank on which it was cleared since it was
    reduced adds :data:`CLEARED`. A last place stays 0, below which no maximum falls. Packs of
    experts differ between data-parallel ranks: each has a block of places for every expert that the
    ranks hold.

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
        self._here: tuple[int, ...] = ()  # of all packs in order, what this rank adds
        self._uploaded: dict[tuple[int, ...], Tensor] = {}
        self._zero = torch.zeros(1, dtype=torch.float64, device=device)

    def numel(self) -> int:
        if len(self._places) != len(self._grads):
            self._arrange()
        return self._numel + 1

    def local(self) -> Tensor:
        """Return this rank's part; uploaded once per pattern."""
        if len(self._places) != len(self._grads):
            self._arrange()
        self._here = tuple(
            CLEARED if slot in grads.gone else -int(is_here)
            for grads in self._grads
            for slot, is_here in enumerate(grads.presence())
        )
        if self._here not in self._uploaded:
            if len(self._uploaded) > 8:
                self._uploaded.clear()
            numbers, slots = [0] * (self._numel + 1), iter(self._here)
            for places in self._places:
                numbers[places] = islice(slots, places.stop - places.start)
            self._uploaded[self._here] = to_device(numbers, torch.float64, self._device)
        counts = self._uploaded[self._here]
        for grads, places in zip(self._grads, self._places, strict=True):
            if grads.holders is not None:
                counts = counts.clone()
                counts[places] -= grads.holders
        return counts

    def read(self, total: Tensor) -> Tensor:
        """Return whether a gradient is there on some ranks, and was cleared on others."""
        if not self._asks:
            return self._zero
        # The remainder has the sign of the total: above 0 if CLEARED is in it, and -1 too.
        return torch.fmod(total, CLEARED).amax(0, keepdim=True)

    def error(self, mistakes: Sequence[float]) -> Exception:
        """Name a parameter in an error, with the ranks."""
        names = [slot.name for grads in self._grads for slot in grads.pack.layout.slots]
        here = dict(zip(names, self._here, strict=True))
        told = known(here, self._process_groups.dp, self._device)
        texts = {CLEARED: "cleared", 0: "not there", -1: "kept"}
        for name in names:
            states = [(rank, texts[of_rank.get(name, 0)]) for rank, of_rank in told.items()]
            if {"cleared", "kept"} <= {text for _, text in states}:
                return RuntimeError(
                    f"step: after the backward .grad of {name!r} was kept on some ranks and "
                    f"cleared on others ({by_rank(states)}); clear gradients on all ranks alike"
                )
        cleared = [name for name, state in here.items() if state > 0]
        return RuntimeError(
            "step: after the backward .grad of some parameters was cleared on some ranks and kept "
            f"on others; this rank cleared {', '.join(cleared) or 'none'}; do it on all ranks alike"
        )

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

    def anywhere(self, total: Tensor) -> dict[Pack, tuple[bool, ...]]:
        """Return the slots with a gradient on some rank, by pack.

        A gradient that is here is present. Only for a slot without one the counts of the other
        ranks are read. On an accelerator, where that waits for the all-reduce, only if this rank
        owns a part of it.
        """
        local = [here < 0 for here in self._here]
        on_host = _compat.is_host(self._device)
        owned = (on_host or owns for grads in self._grads for owns in grads.owned)
        if self._asks and any(owns and not has for owns, has in zip(owned, local, strict=True)):
            present = [-count % CLEARED > 0 for count in total.tolist()]
            return {
                grads.pack: tuple(present[places])
                for grads, places in zip(self._grads, self._places, strict=True)
            }
        slots = iter(local)
        return {grads.pack: tuple(islice(slots, len(grads.owned))) for grads in self._grads}


class NormParts(NamedTuple):
    """The parts of own spans whose norms are taken.

    Attributes:
        of: the number of the pack of each, and the slice of its own span.
        mask: bool, (parts, groups): the group that a part counts for here; ``None``: there is one
            group, and all count.
        from_last: the number of the pack of each, counted from the last, which is 1; fp64.
        groups: their number.
    """

    of: tuple[tuple[int, slice], ...]
    mask: Tensor | None
    from_last: Tensor
    groups: int


class Sums(NamedTuple):
    """The parts of a control vector, or of the sum of those of all ranks.

    Attributes:
        powers: of the norm of each group, see :class:`.PNorm`.
        nonfinite: see :class:`.Counts`.
        of: each signal's.
    """

    powers: Tensor
    nonfinite: Tensor
    of: Mapping[Signal, Tensor]


class Agreement(NamedTuple):
    """The reading of the sum of the control vectors, by itself.

    Attributes:
        powers: of the norm of each group, see :class:`.PNorm`.
        totals, readings: of each signal, its part of the sum, and what it reads there.
        scale: of the gradients in the own spans, 0-dim; ``unscale`` is its inverse, fp32.
        norm, skip: as in :class:`.Decision`, before a verdict.
        report: see :class:`.Report`.
    """

    powers: Tensor
    totals: Mapping[Signal, Tensor]
    readings: Mapping[Signal, Tensor]
    scale: Tensor | None
    unscale: Tensor | None
    norm: Tensor
    skip: Tensor
    report: Tensor


class Arithmetic:
    """The arithmetic from norms and signals to an outcome, waiting for nothing.

    Args:
        signals: in the order of the vector.
        skips: knows the first pack that is not finite.
    """

    def __init__(
        self, norm: PNorm, signals: Sequence[Signal], process_groups: ProcessGroups, report: Report,
        skips: SkipReport,
    ) -> None:  # fmt: skip
        self._norm, self._signals, self._process_groups = norm, signals, process_groups
        self._report, self._skips = report, skips
        # Those that define a method: in a step the others cost nothing.
        self._reads, self._scales = (defining(method, signals) for method in ("read", "scale"))

    def sizes(self, groups: int, lengths: Sequence[int]) -> list[int]:
        """Return the length of each part of the control vector, by those of the signals' parts."""
        ranks = self._process_groups.dp.size
        return [groups * (ranks if self._norm.is_maximum else 1), ranks, *lengths]

    def parts(self, vector: Tensor, sizes: Sequence[int]) -> Sums:
        """Return the parts of a control vector, by :meth:`sizes`."""
        powers, nonfinite, *of_signals = vector.split(sizes)
        return Sums(powers, nonfinite, dict(zip(self._signals, of_signals, strict=True)))

    def vector(
        self, powers: Tensor, norm_parts: NormParts, own: Sequence[Tensor]
    ) -> tuple[Tensor, list[int]]:
        """Return the control vector of this rank, and the length of each of its parts.

        Args:
            powers: of the norm of each of ``norm_parts``, see :class:`.PNorm`.
            own: the parts of the signals.
        """
        nonfinite = self._skips.first_nonfinite(powers, norm_parts.from_last)
        parts = [self._group_powers(powers, norm_parts), nonfinite, *own]
        return torch.cat(parts), [*map(Tensor.numel, parts)]

    def _group_powers(self, powers: Tensor, norm_parts: NormParts) -> Tensor:
        """Return this rank's powers of each group; with a maximum of each rank and group.

        Of a copy that counts elsewhere it matters only whether it is finite.
        """
        groups, mask = norm_parts.groups, norm_parts.mask
        if not len(powers):
            own = powers.new_zeros(groups, dtype=torch.float64)
        elif mask is None:
            own = self._norm.merge(powers)
        else:
            by_group = powers[:, None]
            own = self._norm.merge(torch.where(mask | ~by_group.isfinite(), by_group, 0.0))
        if not self._norm.is_maximum:
            return own.view(-1)
        by_rank = own.new_zeros(self._process_groups.dp.size, groups)
        by_rank[self._process_groups.dp.rank] = own
        return by_rank.view(-1)

    def agree(self, vector: Tensor, sizes: Sequence[int]) -> Agreement:
        """Read the sum.

        Args:
            sizes: of its parts: powers of the norm, first packs that are not finite, signals'.
        """
        group_powers, nonfinite, totals = self.parts(vector, sizes)
        powers, readings = self._norm.agreed(group_powers, self._process_groups.dp.size), {**totals}
        for signal in self._reads:
            readings[signal] = signal.read(totals[signal])
        if self._process_groups.model.size > 1:
            powers, readings = self._merged(powers, readings)
        scale, unscale = self.scale(readings)
        norm = self._norm.root(powers, scale)
        report = self._report.of(norm, nonfinite, readings)
        skip = self._report.skips(report, scale is not None)
        return Agreement(powers, totals, readings, scale, unscale, norm, skip, report)

    def scale(self, readings: Mapping[Signal, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Return the scale of the gradients in the own spans, and the factor that removes it."""
        scale: Tensor | None = None
        for signal in self._scales:
            scale = product(signal.scale(readings.get(signal)), scale)
        return scale, None if scale is None else (1.0 / scale).float()

    def _merged(
        self, powers: Tensor, readings: Mapping[Signal, Tensor]
    ) -> tuple[Tensor, dict[Signal, Tensor]]:
        """Merge powers per group and readings of model-parallel ranks, by a small all-gather."""
        comm, parts = self._process_groups.model, [powers, *readings.values()]
        row = torch.cat(parts)
        gathered = row.new_empty(comm.size, row.numel())  # in rank order, the same on all ranks
        comm.all_gather(gathered.view(-1), row, "the decision")
        all_powers, *rows = gathered.split([part.numel() for part in parts], 1)
        merged = {it: it.merge(row) for it, row in zip(readings, rows, strict=True)}
        return self._norm.merge(all_powers), merged

    def settle(
        self, agreed: Agreement, bound: Tensor | None, bounds: Mapping[GroupId, Tensor | None],
        before: Sequence[Tensor | None] | None, is_clipped: bool,
        verdicts: Mapping[Signal, Verdict], present: Mapping[Pack, tuple[bool, ...]],
    ) -> Decision:  # fmt: skip
        """Clip, and say whether the step is made.

        Args:
            bound, bounds: of norms, of all groups and of each, see :func:`.clip_factors`.
            before: of each group what its gradients are multiplied with before they are clipped;
                ``None``: with what removes the scale.
            is_clipped: that is an earlier clip, and the norm is that of the clipped gradients.
            verdicts, present: as in :class:`Decision`.
        """
        powers, _, _, scale, unscale, norm, skip, report = agreed
        limits = [*bounds.values()]
        if before is None:
            factors = clip_factors(self._norm, powers, scale, bound, limits, norm, unscale)
        else:
            powers = self._norm.multiplied(powers, before, scale)
            multiplied = self._norm.root(powers, scale)
            clips = clip_factors(self._norm, powers, scale, bound, limits, multiplied)
            factors = [product(*pair) for pair in zip(before, clips, strict=True)]
            norm = multiplied if is_clipped else norm
        declined = _declined(verdicts)
        skip = skip if declined is None else skip | declined
        taken, multiplier, increment = self._report.tally(skip, report)
        return Decision(
            norm=norm, skip=skip, factors=dict(zip(bounds, factors, strict=True)), unscale=unscale,
            verdicts=verdicts, declined=declined, present=present, taken=taken,
            multiplier=multiplier, increment=increment,
        )  # fmt: skip


def _declined(verdicts: Mapping[Signal, Verdict]) -> Tensor | None:
    """Return whether a verdict skips the step, 0-dim."""
    declined: Tensor | None = None
    for verdict in verdicts.values():
        if verdict.skip is not None:
            declined = verdict.skip if declined is None else declined | verdict.skip
    return declined
