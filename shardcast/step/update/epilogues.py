"""Epilogues: code that is fused behind the rule of an update.

An epilogue is a set of pure functions that are traced into the update's kernel, which has each new
master at hand. Parameters without a gradient, and classes that update by themselves, need one more
pass over the own span (:class:`.rules.NoRule`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.memory.codecs import Codec

if TYPE_CHECKING:
    from shardcast.step.update.rules import Numbers

AVERAGE = "average."  # prefix of the names of averages in a parameter's state
STEPS = ".steps"  # suffix of the name of an average's step count


@dataclass(frozen=True)
class Epilogue:
    """Code that is fused after a rule, constant for the kernel. This base class does nothing."""

    @property
    def state(self) -> tuple[str, ...]:
        """Names of its stored tensors, which start as the masters at the first step."""
        return ()

    @property
    def codec(self) -> Codec:
        """Codec of these."""
        return Codec()

    def numbers(self, step: Any) -> Numbers:
        """Return the numbers of one step.

        Args:
            step: steps that it has taken part in, including this one: a float, or a 0-dim fp64
                tensor.
        """
        return ()

    def apply_(self, master: Tensor, state: tuple[Tensor, ...], numbers: Numbers) -> None:
        """Change ``state`` in place; ``master`` is new, both are fp32 ``(rows, row)``."""


def epilogues_of(config: ShardcastConfig) -> tuple[Epilogue, ...]:
    """Return the epilogues that a configuration asks for."""
    return tuple(
        epilogue
        for extension in config.extensions().values()
        if extension.epilogues is not None
        for epilogue in extension.epilogues(config)
    )
