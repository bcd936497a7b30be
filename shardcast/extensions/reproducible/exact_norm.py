"""The 2-norm of gradients as one sum of exact parts, whatever ranks, packs and spans add it up.

Squares are added in rows of a slot, which no span cuts, in a fixed tree. Each row's sum, fp64, is
then divided into parts that are multiples of fixed powers of two, so few bits long that sums of
billions of them are exact in fp64, and so have no order (Demmel and Nguyen, "Fast Reproducible
Floating-Point Summation", 2013; there with bins that follow the largest value).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardcast.step.decide.norm import PNorm

CHUNK = 1 << 17  # elements whose squares are added at a time
ROWS = 30  # log2 of the rows that may be added
BITS = 53 - ROWS - 1  # of a part
# Exponents of the multiples. A row's sum is below 2**263, for 128 squares of fp32; what is below
# 2**-154 in one counts as zero.
BINS = range(263 + ROWS - 52, -154, -BITS)


class ExactNorm(PNorm):
    """The 2-norm; its powers have a number for each bin until :meth:`agreed` adds them up."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(2.0, device)

    def powers(self, spans: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
        """The exact parts of each span's sum of squares, of shape (spans, bins)."""
        parts = [self._parts(own, row) for own, row in zip(spans, rows, strict=True)]
        shape = 0, len(BINS)
        return torch.stack(parts) if parts else torch.zeros(shape, device=self._device)

    def _parts(self, own: Tensor, row: int) -> Tensor:
        """The exact parts of a span's sum of squares, 1-d.

        Args:
            row: elements that no span cuts, a power of two; of slots, of which each begins a row.
        """
        rows = -(-own.numel() // row)
        sums = torch.zeros(rows, dtype=torch.float64, device=own.device)
        count = max(1, CHUNK // row)  # rows at a time
        scratch = torch.empty(min(count, rows) * row, dtype=torch.float64, device=own.device)
        for start in range(0, rows, count):
            piece, target = own[start * row : (start + count) * row], sums[start : start + count]
            squares = scratch[: target.numel() * row]
            squares[: piece.numel()].copy_(piece)
            squares[piece.numel() :].zero_()  # alone on one rank a pack is not padded
            halves = squares.square_().view(-1, row)
            while halves.shape[1] > 1:
                left, right = halves.chunk(2, 1)
                halves = left + right
            target.copy_(halves[:, 0])
        parts = []
        for exponent in BINS:
            shift = 1.5 * 2.0 ** (52 + exponent)
            part = (sums + shift) - shift  # rounded to a multiple of 2**exponent
            parts.append(part.sum())
            sums -= part
        return torch.stack(parts).to(self._device)

    def agreed(self, powers: Tensor, ranks: int) -> Tensor:
        """Per group, of sums over ranks: one number."""
        return powers.view(-1, len(BINS)).sum(1)
