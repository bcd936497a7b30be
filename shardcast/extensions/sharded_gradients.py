"""``grads: sharded``: of the gradients of a pack a rank keeps its own span."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.config import ShardcastConfig
from shardcast.memory.gradient_access import check_given
from shardcast.memory.gradients import Gradients, own_part
from shardcast.memory.pack import Pack
from shardcast.memory.ungathered import hide
from shardcast.option_values import Option, one_of
from shardcast.plan.parallel_dims import ParallelDims
from shardcast.plan.precision import MASTER_DTYPE

COMING = 1 << 22  # bytes of gradients that are copied in by one call
WAY_OUT = (
    "with grads 'sharded' no rank has room for all of it; edit each rank's own gradient in a "
    "register_post_accumulate_grad_hook, or use grads 'full'"
)


class ShardedGradients(Gradients):
    """Gradients of which only the own span stays: ``data`` lives from the first to ``landed()``.

    After the reduction ``.grad`` is a stand-in: an :class:`.UngatheredGradient` of the parameter's
    shape, in the memory of one element. It says who has a gradient, is cleared and kept like every
    other one, and nobody can take it for a mean. Gradients are copied in while others still come,
    so that the pack is not there twice. Over several backwards the own span is fp32, in which means
    are added up.
    """

    stays = False
    cannot_gather = "with grads 'sharded' a rank has no room for all gradients; use grads 'full'"

    def __init__(self, pack: Pack, dtype: torch.dtype, wire: torch.dtype) -> None:
        super().__init__(pack, dtype, wire)
        self._own: Tensor | None = None
        self._stand_ins: list[StandIn | None] = [None] * len(pack.params)
        self._zeroed = False  # by zero_grad(set_to_none=False): zeros need not be added to
        self._coming: list[int] = []  # gradients to be copied in when the next one comes
        self._coming_bytes = 0

    @property
    def own(self) -> Tensor:
        if self._own is None:
            self._own = torch.zeros(self.pack.own.numel, dtype=self.dtype, device=self._device)
        return self._own

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self._own is None else self._own.nbytes)

    def holds(self, position: int) -> bool:
        stand_in = self._stand_ins[position]
        return stand_in is not None and self.pack.params[position].grad is stand_in.grad

    def _is_own(self, position: int, grad: Tensor) -> bool:
        return self.holds(position) or super()._is_own(position, grad)

    def show(self, position: int) -> None:
        if not self.holds(position):
            stand_in = self._stand_ins[position]
            if stand_in is None or stand_in.is_written:
                slot = self.pack.layout.slots[position]
                stand_in = StandIn(slot.name, slot.shape, self.dtype, self._device)
                self._stand_ins[position] = stand_in
            self.pack.params[position].grad = stand_in.grad

    def expect(self, position: int) -> bool:
        if self.holds(position):
            self.pack.params[position].grad = None  # nothing can be added to it
        if self._coming_bytes >= COMING:
            self._take(self._coming)
        self._coming.append(position)
        self._coming_bytes += self.pack.layout.slots[position].numel * self.dtype.itemsize
        return True

    def _take(self, positions: Iterable[int]) -> None:
        """Copy gradients into ``data``; ``.grad`` is a view of it, to which autograd may add."""
        super().adopt(positions)
        self._coming, self._coming_bytes = [], 0

    def collect(self) -> set[int]:
        params = self.pack.params
        self._zeroed = False
        self._take(range(len(params)))
        absent: set[int] = set()
        for position, param in enumerate(params):
            if self.holds(position):
                self.adopt([position])  # zeros, of a script whose backward before had failed
                self.clear(position)  # its mean is carried
            elif param.grad is not None:
                self.show(position)
            else:
                self.clear(position)  # it may have been cleared since it was copied in
                absent.add(position)
        return absent

    @torch.no_grad()
    def adopt(self, positions: Iterable[int] | None = None) -> bool:
        """Take gradients that a script set after the reduction, or zeroed, for means."""
        has_taken = False
        for position in range(len(self.pack.params)) if positions is None else positions:
            grad = self.pack.params[position].grad
            if grad is None:
                continue
            part = own_part(self.pack, position)
            stand_in = self._stand_ins[position]
            if stand_in is not None and grad is stand_in.grad:
                if stand_in.is_written:
                    self.own[part].copy_(stand_in.value.expand(part.stop - part.start))
                    self.pack.params[position].grad = None
                    self.show(position)
                continue
            has_taken = True
            check_given(self.pack, position, grad)
            shift = self.pack.own.start - self.pack.layout.slots[position].offset
            self.own[part].copy_(grad.reshape(-1)[part.start + shift : part.stop + shift])
            self.show(position)
        return has_taken

    @torch.no_grad()
    def zero(self, set_to_none: bool) -> None:
        self._zeroed = not set_to_none
        if self._zeroed and self._own is not None:
            self._own.zero_()

    def free(self) -> None:
        super().free()
        self._own, self._coming, self._coming_bytes = None, [], 0

    def local(self, sent: Tensor) -> Tensor:
        return sent[self.pack.own.start : self.pack.own.stop]

    def landed(self, pieces: Sequence[Tensor]) -> None:
        """Give the storage back.

        Nobody could be asked later for the gradients that spoil the mean. So they are looked for
        here, on CPU, where a report names the element: one more sum over the own span, which would
        copy it into another dtype first; where it overflows for nothing, nobody is named.
        """
        self._data = None
        del self._own_data  # a view, which would keep all of the storage
        own = self.own
        if not _compat.is_host(own.device) or len(pieces) == 1 or self.culprits:
            return
        if not bool(own.sum().isfinite()):
            index = int(torch.argmax((~own.isfinite()).to(torch.uint8)))
            self.culprits = [r for r, piece in enumerate(pieces) if not piece[index].isfinite()]

    def reopen(self, kept: Collection[int]) -> Tensor | None:
        """The own span becomes the fp32 sum, unless there is nothing to be added to."""
        self.adopt(kept)  # those that a script zeroed
        if self._zeroed or not kept:
            self.culprits = ()
            if self.own.dtype != self.dtype:
                self._own = None
            return None
        for position in range(len(self.pack.params)):
            if position not in kept:
                self.own[own_part(self.pack, position)].zero_()
        self._own = self.own.to(MASTER_DTYPE)
        return self._own


class StandIn:
    """The ``.grad`` of a parameter whose gradient is no longer here: NaN, with no room for values.

    Nobody can edit it in place, but by ``zero_()``, by which gradients are cleared.

    Attributes:
        grad: what a script sees; it is no view to autograd, so that ``detach_()`` works.
        value: its one element, 1-d.
    """

    def __init__(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.value = torch.full((1,), math.nan, dtype=dtype, device=device)
        self.grad = self.value.expand(1).view([1] * len(shape)).expand(shape).detach()
        self._version = self.value._version  # one with that of its views
        hide(self.grad, of=name, way_out=WAY_OUT, is_empty=True)

    @property
    def is_written(self) -> bool:
        """Return whether a script wrote to it."""
        return self.value._version != self._version


def _fits(_config: ShardcastConfig, parallel_dims: ParallelDims) -> None:
    if parallel_dims.in_pipeline:
        raise ValueError(
            "grads: expected 'full' in a pipeline, whose backwards accumulate locally until "
            "step(), got 'sharded'"
        )


OPTION = Option(
    help="full: every rank keeps storage for all gradients; sharded: every backward is reduced, "
    "also under no_sync(), and a rank keeps its own part (.grad cannot be read then)",
    within=one_of("full", "sharded"),
    gradients=ShardedGradients,
    fits=_fits,
)
