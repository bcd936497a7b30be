"""The norm of gradients that are split into spans, packs and ranks, and clipping by it.

Sums of p-th powers can be merged (maxima for inf); they are called powers here. They are in fp64,
so the norm does not depend on how packs are cut, to fp32 precision. On a CPU it is finite for every
finite gradient. :class:`GradientNorm` sums powers over ranks and returns each group's factor;
:class:`PNorm` is the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import ProcessGroups
from shardcast.memory.gradients import Gradients
from shardcast.memory.slices import CHUNK, slices
from shardcast.plan.layout import GroupId, with_values
from shardcast.plan.originals import OptimizerList
from shardcast.step.decide.decision import Decision
from shardcast.step.decide.signal import Signal, to_device

LIMITS = 64  # bounds kept on the device; a schedule may have a new one in each step
EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class NormParts(NamedTuple):
    """The parts of own spans whose norms are computed.

    Attributes:
        of: pack number of each part, and its slice of the own span.
        mask: bool, (parts, groups): the group to which a part counts; ``None``: there is one group,
            and all parts count.
        from_last: pack number of each part, counted from the last pack, which is 1; fp64.
    """

    of: tuple[tuple[int, slice], ...]
    mask: Tensor | None
    from_last: Tensor


class GradientNorm(Signal):
    """The norm of each group, the factors that clip it, and the first non-finite pack.

    Its slice starts with each data-parallel rank's first non-finite pack, counted from the last
    pack, so that the first one has the largest number (0: none). After it comes the power of each
    group; for a maximum, that of each rank and group. Non-finite packs are its mistakes, which skip
    the step.

    Args:
        grads: the gradient packs that are reduced; the list may grow.
        originals: the optimizers, whose groups may have their own bounds.
    """

    name = "norm"
    adds_up = False

    def __init__(
        self,
        grads: Sequence[Gradients],
        originals: OptimizerList,
        process_groups: ProcessGroups,
        p: float,
        device: torch.device,
    ) -> None:
        self._grads, self._originals, self._device = grads, originals, device
        self._rank, self._ranks = process_groups.dp.rank, process_groups.dp.size
        self._model_rank = process_groups.model.rank
        self.skips = (True,) * self._ranks
        self._of = PNorm(p, device)
        self._bound: float | None = None  # bound of the coming decision; groups may have their own
        self._bounds: dict[GroupId, Any] = {}
        self._pending: Decision | None = None
        self._parts: tuple[object, NormParts] | None = None
        self._none = torch.zeros((), dtype=torch.float64, device=device)
        self._row = self._none.new_zeros(0)

    def begin(self, bound: float | None, pending: Decision | None) -> None:
        """Set the bounds of the coming decision; see :meth:`.Decider.decide`."""
        self._bound, self._pending = bound, pending
        # Only of the sharded groups: with other groups this rank has an error to share with all
        # ranks.
        self._bounds = dict.fromkeys(self._originals.sharded)
        for number, owner, group in self._originals.numbered():
            # Some classes have their own option of that name.
            if number in self._bounds and "max_grad_norm" not in owner.defaults:
                self._bounds[number] = group.get("max_grad_norm")

    def numel(self) -> int:
        of_groups = self._ranks if self._of.is_maximum else 1
        return self._ranks + of_groups * len(self._originals.sharded)

    def local(self) -> Tensor:
        """Return this rank's part; the next call overwrites it."""
        if len(self._row) != self.numel():  # only when its length changes
            self._row = self._none.new_zeros(self.numel())
        parts = self._parts_of()
        powers = self._of.powers([self._grads[number].own[part] for number, part in parts.of])
        first, of_groups = self._row[self._rank], self._row[self._ranks :]
        if self._of.is_maximum:
            of_groups = of_groups.view(self._ranks, -1)[self._rank]
        if not len(powers):
            self._row.zero_()
            return self._row
        # Not numbers[index], because indexing by a 0-dim tensor reads its value.
        numbers = torch.where(powers < math.inf, self._none, parts.from_last)
        torch.amax(numbers, 0, out=first)  # saves a launch to copy it into the row
        if parts.mask is None:
            of_groups = of_groups[0]
        else:  # a replica that is counted on another rank contributes only its finiteness
            by_group = powers[:, None]
            powers = torch.where(parts.mask | ~by_group.isfinite(), by_group, 0.0)
        self._of.merge(powers, out=of_groups)
        return self._row

    def _parts_of(self) -> NormParts:
        """Return the parts of own spans whose norms are computed, each for its group.

        Groups that are clipped together count as the first of them. So a pack has one part, however
        many groups it has.
        """
        first: dict[Any, GroupId] = {}
        counted_as = {}
        for group, bound in self._bounds.items():
            factor = None if self._pending is None else self._pending.factors[group]
            together = group if bound is not None else id(factor)
            counted_as[group] = first.setdefault(together, group)
        key = len(self._grads), tuple(counted_as.values())
        if self._parts is None or self._parts[0] != key:
            self._parts = key, self._arranged(counted_as)
        return self._parts[1]

    def _arranged(self, counted_as: Mapping[GroupId, GroupId]) -> NormParts:
        columns = {group: number for number, group in enumerate(counted_as)}
        parts, mask, from_last = list[tuple[int, slice]](), list[list[bool]](), list[int]()
        for number, grads in enumerate(self._grads):
            is_primary = grads.pack.layout.pack_groups.is_primary
            for part, group in with_values(grads.pack.ranges, counted_as):
                parts.append((number, part))
                mask.append([is_primary and n == columns[group] for n in range(len(columns))])
                from_last.append(len(self._grads) - number)
        are_all = len(columns) == 1 and all(map(all, mask))
        return NormParts(
            tuple(parts),
            None if are_all else to_device(mask, torch.bool, self._device),
            to_device(from_last, torch.float64, self._device),
        )

    def read(self, total: Tensor) -> Tensor:
        """Return the first non-finite packs, then the power of each group."""
        if not self._of.is_maximum:
            return total
        first, powers = total.split([self._ranks, len(total) - self._ranks])
        return torch.cat([first, self._of.merge(powers.view(self._ranks, -1))])

    def merge(self, readings: Tensor) -> Tensor:
        """Merge powers of model-parallel ranks, each of which names its own packs."""
        first = readings[self._model_rank, : self._ranks]
        return torch.cat([first, self._of.merge(readings[:, self._ranks :])])

    def total(self, reading: Tensor, scale: Tensor | None) -> Tensor:
        """Return the norm of all groups, 0-dim, with ``scale`` removed."""
        return self._of.root(reading[self._ranks :], scale)

    def clip(
        self,
        reading: Tensor,
        norm: Tensor,
        scale: Tensor | None,
        unscale: Tensor | None,
        before: Tensor | None,
    ) -> tuple[Tensor, dict[GroupId, Tensor | None]]:
        """Return the norm that is clipped, and the factor of each group's gradients.

        Args:
            norm: the :meth:`total`.
            scale: scale of the gradients in own spans; ``unscale`` removes it.
            before: a verdict's factor on the gradients before they are clipped. It includes
                ``unscale``. An earlier decision has its own factors for that.
        """
        powers = reading[self._ranks :]
        bound, *bounds = (
            None if limit is None else self._of.on_device(limit)
            for limit in (self._bound, *self._bounds.values())
        )
        earlier = [before] * len(bounds)
        if self._pending is not None:
            earlier = [self._pending.factors[group] for group in self._bounds]
        elif before is unscale:
            factors = clip_factors(self._of, powers, scale, bound, bounds, norm, unscale)
            return norm, dict(zip(self._bounds, factors, strict=True))
        powers = self._of.multiplied(powers, earlier, scale)
        multiplied = self._of.root(powers, scale)
        clips = clip_factors(self._of, powers, scale, bound, bounds, multiplied)
        factors = [product(*pair) for pair in zip(earlier, clips, strict=True)]
        clipped = norm if self._pending is None else multiplied
        return clipped, dict(zip(self._bounds, factors, strict=True))

    def clamp_(self, limit: float, unscale: Tensor | None, pending: Decision | None) -> None:
        """Clamp all means so that their products with a factor are in ``[-limit, limit]``."""
        for grads in self._grads:
            if pending is None:
                clamp_(grads.all_shown, limit, unscale)
                continue
            for part, factor in with_values(grads.shown_ranges, pending.factors):
                clamp_(grads.all_shown[part], limit, factor)

    def error(self, mistakes: Sequence[float]) -> None:
        """Return no error: the step is skipped, see :meth:`.SkipReport.poll`."""

    def packs(self, first: Sequence[float]) -> Iterator[tuple[int, Gradients]]:
        """Return, by rank, the first non-finite pack in these numbers."""
        yield from ((rank, self._grads[-int(n)]) for rank, n in enumerate(first) if n)


