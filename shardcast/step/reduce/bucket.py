"""Reduce: one gradient pack on its way to the owners, and the sum that arrives there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from shardcast.comm import Comm, Exchanged, Flight, Scattered, TwoLevel
from shardcast.memory.gradients import GradPack, own_part
from shardcast.memory.local_param import LocalParam
from shardcast.step.reduce.mean import Divisor, Mean, added, mean_in_chunks_


@dataclass(eq=False)
class Bucket:
    """Where one gradient pack stands."""

    grads: GradPack
    wire: torch.dtype
    mean: Mean
    divisor: Divisor
    sums: Sequence[Comm] = ()  # further groups over which gradients are summed
    # Mesh dimensions along which a gradient that is whole is left to the ranks of coordinate 0.
    repeated: Sequence[str] = ()
    # Sent before the round of its step, as all gradients of its pipeline stage were there; they are
    # sums over so many micro-batches.
    early: bool = False
    micro_batches: int = 1
    flight: Flight | None = None
    reduced: bool = False  # the own span holds the mean
    carry: Tensor | None = None  # fp32 means of earlier rounds of this step
    # Slots without a gradient here when it was last sent: what is in the own span is of others.
    absent: set[int] = field(default_factory=set)

    @property
    def first(self) -> str:
        """Name of its first parameter, for errors."""
        return self.grads.pack.layout.slots[0].name

    @property
    def begun(self) -> bool:
        """Whether gradients that come now are to be added to what was sent already."""
        return self.reduced or self.flight is not None

    @property
    def late(self) -> bool:
        """Whether it is sent at the end only, as its further sums are with ranks whose backward
        waits for others than ours.
        """
        return self.grads.pack.layout.sharing.adds

    def collect(self) -> bool:
        """Take in all gradients that are there; whether one had a graph of its own."""
        self.absent, has_graph = self.grads.collect()
        if self.repeated:
            pack = self.grads.pack
            for slot, param in zip(pack.layout.slots, pack.params, strict=True):
                if isinstance(param, LocalParam) and param.repeats(self.repeated):
                    self.grads.data[slot.offset : slot.end].zero_()
        return has_graph

    def clear(self) -> None:
        """All gradients were cleared."""
        self.settle()
        self.carry = self.grads.joint = None

    def settle(self) -> None:
        """The round of the step is here, for which it was sent early, or it is not to be."""
        self.early, self.micro_batches = False, 1

    def forget(self, positions: Iterable[int]) -> None:
        """Keep no means of these slots."""
        if self.carry is not None:
            for position in positions:
                self.carry[own_part(self.grads.pack, position)].zero_()

    def drop_cleared(self, others_too: bool) -> None:
        """Zero the means of gradients that were cleared, and if asked of other ranks' alone."""
        gone = {n for n, p in enumerate(self.grads.pack.params) if p.grad is None}
        for position in gone if others_too else gone - self.absent:
            self.grads.own[own_part(self.grads.pack, position)].zero_()
            if self.late and self.grads.joint is not None:
                self.grads.joint[position].fill_(0.0)

    def send(self, spare: list[Tensor]) -> None:
        """Start the collective, into one of the ``spare`` buffers if it fits."""
        grads, pack, comm = self.grads, self.grads.pack.layout, self.grads.pack.comm
        sent = grads.data if grads.dtype == self.wire else grads.data.to(self.wire)
        buffer = partial(self._buffer, spare)
        if pack.algorithms.reduce == "reduce_scatter":
            self.flight = Scattered(comm, pack, sent, buffer)
        elif pack.algorithms.reduce == "two_level":
            self.flight = TwoLevel(comm, pack, sent, buffer, pack.algorithms.node)
        else:
            self.flight = Exchanged(comm, pack, sent, buffer, grads.local)

    def _buffer(self, spare: list[Tensor], numel: int) -> Tensor:
        device = self.grads.data.device
        for position, buffer in enumerate(spare):
            if buffer.numel() >= numel and buffer.dtype == self.wire and buffer.device == device:
                return spare.pop(position)[:numel]
        return torch.empty(numel, dtype=self.wire, device=device)

    @torch.no_grad()
    def advance(self) -> None:
        """Launch what follows on the collective under way: the first one of two, if there are."""
        if self.flight is not None:
            self.flight.advance()

    @torch.no_grad()
    def land(self) -> Tensor:
        """Wait for the collective and write the mean over the own span.

        Returns:
            The receive buffer, free again.
        """
        flight, grads = self.flight, self.grads
        assert flight is not None
        pieces, divisor = flight.wait(), self.divisor.value * self.micro_batches
        if self.sums:
            own, slots = grads.own.numel(), grads.pack.layout.slots if self.late else ()
            total = added(pieces, len(slots))
            total[own:].fill_(1.0)  # to assign a number may wait for a GPU, see Control.all_reduce
            for position in self.absent if self.late else ():
                total[own + position].fill_(0.0)
            for comm in self.sums:
                comm.all_reduce(total, grads.pack.layout)
            pieces, grads.joint = [total[:own]], total[own:].clone()
        usual = self.divisor.given is None and self.micro_batches == 1 and not self.sums
        mean = self.mean if usual else mean_in_chunks_  # compiled anew for each other divisor
        mean(pieces, divisor, self.carry, grads.own)
        self.flight = self.carry = None
        self.reduced = True
        grads.landed(pieces if flight.by_rank else pieces[:1])
        return flight.received
