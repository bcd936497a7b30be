"""Codecs: how fp32 values are stored, one class each, and :class:`Encoded` values of a span.

A codec is a pair of pure functions between fp32 values of shape ``(rows, row)`` and *pieces*:
tensors of that shape, or of shape ``(rows,)`` for one number per row. A compiler fuses both
functions into the pass that updates the values. A row never has elements of two parameters. The
update works on the pieces of :class:`Encoded`; all other code reads and writes it in fp32.

In every codec, values that are decoded and encoded without a change keep their bits. So state dicts
and checkpoints hold fp32 values and fit any codec.

Every run has the plain codec; options provide the others as :attr:`.Option.codec`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.config import ShardcastConfig
from shardcast.plan.precision import MASTER_DTYPE

if TYPE_CHECKING:  # circular: it imports this module
    from shardcast.memory.shard import Shard

ROW = 64  # largest row, so that a 64-bit word has one bit per element

Pieces = tuple[Tensor, ...]


@dataclass(frozen=True)
class Codec:
    """All 32 bits, 4 bytes per element; the base of all others.

    Attributes:
        signed: whether values may be negative; second moments are not.
        plain: whether the values themselves are the only piece.
        has_published: whether the first piece is the published parameter.
        by_chance: whether :meth:`encode` rounds stochastically, with :meth:`random_bits`.
        encoding_bytes: temporary bytes per element of :meth:`encode` without a compiler.
    """

    signed: bool = True

    plain: ClassVar[bool] = True
    has_published: ClassVar[bool] = False
    by_chance: ClassVar[bool] = False
    encoding_bytes: ClassVar[int] = 0

    def pieces(self, row: int) -> tuple[tuple[torch.dtype, int], ...]:
        """Return the dtype of each piece, and its elements per row: ``row`` or 1."""
        return ((MASTER_DTYPE, row),)

    def decode(self, pieces: Pieces) -> Tensor:
        """Return the values of pieces; the memory itself if the codec is ``plain``."""
        return pieces[0]

    def encode(self, values: Tensor, bits: Tensor | None) -> Pieces:
        """Return the pieces of values.

        Args:
            bits: int32, a random number in [0, 65536) per value, for a codec ``by_chance``;
                ``None`` rounds to nearest.
        """
        return (values,)

    def merged(self, old: Pieces, new: Pieces, changed: Tensor) -> Pieces:
        """Return the pieces of values that have changed in part.

        A row with a number of its own is encoded again if any of its values changed.

        Args:
            old, new: all values before and after.
            changed: bool, in the shape of the values.
        """
        rows = changed.any(-1)
        if all(piece.dim() == changed.dim() for piece in old):
            return tuple(torch.where(changed, n, o) for o, n in zip(old, new, strict=True))
        return tuple(
            torch.where(rows if n.dim() == rows.dim() else rows[:, None], n, o)
            for o, n in zip(old, new, strict=True)
        )

    def row_keys(self, shard: Shard, row: int) -> Tensor:
        """Return the key of each row of the own span for random bits, 1-d int32, for all steps.

        Like :meth:`random_bits`, only for a codec ``by_chance``.
        """
        raise NotImplementedError

    def random_bits(self, keys: Tensor, like: Tensor, step: Tensor, number: int) -> Tensor:
        """Return bits to encode ``like`` with, ``(rows, row)``, the ``number``-th state tensor.

        Args:
            keys: keys of the rows.
            step: 0-dim, number of this step.
        """
        raise NotImplementedError


def row_of(config: ShardcastConfig, dtype: torch.dtype) -> int:
    """Return the elements per row in a pack of ``dtype``."""
    return min(ROW, config.alignment // dtype.itemsize)


def master_codec(config: ShardcastConfig, dtype: torch.dtype) -> Codec:
    """Return the codec of masters of a pack of ``dtype``; an fp32 pack is its own master."""
    return Codec() if dtype == MASTER_DTYPE else _codec(config, "master", "master")


def moment_codec(config: ShardcastConfig, name: str) -> Codec:
    """Return the codec of the state tensor that ``torch.optim`` calls ``name``."""
    return _codec(config, "moments", name)


def _codec(config: ShardcastConfig, option: str, name: str) -> Codec:
    """Return the codec that the option provides, if it is on."""
    asked = config.extensions().get(option)
    codec = Codec() if asked is None or asked.codec is None else asked.codec(config, name)
    return codec


def shown(masters: Tensor, published: Tensor, last: Tensor | None = None) -> Tensor:
    """Return masters as the model shows them: published values replace masters with another cast.

    The comparison is bitwise, so a published NaN, or a zero with another sign, counts, too. All
    other masters keep their full precision.

    Args:
        published: the low-precision parameter, in the shape of the masters.
        last: what was published of them; without it, their cast to nearest.
    """
    last = masters.to(published.dtype) if last is None else last
    edited = last.view(torch.int16) != published.view(torch.int16)
    return torch.where(edited, published.to(MASTER_DTYPE), masters)


def take_shown_(masters: Tensor, published: Tensor, last: Tensor | None = None) -> None:
    """Overwrite masters with :func:`shown` ones."""
    if _compat.is_host(masters.device) and not torch.compiler.is_compiling():
        cast = masters.to(published.dtype) if last is None else last
        if _compat.has_bits_of(cast, published):  # almost always nothing was written
            return
    masters.copy_(shown(masters, published, last))


class Encoded:
    """The fp32 values of ``numel`` elements: masters, or one state tensor.

    Slices start with a row and end with a row or a parameter.

    Args:
        row: elements per row; see :func:`.codecs.row_of`.
        zeros: allocates memory from a number of elements and a dtype; see :meth:`.Home.zeros`.
        first: the first piece, if it exists: the memory of plain values, or the owned span of the
            pack for a codec that has the published parameter.

    Attributes:
        pieces: the memory itself, including the published parameter.
    """

    def __init__(
        self,
        codec: Codec,
        numel: int,
        row: int,
        zeros: Callable[[int, torch.dtype], Tensor],
        *,
        first: Tensor | None = None,
    ) -> None:
        self.codec, self.row, self._numel = codec, row, numel
        self._counts = [count for _, count in codec.pieces(row)]
        self.pieces = [] if first is None else [first]
        rows = -(-numel // row)
        for dtype, count in codec.pieces(row)[len(self.pieces) :]:
            self.pieces.append(zeros(numel if count == row else rows * count, dtype))

    @property
    def nbytes(self) -> int:
        """Bytes held, without the published parameter."""
        return sum(piece.nbytes for piece in self.pieces[self.codec.has_published :])

    @property
    def first(self) -> Tensor:
        """The memory of the first piece."""
        return self.pieces[0]

    def move(self, first: Tensor) -> None:
        """Use other memory, with the same values, for the first piece."""
        self.pieces[0] = first

    def parts(self, part: slice) -> Pieces:
        """Yield the memory of the pieces of a part, 1-d."""
        start, stop, _ = part.indices(self._numel)
        rows = slice(start // self.row, -(-stop // self.row))
        return tuple(
            piece[start:stop] if count == self.row else piece[rows]
            for piece, count in zip(self.pieces, self._counts, strict=True)
        )

    def _put(self, part: slice, pieces: Pieces) -> None:
        """Overwrite the pieces of a part, except those that are the memory itself."""
        for memory, piece in zip(self.parts(part), pieces, strict=True):
            if piece.data_ptr() != memory.data_ptr():
                memory.copy_(piece)

    def read(self, part: slice) -> Tensor:
        """Return a part, 1-d fp32; for plain values the memory itself."""
        pieces = self.parts(part)
        if self.codec.plain:
            return pieces[0]
        return self.codec.decode(self._rows_of(pieces)).view(-1)[: pieces[0].numel()]

    def _rows_of(self, pieces: Pieces) -> Pieces:
        """Return 1-d pieces in the shapes of the codec."""
        return tuple(
            in_rows(piece, self.row) if count == self.row else piece
            for piece, count in zip(pieces, self._counts, strict=True)
        )

    def _flat(self, rows: Pieces, numel: int) -> Pieces:
        """Return pieces in the shapes of the codec as 1-d ones of ``numel`` values."""
        return tuple(
            piece.view(-1)[:numel] if count == self.row else piece
            for piece, count in zip(rows, self._counts, strict=True)
        )

    def write(self, part: slice, values: Tensor) -> None:
        """Overwrite a part with 1-d fp32 values."""
        if self.codec.plain:  # without a copy of rows that are not whole
            self._put(part, (values,))
            return
        pieces = self.codec.encode(in_rows(values, self.row), None)
        self._put(part, self._flat(pieces, values.numel()))

    def edit(self, part: slice, changed: Tensor, values: Tensor) -> None:
        """Write the 1-d fp32 values that have changed; all others keep their bits.

        If a row has a number of its own, the whole row is encoded again.
        """
        old, numel = self._rows_of(self.parts(part)), values.numel()
        rows = in_rows(changed, self.row)
        new = torch.where(rows, in_rows(values, self.row), self.codec.decode(old))
        pieces = self.codec.merged(old, self.codec.encode(new, None), rows)
        self._put(part, self._flat(pieces, numel))


def in_rows(flat: Tensor, row: int) -> Tensor:
    """Return whole rows, with zeros after the last element."""
    missing = -flat.numel() % row
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, row)
