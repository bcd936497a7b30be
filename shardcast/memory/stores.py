"""Stores: the memory of fp32 values of an owned span, in one of the :mod:`.forms`, here or there.

The update works on windows of the pieces themselves (:meth:`Store.window`, :meth:`Store.keep`);
everything else reads and writes fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardcast.memory.forms import Exact, Form, Raw, decode_flat, encode_flat


class Place:
    """Where the bytes of a store lie: on the ``device`` of the update, or on the host, pinned."""

    def __init__(self, device: torch.device, host: bool) -> None:
        self.device, self.host = device, host

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of a store."""
        if not self.host:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        return torch.zeros(numel, dtype=dtype, pin_memory=self.device.type == "cuda")

    def fetch(self, kept: Tensor) -> Tensor:
        """A window for the update; a copy where the bytes are on the host."""
        # Copies are ordered by the device: a window is sent back before it is fetched anew (see
        # lanes), and the host never reads this memory except by a fetch.
        return kept.to(self.device, copy=True, non_blocking=True) if self.host else kept


class Store:
    """Fp32 values of ``numel`` elements.

    Slices are of these; they begin with a row and end with one, or with a parameter.

    Args:
        row: elements per row; see :func:`.forms.row_of`.
        data: the memory of exact values, if it is there already.
        published: the first piece of split values, the owned span of the pack; on the device.
    """

    def __init__(
        self,
        form: Form,
        numel: int,
        row: int,
        place: Place,
        *,
        data: Tensor | None = None,
        published: Tensor | None = None,
    ) -> None:
        self.form, self.row = form, row
        self._numel, self._place = numel, place
        self._counts = [count for _, count in form.pieces(row)]  # of each piece, per row
        self._pieces = [piece for piece in (data, published) if piece is not None]
        self._shared = 0 if published is None else 1  # pieces that are the pack's own
        rows = -(-numel // row)
        for dtype, count in form.pieces(row)[len(self._pieces) :]:
            self._pieces.append(place.zeros(numel if count == row else rows * count, dtype))

    @property
    def nbytes(self) -> int:
        """Bytes held, the pack's own aside."""
        return sum(piece.nbytes for piece in self._pieces[self._shared :])

    @property
    def data(self) -> Tensor:
        """1-d fp32, the memory itself; only of exact values."""
        assert isinstance(self.form, Exact)
        return self._pieces[0]

    def _slices(self, part: slice) -> list[slice]:
        start, stop, _ = part.indices(self._numel)
        first, last = start // self.row, -(-stop // self.row)
        return [
            slice(start, stop) if count == self.row else slice(first * count, last * count)
            for count in self._counts
        ]

    def window(self, part: slice) -> Raw:
        """The pieces of a part, 1-d, on the device: memory itself, or copies that must be kept."""
        pieces = [p[s] for p, s in zip(self._pieces, self._slices(part), strict=True)]
        near = self._shared
        return (*pieces[:near], *(self._place.fetch(piece) for piece in pieces[near:]))

    def keep(self, part: slice, raw: Raw) -> None:
        """Give updated pieces back."""
        for piece, where, new in zip(self._pieces, self._slices(part), raw, strict=True):
            mine = piece[where]
            if new.data_ptr() != mine.data_ptr():
                mine.copy_(new, non_blocking=True)

    def read(self, part: slice) -> Tensor:
        """1-d fp32, on the device; of exact values there it is the memory itself."""
        return decode_flat(self.form, self.window(part), self.row)

    def write(self, part: slice, values: Tensor, chance: Tensor | None = None) -> None:
        """Take 1-d fp32 values.

        Args:
            chance: for stochastic rounding, per value a number in [0, 65536), int32; ``None``
                rounds to nearest.
        """
        self.keep(part, encode_flat(self.form, values, self.row, chance))
