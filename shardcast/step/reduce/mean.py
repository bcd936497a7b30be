"""Reduce: the mean over ranks of what arrived for a span, in chunks.

It takes some ten passes over the span for eight ranks, which on an accelerator is more memory
traffic than the whole update: there it is one kernel (:mod:`.compiled_mean`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.config import ShardcastConfig
from shardcast.plan.precision import MASTER_DTYPE, sum_dtype
from shardcast.step.compiling import compiles

CHUNK = 1 << 16  # elements summed at a time on CPU: the fp32 accumulator stays in cache
PIECE = 1 << 24  # the same on an accelerator, where each operation is a kernel launch

Mean = Callable[[Sequence[Tensor], Any, Tensor | None, Tensor], None]


@dataclass
class Divisor:
    """The number that divides the sums over ranks.

    Attributes:
        ranks: how many data-parallel ones there are, for the mean.
        given: what a script says instead; a tensor is 0-dim, on the device of the gradients.
    """

    ranks: int
    given: float | Tensor | None = None

    @property
    def value(self) -> float | Tensor:
        return self.ranks if self.given is None else self.given


def choose_mean(config: ShardcastConfig, size: int, device: torch.device) -> Mean:
    """Return :func:`mean_in_chunks_`, or a kernel of its bits where the update is compiled."""
    if compiles(config, device):
        from shardcast.step.reduce.compiled_mean import compiled_mean_, is_exact

        if is_exact(size):
            return compiled_mean_
    return mean_in_chunks_


def mean_in_chunks_(
    pieces: Sequence[Tensor], size: float | Tensor, carry: Tensor | None, out: Tensor
) -> None:
    """Write the sum of ``pieces`` in order over ``size``, plus the fp32 carry, rounded once.

    No more than a chunk is in higher precision at a time.

    Args:
        pieces: of equal shape and dtype; ``out`` itself may be one of them.
        out: overwritten.
    """
    low = out.dtype == pieces[0].dtype != MASTER_DTYPE
    two = isinstance(size, int) and len(pieces) == size == 2
    if two and carry is None and low:
        # In fp32, where the difference and its half are exact, and rounded once: the bits of
        # the sum's half, unless values exceed 1.7e38. There, and where one is infinite, what
        # comes out may be NaN, which skips the step as an infinity does.
        torch.lerp(pieces[0], pieces[1], 0.5, out=out)
        return

    def total(part: slice) -> Tensor:
        total = pieces[0][part].to(sum_dtype(pieces[0].dtype), copy=True)
        for piece in pieces[1:]:
            total += piece[part]
        return total

    if out.numel() > CHUNK:
        divide_(total, size, carry, out)
        return
    mean = pieces[0].to(sum_dtype(pieces[0].dtype), copy=True)  # all at once: slices take time
    for piece in pieces[1:]:
        mean += piece
    mean /= size
    if carry is not None:
        mean += carry
    out.copy_(mean)


def divide_(
    total: Callable[[slice], Tensor], size: float | Tensor, carry: Tensor | None, out: Tensor
) -> None:
    """Write ``out = total / size + carry``, chunk by chunk.

    Args:
        total: gives those elements of the sum, which are overwritten.
    """
    for part in chunks(out):
        mean = total(part)
        mean /= size
        if carry is not None:
            mean += carry[part]
        out[part].copy_(mean)


def chunks(tensor: Tensor) -> Iterator[slice]:
    """Give ranges of a 1-d tensor whose fp32 copy stays in the cache of a CPU."""
    chunk = CHUNK if _compat.is_host(tensor.device) else PIECE
    for start in range(0, tensor.numel(), chunk):
        yield slice(start, min(start + chunk, tensor.numel()))
