"""Reduce: one round, in which every pack is sent to its owners exactly once.

Life of a pack in one synchronised backward::

    gradients accumulated -> counted                            (hook before accumulation)
    all slots there       -> adopted and launched with the next gradient, packs in a fixed
                             order, last first
    two launches later    -> landed: waited for, summed in fp32 over ranks in rank order,
                             divided by their number, written over the own span
    end of backward       -> packs still incomplete are launched, absent gradients as zeros

so each synchronised backward launches every pack exactly once, in the same order, on every rank,
whatever gradients are absent. The own span of a gradient pack then holds the mean. If more is
accumulated on top (several backwards before a step), the mean moves to an fp32 *carry* first and is
added back when the pack is reduced again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import Grid
from shardcast.step.reduce.bucket import Bucket
from shardcast.step.reduce.states import Launch, States
from shardcast.step.reduce.user_edits import Edits

WINDOW = 2  # packs in flight: bounds the memory of receive buffers


class _Crowd(list["weakref.ref[Round]"]):
    """The rounds of one backward, in the order in which it reached their models."""


# By the number of the backward, which is all that models in one backward have in common: nobody
# but its rounds holds what is in here, so an entry ends with them, in a failed backward too.
_CROWDS: weakref.WeakValueDictionary[int, _Crowd] = weakref.WeakValueDictionary()


class Round:
    """Sends the packs once, beside a backward or (see :meth:`flush`) without one.

    Only the engine's callback holds the round of a backward. The engine drops it when the backward
    ends or fails, and with it all that is known of that backward; what is still in flight then is
    in the buckets, and lands when the next round begins.

    Args:
        buckets: in the order of launching.
        sends: else complete packs are only adopted: with one rank, or inside ``no_sync()``.
        alone: gradients are means as they come.

    Attributes:
        backward: which one it is.
        over: it ended, or one of our own errors ended it, whose traceback keeps the round.
        counting: packs whose gradients the hooks only have to count, with those that came.
    """

    def __init__(
        self, grid: Grid, buckets: Sequence[Bucket], states: States, edits: Edits, sends: bool,
        alone: bool,
    ) -> None:  # fmt: skip
        self._grid, self._buckets, self._states, self._edits = grid, buckets, states, edits
        self._sends, self._alone = sends, alone
        self.over = False
        self.backward = _compat.current_backward()
        self.counting: dict[Bucket, set[int]] = {}
        self._inner = self.backward  # the last backward inside it that adds to gradients
        self._next = 0  # first bucket that was not sent yet
        self._arrived: dict[Bucket, set[int]] = {}  # slots with a gradient in this backward
        self._flying: list[Bucket] = []
        self._spare: list[Tensor] = []  # receive buffers to be used again
        self._looked = False  # for gradients that were cleared
        self._crowd = _Crowd()
        land_all(bucket for bucket in buckets if not bucket.early)  # where a backward failed
        if any(bucket.carry is not None for bucket in buckets):
            self._forget_cleared()  # before more is accumulated

    def begin(self) -> None:
        """Have the running backward hold and end this round.

        With others on its group this round, and theirs, launch at the end only, in this order.
        """
        _compat.at_end_of_backward(self._end)
        if self._sends:
            self._crowd = _CROWDS.setdefault(self.backward, _Crowd())
            self._crowd.append(weakref.ref(self))
            group = self._grid.cut.group
            rounds = (there() for there in self._crowd)
            met = [r for r in rounds if r is not None and r._grid.cut.group is group]
            if len(met) > 1:
                for other in met:
                    other._states.crowded()

    def accumulates(self, running: int) -> bool:
        """Whether ``running`` is this backward, or one inside it that adds to gradients."""
        if running not in (self.backward, self._inner):
            if not _compat.accumulates():
                return False
            self._inner = running
        return True

    def arrive(self, bucket: Bucket, position: int, running: int) -> None:
        """A gradient is about to be accumulated in the backward ``running``.

        Packs that were complete before are sent now. Not when the last one comes: hooks of the
        script on that very parameter, which may clip or replace ``.grad``, run later.
        """
        if running != self.backward and self._sends:
            self._states.nested()
        eager = not self._sends or self._states.launch is Launch.EAGER
        if eager:
            self._advance(bucket.grads.pack.data.device)
        arrived = self._arrived.get(bucket)
        if arrived is None:
            arrived = self._arrived[bucket] = set()
            self._open(bucket)
        elif bucket.begun:  # to launch it again would be a collective that others may not issue
            raise RuntimeError(
                f"backward: a re-entrant checkpoint brought a gradient of {bucket.first!r} or a "
                "parameter packed with it for a second time after it was sent; use "
                "torch.utils.checkpoint with use_reentrant=False, or checkpoint from the first "
                "step on with grads 'full'"
            )
        arrived.add(position)
        told = bucket.grads.clear_way(position)
        if running == self.backward and not told and (not eager or self._waits_for(bucket)):
            self.counting[bucket] = arrived

    def _waits_for(self, bucket: Bucket) -> bool:
        """Whether it is the next one: the first gradient of another pack will launch it."""
        return self._next < len(self._buckets) and self._buckets[self._next] is bucket

    def _advance(self, device: torch.device) -> None:
        """Launch packs that are complete, in order.

        Hooks run on one thread per device. What was counted on another one is perhaps not
        accumulated yet, and is launched later.
        """
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            pack = bucket.grads.pack
            if bucket.late:
                return
            if len(self._arrived.get(bucket, ())) < len(pack.params) or pack.data.device != device:
                return
            self._next += 1
            self.counting.pop(bucket, None)
            if self._sends:
                self._launch(bucket)
            else:
                self._adopt(bucket)

    def _open(self, bucket: Bucket) -> None:
        """The first gradient of a pack comes."""
        if bucket.grads.pack.pending:
            raise RuntimeError(
                f"overlap_sync: a backward reached {bucket.first!r} or a parameter packed with it, "
                "whose values of the last step were still on their way: a forward read it without "
                "its module being called, or was made before that step; call "
                "optimizer.wait_sync() before such a forward, or leave overlap_sync off"
            )
        self._check_not_sent(bucket)
        if bucket.begun:
            self._reopen(bucket)

    def _check_not_sent(self, bucket: Bucket) -> None:
        """Raise for more gradients of a stage that was reduced for this step."""
        if bucket.early:
            raise RuntimeError(
                "overlap_reduce: a pipeline schedule ran a second time before step(); call "
                "optimizer.step() after each, or do without overlap_reduce"
            )

    def _end(self) -> None:
        self.over = True  # an engine's thread may keep the callback for a moment longer
        if self._sends:
            self.flush()
            self._states.ended()
            self._edits.note()
        else:
            for bucket in self._arrived:
                self._adopt(bucket)

    def flush(self) -> None:
        """Send what was not sent yet, zeros for absent gradients, and have all means here.

        All, for whoever edits ``.grad`` in place after backward edits the mean.
        """
        for bucket in self._buckets[self._next :]:
            if bucket.early:
                land_all([bucket])
                bucket.drop_cleared(others_too=False)
                bucket.settle()
            else:
                self._launch(bucket)
        while self._flying:
            self._land()
        self._states.flushed()

    def send_early(self, bucket: Bucket, micro_batches: int) -> None:
        """Send a pack of which this step brings no further gradient, before the round of the step.

        It lands in that round, so that the backwards of other stages do not wait for it.
        """
        self._check_not_sent(bucket)
        bucket.micro_batches = micro_batches
        self._launch(bucket)
        bucket.early = True

    # -- one pack -----------------------------------------------------------------------------

    def _adopt(self, bucket: Bucket) -> None:
        if bucket.grads.adopt():
            self._edits.warn_of_graph()

    def _launch(self, bucket: Bucket) -> None:
        if bucket.begun:
            self._reopen(bucket)
        if bucket.collect():
            self._edits.warn_of_graph()
        if not self._alone:
            bucket.send(self._spare)
            self._flying.append(bucket)
            if len(self._flying) > 1:
                self._flying[-2].advance()
            if len(self._flying) > WINDOW:
                self._land()

    def _land(self) -> None:
        self._spare.append(self._flying.pop(0).land())

    def _reopen(self, bucket: Bucket) -> None:
        """New gradients for a reduced pack: keep the mean of those that were not cleared.

        Where this rank had no gradient there may be a mean all the same, of other ranks' ones. One
        that a script replaced (``p.grad = p.grad * 2``) is a mean too, and not to be averaged.
        """
        grads, params = bucket.grads, bucket.grads.pack.params
        others: set[int] = set()
        if not self._states.past:
            self._forget_cleared()
            grads.adopt(set(range(len(params))) - bucket.absent)
            others = {position for position in bucket.absent if params[position].grad is None}
        kept = {position for position in range(len(params)) if grads.holds(position)}
        # Usually none: all gradients were set to None, all are overwritten.
        bucket.carry, bucket.reduced = grads.reopen(kept | others), False

    def _forget_cleared(self) -> None:
        """Keep no means of gradients that were cleared by hand.

        If there are any, the means of slots where only other ranks had a gradient were so too.
        """
        if self._looked:
            return
        self._looked = True
        cleared = False
        for bucket in self._buckets:
            if bucket.reduced or bucket.carry is not None:
                params = bucket.grads.pack.params
                gone = {n for n, p in enumerate(params) if p.grad is None} - bucket.absent
                bucket.forget(gone)
                cleared = cleared or bool(gone)
        if cleared:
            for bucket in self._buckets:
                bucket.forget(bucket.absent)
                bucket.absent = set()


def land_all(buckets: Iterable[Bucket]) -> None:
    """Finish what a failed backward, or no backward, left in flight."""
    for bucket in buckets:
        if bucket.flight is not None:
            bucket.land()
