"""Reduce: one pass, in which every pack is sent to its owners exactly once.

Life of a pack in one synchronized backward::

    gradients accumulated -> counted                            (hook before accumulation)
    all of them there     -> collected and launched with the next gradient, packs in a fixed
                             order, last first
    two launches later    -> landed: waited for, summed in fp32 over ranks in rank order,
                             divided by their number, written over the own span
    end of backward       -> packs still incomplete are launched, absent gradients as zeros

Each pass launches every pack exactly once, in the same order on every rank, even if gradients are
absent. A failed backward is also a pass, even if it failed before its first gradient. The next
backward, clear, step or other call of all ranks sends the rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial

import torch

from shardcast import _compat
from shardcast.comm import Buffers
from shardcast.step.reduce.bucket import Bucket

WINDOW = 2  # packs in flight; bounds the memory of buffers


class Backward:
    """A running backward, from the model's output or its first gradient on.

    Attributes:
        number: the engine's number.
        sends: whether gradients are reduced during it, not accumulated on this rank.
        waits: whether everything is sent at its end: in the first backward a re-entrant checkpoint
            may produce gradients twice, and another model may be reached.
        started: whether a gradient came.
        end: weak reference to the callback at its end, which the engine drops if it fails.
    """

    def __init__(
        self,
        sends: bool,
        waits: bool,
        ended: Callable[[Backward], None],
        failed: Callable[[int], None],
    ) -> None:
        self.number = number = _compat.current_backward()
        self.sends, self.waits = sends, waits
        self.started = False
        end = partial(ended, self)
        # The engine alone holds the callback, and drops it when the backward fails.
        self._dropped = weakref.ref(end, _compat.untraced(lambda _: failed(number)))
        _compat.at_end_of_backward(end)
        self._inner = self.number  # the last inner backward that adds to gradients

    def accumulates(self, running: int) -> bool:
        """Return whether ``running`` is this backward, or one inside it that adds to gradients."""
        if running not in (self.number, self._inner):
            if not _compat.accumulates():
                return False
            self._inner = running
        return True


class ReducePass:
    """Sends each pack once, in the same order on all ranks, a few at a time.

    Args:
        buckets: buckets of all packs, in the order in which they were added.
        buffers: for what is sent and received.

    Attributes:
        left: packs that were not sent yet, in order.
    """

    def __init__(self, buckets: Iterable[Bucket], buffers: Buffers) -> None:
        # Gradients arrive roughly from the last parameter to the first; this order is equal on all
        # ranks.
        last_first = [*buckets][::-1]
        self.left = dict.fromkeys(sorted(last_first, key=lambda bucket: bucket.late))
        self._buffers = buffers
        self._flying: list[Bucket] = []

    def advance(self, device: torch.device, synchronizes: bool) -> None:
        """Launch packs that are complete, in order.

        Hooks run on one thread per device. A gradient that was counted on another thread may not be
        accumulated yet, so its pack is launched later.

        Args:
            synchronizes: this is not inside ``no_sync()``.
        """
        while self.left:
            bucket = next(iter(self.left))
            is_at_end = bucket.late or bucket.at_end
            if is_at_end or not bucket.complete or bucket.grads.pack.data.device != device:
                return
            if bucket.grads.alone:
                del self.left[bucket]
                bucket.adopt(synchronizes)
            else:
                with _compat.without_grad():  # a backward with create_graph runs hooks with it on
                    self._launch(bucket)

    @torch.no_grad()
    def flush(self) -> None:
        """Send everything that was not sent yet, with zeros for absent gradients; land means."""
        while self.left:
            self._launch(next(iter(self.left)))
        while self._flying:
            self._land()

    def _launch(self, bucket: Bucket) -> None:
        del self.left[bucket]
        if bucket.grads.alone:
            bucket.grads.adopt_all()
            return
        bucket.send(self._buffers)
        self._flying.append(bucket)
        if len(self._flying) > 1:
            self._flying[-2].advance()
        if len(self._flying) > WINDOW:
            self._land()

    def _land(self) -> None:
        self._flying.pop(0).land(self._buffers)
