"""F2, reduce: one gradient pack on its way to the owners, and the sum that arrives there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardcast.comm import Comm
from shardcast.grads import GradPack
from shardcast.precision import MASTER_DTYPE

CHUNK = 1 << 16  # elements summed at a time on CPU: the fp32 accumulator stays in cache
PIECE = 1 << 24  # the same on an accelerator, where each operation is a kernel launch


@dataclass
class Stage:
    """Where one gradient pack stands."""

    grads: GradPack
    wire: torch.dtype
    scatter: bool  # by reduce-scatter, else by all-to-all
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
        received, carry, own = self.received, self.carry, self.grads.own
        assert received is not None
        pieces = self._pieces(received)
        if (
            size == 2
            and len(pieces) == 2
            and carry is None
            and own.dtype == self.wire != MASTER_DTYPE
        ):
            # In fp32, where the difference and its half are exact, and rounded once: the bits of
            # the sum's half, unless values exceed 1.7e38. There, and where one is infinite, what
            # comes out may be NaN, which skips the step as an infinity does.
            torch.lerp(pieces[0], pieces[1], 0.5, out=own)
        else:
            _mean(pieces, size, self.wire, carry, out=own)
        self.work = self.received = self.sent = self.carry = None
        self.reduced = True
        if self.grads.sharded:
            self.grads.release(self.marked)
        return received

    def _pieces(self, received: Tensor) -> list[Tensor]:
        """What is to be summed, in rank order: our own piece comes from what was sent."""
        span = self.grads.pack.own
        if self.scatter or not span.numel:
            return [received]
        assert self.sent is not None
        pieces = list(received.split(span.numel))
        pieces[span.owner] = self.sent[span.start : span.stop]
        return pieces


def _mean(
    pieces: list[Tensor], size: int, wire: torch.dtype, carry: Tensor | None, out: Tensor
) -> None:
    """The sum of ``pieces`` over ``size``, plus the carry; it may overwrite one of the pieces."""
    # One size up from the wire, so that the sum of equal fp32 values is exact too.
    exact = torch.float64 if wire == MASTER_DTYPE else MASTER_DTYPE
    chunk = CHUNK if out.device.type == "cpu" else PIECE
    for start in range(0, out.numel(), chunk):
        stop = min(start + chunk, out.numel())
        total = pieces[0][start:stop].to(exact, copy=True)
        for piece in pieces[1:]:
            total += piece[start:stop]
        # Divided, not multiplied by the reciprocal: the mean of equal values is that value.
        total /= size
        if carry is not None:
            total += carry[start:stop]
        out[start:stop].copy_(total)
