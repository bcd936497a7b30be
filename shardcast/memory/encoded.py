"""Encoded: the fp32 values of an owned span as a codec keeps them, on the device or on the host.

The update works on the pieces themselves (:meth:`Encoded.fetch`, :meth:`Encoded.send`);
everything else reads and writes fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardcast.memory.codecs import Codec, Pieces


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
        ``step.update.offload``), and the host reads this memory by a fetch only.
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
