"""Whether something succeeded on all ranks: what :meth:`Comm.together` tells, and raises."""

from __future__ import annotations

from collections.abc import Sequence

from shardcast.messages import by_rank

Told = tuple[str, str] | None  # kind and message of an error


def told(error: Exception | None) -> Told:
    if error is None:
        return None
    kinds = (kind.__name__ for kind in (ValueError, TypeError) if isinstance(error, kind))
    own_words = isinstance(error, (ValueError, TypeError, RuntimeError, OSError))
    return next(kinds, ""), str(error) if own_words else f"{type(error).__name__}: {error}"


def raise_together(everyone: Sequence[tuple[str, Told]], error: Exception | None) -> None:
    """Raise if a rank failed or was in another call; ``error`` is this rank's own."""
    if error is not None:
        raise error
    failed = {rank: told for rank, (_, told) in enumerate(everyone) if told is not None}
    if failed:
        kinds = {kind for kind, _ in failed.values()}
        raised = {"ValueError": ValueError, "TypeError": TypeError}.get(
            kinds.pop() if len(kinds) == 1 else "", RuntimeError
        )
        raise raised(by_rank((rank, message) for rank, (_, message) in failed.items()))
    if len({call for call, _ in everyone}) > 1:
        raise RuntimeError(
            "the ranks are in different calls: "
            + by_rank((rank, call or "(unnamed)") for rank, (call, _) in enumerate(everyone))
            + "; make the same calls in the same order on every rank"
        )
