"""Time limits that grow with the load of the machine, for all that a test waits for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver

from storages import settle

from shardcast.testing import SpawnedWorld, spawn_world

WORLDS: dict[SpawnedWorld, float] = {}  # those that are shared, and the time limits of their runs


def cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def patience(seconds: float) -> float:
    """Return a longer limit if the machine runs more than these tests."""
    return seconds * max(1.0, os.getloadavg()[0] / cores() / 3)


@contextmanager
def started(world_size: int, timeout: float = 100.0) -> Iterator[SpawnedWorld]:
    """Real processes that are there before a test, whose time limit does not count set-up.

    To start them takes a second, and nearly a minute on a busy machine.
    """
    forkserver.ensure_running()  # now: it passes on the environment that it begins with
    with spawn_world(world_size, timeout=patience(timeout), start_method="forkserver") as world:
        world.run(settle, timeout=300.0)
        WORLDS[world] = timeout
        yield world
        del WORLDS[world]
