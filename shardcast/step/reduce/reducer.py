"""Reduce: gradients of every rank to the owner of their span, while backward runs.

Life of a pack in one synchronised backward::

    gradient accumulated -> adopted into the gradient pack      (post-accumulate hook)
    all slots there      -> launched with the next gradient, packs in a fixed order, last first
    two launches later   -> finished: waited for, summed in fp32 over ranks in rank order,
                            divided by their number, written over the own span
    end of backward      -> packs still incomplete are launched, absent gradients as zeros

so each synchronised backward launches every pack exactly once, in the same order, on every rank,
whatever gradients are absent. The own span of a gradient pack then holds the mean; the rest of
it is consumed. If more is accumulated on top (several backwards before a step), the mean moves to
an fp32 *carry* first and is added back when the pack is reduced again.

Peers sum in the wire dtype (DDP, ZeRO) or pre-divide in fp16; here low precision is only on the
wire, and the mean is rounded once.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.memory.gradients import GradPack
from shardcast.memory.pack import Pack
from shardcast.plan.precision import MASTER_DTYPE, Precision
from shardcast.step.reduce.bucket import Bucket
from shardcast.step.reduce.mean import choose_mean
from shardcast.step.reduce.user_edits import Edits

WINDOW = 2  # packs in flight: bounds the memory of receive buffers


class _Crowd(list["weakref.ref[Reducer]"]):
    """The reducers that one backward goes through, in the order in which it reached them."""


# By the number of the backward; the reducers hold what is in here.
_CROWDS: weakref.WeakValueDictionary[int, _Crowd] = weakref.WeakValueDictionary()


class Reducer:
    """Reduces the gradients of the packs given to :meth:`add` to their owners.

    All ranks must run the same number of synchronised backwards; inside :meth:`no_sync` none.

    Args:
        averaged: the gradients are equal on all ranks when backward ends (DDP averages them);
            nothing is sent, the own spans are only copied.
    """

    def __init__(
        self, comm: Comm, precision: Precision, config: ShardcastConfig, averaged: bool = False
    ) -> None:
        self._comm, self._precision, self._config = comm, precision, config
        self._sharded = config.grads == "sharded" and comm.size > 1
        self.averaged = averaged
        self.grads: list[GradPack] = []  # in the order of add()
        self.touched = False  # a gradient arrived since finish()
        self._buckets: list[Bucket] = []  # in the order of launching
        self._numbered: list[Bucket] = []  # as grads
        self._next = 0  # first bucket of this round that was not launched yet
        self._end: Callable[[], Any] = _nothing  # weak, to the queued end-of-backward callback
        self._backward = -1  # which backward that is
        self._accumulating = -1  # the last backward known to add to gradients
        # Launch packs before the backward ends. Not in the first one, and never after one inside
        # another was seen: a re-entrant checkpoint may bring a gradient twice. Sharded gradients
        # are always launched: to wait would need the memory that they are to save.
        # But never again after one backward went through several models on a group: which of them
        # has a pack complete first depends on the gradients of a rank, and so would the order.
        self._early = self._sharded
        self._nested = self._crowded = False
        self._crowd = _Crowd()
        self._sync = True
        self._due = True  # a round must be run before the next step
        self.edits = Edits(self.grads)
        self._may_warn_of_graph = True
        self._told = False  # zero_grad() or a step made the last round's means a thing of the past
        self._cleared: bool | None = None  # some were found cleared since the last round
        self._flying: list[Bucket] = []
        self._spare: list[Tensor] = []  # receive buffers to be used again within this step
        self._handles: list[Any] = []

    def add(self, pack: Pack) -> GradPack:
        """Reduce the gradients of ``pack`` from now on; every rank must add the same packs.

        Gradients that its parameters have already are reduced with this step's.
        """
        grads = GradPack(pack, self._precision.grad_dtype(pack.layout.dtype), self._sharded)
        wire = self._precision.wire_dtype(pack.layout.dtype)
        mean = choose_mean(self._config, self._comm.size, pack.data.device)
        bucket = Bucket(grads, wire, self._scatters(pack, wire), mean)
        self.grads.append(grads)
        number = len(self._numbered)
        self._numbered.append(bucket)
        for param in pack.params:
            if param.grad_dtype != grads.dtype:
                grad, param.grad = param.grad, None
                param.grad_dtype = grads.dtype
                param.grad = None if grad is None else grad.to(grads.dtype)
        # Gradients arrive roughly from the last parameter to the first.
        self._buckets.insert(0, bucket)
        if not self.averaged:
            before = _compat.weak_hook(partial(Reducer._before_accumulate, number=number), self)
            for position, param in enumerate(pack.params):
                trains = param.requires_grad
                param.requires_grad_(True)  # else it takes no hooks, and may be unfrozen later
                after = partial(Reducer._after_accumulate, number=number, position=position)
                self._handles += [
                    param.register_hook(before),
                    param.register_post_accumulate_grad_hook(_compat.weak_hook(after, self)),
                ]
                param.requires_grad_(trains)
            if not self._due:
                self._launch(bucket)
        return grads

    def _scatters(self, pack: Pack, wire: torch.dtype) -> bool:
        """``auto``: reduce-scatter only where it sums in fp32 anyway, on a backend good at it.

        On gloo an all-to-all and a local sum beat it (``launch/benchmark.py``). NCCL's
        reduce-scatter rounds to the wire dtype at every hop, so low-precision gradients use the
        all-to-all there too.
        """
        if self._config.reduce != "auto":
            return self._config.reduce == "reduce_scatter"
        equal = len({span.numel for span in pack.layout.spans}) == 1
        return (
            equal and wire == MASTER_DTYPE and "nccl" in self._comm.backend(pack.params[0].device)
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backwards accumulate locally and no collective is issued.

        It changes nothing for sharded gradients, which have no room to accumulate locally.
        """
        before, self._sync = self._sync, self._sharded
        self._due = True
        try:
            yield
        finally:
            self._sync = before

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin(self) -> None:
        """Have the round flushed when the running backward ends.

        Called when a backward reaches the model's output, so that it is the *outermost* backward
        that flushes, not one that a re-entrant checkpoint runs inside; the first gradient hook
        does the same for models whose submodules are called directly.
        """
        if self._local or self._armed() or self.averaged:
            return
        if not self._accumulates():  # what autograd.grad returns is no gradient of ours yet
            return
        self._backward = _compat.current_backward()
        self._next = 0  # not so if an exception ended the backward before
        for (
            bucket
        ) in self._buckets:  # nor this; and under no_sync() not all of a pack may have come
            bucket.arrived.clear()
        end = partial(Reducer._end_backward, self)
        self._end = weakref.ref(end)
        _compat.at_end_of_backward(end)
        self._meet()

    def _meet(self) -> None:
        """Launch at the end only, in the order of arrival, if another model is in this backward."""
        self._crowd = _CROWDS.setdefault(self._backward, _Crowd())
        self._crowd.append(weakref.ref(self))
        group = self._comm.group
        met = [other for there in self._crowd if (other := there()) and other._comm.group is group]
        if len(met) > 1:
            for other in met:
                other._crowded, other._early = True, False

    def _armed(self) -> bool:
        """The engine forgets the callback, which nobody else holds, when its backward ends."""
        return self._end() is not None

    def finish(self) -> None:
        """Have all gradients of the own spans here; the last call of this stage before a step.

        Every rank must call it. Runs the round itself for gradients that no synchronised
        backward brought (set by hand, or accumulated under :meth:`no_sync`).

        Raises:
            RuntimeError: inside :meth:`no_sync`.
        """
        if not self._sync:
            raise RuntimeError(
                "step() was called inside no_sync(): the gradients were not reduced; leave the "
                "context before the last backward and the step"
            )
        self.touched = False
        if self.averaged:
            for grads in self.grads:
                for position in range(len(grads.pack.params)):
                    grads.take(position)
            return
        self.edits.check_in_place()
        if self._due or self._comm.size == 1:  # alone no backward makes a round due
            self._flush()
        elif self._told:
            self.edits.check_strangers()
        self._land_all()
        for grads in self.grads:
            grads.adopt_all()  # one replaced by hand after the reduction is final, as with DDP

    def used(self) -> None:
        """A step used the gradients: the next one needs a round of its own."""
        self._due = self._told = True

    def cleared(self) -> None:
        """Gradients were cleared. No round is due for it: one rank alone may clear its own."""
        self._told = True

    def show(self, present: Mapping[Pack, Sequence[bool]]) -> None:
        """Make the mean visible as ``.grad`` where only other ranks had a gradient.

        As DDP does; so it is cleared, or added to, like every other gradient.

        Args:
            present: per pack and slot, whether some rank has a gradient.
        """
        for bucket in self._numbered:
            grads = bucket.grads
            slots = present[grads.pack]
            for position, param in enumerate(grads.pack.params):
                if param.grad is None and slots[position] and grads.owned[position]:
                    grads.show(position)
                    bucket.absent.discard(position)  # is seen when it is cleared

    # -- hooks ------------------------------------------------------------------------------

    def _accumulates(self) -> bool:
        running = _compat.current_backward()
        if running != self._accumulating and _compat.accumulates():
            self._accumulating = running
        return running == self._accumulating

    @property
    def _local(self) -> bool:
        """Whether backwards send nothing at present."""
        return not self._sync or self._comm.size == 1

    def _before_accumulate(self, _grad: Tensor, number: int) -> None:
        if not self._accumulates():
            return
        self.begin()
        self.touched = True
        self._launch_complete()
        bucket = self._numbered[number]
        if bucket.grads.pack.pending:
            raise RuntimeError(
                "overlap_sync: a backward reached "
                f"{bucket.grads.pack.layout.slots[0].name!r} or a parameter packed with it, whose "
                "values of the last step were still on their way: a forward read it without its "
                "module being called, or was made before that step; call optimizer.wait_sync() "
                "before such a forward, or leave overlap_sync off"
            )
        if bucket.reduced or bucket.work is not None:
            if self._armed() and self._launched_in_this_round(bucket):
                # To launch it again would be a collective that the other ranks may not issue.
                raise RuntimeError(
                    "backward: a re-entrant checkpoint brought a gradient of "
                    f"{bucket.grads.pack.layout.slots[0].name!r} or a parameter packed with it for "
                    "a second time after it was sent; use torch.utils.checkpoint with "
                    "use_reentrant=False, or checkpoint from the first step on with grads 'full'"
                )
            self._reopen(bucket)

    def _launched_in_this_round(self, bucket: Bucket) -> bool:
        return any(bucket is other for other in self._buckets[: self._next])

    def _after_accumulate(self, param: Tensor, number: int, position: int) -> None:
        if param.grad is not None and param.grad.requires_grad:
            self._warn_of_graph()
        bucket = self._numbered[number]
        if self._sharded:  # elsewhere all of a pack at once, which takes one call
            bucket.grads.adopt(position)
        bucket.arrived.add(position)
        if self._local:
            if bucket.complete:  # else when it is collected
                bucket.grads.adopt_all()
                bucket.arrived.clear()
            return
        if _compat.current_backward() != self._backward:
            self._nested = not self._sharded
            self._early = self._sharded and not self._crowded

    def _warn_of_graph(self) -> None:
        if self._may_warn_of_graph:
            self._may_warn_of_graph = False
            warnings.warn(
                "backward(create_graph=True): .grad becomes the mean over ranks, which has no "
                "graph, so a loss that is computed from .grad trains nothing; take the gradients "
                "for it from torch.autograd.grad(..., create_graph=True)",
                stacklevel=2,
            )

    def _launch_complete(self) -> None:
        """Launch the packs that were complete when the next gradient came.

        Not in the hook that completed one: hooks of the script on that very parameter, which may
        clip or replace ``.grad``, run after ours.
        """
        while (
            self._early and self._next < len(self._buckets) and self._buckets[self._next].complete
        ):
            self._launch(self._buckets[self._next])
            self._next += 1

    def _end_backward(self) -> None:
        self._end = _nothing  # an engine's thread may keep the callback for a moment longer
        self._flush()
        self._early = not (self._nested or self._crowded)
        self._land_all()  # whoever edits .grad in place after backward edits the mean
        if not self._sharded:
            self.edits.note()

    def _flush(self) -> None:
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        self._next = 0
        self._due = self._told = False
        self._cleared = None

    def _land_all(self) -> None:
        while self._flying:
            self._land(self._flying.pop(0))
        self._spare.clear()

    # -- one pack ---------------------------------------------------------------------------

    def _reopen(self, bucket: Bucket) -> None:
        """New gradients for a reduced pack: keep the mean of those that were not cleared.

        Where this rank had no gradient there may be a mean all the same, of other ranks' ones. One
        that a script replaced (``p.grad = p.grad * 2``) is a mean too, and not to be averaged.
        """
        if bucket.work is not None:
            self._flying.remove(bucket)
            self._land(bucket)
        grads = bucket.grads
        if not self._told:
            for position in range(len(grads.pack.params)):
                if position not in bucket.absent:
                    grads.adopt(position)
        kept = {position for position in range(len(grads.pack.params)) if grads.holds(position)}
        if not self._was_cleared():
            kept |= {
                position for position in bucket.absent if grads.pack.params[position].grad is None
            }
        bucket.reopen(kept)  # usually none: all gradients were set to None, all are overwritten

    def _was_cleared(self) -> bool:
        """Whether gradients were cleared since the last round."""
        if self._cleared is None:
            self._cleared = self._told or any(
                param.grad is None
                for bucket in self._buckets
                for position, param in enumerate(bucket.grads.pack.params)
                if bucket.reduced and position not in bucket.absent
            )
        return self._cleared

    def _launch(self, bucket: Bucket) -> None:
        if bucket.reduced or bucket.work is not None:
            self._reopen(bucket)
        bucket.collect()
        if self._comm.size == 1:
            return
        bucket.send(self._comm, self._spare)
        self._flying.append(bucket)
        if len(self._flying) > WINDOW:
            self._land(self._flying.pop(0))

    def _land(self, bucket: Bucket) -> None:
        self._spare.append(bucket.land(self._comm.size))


def _nothing() -> None:
    """A weak reference to nothing."""
