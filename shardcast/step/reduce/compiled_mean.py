"""Reduce: the mean over ranks as one kernel, which reads every piece once and writes the mean once.

The first call for a length is made by Dynamo; the others go to its graph themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

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
    own = [piece is out for piece in pieces]
    memory: Any = out
    last: _LastMean | None = getattr(memory, "last_mean", None)
    if last is not None and carry is None and last.serves(pieces, size, own):
        return
    # In rows, of whose number one graph serves all but 0 and 1, so that a length is known to be
    # a multiple of what is loaded at a time; all spans are with the default alignment.
    row = ROW if out.numel() % ROW == 0 and out.numel() > ROW else 0
    key = size, row, pieces[0].dtype, out.dtype, carry is None, tuple(own)
    _kernel(*key)(pieces, size, carry, out)
    call = None if carry is not None else _graph(*key).call_for(_rows_of(out, row))
    memory.last_mean = (
        None if call is None else _LastMean(call, size, row, own, pieces[-1 if own[0] else 0], out)
    )


class _LastMean:
    """The call by which a mean was written to some memory, and is in each backward.

    Args:
        piece: one of what was added up.
    """

    def __init__(
        self, call: inductor.Call, size: int, row: int, own: list[bool], piece: Tensor, out: Tensor
    ) -> None:
        self._call = call.with_first([_rows_of(out, row)])
        self._kind = size, own, piece.dtype, piece.numel()
        self._row = row

    def serves(self, pieces: Sequence[Tensor], size: int, own: list[bool]) -> bool:
        """Write the mean of these, if they are like those."""
        piece, row = pieces[-1 if own[0] else 0], self._row
        if self._kind != (size, own, piece.dtype, piece.numel()) or not self._call.fits:
            return False
        received: Sequence[Any] = pieces
        try:
            rows = [part.in_rows for part in received]
        except AttributeError:  # a new buffer
            rows = [_rows_of(part, row) for part in received]
        self._call([None, *rows])  # no carry
        return True


def _rows_of(tensor: Tensor, row: int) -> Tensor:
    """Return :func:`_compat.rows_of`, made once for a tensor: packs land in the same ones.

    It holds the memory, not ``tensor``, with which it goes.
    """
    known: Any = tensor
    rows: Tensor | None = getattr(known, "in_rows", None)
    if rows is None:
        rows = known.in_rows = _compat.rows_of(tensor, row)
    return rows


@functools.cache  # one compiled function, so that models of one process share its graph
def _graph(size: int, *_: Any) -> inductor.GraphForLengths:
    def mean(out: Tensor, carry: Tensor | None, *pieces: Tensor) -> None:
        mean_(pieces, size, carry, out)  # a constant, by which is divided in the pieces' own dtype

    return inductor.GraphForLengths(mean)


@functools.cache
def _kernel(size: int, row: int, dtype: torch.dtype, *others: Any) -> Callable[..., None]:
    graph = _graph(size, row, dtype, *others)

    def in_rows(pieces: Sequence[Tensor], size: int, carry: Tensor | None, out: Tensor) -> None:
        # Not known as views: a compiled graph would be bound to their bases, and to their offsets.
        target = _rows_of(out, row)
        rest = None if carry is None else _rows_of(carry, row)
        graph(target, rest, *(target if piece is out else _rows_of(piece, row) for piece in pieces))

    return or_eager(in_rows, mean_in_chunks_, f"the mean over {size} ranks in {dtype}")
