"""Epilogues: what is fused behind the rule of an update.

An epilogue is a set of pure functions that are traced into the update's kernel, for it is the only
place where the old and the new master, the gradient, the moments and the published values of an
element meet. A parameter without a gradient, and a class that updates by itself, have one pass more
over the own span (:class:`.rules.NoRule`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.memory.codecs import Codec

if TYPE_CHECKING:
    from shardcast.step.update.rules import Numbers

AVERAGE = "average."  # begins the names of averages among the state of a parameter
STEPS = ".steps"  # ends the name of an average's number of steps


class UpdateValues(NamedTuple):
    """The values of an update that an epilogue sees, ``(rows, row)``; it changes none.

    Attributes:
        grad: fp32, unscaled and clipped.
        state: the rule's new state, in the order of ``rule.state``.
        decrease: fp32, the old master minus the new one; an epilogue that sees it may overwrite it.
        last_published: bit patterns of the cast of the master before the step, whatever a script
            has written over it since; ``None`` as the next ones.
        old_published, published: bit patterns of the parameter before and after, int16, or ``None``
            where the master is the parameter. A compiler leaves out a cast to low precision and
            back: values would not be rounded.
    """

    master: Tensor
    state: tuple[Tensor, ...]
    grad: Any = None  # a Tensor, as what follows, for epilogues that compare
    decrease: Any = None
    old_published: Any = None
    published: Any = None
    last_published: Any = None


@dataclass(frozen=True)
class Epilogue:
    """A part that is fused behind a rule, a constant of the kernel. This one does nothing.

    Attributes:
        sums: names of the numbers per fragment that it gives; it runs in the steps alone that are
            measured.
        squares: how many of them, the first ones, are sums of squares, given as their roots.
        compares: whether it sees more than the new master and state: all else of
            :class:`UpdateValues` is ``None`` where no epilogue does, for eagerly it takes passes.
        follows: whether it sees what is published, and what was, and no more: it keeps what it
            follows in ``Shard.followed``. That neither begins as the masters nor is saved,
            and absent gradients need no pass for it.
    """

    sums: ClassVar[tuple[str, ...]] = ()
    squares: ClassVar[int] = 0
    compares: ClassVar[bool] = False
    follows: ClassVar[bool] = False

    @property
    def state(self) -> tuple[str, ...]:
        """The names of its stored tensors, which begin as the masters, at the first step."""
        return ()

    @property
    def codec(self) -> Codec:
        """The codec of these."""
        return Codec()

    def numbers(self, step: Any) -> Numbers:
        """Return the numbers of one step.

        Args:
            step: how many steps it has taken part in, this one too: a float, or a 0-dim fp64
                tensor.
        """
        return ()

    def apply_(
        self, updated: UpdateValues, state: tuple[Tensor, ...], numbers: Numbers
    ) -> tuple[Tensor, ...]:
        """Change ``state`` in place; return the sums of each row, 1-d, of squares the roots."""
        return ()


def epilogues_of(config: ShardcastConfig) -> tuple[Epilogue, ...]:
    """Return the epilogues that a configuration asks for; those with sums stand last."""
    epilogues = [
        epilogue
        for extension in config.extensions().values()
        if extension.epilogues is not None
        for epilogue in extension.epilogues(config)
    ]
    return tuple(sorted(epilogues, key=lambda epilogue: bool(epilogue.sums)))
