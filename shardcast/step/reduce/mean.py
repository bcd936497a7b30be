"""Reduce: the mean over ranks of the pieces of a span, in chunks or as one kernel.

In chunks it takes about ten passes over the span for eight ranks. On an accelerator that is more
memory traffic than the whole update, so there one kernel reads and writes everything once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardcast import _compat
from shardcast._compat import inductor
from shardcast.config import ShardcastConfig
from shardcast.memory.slices import CHUNK, LAUNCH, slices
from shardcast.plan.precision import MASTER_DTYPE, sum_dtype
from shardcast.step.compiling import compiles, or_eager

ROW = 16  # elements: two or four loads of 16 bytes
# Numbers of ranks for which it is compiled: each rank's piece is an operand of the kernel, and
# division by a power of two is exact however a compiler divides.
POWERS = (2, 4, 8, 16, 32)
OTHERS = (3, 5, 6, 7)

Mean = Callable[[Sequence[Tensor], float | Tensor, Tensor | None, Tensor], None]


@dataclass
class Divisor:
    """The number that divides the sums over ranks.

    Attributes:
        ranks: number of data-parallel ranks, for the mean.
        given: the script's own number; a tensor is 0-dim, on the device of the gradients.
    """

    ranks: int
    given: float | Tensor | None = None

    @property
    def value(self) -> float | Tensor:
        return self.ranks if self.given is None else self.given


def choose_mean(config: ShardcastConfig, size: int, device: torch.device) -> Mean:
    """Return :func:`mean_in_chunks_`, or a kernel with its bits if the update is compiled."""
    return compiled_mean_ if compiles(config, device) and is_exact(size) else mean_in_chunks_


def mean_in_chunks_(
    pieces: Sequence[Tensor], size: float | Tensor, carry: Tensor | None, out: Tensor
) -> None:
    """Write the sum of ``pieces`` in order over ``size``, plus the fp32 carry, rounded once.

    Only one chunk at a time is in higher precision.

    Args:
        pieces: of equal shape and dtype; ``out`` itself may be one of them.
        out: overwritten.
    """
    low = out.dtype == pieces[0].dtype != MASTER_DTYPE
    two = isinstance(size, int) and len(pieces) == size == 2
    if two and carry is None and low:
        # In fp32, where the difference and its half are exact, and rounded once. These are the bits
        # of half the sum, unless values exceed 1.7e38. Then, or if a value is infinite, the result
        # may be NaN, which skips the step like an infinity.
        torch.lerp(pieces[0], pieces[1], 0.5, out=out)
        return

    # On a CPU the fp32 copy of a chunk stays in the cache.
    for part in slices(out.numel(), CHUNK if _compat.is_host(out.device) else LAUNCH):
        mean = pieces[0][part].to(sum_dtype(pieces[0].dtype), copy=True)
        for piece in pieces[1:]:
            mean += piece[part]
        mean /= size
        if carry is not None:
            mean += carry[part]
        out[part].copy_(mean)


def is_exact(size: int) -> bool:
    """Return whether the kernel of the mean over ``size`` ranks has the eager mean's bits."""
    return size in POWERS or (size in OTHERS and inductor.divides_exactly())


def mean_(pieces: Sequence[Tensor], size: int, carry: Tensor | None, out: Tensor) -> None:
    """Write the result of :func:`mean_in_chunks_`, all at once."""
    total = pieces[0].to(sum_dtype(pieces[0].dtype))
    for piece in pieces[1:]:
        total = total + piece
    # Divided, not multiplied by the reciprocal, so that the mean of equal values is that value.
    total = total / size
    out.copy_(total if carry is None else total + carry)


def compiled_mean_(
    pieces: Sequence[Tensor], size: float | Tensor, carry: Tensor | None, out: Tensor
) -> None:
    """Run :func:`mean_` as one kernel; ``size`` is the number of ranks."""
    assert isinstance(size, int)
    if not out.numel():
        return
    # In rows, so that the length is known to be a multiple of one load, as all spans are with the
    # default alignment. One graph serves any number of rows except 0 and 1.
    row = ROW if out.numel() % ROW == 0 and out.numel() > ROW else 0
    is_own = tuple(piece is out for piece in pieces)
    run = _kernel(size, row, pieces[0].dtype, out.dtype, carry is None, is_own)
    # Not as views, because a compiled graph would be bound to their bases and offsets.
    target = _compat.rows_of(out, row)
    in_rows = [target if piece is out else _compat.rows_of(piece, row) for piece in pieces]
    run(in_rows, None if carry is None else _compat.rows_of(carry, row), target)


@functools.cache  # one compiled function, so that models in one process share its graph
def _kernel(size: int, row: int, dtype: torch.dtype, *_: object) -> Callable[..., None]:
    def mean(pieces: Sequence[Tensor], carry: Tensor | None, out: Tensor) -> None:
        mean_(pieces, size, carry, out)  # a constant, which divides in the pieces' own dtype

    def in_chunks(pieces: Sequence[Tensor], carry: Tensor | None, out: Tensor) -> None:
        flat = None if carry is None else carry.view(-1)
        mean_in_chunks_([piece.view(-1) for piece in pieces], size, flat, out.view(-1))

    name = f"the mean over {size} ranks in {dtype}"
    return or_eager(inductor.compiled(mean), in_chunks, name)
