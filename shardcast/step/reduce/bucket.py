"""Reduce: one gradient pack on its way to the owners, and the sum that arrives there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from shardcast.comm import Comm, Exchanged, Flight, Scattered, TwoLevel
from shardcast.memory.gradients import GradPack, own_part
from shardcast.step.reduce.mean import Mean


@dataclass(eq=False)
class Bucket:
    """Where one gradient pack stands."""

    grads: GradPack
    wire: torch.dtype
    mean: Mean
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

    def collect(self) -> bool:
        """Take in all gradients that are there; whether one had a graph of its own."""
        self.absent, has_graph = self.grads.collect()
        return has_graph

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

    def send(self, comm: Comm, spare: list[Tensor]) -> None:
        """Start the collective, into one of the ``spare`` buffers if it fits."""
        grads, pack = self.grads, self.grads.pack.layout
        sent = grads.data if grads.dtype == self.wire else grads.data.to(self.wire)
        buffer = partial(self._buffer, spare)
        if pack.route.reduce == "reduce_scatter":
            self.flight = Scattered(comm, pack, sent, buffer)
        elif pack.route.reduce == "two_level":
            self.flight = TwoLevel(comm, pack, sent, buffer, pack.route.node)
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
    def land(self, size: int) -> Tensor:
        """Wait for the collective and write the mean over ``size`` ranks over the own span.

        Returns:
            The receive buffer, free again.
        """
        flight, grads = self.flight, self.grads
        assert flight is not None
        pieces = flight.wait()
        self.mean(pieces, size, self.carry, grads.own)
        self.flight = self.carry = None
        self.reduced = True
        grads.landed(pieces if flight.by_rank else pieces[:1])
        return flight.received
