"""Errors that all ranks raise: what some did or planned differently, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shardcast.messages import by_rank

if TYPE_CHECKING:  # it imports this module
    from shardcast.comm.objects import Comm


def differing(comm: Comm, lines: Sequence[str], device: torch.device) -> RuntimeError:
    """The error that names the first line that differs, and what each rank has there.

    Every rank of ``comm`` must call it.
    """
    # Parameters are indented deepest: a difference is named there before it is in totals.
    ordered = sorted(lines, key=lambda line: len(line.lstrip()) - len(line))
    # No rank gets the lines of all the others, which of a thousand ranks are gigabytes.
    reference = comm.share(ordered, device)  # rank 0's
    longest = max(len(reference), len(ordered))
    places = (n for n in range(longest) if reference[n : n + 1] != ordered[n : n + 1])
    first = min(comm.exchange(next(places, longest), device))
    fact = ordered[first].strip() if first < len(ordered) else "(nothing)"
    return RuntimeError(
        "model: the ranks do not hold the same model and options; first difference: "
        f"{by_rank(enumerate(comm.exchange(fact, device)))}. Build the same model, optimizer "
        "groups and config on every rank."
    )


def failure_of(error: Exception | None) -> tuple[str, str] | None:
    """Return the kind and message of an error."""
    if error is None:
        return None
    kinds = (kind.__name__ for kind in (ValueError, TypeError) if isinstance(error, kind))
    own_words = isinstance(error, (ValueError, TypeError, RuntimeError, OSError))
    return next(kinds, ""), str(error) if own_words else f"{type(error).__name__}: {error}"


def raised_elsewhere(outcomes: Sequence[tuple[str, tuple[str, str] | None]]) -> Exception:
    """The error of a rank that had none: others failed, or are in different calls.

    Args:
        outcomes: call and failure of each rank.
    """
    failures = {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure}
    if failures:
        kinds = {kind for kind, _ in failures.values()}
        raised = {"ValueError": ValueError, "TypeError": TypeError}.get(
            kinds.pop() if len(kinds) == 1 else "", RuntimeError
        )
        return raised(by_rank((rank, message) for rank, (_, message) in failures.items()))
    calls = [(rank, call or "(unnamed)") for rank, (call, _) in enumerate(outcomes)]
    return RuntimeError(
        f"the ranks are in different calls: {by_rank(calls)}; make the same calls in the same "
        "order on every rank"
    )
