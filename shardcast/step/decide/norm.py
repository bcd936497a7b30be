"""The p-norm of gradients that are cut into spans, packs and ranks, and clipping by it.

What can be merged are sums of p-th powers (for inf: maxima), here called powers. They are fp64,
which makes the norm independent of how the packs are cut, to fp32 precision, and on CPU finite for
every finite gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardcast import _compat

CHUNK = 1 << 16  # elements whose squares are summed at a time on CPU: stays in cache
LIMITS = 64  # bounds that are kept on the device; a schedule may have one for each step
EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


class PNorm:
    """The arithmetic of one p-norm; its results are 0-dim or 1-d on ``device``.

    Attributes:
        is_maximum: powers are merged by their maximum, not by their sum.
    """

    def __init__(self, p: float, device: torch.device) -> None:
        self._p, self._device = p, device
        # Of these a compiler's graph has one case; p itself would be a number that is given to it.
        self.is_maximum, self._is_euclidean = math.isinf(p), p == 2.0
        self._zero = torch.zeros((), dtype=torch.float32, device=device)
        self._limits: dict[float, Tensor] = {}

    def on_device(self, limit: float | Tensor) -> Tensor:
        """Return a finite bound as 0-dim fp64; a number of the host is uploaded once."""
        most = torch.finfo(torch.float64).max  # no bound: infinity is no multiple of itself
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

        On an accelerator all spans of one dtype are one call, as in torch's ``clip_grad_norm_``,
        which reads them once and sums in fp32. The price: a span whose sum of powers exceeds fp32
        (a norm above 1e19, with p of 2) counts as infinite, so that the step is skipped.
        """
        if _compat.is_host(self._device) or not spans:
            powers = [self.power(own) for own in spans]
            return torch.stack(powers) if powers else self._zero.new_empty(0)
        norms = [self._zero] * len(spans)
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number, own in enumerate(spans):
            if own.numel():  # an empty one has no maximum
                kinds.setdefault((own.device, own.dtype), []).append(number)
        for (device, _), numbers in kinds.items():
            every = torch._foreach_norm([spans[n] for n in numbers], self._p, dtype=torch.float32)
            for number, norm in zip(numbers, every, strict=True):
                norms[number] = norm if device == self._device else norm.to(self._device)
        stacked = torch.stack(norms) if len(norms) > 1 else norms[0].view(1)
        return stacked if self.is_maximum else stacked.pow(self._p)

    def power(self, own: Tensor) -> Tensor:
        """Return the power of a 1-d span of the host, 0-dim."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        scratch = torch.empty(CHUNK, dtype=torch.float64)
        for start in range(0, own.numel(), CHUNK):
            piece = own[start : start + CHUNK]
            if self._p == 2.0:
                doubles = scratch[: piece.numel()].copy_(piece)
                total += torch.dot(doubles, doubles)
            else:
                norm = torch.linalg.vector_norm(piece, self._p, dtype=torch.float64)
                norm = norm.to(self._device)
                total = torch.maximum(total, norm) if self.is_maximum else total + norm.pow(self._p)
        return total

    def merge(self, powers: Tensor) -> Tensor:
        """Merge powers of parts, along the first dimension, into those of the whole, in fp64."""
        if powers.shape[0] == 1:
            return powers[0].double()
        return powers.amax(0).double() if self.is_maximum else powers.sum(0, dtype=torch.float64)

    def agreed(self, powers: Tensor, ranks: int) -> Tensor:
        """Return the powers per group, of the sum of all ranks' :attr:`ControlVector.powers`."""
        return self.merge(powers.view(ranks if self.is_maximum else 1, -1))

    def root(self, powers: Tensor, scale: Tensor | None) -> Tensor:
        """Return the norm, 0-dim, of a whole with parts of these powers, ``scale`` removed."""
        norm = self.merge(powers)
        if self._is_euclidean:
            norm = norm.sqrt()
        elif not self.is_maximum:
            norm = norm.pow(1.0 / self._p)
        return norm if scale is None else norm / scale

    def multiplied(
        self, powers: Tensor, factors: Sequence[Tensor | None], scale: Tensor | None
    ) -> Tensor:
        """Return the powers of parts that are multiplied by ``factors``, one each; ``None`` is 1.

        Args:
            scale: a loss scale that the factors remove, and that is to stay.
        """
        one = torch.ones((), dtype=torch.float64, device=self._device)
        back = one if scale is None else scale.double()
        each = torch.stack([one if factor is None else factor * back for factor in factors])
        return powers * (each if self.is_maximum else each.pow(self._p))


def product(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return a product, of which ``None`` is 1."""
    if first is None or second is None:
        return second if first is None else first
    return first * second


def clip_factors(
    norm: PNorm, powers: Tensor, scale: Tensor | None, bound: Tensor | None,
    bounds: Sequence[Tensor | None], total: Tensor, times: Tensor | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """Return per group the factor that keeps its bound, 0-dim fp32; ``None`` without one.

    Groups that are clipped together have the same tensor.

    Args:
        powers: per group, see :class:`PNorm`; the gradients have the loss scale ``scale``.
        bound: of the norm of all groups that have none of their own, see :meth:`PNorm.on_device`.
        bounds: per group, one of its own, by which it is clipped by itself.
        total: the norm of all groups.
        times: 0-dim fp32, multiplies all of them.
    """

    def clip(bound: Tensor | None, members: list[int]) -> Tensor | None:
        if bound is None:
            return times
        norm_of_members = total
        if len(members) < len(bounds):
            # Not powers[members]: a list as an index is copied to the device, which waits for it.
            of_members = torch.stack([powers[member] for member in members])
            norm_of_members = norm.root(of_members, scale)
        # 1 where the norm keeps it, in three launches.
        above = torch.maximum(norm_of_members + EPS, bound)
        factor = torch.div(bound, above, out=torch.empty_like(above, dtype=torch.float32))
        return product(times, factor)

    unbounded = [number for number, own in enumerate(bounds) if own is None]
    shared = clip(bound, unbounded) if unbounded else None
    return [shared if own is None else clip(own, [number]) for number, own in enumerate(bounds)]


def clamp_(own: Tensor, limit: float, factor: Tensor | None) -> None:
    """Clamp a span so that its product with ``factor`` lies in ``[-limit, limit]``.

    Infinities stay, so that the step is skipped for them.
    """
    bound = torch.full((), limit, dtype=torch.float32, device=own.device)  # waits for nothing
    if factor is not None:
        # Without a finite norm there is no factor either: the step is skipped, but padding that is
        # clamped to NaN would stay so, and spoil all later norms.
        bound = (bound / factor).nan_to_num(math.inf, math.inf)
    own.copy_(torch.where(own.isfinite(), own.clamp(-bound, bound), own))
