"""Errors of ranks that do not fit together, and faults to inject into a threaded world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .record import Collective


class CollectiveMismatchError(RuntimeError):
    """Ranks met in one collective with different calls.

    ``calls`` maps each rank that has arrived to its call.
    """

    def __init__(self, message: str, calls: Mapping[int, Collective]) -> None:
        super().__init__(message)
        self.calls = dict(calls)


class RankLeftError(RuntimeError):
    """A collective cannot complete because ``rank`` has returned or raised.

    ``__cause__`` is that rank's exception, if it raised.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class RendezvousTimeoutError(TimeoutError):
    """The ranks ``missing`` did not join a collective within the time-out."""

    def __init__(self, message: str, missing: tuple[int, ...]) -> None:
        super().__init__(message)
        self.missing = missing


class BufferHazardError(RuntimeError):
    """A buffer was used during a collective on it, or nobody waited for the result."""


class RankDied(RuntimeError):  # noqa: N818, it names what happened to the rank
    """The injected fault :class:`Death`."""


@dataclass(frozen=True)
class Delay:
    """``rank`` sleeps ``seconds`` before its collective number ``at``; other ranks continue.

    ``at`` counts a rank's collectives from 0, here and in the other faults.
    """

    rank: int
    at: int
    seconds: float


@dataclass(frozen=True)
class Drop:
    """``rank`` silently skips its collective number ``at``.

    Its tensors do not change. Its next collective meets the skipped one on the other ranks: they
    raise :class:`CollectiveMismatchError`, or :class:`RankLeftError` if it was the last. If the
    next collectives look the same, the error comes at the first that differs.
    """

    rank: int
    at: int


@dataclass(frozen=True)
class Death:
    """``rank`` raises :class:`RankDied` instead of its collective number ``at``."""

    rank: int
    at: int


Fault = Delay | Drop | Death
"""A fault that :meth:`ThreadedWorld.run` can inject."""
