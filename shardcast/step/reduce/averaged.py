"""Reduce for a model that DDP averages: nothing is sent, the own spans are only copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from shardcast.config import ShardcastConfig
from shardcast.memory.full_gradients import FullGradients
from shardcast.memory.gradients import GradPack, set_grad_dtype
from shardcast.memory.pack import Pack
from shardcast.plan.precision import grad_dtype
from shardcast.step.reduce.mean import Divisor
from shardcast.step.reduce.user_edits import Edits

INSIDE_NO_SYNC = (
    "step() was called inside no_sync(): the gradients were not reduced; leave the context before "
    "the last backward and the step"
)


class AveragedReducer:
    """What ``Reducer`` is to a sharded model, for one whose gradients DDP makes equal.

    It has no hooks: what a backward brings is DDP's, and is copied when a step asks for it.
    """

    averaged = True
    touched = False  # a backward after a clip shows as an edit

    def __init__(self, config: ShardcastConfig) -> None:
        self._config = config
        self.divisor = Divisor(1)  # DDP's own; nothing is divided here
        self._syncs = True
        self.grads: list[FullGradients] = []
        self._edits = Edits(self.grads)

    @property
    def grad_version(self) -> int:
        return self._edits.version()

    def add(self, pack: Pack) -> GradPack:
        """Take the gradients of ``pack`` from now on."""
        grads = FullGradients(pack, grad_dtype(pack.layout.dtype, self._config))
        set_grad_dtype(pack, grads.dtype)
        self.grads.append(grads)
        return grads

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it no step is allowed; DDP's own holds back the averaging."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def finish(self) -> None:
        """Copy the gradients in."""
        if not self._syncs:
            raise RuntimeError(INSIDE_NO_SYNC)
        for grads in self.grads:
            grads.take()

    def begin(self) -> None: ...
    def gather(self) -> None: ...
    def used(self) -> None: ...
    def cleared(self) -> None: ...
    def close(self) -> None: ...

    def show(self, present: Mapping[Pack, Sequence[bool]]) -> None:
        for grads in self.grads:
            show_others(grads, present[grads.pack])


def show_others(grads: GradPack, present: Sequence[bool]) -> list[int]:
    """Make the mean ``.grad`` where only other ranks had a gradient; returns which ones."""
    shown = [
        position
        for position, param in enumerate(grads.pack.params)
        if param.grad is None and present[position] and grads.owned[position]
    ]
    for position in shown:
        grads.show(position)
    return shown
