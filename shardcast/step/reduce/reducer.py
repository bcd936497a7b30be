"""Reduce: gradients of every rank to the owner of their span, while backward runs.

One hook per parameter tells the :class:`Round` of the running backward what comes, and the round
sends the packs. Peers sum in the wire dtype (DDP, ZeRO) or pre-divide in fp16; here low precision
is only on the wire, and the mean is rounded once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import Grid
from shardcast.config import ShardcastConfig
from shardcast.memory.full_gradients import FullGradients
from shardcast.memory.gradients import GradPack, set_grad_dtype
from shardcast.memory.pack import Pack
from shardcast.memory.sharded_gradients import ShardedGradients
from shardcast.plan.precision import grad_dtype, wire_dtype
from shardcast.plan.sharing import Sharing
from shardcast.step.reduce.averaged import INSIDE_NO_SYNC, show_others
from shardcast.step.reduce.bucket import Bucket
from shardcast.step.reduce.mean import Divisor, choose_mean
from shardcast.step.reduce.round import Round, land_all
from shardcast.step.reduce.states import States
from shardcast.step.reduce.user_edits import Edits, nothing


class Reducer:
    """Reduces the gradients of the packs given to :meth:`add` to their owners.

    All ranks must run the same number of synchronised backwards; inside :meth:`no_sync` none.

    Attributes:
        grads: the gradients of the packs, in the order of :meth:`add`; it grows.
        divisor: of the sums over ranks.
        at_step: backwards send nothing, as in a pipeline, where a step has many; finish() does.
        touched: a gradient arrived since :meth:`finish`.
    """

    averaged = False

    def __init__(self, grid: Grid, config: ShardcastConfig, at_step: bool) -> None:
        self._grid, self._config = grid, config
        self.at_step = at_step
        self.divisor = Divisor(grid.dp.size)
        self.grads: list[GradPack] = []
        self.touched = False
        self._buckets: dict[Pack, Bucket] = {}
        self._states = States(self._sharded)
        self._edits = Edits(self.grads)
        self._syncs = True
        self._round: Callable[[], Round | None] = nothing  # weak: the engine holds it
        self._unhook: list[Callable[[], None]] = []

    @property
    def _sharded(self) -> bool:
        return self._config.grads == "sharded" and self._grid.cut.size > 1

    @property
    def _local(self) -> bool:
        """Whether backwards send nothing at present."""
        return not self._syncs or self.at_step or self._alone

    @property
    def _alone(self) -> bool:
        """Whether gradients are means as they come."""
        return self._grid.everyone.size == 1 and self.divisor.given is None

    @property
    def grad_version(self) -> int:
        """Another number after any gradient came, was edited in place, replaced or cleared."""
        return self._edits.version()

    def add(self, pack: Pack) -> GradPack:
        """Reduce the gradients of ``pack`` from now on; every rank must add the same packs.

        Gradients that its parameters have already are reduced with this step's.
        """
        kind = ShardedGradients if self._sharded else FullGradients
        grads: GradPack = kind(pack, grad_dtype(pack.layout.dtype, self._config))
        wire = wire_dtype(pack.layout.dtype, self._config)
        set_grad_dtype(pack, grads.dtype)
        axes, sharing = self._grid.axes, pack.layout.sharing
        mean = choose_mean(self._config, pack.comm.size, pack.data.device)
        repeated = [dim for dim in sharing.sums if dim in axes.model and axes.here[dim] > 0]
        sums = self._grid.groups(sharing.sums)
        bucket = self._buckets[pack] = Bucket(grads, wire, mean, self.divisor, sums, repeated)
        self.grads.append(grads)
        hooks = _hooks(weakref.ref(self), bucket, len(pack.in_model))
        self._unhook.append(_compat.hook_gradients(pack.in_model, hooks))
        if not self._states.due:
            bucket.collect()
            if not self._alone:
                bucket.send([])
        return grads

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backwards accumulate locally and no collective is issued.

        It changes nothing for sharded gradients, which have no room to accumulate locally.
        """
        before, self._syncs = self._syncs, self._sharded
        self._states.local()
        try:
            yield
        finally:
            self._syncs = before

    def close(self) -> None:
        """Remove the hooks from the parameters, and wait for what a failed backward has sent."""
        for remove in self._unhook:
            remove()
        self._unhook.clear()
        land_all(self._buckets.values())  # last: it raises where a rank was lost

    def begin(self) -> None:
        """Have the round flushed when the running backward ends.

        Called when a backward reaches the model's output, so that it is the *outermost* backward
        that flushes, not one that a re-entrant checkpoint runs inside; the first gradient hook
        does the same for models whose submodules are called directly.
        """
        if not self._local and self._running() is None and _compat.accumulates():
            self._begin()

    def finish(self) -> None:
        """Have all gradients of the own spans here; the last call of this stage before a step.

        Every rank must call it. Runs the round itself for gradients that no synchronised
        backward brought (set by hand, or accumulated under :meth:`no_sync`).

        Raises:
            RuntimeError: inside :meth:`no_sync`.
        """
        if not self._syncs:
            raise RuntimeError(INSIDE_NO_SYNC)
        self.touched = False
        self._edits.check_in_place()
        if self._states.due or self._alone:  # alone no backward makes a round due
            self._new_round().flush()
        else:
            if self._states.past:
                self._edits.check_strangers()
            else:
                self._edits.check_replaced()
            land_all(self._buckets.values())
            for bucket in self._buckets.values():
                bucket.drop_cleared(self._states.past)
        for grads in self.grads:
            grads.adopt()  # one replaced by hand after the reduction is final, as with DDP

    @torch.no_grad()
    def gather(self) -> None:
        """Have the mean in every ``.grad``, not in the own spans alone. Collective.

        To be called after :meth:`finish`; the next step and backwards go on from there.
        """
        if self._alone:
            return
        for pack, present in self._present_anywhere().items():
            bucket = self._buckets[pack]
            assert isinstance(bucket.grads, FullGradients), "the optimizer refuses sharded ones"
            bucket.grads.gather(present)
            bucket.absent.clear()
        self._edits.gathered()

    def _present_anywhere(self) -> dict[Pack, list[bool]]:
        """Per pack and slot, whether some rank has a gradient; one all-reduce per kind of pack.

        The host waits for the answer only where a gradient is missing here.
        """
        kinds: dict[Sharing, list[Pack]] = {}
        for pack in self._buckets:
            kinds.setdefault(pack.layout.sharing._replace(counts=True), []).append(pack)
        present: dict[Pack, list[bool]] = {}
        for sharing, packs in kinds.items():
            flags = [param.grad is not None for pack in packs for param in pack.params]
            total = torch.tensor(flags, dtype=torch.float32).to(packs[0].data.device)
            for comm in (self._grid.holders(sharing), *self._grid.groups(sharing.sums)):
                comm.all_reduce(total, "gather_gradients")
            if not all(flags):
                flags = (total > 0).tolist()
            for pack in packs:
                count = len(pack.params)
                present[pack], flags = flags[:count], flags[count:]
        return present

    @torch.no_grad()
    def finish_early(self, packs: Collection[Pack], micro_batches: int) -> None:
        """Send packs whose gradients of this step are all here; :meth:`finish` has the rest.

        Every rank that cuts them must call it, in the same order.

        Args:
            micro_batches: of which the gradients are sums, and by which they are divided.
        """
        round = self._new_round()
        for pack in packs:
            bucket = self._buckets.get(pack)
            if bucket is None:  # frozen
                continue
            if bucket.late or self._alone:
                for param in pack.params:
                    if param.grad is not None:
                        param.grad.div_(micro_batches)
            else:
                round.send_early(bucket, micro_batches)

    def used(self) -> None:
        """A step used the gradients: the next one needs a round of its own."""
        self._states.stepped()

    def cleared(self) -> None:
        """Gradients were cleared. No round is due for it: one rank alone may clear its own."""
        land_all(self._buckets.values())  # of a failed backward, before it is zeroed
        self._states.cleared()
        for bucket in self._buckets.values():
            bucket.clear()

    def show(self, present: Mapping[Pack, Sequence[bool]]) -> None:
        """Make the mean visible as ``.grad`` where only other ranks had a gradient.

        As DDP does; so it is cleared, or added to, like every other gradient.

        Args:
            present: per pack and slot, whether some rank has a gradient.
        """
        for pack, bucket in self._buckets.items():
            bucket.absent.difference_update(show_others(bucket.grads, present[pack]))

    # -- the round of the running backward ----------------------------------------------------

    def _running(self) -> Round | None:
        round = self._round()
        return None if round is None or round.over else round

    def _new_round(self) -> Round:
        self._states.local()  # so a round is due where a backward fails
        self._edits.begin()
        # Gradients arrive roughly from the last parameter to the first.
        order = list(self._buckets.values())[::-1]
        order.sort(key=lambda bucket: bucket.late)
        return Round(self._grid, order, self._states, self._edits, not self._local, self._alone)

    def _begin(self) -> Round:
        round = self._new_round()
        self._round = weakref.ref(round)
        round.begin()
        return round

    def _arrive(self, bucket: Bucket, position: int, running: int) -> None:
        """A gradient comes of which the hook does not know that it is only to be counted."""
        round = self._running()
        if round is None:
            if not _compat.accumulates():  # what autograd.grad returns is no gradient of ours yet
                return
            round = self._begin()
        elif not round.accumulates(running):
            return
        self.touched = True
        try:
            round.arrive(bucket, position, running)
        except BaseException:
            round.over = True
            raise


def _hooks(me: weakref.ref[Reducer], bucket: Bucket, count: int) -> Iterator[Callable[[Any], None]]:
    """Run before a gradient is accumulated, one per parameter: so they do next to nothing."""
    for number in range(count):

        def hook(grad: Tensor | None, position: int = number) -> None:
            reducer = me()
            if reducer is None:
                return
            running = _compat.current_backward()
            round = reducer._round()
            if round is not None and round.backward == running:
                arrived = round.counting.get(bucket)
                if arrived is not None:
                    arrived.add(position)
                    return
            if grad is not None:  # as a function may give, which autograd does not accumulate
                reducer._arrive(bucket, position, running)

        yield hook
