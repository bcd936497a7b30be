"""What of the collectives of a step runs beside its backward, or beside the next forward.

Forward and backward take ``6 * parameters * tokens`` operations (two in forward, four in backward,
for each parameter and token) at the rate of the machine; nothing that depends on the model's
architecture is known. Gradients are taken to arrive evenly over the backward, last pack first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardcast.plan.costs import Machine

FORWARD, BACKWARD = 2.0, 4.0  # operations per parameter and token
TOKENS = 8192  # of one rank in a step, where nobody says how many


def compute_times(numel: int, tokens: int, machine: Machine) -> tuple[float, float]:
    """Seconds of forward and of backward for ``tokens`` of one rank."""
    return FORWARD * numel * tokens / machine.flops, BACKWARD * numel * tokens / machine.flops


def arrivals(sizes: Sequence[int], seconds: float) -> list[float]:
    """When the gradients of each pack, in their order, are complete."""
    total, so_far, times = sum(sizes) or 1, 0, []
    for size in sizes:
        so_far += size
        times.append(seconds * so_far / total)
    return times


def hidden(works: Sequence[float], ready: Sequence[float], end: float) -> float:
    """What of ``works`` is done before ``end``; see :func:`exposed`."""
    return max(0.0, sum(works) - exposed(works, ready, end))  # above 0 but for rounding


def exposed(works: Iterable[float], ready: Iterable[float], end: float) -> float:
    """How long after ``end`` the last of ``works`` ends, each beginning when it is ready.

    One after another, in their order. Read backwards in time, it is also by how much a forward of
    ``end`` seconds is delayed that needs each of ``works`` done before a deadline.
    """
    clock = 0.0
    for seconds, begin in zip(works, ready, strict=True):
        clock = max(clock, begin) + seconds
    return max(0.0, clock - end)
