"""Reduce: the two states of a reducer, and what may follow what."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar


class Launch(Enum):
    """When packs are sent.

    Full gradients begin with LEARNING. Sharded ones are EAGER at once, nested backwards or not: to
    wait would need the memory that they are to save.
    """

    LEARNING = "at the end of backward"  # the first: a re-entrant checkpoint may bring one twice
    EAGER = "beside the backward"
    # One backward inside another was seen. Or one went through several models on a group: which
    # of them has a pack complete first depends on the gradients of a rank, and so would the order.
    DEFERRED = "at the end of backward, for good"


class Gradients(Enum):
    """What the gradient memory means."""

    LOCAL = "accumulated here since the last round, or there was none"
    REDUCED = "own spans hold the mean"
    CONSUMED = "used by a step, or cleared before their round"
    # No round is due: one rank alone may clear its gradients.
    DISCARDED = "cleared after their round, without a step"


S = TypeVar("S", Launch, Gradients)

LAUNCH: Mapping[Launch, tuple[Launch, ...]] = {
    Launch.LEARNING: (Launch.EAGER, Launch.DEFERRED),  # the first clean end; nested, crowded
    Launch.EAGER: (Launch.DEFERRED,),
    Launch.DEFERRED: (),
}
GRADIENTS: Mapping[Gradients, tuple[Gradients, ...]] = {
    Gradients.LOCAL: (Gradients.REDUCED, Gradients.CONSUMED),  # a round; zero_grad() or a step
    Gradients.REDUCED: (
        Gradients.LOCAL,  # the next backward begins, or no_sync()
        Gradients.CONSUMED,  # a step
        Gradients.DISCARDED,  # zero_grad()
    ),
    Gradients.CONSUMED: (Gradients.REDUCED,),
    Gradients.DISCARDED: (Gradients.CONSUMED,),  # a backward begins, no_sync(), or a step
}


class States:
    """The states of one reducer, and the events that change them.

    Attributes:
        launch: when packs are sent.
    """

    def __init__(self, sharded: bool) -> None:
        self._sharded = sharded
        self.launch = Launch.EAGER if sharded else Launch.LEARNING
        self._gradients = Gradients.LOCAL

    @property
    def due(self) -> bool:
        """Whether a round must be run before the next step."""
        return self._gradients in (Gradients.LOCAL, Gradients.CONSUMED)

    @property
    def past(self) -> bool:
        """Whether the means of the last round count no more."""
        return self._gradients in (Gradients.CONSUMED, Gradients.DISCARDED)

    def nested(self) -> None:
        """A backward inside another one brought a gradient."""
        if not self._sharded:
            self.crowded()

    def crowded(self) -> None:
        """A backward goes through several models on a group."""
        self.launch = entered(LAUNCH, self.launch, Launch.DEFERRED)

    def ended(self) -> None:
        """A synchronised backward ended."""
        if self.launch is Launch.LEARNING:
            self.launch = entered(LAUNCH, self.launch, Launch.EAGER)

    def flushed(self) -> None:
        """A round has sent all packs."""
        self._enter(Gradients.REDUCED)

    def stepped(self) -> None:
        """A step used the gradients."""
        self._enter(Gradients.CONSUMED)

    def cleared(self) -> None:
        """``zero_grad()`` was called."""
        if not self.past:
            self._enter(Gradients.CONSUMED if self.due else Gradients.DISCARDED)

    def local(self) -> None:
        """A backward, a round or ``no_sync()`` begins: what comes is in no finished round yet."""
        if not self.due:
            self._enter(Gradients.CONSUMED if self.past else Gradients.LOCAL)

    def _enter(self, state: Gradients) -> None:
        self._gradients = entered(GRADIENTS, self._gradients, state)


def entered(table: Mapping[S, tuple[S, ...]], now: S, then: S) -> S:
    """``then``, if the table allows it; to stay is no transition.

    Raises:
        RuntimeError: it does not.
    """
    if then is not now and then not in table[now]:
        raise RuntimeError(f"reduce: {then} cannot follow {now}; please report this")
    return then
