"""The gradients of a pack: what full and sharded ones have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from shardcast.memory.pack import Pack


class GradPack(ABC):
    """The gradients of one pack on their way from autograd to the mean of the own span.

    ``collect()`` takes in every ``.grad``, zeros where there is none; ``data`` is sent; the mean
    is written to ``own``, then ``landed(pieces)``, of which it is the mean (one piece: of a sum
    over ranks). ``adopt()`` takes a ``.grad`` that a script replaced since. ``reopen(kept)``
    begins anew and returns the fp32 means of the slots ``kept``, to be added to the next.

    Attributes:
        owned: per slot, whether part of it lies in the own span.
        culprits: ranks whose own gradients made the mean non-finite, where that is known.
        joint: of copies whose gradients are added up, on how many ranks of one data-parallel
            coordinate each slot had one in the last round, fp32; ``None`` after they were cleared.
        data: 1-d, ``layout.numel`` elements; padding is zero, in no sum and no norm.
    """

    culprits: Collection[int] = ()
    joint: Tensor | None = None

    def __init__(self, pack: Pack, dtype: torch.dtype) -> None:
        self.pack, self.dtype = pack, dtype
        _, start, stop = pack.own
        self.owned = tuple(
            numel > 0 and offset < stop and start < offset + numel
            for _, _, offset, numel in pack.layout.slots
        )
        self._device = pack.params[0].device
        self._data: Tensor | None = None
        self._views: list[Tensor] = []  # of ``data``, one per slot

    @property
    def allocated(self) -> bool:
        """Whether ``data`` is there."""
        return self._data is not None

    @property
    def version(self) -> int:
        """Another number after every edit of ``data``."""
        return 0

    def _allocate(self) -> Tensor:
        numel = self.pack.layout.numel
        self._data = torch.zeros(numel, dtype=self.dtype, device=self._device)
        self._views = self.pack.views(self._data)
        return self._data

    @property
    @abstractmethod
    def data(self) -> Tensor: ...
    @property
    @abstractmethod
    def own(self) -> Tensor: ...
    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def holds(self, position: int) -> bool:
        """Whether ``.grad`` of the parameter at ``position`` is what stands for ours."""

    @abstractmethod
    def show(self, position: int) -> None:
        """Set the ``.grad`` at ``position`` to what stands for ours."""

    def clear_way(self, position: int) -> bool:
        """A gradient is about to be accumulated; whether those of other slots must be told too."""
        return False  # autograd adds to what is there

    @abstractmethod
    def collect(self) -> tuple[set[int], bool]:
        """The positions without a gradient, and whether some gradient had a graph."""

    @abstractmethod
    def adopt(self, positions: Iterable[int] | None = None) -> bool:
        """Of all slots by default; whether some gradient had a graph."""

    def local(self, sent: Tensor) -> Tensor:
        """The own span of ``sent``; ``own`` itself where that is the same memory."""
        return sent[self.pack.own.start : self.pack.own.stop]

    @abstractmethod
    def landed(self, pieces: Sequence[Tensor]) -> None: ...
    @abstractmethod
    def reopen(self, kept: Collection[int]) -> Tensor | None: ...


def own_part(pack: Pack, position: int) -> slice:
    """The elements of the own span that belong to one slot."""
    slot, own = pack.layout.slots[position], pack.own
    start = min(max(slot.offset, own.start), own.stop)
    return slice(start - own.start, max(start, min(slot.end, own.stop)) - own.start)


def check_dense(pack: Pack, position: int, grad: Tensor) -> None:
    """Raise a TypeError for a sparse gradient."""
    if grad.layout != torch.strided:
        raise TypeError(
            f"gradient of {pack.layout.slots[position].name!r}: expected a dense tensor, got "
            f"{grad.layout}; use sparse=False in the embedding, or leave this parameter to an "
            "optimizer of its own"
        )


def set_grad_dtype(pack: Pack, dtype: torch.dtype) -> None:
    """Have autograd accumulate gradients in ``dtype``; those that are there are cast."""
    for param in pack.params:
        if param.grad_dtype != dtype:
            grad, param.grad = param.grad, None
            param.grad_dtype = dtype
            param.grad = None if grad is None else grad.to(dtype)
