"""F2, masters: the fp32 copy of the elements that this rank owns.

A low-precision pack has fp32 masters for its own span, 4 bytes per owned element. A pack stored
in fp32 is its own master: the update writes straight into it and nothing is cast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardcast.pack import GradPack, Pack
from shardcast.precision import MASTER_DTYPE


class Master:
    """Masters of one pack on this rank.

    Attributes:
        data: 1-d fp32, the own span in full precision; shares the pack's storage if that is fp32.
        fragments: the parameters' parts in the own span, in pack order.
    """

    def __init__(self, pack: Pack, grads: GradPack | None) -> None:
        self.pack = pack
        self.grads = grads  # None for packs whose parameters were frozen from the start
        self.fragments = pack.layout.fragments(pack.own.owner)
        self.data = torch.empty(0)

    @property
    def in_place(self) -> bool:
        """Whether the pack's own span *is* the master."""
        return self.pack.layout.dtype == MASTER_DTYPE

    def fill(self, source: Tensor | None) -> None:
        """Take the own span of ``source`` (1-d, the whole pack, fp32), or of the pack itself."""
        published = self.pack.span(self.pack.own)
        if self.in_place:
            self.data = published
        elif source is None:
            self.data = published.to(MASTER_DTYPE)
        elif self.pack.own.numel == source.numel():
            self.data = source
        else:  # a clone, so that the rest of the source is freed
            self.data = source[self.pack.own.start : self.pack.own.stop].clone()

    def local(self, start: int, stop: int) -> slice:
        """Pack elements ``[start, stop)`` as a slice of :attr:`data`."""
        return slice(start - self.pack.own.start, stop - self.pack.own.start)

    @torch.no_grad()
    def publish(self) -> None:
        """Cast the masters into the own span of the pack."""
        if not self.in_place:
            self.pack.span(self.pack.own).copy_(self.data)

    @torch.no_grad()
    def absorb(self) -> None:
        """Take the published values as masters; what low precision lost stays lost."""
        if not self.in_place:
            self.data.copy_(self.pack.span(self.pack.own))
