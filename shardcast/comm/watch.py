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
        self._comms: weakref.WeakKeyDictionary[TensorCollectives, None] = (
            weakref.WeakKeyDictionary()
        )

    @classmethod
    def begin(cls, comm: TensorCollectives) -> Watch:
        """Return this thread's watch, and add ``comm`` to it."""
        watch: Watch | None = getattr(_of_thread, "watch", None)
        if watch is None:
            watch = _of_thread.watch = cls()
        if comm.size > 1:
            watch._comms[comm] = None
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
            for comm in watch.comms
            if comm.store is not None  # its group still exists
        ]
        return max(comms, key=lambda comm: comm.size, default=None) if len(watches) == 1 else None

    @property
    def comms(self) -> list[TensorCollectives]:
        """Its groups of several ranks."""
        # `keyrefs` copies at once. Another thread may add a group, or collect one, meanwhile.
        return [comm for ref in self._comms.keyrefs() if (comm := ref()) is not None]

    @property
    def steps(self) -> int:
        """Number of steps of the optimizer that made most, among those still in use."""
        return max((comm.steps for comm in self.comms if comm.is_alive), default=0)

    def end(self, comm: TensorCollectives) -> None:
        """Remove ``comm``; if no other group is left, stop the watch at once."""
        # An optimizer that was not closed may outlive its process group.
        if not any(other.is_alive for other in self.comms if other is not comm):
            self._all.discard(self)
            if self.lookout is not None:
                self.lookout.end(self)
        self._comms.pop(comm, None)


_of_thread = threading.local()
