"""F2, masters: the fp32 copy of the elements that this rank owns.

A low-precision pack has fp32 masters for its own span, 4 bytes per owned element. A pack stored
in fp32 is its own master: the update writes straight into it and nothing is cast.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardcast.comm import Comm
from shardcast.grads import GradPack
from shardcast.layout import PackLayout
from shardcast.pack import Pack
from shardcast.precision import MASTER_DTYPE


class Master:
    """Masters of one pack on this rank.

    Attributes:
        data: 1-d fp32, the own span in full precision; shares the pack's storage if that is fp32.
        fragments: the parameters' parts in the own span, in pack order.
    """

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        self.grads: GradPack | None = None  # None while frozen: neither reduced nor updated
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
        """Take published values that are not the cast of their masters as the new masters.

        Masters whose cast is what is published keep their full precision.
        """
        if not self.in_place:
            published = self.pack.span(self.pack.own)
            same = self.data.to(published.dtype) == published
            self.data.copy_(torch.where(same, self.data, published.to(MASTER_DTYPE)))


def build_master(layout: PackLayout, params: list[nn.Parameter], comm: Comm) -> Master:
    """One pack and its masters: stage in fp32, broadcast from rank 0, keep, cast, free.

    Originals are freed one by one as they are staged, so no more than one pack is held twice.
    Every rank must call it, with equal layouts.
    """
    pack = Pack(layout, params, layout.spans[comm.rank])
    master = Master(pack)
    if comm.size == 1 and layout.dtype == MASTER_DTYPE:
        pack.fill()
        master.fill(None)
        return master
    device = params[0].device
    staged = torch.zeros(layout.numel, dtype=MASTER_DTYPE, device=device)
    for slot, param in zip(layout.slots, params, strict=True):
        staged[slot.offset : slot.end].view(slot.shape).copy_(param.data)
        param.data = torch.empty(0, dtype=layout.dtype, device=device)
    comm.broadcast(staged, 0)
    pack.fill(staged)
    master.fill(staged)
    return master
