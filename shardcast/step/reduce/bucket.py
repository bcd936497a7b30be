"""Reduce: the gradients of one pack on their way to the mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import REDUCTIONS, Buffer, Buffers, Comm, Reduction, ReplicaSumReduction
from shardcast.memory.gradients import Gradients
from shardcast.memory.local_param import LocalParam
from shardcast.plan.layout import PackLayout
from shardcast.plan.precision import MASTER_DTYPE, sum_dtype
from shardcast.step.reduce.mean import Divisor, Mean, mean_in_chunks_


@dataclass(eq=False)
class Bucket:
    """The gradients of one pack, sent to the owners exactly once in each reduction.

    Attributes:
        sums: other groups over which gradients are summed.
        repeated: mesh dimensions along which the ranks at coordinate 0 send a whole gradient for
            all.
        streams: streams of an accelerator on which gradients were made; ``None`` on a host.
        at_end: it is sent at the end of a backward, because a backward inside another one produced
            a gradient.
    """

    grads: Gradients
    mean: Mean
    divisor: Divisor
    sums: Sequence[Comm]
    repeated: Sequence[str]
    streams: set[Any] | None
    at_end: bool = False
    _reduction: Reduction | None = None
    _packed: Buffer | None = None  # buffer of the sent gradients

    @cached_property
    def late(self) -> bool:
        """Whether its further sums are with ranks whose backward waits for others.

        Then it is sent at the end, as one of the last.
        """
        return self.grads.pack.layout.pack_groups.sums_replicas

    @property
    def complete(self) -> bool:
        """Whether all gradients have arrived in this backward."""
        return len(self.grads.arrived) == len(self.grads.pack.params)

    def arrive(self, position: int, sends: bool, is_outer: bool, is_sent: bool) -> bool:
        """Note a gradient that is about to be accumulated.

        Args:
            sends: the backward sends gradients.
            is_outer: it belongs to the backward itself, not to one inside it.
            is_sent: this backward has already sent the pack.

        Returns:
            Whether all gradients have arrived.
        """
        grads, first = self.grads, self.grads.pack.layout.slots[0].name
        if is_sent:  # other ranks may not launch it again
            grads.refuse(
                RuntimeError(
                    f"backward: a re-entrant checkpoint produced another gradient of {first!r}, "
                    "or of a parameter in its pack, after that pack was sent; call "
                    "optimizer.zero_grad() and run this step again (the pack is then sent last), "
                    "or use torch.utils.checkpoint with use_reentrant=False"
                )
            )
        if not grads.arrived and grads.pack.pending:
            grads.refuse(
                RuntimeError(
                    f"overlap_sync: a backward reached {first!r} or a parameter in its pack "
                    "before the values of the last step had arrived: a forward read it without "
                    "calling its module, or ran before that step; call optimizer.wait_sync() "
                    "before such a forward, or leave overlap_sync off"
                )
            )
        self.at_end = self.at_end or (sends and (is_sent or not is_outer))
        grads.arrive(position)
        self.note_stream()
        return self.complete

    def note_stream(self) -> None:
        """Note the stream on which a hook runs."""
        if self.streams is not None:
            self.streams.add(_compat.current_stream(self.grads.pack.data.device))

    def _wait_for_streams(self) -> None:
        """Let the current stream wait until all gradients are made, before it copies them."""
        if self.streams:
            _compat.wait_streams(self.streams, [param.grad for param in self.grads.pack.params])
            self.streams.clear()

    def failed(self, waits: bool) -> None:
        """Called when the backward failed, possibly before the last gradient was accumulated.

        Args:
            waits: the pack was not sent, and the ranks will send it together.
        """
        try:
            # Now, because the next backward may write before its first hook runs.
            self.grads.keep(has_failed=True)
            if waits:
                self.grads.show_all()
        except Exception as error:  # most likely out of memory, like the backward itself
            lost = RuntimeError(
                "backward: gradients of a failed backward could not be kept "
                f"({type(error).__name__}: {error}), and their memory may hold other values now; "
                "call optimizer.zero_grad() after a failed backward"
            )
            self.grads.refuse(lost)

    def adopt(self, synchronizes: bool) -> None:
        """Adopt one rank's gradients of a backward that sends nothing.

        Args:
            synchronizes: it is not inside ``no_sync()``, so this may be the mean of the step.
        """
        self._wait_for_streams()
        self.grads.adopt()
        if synchronizes:
            self.grads.has_come(self.grads)

    def end_local(self, synchronizes: bool) -> None:
        """End a backward that has sent nothing.

        Args:
            synchronizes: see :meth:`adopt`; false for a pack that was adopted already.
        """
        if self.grads.arrived and self.grads.alone:
            self.adopt(synchronizes)
        self.grads.keep()

    def send(self, buffers: Buffers) -> None:
        """Launch the collective, with memory from ``buffers``."""
        assert not self.grads.in_flight
        grads, layout = self.grads, self.grads.pack.layout
        self._wait_for_streams()
        device, self._packed = grads.pack.data.device, None

        def empty(numel: int, dtype: torch.dtype) -> Tensor:
            self._packed = buffers.take(numel, dtype, device)
            return self._packed.data

        sent = grads.collect(empty, self._is_repeated if self.repeated else None)
        # there is none with one rank
        reduction = REDUCTIONS[layout.algorithms.reduce or "all_to_all"]
        take = partial(buffers.take, dtype=sent.dtype, device=device)
        own = sent[grads.pack.own.start : grads.pack.own.stop]
        self._reduction = reduction(grads.pack.comm, layout, sent, own, take)
        if not self.late:
            for group in self.sums:
                self._reduction = ReplicaSumReduction(
                    self._reduction, group, layout, partial(_added, room=0)
                )

    def _is_repeated(self, position: int) -> bool:
        param = self.grads.pack.params[position]
        return isinstance(param, LocalParam) and param.repeats(self.repeated)

    def advance(self) -> None:
        """Launch the collective that follows the one in flight, if there are two."""
        if self._reduction is not None:
            self._reduction.advance()

    def land(self, buffers: Buffers) -> None:
        """Wait for the collective in flight, if any, and write the mean over the own span.

        Args:
            buffers: get back the buffers that it used.
        """
        reduction, grads = self._reduction, self.grads
        if reduction is None:
            return
        pieces, divisor, holders = reduction.wait(), self.divisor.value, None
        if self.late:
            total, holders = self._sum_of_copies(pieces, grads.pack.layout)
            pieces = [total]
        usual = self.divisor.given is None and not self.sums
        mean = self.mean if usual else mean_in_chunks_  # compiled again for each other divisor
        if reduction.mean_ is not None:
            mean = reduction.mean_
        mean(pieces, divisor, *grads.own_mean())
        self._reduction = None
        grads.landed(pieces if reduction.by_rank else pieces[:1], holders)
        # Hazard: from here on nothing may read the sent or received data.
        buffers.give(reduction.received)
        if self._packed is not None:
            buffers.give(self._packed)
            self._packed = None

    def leave(self) -> Reduction | None:
        """Give up the reduction in flight, if any: the caller keeps it until its wait() returns."""
        left, self._reduction = self._reduction, None
        return left

    def _sum_of_copies(self, pieces: Sequence[Tensor], layout: PackLayout) -> tuple[Tensor, Tensor]:
        """Sum ``pieces`` over holders of copies, and count per slot those with a gradient."""
        own = self.grads.own.numel()
        total = _added(pieces, len(layout.slots))
        total[own:].fill_(1.0)  # assigning a number would wait for a GPU (torch < 2.13)
        for position, has_one in enumerate(self.grads.presence()):
            if not has_one:
                total[own + position].fill_(0.0)
        for comm in self.sums:
            comm.all_reduce(total, layout)
        return total[:own], total[own:].clone()


def _added(pieces: Sequence[Tensor], room: int) -> Tensor:
    """Sum ``pieces`` in fp32, in the order of a mean, with ``room`` for more after them."""
    numel, dtype = pieces[0].numel(), sum_dtype(pieces[0].dtype)
    total = pieces[0].new_empty(numel + room, dtype=dtype)
    part = total[:numel].copy_(pieces[0])
    for piece in pieces[1:]:
        part += piece  # with a slice of ``total`` Python would copy the sum onto itself
    return total.to(MASTER_DTYPE)
