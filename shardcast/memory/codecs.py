"""Codecs: the ways to keep fp32 values, one class each, and :class:`Encoded` values of a span.

A codec is a pair of pure functions between fp32 values of shape ``(rows, row)`` and its *pieces*:
tensors of that shape, or of shape ``(rows,)`` where there is one number per row. A compiler puts
both functions into the pass that updates the values. A row never has elements of two parameters.
The update works on the pieces of :class:`Encoded`; all else reads and writes it in fp32.

Values that were decoded and are encoded unchanged stay the same in every codec, so state dicts
and checkpoints hold fp32 values, whatever codec they come from or go to.

To add a codec: a class here, its name in :data:`CODECS`, and the name in ``config``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.config import ShardcastConfig
from shardcast.plan.precision import MASTER_DTYPE

ROW = 64  # most elements in a row: one word of 64 bits has a bit for each
TIE = 1 << 15  # half of the distance between neighbours in bf16, in steps of fp32
UPPER = -1 << 16  # mask of the half of the bits of an fp32 value that bf16 has

Pieces = tuple[Tensor, ...]


@dataclass(frozen=True)
class Codec:
    """All 32 bits, 4 bytes per element; the base of all others.

    Attributes:
        signed: whether values may be below zero; a second moment's are not.
        plain: whether the values themselves are the only piece.
        has_published: whether the first piece is the published parameter.
        by_chance: whether :meth:`encode` rounds by random bits.
        encoding_bytes: per element, of the temporary tensors of :meth:`encode` without a compiler.
    """

    signed: bool = True

    plain: ClassVar[bool] = True
    has_published: ClassVar[bool] = False
    by_chance: ClassVar[bool] = False
    encoding_bytes: ClassVar[int] = 0

    def pieces(self, row: int) -> tuple[tuple[torch.dtype, int], ...]:
        """The dtype of each piece, and its elements per row: ``row`` or 1."""
        return ((MASTER_DTYPE, row),)

    def decode(self, pieces: Pieces) -> Tensor:
        """Values of the pieces; the memory itself where the codec is ``plain``."""
        return pieces[0]

    def encode(self, values: Tensor, bits: Tensor | None) -> Pieces:
        """Pieces of values.

        Args:
            bits: int32, per value a random number in [0, 65536) for a codec ``by_chance``;
                ``None`` rounds to nearest.
        """
        return (values,)


@dataclass(frozen=True)
class Split16(Codec):
    """The exact values in 2 1/8 bytes beside the published bf16 parameter, their upper half.

    The idea of keeping the 16 bits that the cast drops is that of "Revisiting BFloat16 Training"
    (arXiv:2010.06192). A value is its bf16 cast (nearest, ties to even) plus a signed distance
    that fits 16 bits, as integers of the bit pattern. One pattern is missing: an even bf16 value
    has 65,537 fp32 values that round to it, its two ties among them. A bit per element, in one
    word per row, says of the lower tie that it is the upper one. One weight in 131,072 is a tie,
    but one in 16 of weights that were fp16 once, so that a list of them would have no useful
    bound. NaN stays NaN but loses its payload.
    """

    plain = False
    has_published = True
    encoding_bytes = 29

    def pieces(self, row: int) -> tuple[tuple[torch.dtype, int], ...]:
        return ((torch.bfloat16, row), (torch.int16, row), (_word(row), 1))

    def decode(self, pieces: Pieces) -> Tensor:
        published, distance, ties = pieces
        upper = published.to(MASTER_DTYPE).view(torch.int32)
        tie = (ties[:, None] >> lanes(distance, ties.dtype)) & 1
        bits = upper + distance + tie.to(torch.int32) * (2 * TIE)
        # The sign can change only where a weight was set to zero by hand: it would be a NaN.
        wrong = (bits ^ upper) >> 31  # all ones there, else zero
        return (bits - (wrong & (bits - upper))).view(MASTER_DTYPE)

    def encode(self, values: Tensor, bits: Tensor | None) -> Pieces:
        pattern = values.view(torch.int32)
        # The cast in integers: a compiler takes a cast to bf16 and back for nothing.
        even = (pattern >> 16) & 1
        nan = (pattern & 0x7FFFFFFF) > 0x7F800000
        upper = torch.where(nan, 0x7FC00000, (pattern + (TIE - 1) + even) & UPPER)
        distance = pattern - upper
        word = _word(values.shape[-1])
        ties = ((distance == TIE).to(word) << lanes(distance, word)).sum(-1, dtype=word)
        # The upper tie wraps to the lower one.
        return upper.view(MASTER_DTYPE).to(torch.bfloat16), distance.to(torch.int16), ties


@dataclass(frozen=True)
class Bf16(Codec):
    """2 bytes: rounded to bf16, by chance up or down, so that the mean is the value.

    Rounded to nearest a second moment would stand still: it changes by a thousandth per step, and
    bf16 has steps of a 128th.
    """

    plain = False
    by_chance = True

    def pieces(self, row: int) -> tuple[tuple[torch.dtype, int], ...]:
        return ((torch.bfloat16, row),)

    def decode(self, pieces: Pieces) -> Tensor:
        return pieces[0].to(MASTER_DTYPE)

    def encode(self, values: Tensor, bits: Tensor | None) -> Pieces:
        if bits is not None:
            # The sum carries into the upper half as often as the lower half is large.
            values = ((values.view(torch.int32) + bits) & UPPER).view(MASTER_DTYPE)
        return (values.to(torch.bfloat16),)


@dataclass(frozen=True)
class Int8(Codec):
    """1 byte and an fp32 scale per row, the row's largest finite absolute value.

    Rounded to nearest as in "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861),
    with powers in place of a table: a signed value is kept as its root, an unsigned one as its
    fourth root, in whole steps of the scale. That is fine where values are small, for a second
    moment that became zero would make the next step explode, and one above zero never becomes it.
    The code above the last step is infinity, as the square of a large gradient may be.
    """

    plain = False

    @property
    def steps(self) -> int:
        """Steps from zero to the scale."""
        return 126 if self.signed else 254

    def pieces(self, row: int) -> tuple[tuple[torch.dtype, int], ...]:
        return ((torch.int8 if self.signed else torch.uint8, row), (MASTER_DTYPE, 1))

    def decode(self, pieces: Pieces) -> Tensor:
        codes, scales = pieces
        root = codes.to(MASTER_DTYPE) / self.steps
        values = root * root.abs() if self.signed else root.square().square()
        infinite = root * torch.inf  # NaN of a zero is not taken
        return torch.where(root.abs() > 1, infinite, values * scales[:, None])

    def encode(self, values: Tensor, bits: Tensor | None) -> Pieces:
        size = values.abs()
        # NaN stays in the scale, so that it is not lost.
        scale = torch.where(size == torch.inf, 0.0, size).amax(dim=-1)
        root = (size / scale.clamp_min(torch.finfo(MASTER_DTYPE).tiny)[:, None]).sqrt()
        if self.signed:
            steps = (root * self.steps).round().clamp(max=self.steps + 1)
            return steps.copysign(values).to(torch.int8), scale
        root = root.sqrt()
        least = (root * 1e30).clamp(max=1)  # 1 for all but zeros
        steps = torch.maximum((root * self.steps).round(), least).clamp(max=self.steps + 1)
        return steps.to(torch.uint8), scale


CODECS: dict[str, type[Codec]] = {"fp32": Codec, "split16": Split16, "bf16": Bf16, "int8": Int8}


def row_of(config: ShardcastConfig, dtype: torch.dtype) -> int:
    """Elements of a row in a pack of ``dtype``."""
    return min(ROW, config.alignment // dtype.itemsize)


def master_codec(config: ShardcastConfig, dtype: torch.dtype) -> Codec:
    """The codec of masters of a pack of ``dtype``; a pack in fp32 is its own master."""
    return Codec() if dtype == MASTER_DTYPE else CODECS[config.master]()


def moment_codec(config: ShardcastConfig, name: str) -> Codec:
    """The codec of the state tensor that ``torch.optim`` calls ``name``."""
    return CODECS[config.moments](signed=not name.endswith("_sq"))


def lanes(like: Tensor, dtype: torch.dtype) -> Tensor:
    """0, 1, 2, ... for the elements of a row."""
    return torch.arange(like.shape[-1], dtype=dtype, device=like.device)


def shown(masters: Tensor, published: Tensor) -> Tensor:
    """Masters as the model shows them: the published value where it is not the cast of its master.

    Bits decide, so that a published NaN or another sign of a zero counts as well; elsewhere masters
    keep their full precision.

    Args:
        published: the low-precision parameter, in the shape of the masters.
    """
    edited = masters.to(published.dtype).view(torch.int16) != published.view(torch.int16)
    return torch.where(edited, published.to(MASTER_DTYPE), masters)


def take_shown_(masters: Tensor, published: Tensor) -> None:
    """:func:`shown` in place."""
    if _compat.is_host(masters.device) and not torch.compiler.is_compiling():
        # Almost always there is nothing to take. Of words of 64 bits torch compares four times as
        # many bytes in a second as of 16.
        word = torch.int16 if published.shape[-1] % 4 else torch.int64
        if torch.equal(masters.to(published.dtype).view(word), published.view(word)):
            return
    masters.copy_(shown(masters, published))


def _word(row: int) -> torch.dtype:
    """The integer with a bit for each element of a row."""
    return {16: torch.int16, 32: torch.int32, 64: torch.int64}.get(row, torch.uint8)


class Encoded:
    """Fp32 values of ``numel`` elements: masters, or one state tensor.

    Slices begin with a row and end with one, or with a parameter.

    Args:
        row: elements per row; see :func:`.codecs.row_of`.
        device: where the update runs.
        on_host: whether the memory is on the host, pinned.
        first: the first piece, if it is there already: the memory of plain values, or the owned
            span of the pack for a codec that has the published parameter.
    """

    def __init__(
        self, codec: Codec, numel: int, row: int, device: torch.device, *,
        on_host: bool = False, first: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.codec, self.row = codec, row
        self._numel, self._device, self._on_host = numel, device, on_host
        self._counts = [count for _, count in codec.pieces(row)]
        self._pieces = [] if first is None else [first]
        rows = -(-numel // row)
        for dtype, count in codec.pieces(row)[len(self._pieces) :]:
            self._pieces.append(self._zeros(numel if count == row else rows * count, dtype))

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        if not self._on_host:
            return torch.zeros(numel, dtype=dtype, device=self._device)
        return torch.zeros(numel, dtype=dtype, pin_memory=self._device.type == "cuda")

    @property
    def nbytes(self) -> int:
        """Bytes held, the published parameter aside."""
        return sum(piece.nbytes for piece in self._pieces[self.codec.has_published :])

    @property
    def data(self) -> Tensor:
        """1-d fp32, the memory itself; only of a plain codec."""
        assert self.codec.plain
        return self._pieces[0]

    @property
    def is_memory(self) -> bool:
        """Whether :meth:`read` gives the memory itself, not a copy."""
        return self.codec.plain and not self._on_host

    @property
    def first(self) -> Tensor:
        """The memory of the first piece."""
        return self._pieces[0]

    def move(self, first: Tensor) -> None:
        """Have the first piece in other memory, which holds the same values."""
        self._pieces[0] = first

    def _parts(self, part: slice) -> list[Tensor]:
        start, stop, _ = part.indices(self._numel)
        rows = slice(start // self.row, -(-stop // self.row))
        return [
            piece[start:stop] if count == self.row else piece[rows]
            for piece, count in zip(self._pieces, self._counts, strict=True)
        ]

    def fetch(self, part: slice) -> Pieces:
        """The pieces of a part, 1-d, on the device: the memory itself, or copies to be sent back.

        Copies are ordered by the device: a part is sent back before it is fetched anew (see
        ``extensions.offload``), and the host reads this memory by a fetch only.
        """
        pieces = self._parts(part)
        if self._on_host:
            for number in range(self.codec.has_published, len(pieces)):
                pieces[number] = pieces[number].to(self._device, copy=True, non_blocking=True)
        return tuple(pieces)

    def send(self, part: slice, pieces: Pieces) -> None:
        """Take updated pieces back; nothing is done for those that are the memory itself."""
        for memory, piece in zip(self._parts(part), pieces, strict=True):
            if piece.data_ptr() != memory.data_ptr():
                memory.copy_(piece, non_blocking=True)

    def read(self, part: slice) -> Tensor:
        """1-d fp32, on the device; the memory itself of plain values there."""
        pieces = self.fetch(part)
        if self.codec.plain:
            return pieces[0]
        rows = tuple(
            _in_rows(piece, self.row) if count == self.row else piece
            for piece, count in zip(pieces, self._counts, strict=True)
        )
        return self.codec.decode(rows).view(-1)[: pieces[0].numel()]

    def write(self, part: slice, values: Tensor, bits: Tensor | None = None) -> None:
        """Take 1-d fp32 values.

        Args:
            bits: see :meth:`.Codec.encode`; 1-d.
        """
        if self.codec.plain:
            self.send(part, (values,))
            return
        pieces = self.codec.encode(
            _in_rows(values, self.row), None if bits is None else _in_rows(bits, self.row)
        )
        numel = values.numel()
        self.send(
            part,
            tuple(
                piece.view(-1)[:numel] if count == self.row else piece
                for piece, count in zip(pieces, self._counts, strict=True)
            ),
        )


def _in_rows(flat: Tensor, row: int) -> Tensor:
    """Whole rows, zeros behind the last element."""
    missing = -flat.numel() % row
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, row)
