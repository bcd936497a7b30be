"""Faults to inject into a threaded world. ``at`` counts a rank's collectives from 0."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Delay:
    """``rank`` sleeps ``seconds`` before its collective number ``at``; the others go on."""

    rank: int
    at: int
    seconds: float


@dataclass(frozen=True)
class Drop:
    """``rank`` silently skips its collective number ``at``.

    Its tensors stay as they are and its next collective meets the one that it skipped on the
    other ranks: a :class:`CollectiveMismatchError`, or a :class:`RankLeftError` if it was the last.
    Where neighbours in the sequence look the same, the error comes at the first that differs.
    """

    rank: int
    at: int


@dataclass(frozen=True)
class Death:
    """``rank`` raises :class:`RankDied` instead of its collective number ``at``."""

    rank: int
    at: int


Fault = Delay | Drop | Death
"""What :meth:`ThreadedWorld.run` can inject."""
