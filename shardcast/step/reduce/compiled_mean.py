"""Reduce: the mean over ranks as one kernel, which reads and writes everything once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardcast import _compat
from shardcast._compat import inductor
from shardcast.plan.precision import sum_dtype
from shardcast.step.fallback import or_eager
from shardcast.step.reduce.mean import mean_in_chunks_

ROW = 16  # elements: two or four loads of 16 bytes
# For how many ranks it is compiled: each one's piece is an operand of the kernel, and division by
# a power of two is exact in whatever way a compiler divides.
POWERS = (2, 4, 8, 16, 32)
OTHERS = (3, 5, 6, 7)


def is_exact(size: int) -> bool:
    """Return whether the kernel of the mean over ``size`` ranks has the bits of the eager one."""
    return size in POWERS or (size in OTHERS and inductor.divides_exactly())


def mean_(pieces: Sequence[Tensor], size: int, carry: Tensor | None, out: Tensor) -> None:
    """Do as :func:`.mean_in_chunks_`, all at once."""
    total = pieces[0].to(sum_dtype(pieces[0].dtype))
    for piece in pieces[1:]:
        total = total + piece
    # Divided, not multiplied by the reciprocal: the mean of equal values is that value.
    total = total / size
    out.copy_(total if carry is None else total + carry)


def compiled_mean_(pieces: Sequence[Tensor], size: int, carry: Tensor | None, out: Tensor) -> None:
    """Run :func:`mean_` as one kernel."""
    if not out.numel():
        return
    # In rows, of whose number one graph serves all but 0 and 1, so that a length is known to be a
    # multiple of what is loaded at a time; all spans are with the default alignment.
    row = ROW if out.numel() % ROW == 0 and out.numel() > ROW else 0
    is_own = tuple(piece is out for piece in pieces)
    run = _kernel(size, row, pieces[0].dtype, out.dtype, carry is None, is_own)
    # Not known as views: a compiled graph would be bound to their bases, and to their offsets.
    target = _compat.rows_of(out, row)
    in_rows = [target if piece is out else _compat.rows_of(piece, row) for piece in pieces]
    run(in_rows, None if carry is None else _compat.rows_of(carry, row), target)


@functools.cache  # one compiled function, so that models of one process share its graph
def _kernel(size: int, row: int, dtype: torch.dtype, *_: object) -> Callable[..., None]:
    def mean(pieces: Sequence[Tensor], carry: Tensor | None, out: Tensor) -> None:
        mean_(pieces, size, carry, out)  # a constant, by which is divided in the pieces' own dtype

    def in_chunks(pieces: Sequence[Tensor], carry: Tensor | None, out: Tensor) -> None:
        flat = None if carry is None else carry.view(-1)
        mean_in_chunks_([piece.view(-1) for piece in pieces], size, flat, out.view(-1))

    name = f"the mean over {size} ranks in {dtype}"
    return or_eager(inductor.compiled(mean), in_chunks, name)
