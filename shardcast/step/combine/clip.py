"""Clipping: by what the gradients of each group are multiplied, or to what they are clamped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardcast.step.combine.norm import PNorm

EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


def clip_factors(
    norm: PNorm,
    powers: Tensor,
    scale: Tensor | None,
    max_norm: float | None,
    limits: Sequence[float | None],
) -> list[Tensor | None]:
    """Per group, 0-dim fp32 by which its bound is kept; ``None`` without one.

    Args:
        powers: per group, see :class:`PNorm`; the gradients have the loss scale ``scale``.
        max_norm: bound of the norm of all groups that have none of their own.
        limits: per group, a bound of its own, by which it is clipped by itself.
    """

    def clip(limit: float | None, members: list[int]) -> Tensor | None:
        if limit is None:
            return None
        # Not powers[members]: a list as an index is copied to the device, which waits for it.
        some = torch.stack([powers[member] for member in members])
        return (limit / (norm.root(some, scale) + EPS)).clamp(max=1.0).float()

    rest = [number for number, limit in enumerate(limits) if limit is None]
    shared = clip(max_norm, rest) if rest else None
    return [
        shared if limit is None else clip(limit, [number]) for number, limit in enumerate(limits)
    ]


def clamp_(own: Tensor, limit: float, factor: Tensor | None) -> None:
    """Clamp a span to ``[-limit, limit]``, meant of what it is when multiplied by ``factor``.

    Infinities stay, so that the step is skipped for them.
    """
    bound = torch.full((), limit, dtype=torch.float32, device=own.device)  # waits for nothing
    if factor is not None:
        # Without a finite norm there is no factor either: the step is skipped, but padding that is
        # clamped to NaN would stay so, and spoil all later norms.
        bound = (bound / factor).nan_to_num(math.inf, math.inf)
    own.copy_(torch.where(own.isfinite(), own.clamp(-bound, bound), own))
