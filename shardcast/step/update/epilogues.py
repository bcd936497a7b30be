"""Epilogues: code that is fused behind the rule of an update.

An epilogue is a set of pure functions that are traced into the update's kernel, the only place
where an element's old and new master, gradient, moments and published values meet. Parameters
without a gradient, and classes that update by themselves, need one more pass over the own span
(:class:`.rules.NoRule`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.memory.codecs import Codec

if TYPE_CHECKING:
    from shardcast.step.update.rules import Numbers

AVERAGE = "average."  # prefix of the names of averages in a parameter's state
STEPS = ".steps"  # suffix of the name of an average's step count


class UpdateValues(NamedTuple):
    """The values of an update that an epilogue sees, ``(rows, row)``; it changes none of them.

    Attributes:
        grad: fp32, unscaled and clipped.
        state: the rule's new state, in the order of ``rule.state``.
        decrease: fp32, old minus new master; an epilogue that sees it may overwrite it.
        old_published, published: bit patterns of the parameter before and after, int16; ``None`` if
            the master is the parameter. As bits, because a compiler removes a cast to low precision
            and back, and values would not be rounded.
    """

    master: Tensor
    state: tuple[Tensor, ...]
    grad: Any = None  # a Tensor, like the next ones, for epilogues that compare
    decrease: Any = None
    old_published: Any = None
    published: Any = None


@dataclass(frozen=True)
class Epilogue:
    """Code that is fused after a rule, constant for the kernel. This base class does nothing.

    Attributes:
        sums: names of the numbers per fragment that it returns. It runs only in measured steps.
        squares: how many of them, from the first on, are sums of squares, returned as roots.
        compares: whether it reads more than the new master and state. The other values of
            :class:`UpdateValues` are ``None`` unless an epilogue compares, because they take more
            passes in eager mode.
    """

    sums: ClassVar[tuple[str, ...]] = ()
    squares: ClassVar[int] = 0
    compares: ClassVar[bool] = False

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

    def apply_(
        self, updated: UpdateValues, state: tuple[Tensor, ...], numbers: Numbers
    ) -> tuple[Tensor, ...]:
        """Change ``state`` in place; return the sums of each row, 1-d, roots for squares."""
        return ()


def epilogues_of(config: ShardcastConfig) -> tuple[Epilogue, ...]:
    """Return the epilogues that a configuration asks for; those with sums are last."""
    epilogues = [
        epilogue
        for extension in config.extensions().values()
        if extension.epilogues is not None
        for epilogue in extension.epilogues(config)
    ]
    return tuple(sorted(epilogues, key=lambda epilogue: bool(epilogue.sums)))
