"""Reduce: the mean over ranks of what arrived for a span, in chunks or as one kernel.

In chunks it takes some ten passes over the span for eight ranks, which on an accelerator is more
memory traffic than the whole update; compiled, every piece is read once and the mean written once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast._compat import inductor
from shardcast.config import ShardcastConfig
from shardcast.plan.precision import MASTER_DTYPE, sum_dtype
from shardcast.step.compiling import compiles, or_eager

if TYPE_CHECKING:
    from shardcast.step.reduce.micro_batches import MicroBatches

CHUNK = 1 << 16  # elements summed at a time on CPU: the fp32 accumulator stays in cache
ROW = 16  # elements: two or four loads of 16 bytes
PIECE = 1 << 24  # the same on an accelerator, where each operation is a kernel launch
# For how many ranks it is compiled: each one's piece is an operand of the kernel, and division by
# a power of two is exact in whatever way a compiler divides.
POWERS = (2, 4, 8, 16, 32)
OTHERS = (3, 5, 6, 7)

Mean = Callable[[Sequence[Tensor], Any, Tensor | None, Tensor], None]


@dataclass
class Divisor:
    """The number that divides the sums over ranks.

    Attributes:
        ranks: how many data-parallel ones there are, for the mean.
        given: what a script says instead; a tensor is 0-dim, on the device of the gradients.
        of_tree: the micro-batches of a step, where these have an order.
        counted: the step divides by tokens that a script counts.
    """

    ranks: int
    given: float | Tensor | None = None
    of_tree: MicroBatches | None = None
    counted: bool = False

    @property
    def value(self) -> float | Tensor:
        if self.given is not None:
            return self.given
        if self.of_tree is not None and self.counted:
            # The step divides by the tokens instead: this one is rounded, and may overflow, alike
            # at any number of ranks.
            return self.of_tree.total or self.ranks  # until they are counted
        return self.ranks


def choose_mean(config: ShardcastConfig, size: int, device: torch.device) -> Mean:
    """Return :func:`mean_`, compiled where the update is, or :func:`mean_in_chunks_`."""
    if not compiles(config, device):
        return mean_in_chunks_
    exact = size in POWERS or (size in OTHERS and inductor.divides_exactly())
    return compiled_mean_ if exact else mean_in_chunks_


def mean_(pieces: Sequence[Tensor], size: int, carry: Tensor | None, out: Tensor) -> None:
    """Write the sum of ``pieces`` in order over ``size``, plus the fp32 carry, rounded once.

    Args:
        pieces: of equal shape and dtype; ``out`` itself may be one of them.
        out: overwritten.
    """
    total = pieces[0].to(sum_dtype(pieces[0].dtype))
    for piece in pieces[1:]:
        total = total + piece
    # Divided, not multiplied by the reciprocal: the mean of equal values is that value.
    total = total / size
    out.copy_(total if carry is None else total + carry)


def added(pieces: Sequence[Tensor], room: int) -> Tensor:
    """Sum ``pieces`` in fp32, in the order of a mean, with ``room`` for more behind it."""
    numel, dtype = pieces[0].numel(), sum_dtype(pieces[0].dtype)
    total = pieces[0].new_empty(numel + room, dtype=dtype)
    part = total[:numel].copy_(pieces[0])
    for piece in pieces[1:]:
        part += piece  # of a slice of ``total`` Python would copy the sum onto itself
    return total.to(MASTER_DTYPE)


def mean_in_chunks_(
    pieces: Sequence[Tensor], size: float | Tensor, carry: Tensor | None, out: Tensor
) -> None:
    """Do as :func:`mean_`, with no more than a chunk in higher precision at a time."""
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
