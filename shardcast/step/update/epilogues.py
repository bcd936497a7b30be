"""Epilogues: what is fused behind the rule of an update.

An epilogue is a set of pure functions that are traced into the update's kernel, for it is the only
place where the old and the new master, the gradient, the moments and the published values of an
element meet. A parameter without a gradient, and a class that updates by itself, have one pass more
over the own span (:class:`.rules.NoRule`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.memory.codecs import CODECS, Codec
from shardcast.option_values import AverageOptions

AVERAGE = "average."  # begins the names of averages among the state of a parameter
STEPS = ".steps"  # ends the name of an average's number of steps


class Updated(NamedTuple):
    """The values of an update that an epilogue sees, of shape ``(rows, row)``; it changes none.

    Attributes:
        grad: fp32, unscaled and clipped.
        state: the rule's new state, in the order of ``rule.state``.
        old_published, published: bit patterns of the parameter before and after, int16 or int32. A
            compiler leaves out a cast to low precision and back: values would not be rounded.
    """

    master: Tensor
    state: tuple[Tensor, ...]
    grad: Any = None  # a Tensor, as what follows, for epilogues that compare
    old_master: Any = None
    old_published: Any = None
    published: Any = None


class Epilogue(Protocol):
    """What is fused behind a rule. Frozen and hashable: it is a constant of the kernel.

    Attributes:
        state: names of the stored tensors that it owns, with a value per element. They begin as
            the masters, at the first step.
        sums: names of the numbers per fragment that it gives; it runs in the steps alone that are
            measured.
        compares: whether it sees more than the new master and state: all else of
            :class:`Updated` is ``None`` where no epilogue does, for eagerly it is made by passes.
    """

    compares: ClassVar[bool]

    @property
    def state(self) -> tuple[str, ...]: ...

    @property
    def sums(self) -> tuple[str, ...]: ...

    def codec(self, name: str) -> Codec:
        """How a stored tensor of its is kept."""

    def numbers(self, step: Any) -> tuple[Any, ...]:
        """The numbers of one step.

        Args:
            step: how many steps it has taken part in, this one too: a float, or a 0-dim fp64
                tensor.
        """

    def apply_(
        self, updated: Updated, state: tuple[Tensor, ...], numbers: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        """Change ``state`` in place; returns the sums of each row, 1-d fp32."""


@dataclass(frozen=True)
class Average:
    """An exponential moving average of the masters."""

    options: AverageOptions
    sums: tuple[str, ...] = ()
    compares: ClassVar[bool] = False

    @property
    def state(self) -> tuple[str, ...]:
        return (AVERAGE + self.options.name,)

    def codec(self, _name: str) -> Codec:
        return CODECS[self.options.stored]()

    def numbers(self, step: Any) -> tuple[Any, ...]:
        decay: Any = self.options.decay
        if self.options.warmup:  # as TensorFlow's ExponentialMovingAverage, diffusers' EMAModel
            warm = (1 + step) / (10 + step)
            decay = warm.clamp(max=decay) if isinstance(warm, Tensor) else min(warm, decay)
        return (1 - decay,)

    def apply_(
        self, updated: Updated, state: tuple[Tensor, ...], numbers: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        state[0].lerp_(updated.master, numbers[0])
        return ()


@dataclass(frozen=True)
class Measures:
    """Sums of squares of gradient, weights and their change, and how many changes were swallowed:
    the master moved, and what is published of it did not."""

    state: ClassVar[tuple[str, ...]] = ()
    sums: ClassVar[tuple[str, ...]] = ("grad", "weight", "update", "swallowed")
    compares: ClassVar[bool] = True

    def codec(self, name: str) -> Codec:
        """None: it stores nothing."""
        raise KeyError(name)

    def numbers(self, _step: Any) -> tuple[Any, ...]:
        """None."""
        return ()

    def apply_(
        self, updated: Updated, _state: tuple[Tensor, ...], _numbers: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        """See :class:`Epilogue`."""
        moved = updated.master - updated.old_master
        sums = [_square_sums(values) for values in (updated.grad, updated.master, moved)]
        # Where the published value changes the master has moved. In place, as numbers of the
        # same dtype: a comparison that gives a bool is not vectorised on a CPU.
        changed = updated.published ^ updated.old_published
        swallowed = moved.ne_(0).sum(-1) - changed.ne_(0).sum(-1, dtype=changed.dtype)
        return (*sums, swallowed)


def _square_sums(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, dim=-1).square_()


def epilogues_of(config: ShardcastConfig) -> tuple[Epilogue, ...]:
    """The epilogues that a configuration asks for; those with sums stand last."""
    averages = tuple(Average(options) for options in config.averages)
    return (*averages, Measures()) if config.metrics else averages
