"""Errors of ranks that do not fit together."""

from __future__ import annotations

from collections.abc import Mapping

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
    """The ranks ``missing`` did not join a collective within the timeout."""

    def __init__(self, message: str, missing: tuple[int, ...]) -> None:
        super().__init__(message)
        self.missing = missing


class BufferHazardError(RuntimeError):
    """A buffer was used during a collective on it, or nobody waited for the result."""
