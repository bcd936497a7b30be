"""Forms: what is kept of fp32 values, and how to get from one to the other.

Every form is a pair of pure functions over tensors of shape ``(rows, row)``, or ``(rows,)`` where
there is one number per row, so that a compiler can put them into the pass that updates the values.
A row never has elements of two parameters. Bytes per element, and what comes back:

* :class:`Exact`, 4: the same bits.
* :class:`Split`, 2 1/8: the same bits, for masters beside a bf16 parameter. The idea of keeping
  the 16 bits that the cast drops is that of "Revisiting BFloat16 Training" (arXiv:2010.06192).
* :class:`Rounded`, 2: rounded stochastically, so that small changes count in the mean.
* :class:`Bytes`, 1 and a scale per row: rounded on a scale of the row's largest value, as in
  "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861), with powers in place of a
  table.

Values that were decoded and are encoded unchanged stay the same in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardcast.plan.precision import MASTER_DTYPE

ROW = 64  # most elements in a row: one word of 64 bits has a bit for each
TIE = 1 << 15  # half of the distance between neighbours in bf16, in steps of fp32
UPPER = -1 << 16  # mask of the half of the bits of an fp32 value that bf16 has

# Of the hash in :func:`chances`: odd, in 32 bits with a sign; shifts and factors of MurmurHash3.
HASH = 0x9E3779B1 - (1 << 32)
MIXING = ((16, 0x85EBCA6B - (1 << 32)), (13, 0xC2B2AE35 - (1 << 32)))

Raw = tuple[Tensor, ...]  # the pieces of memory of a form
Pieces = tuple[tuple[torch.dtype, int], ...]  # of each piece its dtype, and elements per row


def row_of(alignment: int, dtype: torch.dtype) -> int:
    """Elements of a row in a pack of ``dtype``; ``alignment`` is in bytes."""
    return min(ROW, alignment // dtype.itemsize)


@dataclass(frozen=True)
class Exact:
    """All 32 bits."""

    def pieces(self, row: int) -> Pieces:
        return ((MASTER_DTYPE, row),)

    def decode(self, raw: Raw) -> Tensor:
        return raw[0]

    def encode(self, values: Tensor, chance: Tensor | None = None) -> Raw:
        return (values,)


@dataclass(frozen=True)
class Split:
    """The exact values; the first piece is the published bf16 parameter, their upper half.

    A value is its bf16 cast (nearest, ties to even) plus a signed distance that fits 16 bits, as
    integers of the bit pattern. One pattern is missing: an even bf16 value has 65,537 fp32 values
    that round to it, its two ties among them. A bit per element, in one word per row, says of the
    lower tie that it is the upper one. Of weights it is one in 131,072, but of weights that were
    fp16 once it is one in 16, so that a list of them would have no useful bound. NaN stays NaN
    but loses its payload.
    """

    def pieces(self, row: int) -> Pieces:
        return ((torch.bfloat16, row), (torch.int16, row), (_word(row), 1))

    def decode(self, raw: Raw) -> Tensor:
        published, rest, ties = raw
        upper = published.to(MASTER_DTYPE).view(torch.int32)
        tie = (ties[:, None] >> _lanes(rest, ties.dtype)) & 1
        bits = upper + rest + tie.to(torch.int32) * (2 * TIE)
        # Only of a weight that was set to zero by hand the sign can change: it would be a NaN.
        wrong = (bits ^ upper) >> 31  # all ones there, else zero
        return (bits - (wrong & (bits - upper))).view(MASTER_DTYPE)

    def encode(self, values: Tensor, chance: Tensor | None = None) -> Raw:
        bits = values.view(torch.int32)
        # The cast in integers: a compiler takes a cast to bf16 and back for nothing.
        even = (bits >> 16) & 1
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        upper = torch.where(nan, 0x7FC00000, (bits + (TIE - 1) + even) & UPPER)
        rest = bits - upper
        word = _word(values.shape[-1])
        ties = ((rest == TIE).to(word) << _lanes(rest, word)).sum(-1, dtype=word)
        # The upper tie wraps to the lower one.
        return upper.view(MASTER_DTYPE).to(torch.bfloat16), rest.to(torch.int16), ties


@dataclass(frozen=True)
class Rounded:
    """Values rounded to bf16, by chance up or down, so that the mean is the value.

    With round-to-nearest a second moment would stand still: it changes by a thousandth per step,
    and bf16 has steps of a 128th.
    """

    def pieces(self, row: int) -> Pieces:
        return ((torch.bfloat16, row),)

    def decode(self, raw: Raw) -> Tensor:
        return raw[0].to(MASTER_DTYPE)

    def encode(self, values: Tensor, chance: Tensor | None = None) -> Raw:
        """Rounds to nearest without ``chance``: per value a number in [0, 65536), int32."""
        if chance is not None:
            # What is added carries into the upper half as often as the lower half is large.
            values = ((values.view(torch.int32) + chance) & UPPER).view(MASTER_DTYPE)
        return (values.to(torch.bfloat16),)


@dataclass(frozen=True)
class Bytes:
    """One byte per value and an fp32 scale per row, the row's largest absolute value.

    A signed value is kept as its root, an unsigned one as its fourth root, in whole steps of the
    scale: fine where values are small, for a second moment that became zero would make the next
    step explode, and one above zero never becomes it. Rounded to nearest.
    """

    signed: bool

    @property
    def steps(self) -> int:
        """Steps from zero to the scale."""
        return 127 if self.signed else 255

    def pieces(self, row: int) -> Pieces:
        return ((torch.int8 if self.signed else torch.uint8, row), (MASTER_DTYPE, 1))

    def decode(self, raw: Raw) -> Tensor:
        codes, scales = raw
        root = codes.to(MASTER_DTYPE) / self.steps
        values = root * root.abs() if self.signed else root.square().square()
        return values * scales[:, None]

    def encode(self, values: Tensor, chance: Tensor | None = None) -> Raw:
        scale = values.abs().amax(dim=-1)
        share = values / scale.clamp_min(torch.finfo(MASTER_DTYPE).tiny)[:, None]
        if self.signed:
            steps = share.abs().sqrt().mul(self.steps).round().copysign(share)
            return steps.to(torch.int8), scale
        root = share.sqrt().sqrt()
        least = (root * 1e30).clamp(max=1)  # 1 for all but zeros
        return torch.maximum((root * self.steps).round(), least).to(torch.uint8), scale


Form = Exact | Split | Rounded | Bytes


def moment(kind: str, signed: bool = True) -> Form:
    """The form of a moment; ``kind`` is the configuration's."""
    if kind == "bf16":
        return Rounded()
    return Bytes(signed) if kind == "int8" else Exact()


