"""Reduce: one gradient pack on its way to the owners, and the sum that arrives there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardcast.comm import Comm
from shardcast.memory.gradients import GradPack
from shardcast.step.reduce.mean import Mean


@dataclass
class InFlight:
    """A collective under way; its tensors must live, unchanged, until it is waited for."""

    work: Any
    sent: Tensor
    received: Tensor


@dataclass(eq=False)
class Bucket:
    """Where one gradient pack stands."""

    grads: GradPack
    wire: torch.dtype
    scatter: bool  # by reduce-scatter, else by all-to-all
    mean: Mean
    flight: InFlight | None = None
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

    def send(self, comm: Comm, spare: list[Tensor]) -> None:
        """Start the collective, into one of the ``spare`` buffers if it fits."""
        grads, own = self.grads, self.grads.pack.own
        sent = grads.data if grads.dtype == self.wire else grads.data.to(self.wire)
        if self.scatter:
            received = self._buffer(own.numel, spare)
            work = comm.reduce_scatter(received, sent)
        else:
            received = self._buffer(own.numel * comm.size, spare)
            sizes = [span.numel for span in grads.pack.layout.spans]
            work = comm.all_to_all(received, sent, [own.numel] * comm.size, sizes)
        self.flight = InFlight(work, sent, received)

    def _buffer(self, numel: int, spare: list[Tensor]) -> Tensor:
        device = self.grads.data.device
        for position, buffer in enumerate(spare):
            if buffer.numel() >= numel and buffer.dtype == self.wire and buffer.device == device:
                return spare.pop(position)[:numel]
        return torch.empty(numel, dtype=self.wire, device=device)

    @torch.no_grad()
    def land(self, size: int) -> Tensor:
        """Wait for the collective and write the mean over ``size`` ranks over the own span.

        Returns:
            The receive buffer, free again.
        """
        flight, grads = self.flight, self.grads
        assert flight is not None
        flight.work.wait()
        pieces = self._pieces(flight)
        self.mean(pieces, size, self.carry, grads.own)
        self.flight = self.carry = None
        self.reduced = True
        grads.landed(pieces)
        return flight.received

    def _pieces(self, flight: InFlight) -> list[Tensor]:
        """What is to be summed, in rank order: our own piece comes from what was sent."""
        span = self.grads.pack.own
        if self.scatter or not span.numel:
            return [flight.received]
        pieces = list(flight.received.split(span.numel))
        pieces[span.owner] = self.grads.local(flight.sent)
        return pieces
