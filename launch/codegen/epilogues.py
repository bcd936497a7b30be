"""An epilogue to look at the kernel of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardcast.memory.codecs import Codec
from shardcast.step.update.epilogues import Updated


@dataclass(frozen=True)
class Swallowed:
    """How many masters moved while their published values did not."""

    state: tuple[str, ...] = ()
    compares = True
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
