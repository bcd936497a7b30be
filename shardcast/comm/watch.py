"""A rank's notes about its collectives, for reports of long waits."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:  # circular: it imports this module
    from shardcast.comm.group import TensorCollectives, Work


class Lookout(Protocol):
    """Checks watches from time to time, on its own thread."""

    def end(self, watch: Watch) -> None:
        """Stop checking ``watch``."""

    def last_known(self, comm: TensorCollectives) -> str:
        """Return where the ranks were when one had waited long; empty if none had."""


class Watch:
    """One rank of this process: its thread, whether it waits, and its groups.

    Attributes:
        lookout: checks this watch, see :mod:`shardcast.extensions.waiting`; or ``None``.
        thread: id of its thread.
        comms: its groups of several ranks.
        waits: the collective that the rank is waiting in, which sets and clears it.
        begun: number of collectives that it has entered.
        gave_up: one of them failed.
    """

    _all: ClassVar[weakref.WeakSet[Watch]] = weakref.WeakSet()  # watches with groups
    gave_up = False

    def __init__(self) -> None:
        self.lookout: Lookout | None = None
        self.waits: Work | None = None
        self.begun = 0
        self.thread = threading.get_ident()
        self.comms: weakref.WeakSet[TensorCollectives] = weakref.WeakSet()

    @classmethod
    def begin(cls, comm: TensorCollectives) -> Watch:
        """Return this thread's watch, and add ``comm`` to it."""
        watch: Watch | None = getattr(_of_thread, "watch", None)
        if watch is None:
            watch = _of_thread.watch = cls()
        if comm.size > 1:
            watch.comms.add(comm)
            cls._all.add(watch)
        return watch

    @classmethod
    def widest(cls) -> TensorCollectives | None:
        """Return the largest group of this thread, or else of this process."""
        own: Watch | None = getattr(_of_thread, "watch", None)
        watches = [own] if own is not None and own.comms else list(cls._all)
        comms = [
            comm
            for watch in watches
            for comm in list(watch.comms)
            if comm.store is not None  # its group still exists
        ]
        return max(comms, key=lambda comm: comm.size, default=None) if len(watches) == 1 else None

    @property
    def steps(self) -> int:
        """Number of steps of the optimizer that made most, among those still in use."""
        return max((comm.steps for comm in list(self.comms) if comm.is_alive), default=0)

    def end(self, comm: TensorCollectives) -> None:
        """Remove ``comm``; if no other group is left, stop the watch at once."""
        # An optimizer that was not closed may outlive its process group.
        if not any(other.is_alive for other in {*self.comms} - {comm}):
            self._all.discard(self)
            if self.lookout is not None:
                self.lookout.end(self)
        self.comms.discard(comm)


_of_thread = threading.local()
