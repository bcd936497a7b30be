"""Codecs: the ways to keep fp32 values, one class each, and :class:`Encoded` values of a span.

A codec is a pair of pure functions between fp32 values of shape ``(rows, row)`` and its *pieces*:
tensors of that shape, or of shape ``(rows,)`` where there is one number per row. A compiler puts
both functions into the pass that updates the values. A row never has elements of two parameters.
The update works on the pieces of :class:`Encoded`; all else reads and writes it in fp32.

Values that were decoded and are encoded unchanged stay the same in every codec, so state dicts
and checkpoints hold fp32 values, whatever codec they come from or go to.

The only codec that every run has is the plain one; others are those of options, which give them
as :attr:`.Option.codec`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.config import ShardcastConfig
from shardcast.plan.precision import MASTER_DTYPE

if TYPE_CHECKING:  # it imports this module
    from shardcast.memory.shard import Shard

ROW = 64  # most elements in a row: one word of 64 bits has a bit for each

Pieces = tuple[Tensor, ...]


@dataclass(frozen=True)
class Codec:
    """All 32 bits, 4 bytes per element; the base of all others.

    Attributes:
        signed: whether values may be below zero; a second moment's are not.
        plain: whether the values themselves are the only piece.
        has_published: whether the first piece is the published parameter.
        by_chance: whether :meth:`encode` rounds by its :meth:`random_bits`.
        encoding_bytes: per element, of the temporary tensors of :meth:`encode` without a compiler.
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
        """Return values of the pieces; the memory itself where the codec is ``plain``."""
        return pieces[0]

    def encode(self, values: Tensor, bits: Tensor | None) -> Pieces:
        """Return pieces of values.

        Args:
            bits: int32, per value a random number in [0, 65536) for a codec ``by_chance``;
                ``None`` rounds to nearest.
        """
        return (values,)

    def merged(self, old: Pieces, new: Pieces, changed: Tensor) -> Pieces:
        """Return the pieces of values of which only some have changed.

        A row with a number of its own is encoded anew if any of its values has changed.

        Args:
            old, new: all before; all after, those that have not changed too.
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
        """Return what random bits of each row of the own span depend on, 1-d int32, for all steps.

        As :meth:`random_bits` only of a codec ``by_chance``.
        """
        raise NotImplementedError

    def random_bits(self, keys: Tensor, like: Tensor, step: Tensor, number: int) -> Tensor:
        """Return bits to encode ``like`` with, ``(rows, row)``, the ``number``-th state tensor.

        Args:
            keys: of the rows.
            step: 0-dim, this step's number.
        """
        raise NotImplementedError


def row_of(config: ShardcastConfig, dtype: torch.dtype) -> int:
    """Return the elements of a row in a pack of ``dtype``."""
    return min(ROW, config.alignment // dtype.itemsize)


def master_codec(config: ShardcastConfig, dtype: torch.dtype) -> Codec:
    """Return the codec of masters of a pack of ``dtype``; one in fp32 is its own master."""
    return Codec() if dtype == MASTER_DTYPE else _codec(config, "master", "master")


def moment_codec(config: ShardcastConfig, name: str) -> Codec:
    """Return the codec of the state tensor that ``torch.optim`` calls ``name``."""
    return _codec(config, "moments", name)


def _codec(config: ShardcastConfig, option: str, name: str) -> Codec:
    """Return the codec that the option gives, if it was asked for."""
    asked = config.extensions().get(option)
    codec = Codec() if asked is None or asked.codec is None else asked.codec(config, name)
    return codec


def shown(masters: Tensor, published: Tensor, last: Tensor | None = None) -> Tensor:
    """Return masters as the model shows them: the published value where that is not their cast.

    Bits decide, so that a published NaN or another sign of a zero counts as well; elsewhere masters
    keep their full precision.

    Args:
        published: the low-precision parameter, in the shape of the masters.
        last: what was published of them; without it their cast to nearest.
    """
    last = masters.to(published.dtype) if last is None else last
    edited = last.view(torch.int16) != published.view(torch.int16)
    return torch.where(edited, published.to(MASTER_DTYPE), masters)


def take_shown_(masters: Tensor, published: Tensor, last: Tensor | None = None) -> None:
    """Overwrite masters by :func:`shown` ones."""
    if _compat.is_host(masters.device) and not torch.compiler.is_compiling():
        cast = masters.to(published.dtype) if last is None else last
        if _compat.has_bits_of(cast, published):  # almost always there is nothing to take
            return
    masters.copy_(shown(masters, published, last))


class Encoded:
    """The fp32 values of ``numel`` elements: masters, or one state tensor.

    Slices begin with a row and end with one, or with a parameter.

    Args:
        row: elements per row; see :func:`.codecs.row_of`.
        zeros: allocates memory, of a number of elements and a dtype; see :meth:`.Home.zeros`.
        first: the first piece, if it is there already: the memory of plain values, or the owned
            span of the pack for a codec that has the published parameter.
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
        self._pieces = [] if first is None else [first]
        rows = -(-numel // row)
        for dtype, count in codec.pieces(row)[len(self._pieces) :]:
            self._pieces.append(zeros(numel if count == row else rows * count, dtype))

    @property
    def nbytes(self) -> int:
        """The bytes held, the published parameter aside."""
        return sum(piece.nbytes for piece in self._pieces[self.codec.has_published :])

    @property
    def pieces(self) -> Sequence[Tensor]:
        """The memory itself; the published parameter among it."""
        return self._pieces

    @property
    def data(self) -> Tensor:
        """The memory itself, 1-d fp32; only of a plain codec."""
        assert self.codec.plain
        return self._pieces[0]

    @property
    def first(self) -> Tensor:
        """The memory of the first piece."""
        return self._pieces[0]

    def move(self, first: Tensor) -> None:
        """Have the first piece in other memory, which holds the same values."""
        self._pieces[0] = first

    def parts(self, part: slice) -> Pieces:
        """Give the memory of the pieces of a part, 1-d."""
        start, stop, _ = part.indices(self._numel)
        rows = slice(start // self.row, -(-stop // self.row))
        return tuple(
            piece[start:stop] if count == self.row else piece[rows]
            for piece, count in zip(self._pieces, self._counts, strict=True)
        )

    def _put(self, part: slice, pieces: Pieces) -> None:
        """Overwrite the pieces of a part; nothing is done for those that are the memory itself."""
        for memory, piece in zip(self.parts(part), pieces, strict=True):
            if piece.data_ptr() != memory.data_ptr():
                memory.copy_(piece)

    def read(self, part: slice) -> Tensor:
        """Give a part, 1-d fp32; the memory itself of plain values."""
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

    def write(self, part: slice, values: Tensor, bits: Tensor | None = None) -> None:
        """Take 1-d fp32 values.

        Args:
            bits: see :meth:`.Codec.encode`; 1-d.
        """
        if self.codec.plain:
            self._put(part, (values,))
            return
        pieces = self.codec.encode(
            in_rows(values, self.row), None if bits is None else in_rows(bits, self.row)
        )
        self._put(part, self._flat(pieces, values.numel()))

    def edit(self, part: slice, changed: Tensor, values: Tensor) -> None:
        """Take those of 1-d fp32 values that have changed; all others keep their bits.

        Where a row has a number of its own, what is in one row is encoded anew together.
        """
        kept = self.parts(part)
        if self.codec.plain:
            self._put(part, (torch.where(changed, values, kept[0]),))
            return
        old, numel = self._rows_of(kept), values.numel()
        rows = in_rows(changed, self.row)
        new = torch.where(rows, in_rows(values, self.row), self.codec.decode(old))
        pieces = self.codec.merged(old, self.codec.encode(new, None), rows)
        self._put(part, self._flat(pieces, numel))


def in_rows(flat: Tensor, row: int) -> Tensor:
    """Return whole rows, with zeros behind the last element."""
    missing = -flat.numel() % row
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, row)