class PNorm:
    """The arithmetic of one p-norm; results are 0-dim or 1-d on ``device``.

    Attributes:
        is_maximum: powers are merged by their maximum, not their sum.
    """

    def __init__(self, p: float, device: torch.device) -> None:
        self._p, self._device = p, device
        # For these a compiled graph has a fixed case; p itself would be an input of the graph.
        self.is_maximum, self._is_euclidean = math.isinf(p), p == 2.0
        self._zero = torch.zeros((), dtype=torch.float32, device=device)
        self._limits: dict[float, Tensor] = {}

    def on_device(self, limit: float | Tensor) -> Tensor:
        """Return a finite bound as 0-dim fp64; a host number is uploaded once."""
        most = torch.finfo(torch.float64).max  # means no bound, because inf / inf is NaN
        if isinstance(limit, Tensor):
            return limit.to(self._device, torch.float64).clamp(max=most)
        limit = min(limit, most)
        if limit not in self._limits:
            if len(self._limits) > LIMITS:
                self._limits.clear()
            self._limits[limit] = torch.full_like(self._zero, limit, dtype=torch.float64)
        return self._limits[limit]

    def powers(self, spans: Sequence[Tensor]) -> Tensor:
        """Return the power of each 1-d span, 1-d.

        On an accelerator all spans of one dtype are one call, as in torch's ``clip_grad_norm_``. It
        reads them once and sums in fp32. In exchange, a span whose sum of powers exceeds fp32 (a
        norm above 1e19 for p = 2) counts as infinite, and the step is skipped.
        """
        if _compat.is_host(self._device) or not spans:
            powers = [self.power(own) for own in spans]
            return torch.stack(powers) if powers else self._zero.new_empty(0)
        norms = [self._zero] * len(spans)
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number, own in enumerate(spans):
            if own.numel():  # an empty span has no maximum
                kinds.setdefault((own.device, own.dtype), []).append(number)
        for (device, _), numbers in kinds.items():
            every = torch._foreach_norm([spans[n] for n in numbers], self._p, dtype=torch.float32)
            for number, norm in zip(numbers, every, strict=True):
                norms[number] = norm if device == self._device else norm.to(self._device)
        stacked = torch.stack(norms) if len(norms) > 1 else norms[0].view(1)
        return stacked if self.is_maximum else stacked.pow(self._p)

    def power(self, own: Tensor) -> Tensor:
        """Return the power of a 1-d span on the host, 0-dim."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        scratch = torch.empty(CHUNK, dtype=torch.float64)
        for part in slices(own.numel(), CHUNK):
            piece = own[part]
            if self._p == 2.0:
                doubles = scratch[: piece.numel()].copy_(piece)
                total += torch.dot(doubles, doubles)
            else:
                norm = torch.linalg.vector_norm(piece, self._p, dtype=torch.float64)
                norm = norm.to(self._device)
                total = torch.maximum(total, norm) if self.is_maximum else total + norm.pow(self._p)
        return total

    def merge(self, powers: Tensor, out: Tensor | None = None) -> Tensor:
        """Merge powers along the first dimension, in fp64."""
        if powers.shape[0] > 1 and not self.is_maximum:
            return torch.sum(powers, 0, dtype=torch.float64, out=out)
        merged = powers[0] if powers.shape[0] == 1 else powers.amax(0)
        return merged.double() if out is None else out.copy_(merged)

    def root(self, powers: Tensor, scale: Tensor | None) -> Tensor:
        """Return the norm, 0-dim, from these powers of its parts, with ``scale`` removed."""
        norm = self.merge(powers)
        if self._is_euclidean:
            norm = norm.sqrt()
        elif not self.is_maximum:
            norm = norm.pow(1.0 / self._p)
        return norm if scale is None else norm / scale

    def multiplied(
        self, powers: Tensor, factors: Sequence[Tensor | None], scale: Tensor | None
    ) -> Tensor:
        """Return the powers of parts that are multiplied by one of ``factors`` each; ``None`` is 1.

        Args:
            scale: a loss scale that the factors remove and that should stay.
        """
        one = torch.ones((), dtype=torch.float64, device=self._device)
        back = one if scale is None else scale.double()
        each = torch.stack([one if factor is None else factor * back for factor in factors])
        return powers * (each if self.is_maximum else each.pow(self._p))


def product(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return a product in which ``None`` is 1."""
    if first is None or second is None:
        return second if first is None else first
    return first * second


