"""The gradients of a pack: what full and sharded ones have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shardcast.memory.pack import Pack


class GradPack(Protocol):
    """The gradients of one pack on their way from autograd to the mean of the own span.

    ``collect`` → ``data`` is sent → the mean is written to ``own`` → ``landed`` → ``adopt`` what
    a script replaced, until ``reopen`` begins anew.

    Attributes:
        owned: per slot, whether part of it lies in the own span.
        culprits: ranks whose own gradients made the mean non-finite, where that is known.
    """

    pack: Pack
    dtype: torch.dtype
    owned: tuple[bool, ...]
    culprits: Collection[int]

    @property
    def data(self) -> Tensor:
        """All gradients, 1-d, ``layout.numel`` elements. Padding is zero, in no sum or norm."""

    @property
    def own(self) -> Tensor:
        """This rank's span, 1-d."""

    @property
    def nbytes(self) -> int:
        """Bytes held at the moment."""

    @property
    def allocated(self) -> bool:
        """Whether the storage of all gradients is there."""

    @property
    def version(self) -> int:
        """Another one after every edit of the storage."""

    def holds(self, position: int) -> bool:
        """Whether ``.grad`` of the parameter at ``position`` is what stands for ours."""

    def clear_way(self, position: int) -> bool:
        """A gradient is about to be accumulated; whether those of other slots must be told too."""

    def collect(self) -> tuple[set[int], bool]:
        """Take in every ``.grad``, zeros where there is none.

        Returns:
            The positions without a gradient, and whether some gradient had a graph of its own.

        Raises:
            TypeError: a gradient is sparse.
        """

    def adopt(self, positions: Iterable[int] | None = None) -> bool:
        """Take each ``.grad`` there that is not ours, over what is here; default: of all.

        Returns:
            Whether one of them had a graph of its own.
        """

    def show(self, position: int) -> None:
        """Set the ``.grad`` at ``position`` to what stands for ours."""

    def local(self, sent: Tensor) -> Tensor:
        """The own span of ``sent``; ``own`` itself where that is the same memory."""

    def landed(self, pieces: Sequence[Tensor]) -> None:
        """The mean of ``pieces`` is in ``own``; one piece: of a sum over ranks."""

    def reopen(self, kept: Collection[int]) -> Tensor | None:
        """Begin anew; returns the fp32 means of the slots ``kept``, to be added to the next."""


def owned_slots(pack: Pack) -> tuple[bool, ...]:
    """Per slot of ``pack``, whether part of it lies in the own span."""
    own = pack.own
    return tuple(
        slot.numel > 0 and slot.offset < own.stop and slot.end > own.start
        for slot in pack.layout.slots
    )


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
