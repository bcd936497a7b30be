"""Time limits that grow with the load of the machine."""

from __future__ import annotations

import os


def cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def patience(seconds: float) -> float:
    """Return a longer limit if the machine also runs other programs."""
    return seconds * max(1.0, os.getloadavg()[0] / cores() / 3)
