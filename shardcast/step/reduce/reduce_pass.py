"""Reduce: one pass, in which every pack is sent to its owners exactly once.

Life of a pack in one synchronized backward::

    gradients accumulated -> counted                            (hook before accumulation)
    all of them there     -> collected and launched with the next gradient, packs in a fixed
                             order, last first
    two launches later    -> landed: waited for, summed in fp32 over ranks in rank order,
                             divided by their number, written over the own span
    end of backward       -> packs still incomplete are launched, absent gradients as zeros

so each synchronized backward launches every pack exactly once, in the same order, on every rank,
whatever gradients are absent.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from shardcast import _compat
from shardcast.comm import Buffers
from shardcast.step.reduce.bucket import Bucket, land_all

if TYPE_CHECKING:
    from shardcast.step.reduce.reducer import Reducer

WINDOW = 2  # packs in flight: bounds the memory of receive buffers

# Passes that a backward holds, by process group: there is more than one where a backward goes
# through several models, or a failed one is not collected yet.
_PASSES: weakref.WeakKeyDictionary[Any, weakref.WeakSet[ReducePass]] = weakref.WeakKeyDictionary()


class ReducePass:
    """Sends the packs once, during a backward or (see :meth:`flush`) without one.

    Only the engine's callback holds the pass of a backward. The engine drops it when the backward
    ends or fails, and with it all that is known of that backward; what is still in flight then is
    in the buckets, and lands when the next pass begins.

    Args:
        sends: whether complete packs are sent; with one rank, or inside ``no_sync()``, they are
            only taken in.

    Attributes:
        backward: the engine's number of the backward.
        started: whether a gradient came; without any nothing is sent.
        over: whether it ended, maybe by one of our own errors, whose traceback keeps the pass.
    """

    def __init__(self, reducer: Reducer, sends: bool) -> None:
        self._reducer, self._sends = reducer, sends
        # Gradients arrive roughly from the last parameter to the first; equal on all ranks.
        last_first = [*reducer.buckets.values()][::-1]
        self._buckets = sorted(last_first, key=lambda bucket: bucket.late)
        self.over = self.started = False
        self.backward = _compat.current_backward()
        self._inner = self.backward  # the last backward inside it that adds to gradients
        self._next = 0  # first bucket that was not sent yet
        self._flying: list[Bucket] = []
        self._sent: set[Bucket] = set()
        self._buffers = Buffers()

    def start(self) -> None:
        """Hear that the first gradient is about to come, or none in a pass without a backward."""
        self.started = True
        land_all(self._buckets)  # where a backward failed
        for bucket in self._buckets:
            bucket.begin()
        self._reducer.count_only(None)

    def begin(self) -> None:
        """Have the running backward hold and end this pass.

        Two models in one backward launch at its end, in the order in which it reached them: which
        of them has a pack complete first depends on the gradients of a rank.
        """
        _compat.at_end_of_backward(self._end)
        group = self._reducer.process_groups.shard.group
        if self._sends and group is not None:  # alone nobody waits
            passes = _PASSES.setdefault(group, weakref.WeakSet())
            met = [peer for peer in passes if not peer.over and peer.backward == self.backward]
            passes.add(self)
            for reduce_pass in (self, *met) if met else ():
                for bucket in reduce_pass._buckets:
                    bucket.meet()

    def accumulates(self, running: int) -> bool:
        """Return whether ``running`` is this backward, or one inside it that adds to gradients."""
        if running not in (self.backward, self._inner):
            if not _compat.accumulates():
                return False
            self._inner = running
        return True

    def arrive(self, bucket: Bucket, position: int, running: int) -> None:
        """Hear that a gradient is about to be accumulated in the backward ``running``.

        Packs that were complete before are sent now. Not when the last one comes: hooks of the
        script on that very parameter, which may clip or replace ``.grad``, run later.
        """
        reducer, outer = self._reducer, running == self.backward
        if not self._sends or reducer.has_ended or not reducer.beside_others:
            self._advance(bucket.grads.pack.data.device)
        if bucket in self._sent and self._sends:  # to launch it again others may not do
            bucket.grads.refuse(
                RuntimeError(
                    f"backward: a re-entrant checkpoint brought a gradient of {bucket.first!r} or "
                    "a parameter packed with it for a second time after it was sent; call "
                    "optimizer.zero_grad() and run this step again, in which it is sent last, or "
                    "use torch.utils.checkpoint with use_reentrant=False"
                )
            )
        if not bucket.arrived and bucket.grads.pack.pending:
            bucket.grads.refuse(
                RuntimeError(
                    f"overlap_sync: a backward reached {bucket.first!r} or a parameter packed with "
                    "it, whose values of the last step were still on their way: a forward read it "
                    "without its module being called, or was made before that step; call "
                    "optimizer.wait_sync() before such a forward, or leave overlap_sync off"
                )
            )
        bucket.arrive(position, self._sends, reducer.alone, outer and bucket not in self._sent)
        # A full pack is sent when the next gradient arrives, whichever pack that belongs to.
        reducer.count_only(running if outer and not bucket.complete else None)

    def _advance(self, device: torch.device) -> None:
        """Launch packs that are complete, in order.

        Hooks run on one thread per device. What was counted on another one is perhaps not
        accumulated yet, and is launched later.
        """
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if (self._sends and bucket.at_end) or not bucket.complete:
                return
            if bucket.grads.pack.data.device != device:
                return
            self._next += 1
            if self._sends:
                with _compat.without_grad():  # a backward with create_graph runs hooks with it on
                    self._launch(bucket)
            elif self._reducer.alone:
                bucket.adopt()

    def _end(self) -> None:
        self.over = True  # an engine's thread may keep the callback for a moment longer
        if not self.started:
            return
        if self._sends:
            self.flush()
            self._reducer.ended()
        else:
            for bucket in self._buckets:
                bucket.end_local(self._reducer.alone)
            if any(bucket.grads.is_part for bucket in self._buckets):
                self._reducer.warn_of_part()

    @torch.no_grad()
    def flush(self) -> None:
        """Send what was not sent yet, zeros for absent gradients, and have all means here.

        All, for whoever edits ``.grad`` in place after backward edits the mean.
        """
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        while self._flying:
            self._land()
        self._reducer.passed()

    def _launch(self, bucket: Bucket) -> None:
        self._sent.add(bucket)
        if self._reducer.alone:
            bucket.grads.adopt_all()
            return
        bucket.send(self._buffers)
        self._flying.append(bucket)
        if len(self._flying) > 1:
            self._flying[-2].advance()
        if len(self._flying) > WINDOW:
            self._land()

    def _land(self) -> None:
        buffer = self._flying.pop(0).land()
        if buffer is not None:
            self._buffers.give(buffer)
