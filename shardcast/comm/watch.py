"""Notes of a rank on its collectives, for whoever looks after ranks that wait for long."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:  # it imports this module
    from shardcast.comm.group import TensorCollectives, Work


class Lookout(Protocol):
    """Looks at watches from time to time, on a thread of its own."""

    def end(self, watch: Watch) -> None:
        """Look at ``watch`` no more."""

    def last_known(self, comm: TensorCollectives) -> str:
        """Return where the ranks were when one of them had waited for long; empty if none had."""


class Watch:
    """A rank of this process: a thread, whether it waits, and the groups it works with.

    Attributes:
        lookout: looks at this watch, see :mod:`shardcast.extensions.waiting`; or ``None``.
        thread: its number.
        comms: the groups of several ranks.
        waits: the collective that the rank is in; set and taken back by that.
        begun: how many it came to, for the same purpose.
        gave_up: one of them failed.
    """

    _all: ClassVar[weakref.WeakSet[Watch]] = weakref.WeakSet()  # that are not idle
    gave_up = False

    def __init__(self) -> None:
        self.lookout: Lookout | None = None
        self.waits: Work | None = None
        self.begun = 0
        self.thread = threading.get_ident()
        self.comms: weakref.WeakSet[TensorCollectives] = weakref.WeakSet()

    @classmethod
    def begin(cls, comm: TensorCollectives) -> Watch:
        """The one of this thread, which looks after ``comm`` too while that lives."""
        watch: Watch | None = getattr(_of_thread, "watch", None)
        if watch is None:
            watch = _of_thread.watch = cls()
        if comm.size > 1:
            watch.comms.add(comm)
            cls._all.add(watch)
        return watch

    @classmethod
    def widest(cls) -> TensorCollectives | None:
        """The most ranks that this thread, or else this process, works with."""
        own: Watch | None = getattr(_of_thread, "watch", None)
        watches = [own] if own is not None and not own.is_idle else list(cls._all)
        comms = [
            comm
            for watch in watches
            for comm in list(watch.comms)
            if comm.size == 1 or comm.store is not None  # not of a group that was destroyed
        ]
        return max(comms, key=lambda comm: comm.size, default=None) if len(watches) == 1 else None

    @property
    def steps(self) -> int:
        """The steps made so far, of the optimizer that made most and can make more."""
        return max((comm.steps for comm in list(self.comms) if comm.is_alive), default=0)

    def end(self, comm: TensorCollectives) -> None:
        """Look after ``comm`` no more."""
        if {*self.comms} <= {comm}:
            self._all.discard(self)
            if self.lookout is not None:
                self.lookout.end(self)
        self.comms.discard(comm)

    @property
    def is_idle(self) -> bool:
        """Return whether there is nothing to look after."""
        return not self.comms


_of_thread = threading.local()
