"""Faults between ranks, by themselves or injected into a threaded world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .record import Collective


class CollectiveMismatchError(RuntimeError):
    """Ranks met in one collective with different calls.

    ``calls`` maps each rank that had arrived to what it called.
    """

    def __init__(self, message: str, calls: Mapping[int, Collective]) -> None:
        super().__init__(message)
        self.calls = dict(calls)


class RankLeftError(RuntimeError):
    """A collective can never complete because ``rank`` has returned or raised.

    ``__cause__`` is the exception of that rank, if it raised.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class RendezvousTimeoutError(TimeoutError):
    """A collective was not joined by the ranks ``missing`` within the time-out."""

    def __init__(self, message: str, missing: tuple[int, ...]) -> None:
        super().__init__(message)
        self.missing = missing


class BufferHazardError(RuntimeError):
    """A buffer was touched while a collective was using it, or nobody waited for the result."""


class RankDied(RuntimeError):  # noqa: N818, it names what happened to the rank
    """The injected fault :class:`Death`."""


@dataclass(frozen=True)
class Delay:
    """``rank`` sleeps ``seconds`` before its collective number ``at``; the others go on.

    ``at`` counts a rank's collectives from 0, here as in the other faults.
    """

    rank: int
    at: int
    seconds: float


@dataclass(frozen=True)
class Drop:
    """``rank`` silently skips its collective number ``at``.

    Its tensors stay as they are and its next collective meets the one that it skipped on the
    other ranks: a :class:`CollectiveMismatchError`, or a :class:`RankLeftError` if it was the last.
    Where neighbors in the sequence look the same, the error comes at the first that differs.
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
