"""Epilogues to look at the kernels of: the library has no option for one yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardcast.memory.codecs import Codec
from shardcast.step.update.fusion import Updated


@dataclass(frozen=True)
class Average:
    """A moving average of the masters."""

    decay: float = 0.999
    state = ("average",)
    sums: tuple[str, ...] = ()

    def codec(self, _name: str) -> Codec:
        return Codec()

    def numbers(self, step: Any) -> tuple[Any, ...]:
        return (1 - self.decay * (step > 1),)  # the first master begins it

    def apply_(
        self, updated: Updated, state: tuple[Tensor, ...], numbers: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        state[0].add_((updated.master - state[0]) * numbers[0])
        return ()


@dataclass(frozen=True)
class Swallowed:
    """How many masters moved while their published values did not."""

    state: tuple[str, ...] = ()
    sums = ("swallowed",)

    def codec(self, _name: str) -> Codec:
        return Codec()

    def numbers(self, _step: Any) -> tuple[Any, ...]:
        return ()

    def apply_(
        self, updated: Updated, _state: tuple[Tensor, ...], _numbers: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        moved = updated.master != updated.old_master
        return ((moved & (updated.published == updated.old_published)).float(),)
