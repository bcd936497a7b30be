"""Ranks as threads that take turns: one runs at a time, and only a collective passes the turn on.

Real ranks are processes and share nothing. Threads share torch's random generator and every
module-level variable, and would interleave differently in each run: two ranks that both do
``torch.manual_seed(0); nn.Linear(4, 4)`` would disturb each other now and then. Taking turns, with
the random state swapped along, gives each rank a generator of its own and makes every run, and
every failure, the same as the last one. Ranks begin with different seeds, as processes do: who
forgets to broadcast the initial weights shall notice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch


def _always() -> bool:
    return True


class Turns:
    """Whose turn it is, in rank order, among the ranks that are ready to go on."""

    def __init__(self, world_size: int) -> None:
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        """Notified when a rank leaves, when no rank is ready and when the run ends; guards what
        ranks change without having a turn."""
        self._mine = [threading.Condition(lock) for _ in range(world_size)]  # who is next, alone
        self.holder: int | None = None
        self._world_size = world_size
        # All ranks stand in line before the first one runs: the order does not depend on how
        # fast the threads start.
        self._waiting: dict[int, Callable[[], bool]] = dict.fromkeys(range(world_size), _always)
        self._last = world_size - 1
        self._present = world_size
        self._since = time.monotonic()
        self._random = [
            torch.Generator().manual_seed(rank).get_state() for rank in range(world_size)
        ]
        self.ended = False
        """Whether :meth:`end` was called."""

    def take(self, rank: int, ready: Callable[[], bool] = _always) -> None:
        """Wait until ``ready()`` and it is ``rank``'s turn, or until :meth:`end`."""
        with self.changed:
            self._waiting[rank] = ready
            self.pass_on()
            self._mine[rank].wait_for(lambda: self.ended or self._next() == rank)
            del self._waiting[rank]
            if not self.ended:
                self.holder = self._last = rank
                self._since = time.monotonic()
                torch.set_rng_state(self._random[rank])

    def give(self, rank: int) -> None:
        """Pass the turn on."""
        with self.changed:
            self._release(rank)
            self.pass_on()

    def pass_on(self) -> None:
        """Wake the rank whose turn it is next, if it is nobody's turn and somebody is ready."""
        with self.changed:
            rank = self._next()
            if rank is not None:
                self._mine[rank].notify()
            elif self.holder is None:
                self.changed.notify_all()

    def leave(self, rank: int) -> None:
        """Pass the turn on for good."""
        with self.changed:
            self._present -= 1
            self.give(rank)
            self.changed.notify_all()

    def wait(self, rank: int, ready: Callable[[], bool] = _always) -> None:
        """Pass the turn on and stand in line again.

        In one, since the order must not depend on who is quicker, this rank or the next one.
        """
        with self.changed:
            self._release(rank)
            self.take(rank, ready)

    def sleep(self, rank: int, seconds: float, interrupted: Callable[[], bool]) -> None:
        """Let the others go on for so long, or until ``interrupted()``."""
        with self.changed:
            self.give(rank)
            self.changed.wait_for(lambda: self.ended or interrupted(), seconds)
            self.take(rank)

    def end(self) -> None:
        """Let everybody go on at once, so that nobody has to wait for a rank that is stuck."""
        with self.changed:
            self.ended = True
            self._since = time.monotonic()
            for condition in (self.changed, *self._mine):
                condition.notify_all()

    def idle(self) -> float:
        """Seconds since the turn last changed hands."""
        return time.monotonic() - self._since

    def stuck(self) -> bool:
        """Whether all ranks that are left stand in line and none is ready."""
        return 0 < self._present == len(self._waiting) and not self.ended and self._next() is None

    def _release(self, rank: int) -> None:
        if self.holder == rank:
            self._random[rank] = torch.get_rng_state()
            self.holder = None
            self._since = time.monotonic()

    def _next(self) -> int | None:
        """The first ready rank after the one that had the last turn."""
        if self.holder is not None:
            return None
        for step in range(1, self._world_size + 1):
            rank = (self._last + step) % self._world_size
            if rank in self._waiting and self._waiting[rank]():
                return rank
        return None