def nbytes(form: Form, numel: int, row: int, shared: int = 0) -> int:
    """Bytes of ``numel`` values, of the first ``shared`` pieces none."""
    rows = -(-numel // row)
    return sum(
        dtype.itemsize * (numel if count == row else rows * count)
        for dtype, count in form.pieces(row)[shared:]
    )


def decode_flat(form: Form, raw: Raw, row: int) -> Tensor:
    """1-d fp32 of 1-d pieces, which begin with a row and may end within one."""
    if isinstance(form, (Exact, Rounded)):
        return form.decode(raw)
    kinds = zip(raw, form.pieces(row), strict=True)
    rows = tuple(_whole(piece, row) if count == row else piece for piece, (_, count) in kinds)
    return form.decode(rows).view(-1)[: raw[0].numel()]


def encode_flat(form: Form, values: Tensor, row: int, chance: Tensor | None = None) -> Raw:
    """The reverse of :func:`decode_flat`."""
    if isinstance(form, (Exact, Rounded)):
        return form.encode(values, chance)
    kinds = zip(form.encode(_whole(values, row), chance), form.pieces(row), strict=True)
    return tuple(
        piece.view(-1)[: values.numel()] if count == row else piece for piece, (_, count) in kinds
    )


def _whole(flat: Tensor, row: int) -> Tensor:
    """Whole rows, zeros behind the last element."""
    missing = -flat.numel() % row
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, row)


def _word(row: int) -> torch.dtype:
    """The integer with a bit for each element of a row."""
    return {16: torch.int16, 32: torch.int32, 64: torch.int64}.get(row, torch.uint8)


def _lanes(like: Tensor, dtype: torch.dtype) -> Tensor:
    """0, 1, 2, ... for the elements of a row."""
    return torch.arange(like.shape[-1], dtype=dtype, device=like.device)


def chances(start: int | Tensor, numel: int, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent numbers in [0, 65536) for each of ``numel`` elements, int32.

    Each is a function of the element's position and of ``seed`` alone, so that rounding depends
    neither on the world size nor on how an update is cut. A multiply-and-shift hash in wrapping
    32-bit arithmetic, with the mixing steps of MurmurHash3.

    Args:
        start: position of the first element in its pack; a tensor is 0-dim int32.
        seed: 0-dim int32; its device is where the numbers are made.
    """
    bits = torch.arange(numel, dtype=torch.int32, device=seed.device)
    bits = ((bits + start) * HASH) ^ seed
    for shift, factor in MIXING:
        bits = (bits ^ ((bits >> shift) & ((1 << (32 - shift)) - 1))) * factor
    return (bits >> 16) & 0xFFFF, bits & 0xFFFF