def clip_factors(
    norm: PNorm,
    powers: Tensor,
    scale: Tensor | None,
    bound: Tensor | None,
    bounds: Sequence[Tensor | None],
    total: Tensor,
    times: Tensor | None = None,
) -> list[Tensor | None]:
    """Return each group's factor that keeps its bound, 0-dim fp32; ``None`` without a bound.

    Groups that are clipped together have the same tensor.

    Args:
        powers: per group, see :class:`PNorm`; the gradients have the loss scale ``scale``.
        bound: bound of the norm of all groups without their own, see :meth:`PNorm.on_device`.
        bounds: each group's own bound, by which it is clipped separately.
        total: norm of all groups.
        times: 0-dim fp32, a factor of all gradients.
    """

    def clip(bound: Tensor | None, members: list[int]) -> Tensor | None:
        if bound is None:
            return times
        norm_of_members = total
        if len(members) < len(bounds):
            # Not powers[members], because copying an index list to the device waits for it.
            of_members = torch.stack([powers[member] for member in members])
            norm_of_members = norm.root(of_members, scale)
        # 1 if the norm is within the bound, in three launches.
        above = torch.maximum(norm_of_members + EPS, bound)
        factor = torch.div(bound, above, out=torch.empty_like(above, dtype=torch.float32))
        return product(times, factor)

    unbounded = [number for number, own in enumerate(bounds) if own is None]
    shared = clip(bound, unbounded) if unbounded else None
    return [shared if own is None else clip(own, [number]) for number, own in enumerate(bounds)]


def clamp_(own: Tensor, limit: float, factor: Tensor | None) -> None:
    """Clamp a span so that its product with ``factor`` is in ``[-limit, limit]``.

    Infinities stay, so that they skip the step.
    """
    # does not wait for the device
    bound = torch.full((), limit, dtype=torch.float32, device=own.device)
    if factor is not None:
        # If the norm is not finite there is no factor, and the step is skipped. But padding that is
        # clamped to NaN would stay NaN and spoil all later norms.
        bound = (bound / factor).nan_to_num(math.inf, math.inf)
    own.copy_(torch.where(own.isfinite(), own.clamp(-bound, bound), own))
