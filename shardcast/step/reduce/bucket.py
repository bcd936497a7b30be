"""Reduce: one gradient pack on its way to the owners, and the sum that arrives there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardcast.comm import Comm
from shardcast.memory.gradients import GradPack
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.reduce.mean import Mean


@dataclass
class Bucket:
    """Where one gradient pack stands."""

    grads: GradPack
    wire: torch.dtype
    scatter: bool  # by reduce-scatter, else by all-to-all
    mean: Mean
    arrived: set[int] = field(default_factory=set)  # slots with a gradient in this backward
    absent: set[int] = field(default_factory=set)  # slots without one here at the last launch
    work: Any = None  # the collective in flight
    received: Tensor | None = None  # its output
    sent: Tensor | None = None  # its input; alive and unchanged until the work is waited for
    reduced: bool = False  # the own span holds the mean
    carry: Tensor | None = None  # fp32 means of earlier rounds of this step
    marked: set[int] = field(default_factory=set)  # sharded: slots with a gradient in the carry

    @property
    def complete(self) -> bool:
        """Whether every slot has a gradient."""
        return len(self.arrived) == len(self.grads.pack.params)

    def collect(self) -> None:
        """Take in all gradients that are there, zeros for the absent ones."""
        self.arrived.clear()
        self.absent.clear()
        self.grads.adopt_all()
        for position, param in enumerate(self.grads.pack.params):
            if param.grad is None:
                self.grads.clear(position)
                if not (self.grads.sharded and position in self.marked):
                    self.absent.add(position)

    def send(self, comm: Comm, spare: list[Tensor]) -> None:
        """Start the collective, into one of the ``spare`` buffers if it fits."""
        grads, own = self.grads, self.grads.pack.own
        self.sent = grads.data if grads.dtype == self.wire else grads.data.to(self.wire)
        if self.scatter:
            self.received = self._buffer(own.numel, spare)
            self.work = comm.reduce_scatter(self.received, self.sent)
        else:
            self.received = self._buffer(own.numel * comm.size, spare)
            sizes = [span.numel for span in grads.pack.layout.spans]
            self.work = comm.all_to_all(self.received, self.sent, [own.numel] * comm.size, sizes)

    def _buffer(self, numel: int, spare: list[Tensor]) -> Tensor:
        device = self.grads.data.device
        for position, buffer in enumerate(spare):
            if buffer.numel() >= numel and buffer.dtype == self.wire and buffer.device == device:
                return spare.pop(position)[:numel]
        return torch.empty(numel, dtype=self.wire, device=device)

    def reopen(self, kept: set[int]) -> None:
        """Begin anew; the means of the slots ``kept`` are carried over."""
        grads = self.grads
        self.reduced, self.carry = False, None
        self.marked = {position for position in kept if grads.holds(position)}
        if kept:
            for position in range(len(grads.pack.params)):
                if position not in kept:
                    grads.clear(position)
            self.carry = grads.carry(MASTER_DTYPE)
        if grads.sharded:
            grads.reopen(keep_own=bool(kept))

    @torch.no_grad()
    def land(self, size: int) -> Tensor:
        """Wait for the collective and write the mean over ``size`` ranks over the own span.

        Returns:
            The receive buffer, free again.
        """
        self.work.wait()
        received, own = self.received, self.grads.own
        assert received is not None
        self.mean(self._pieces(received, own), size, self.carry, own)
        self.work = self.received = self.sent = self.carry = None
        self.reduced = True
        if self.grads.sharded:
            self.grads.release(self.marked)
        return received

    def _pieces(self, received: Tensor, own: Tensor) -> list[Tensor]:
        """What is to be summed, in rank order: our own piece comes from what was sent."""
        grads, span = self.grads, self.grads.pack.own
        if self.scatter or not span.numel:
            return [received]
        assert self.sent is not None
        pieces = list(received.split(span.numel))
        in_place = not grads.sharded and self.sent is grads.data
        pieces[span.owner] = own if in_place else self.sent[span.start : span.stop]
        return pieces
