"""The thread of a process that looks whether its ranks come to new collectives.

These only note that they begin and end, in two attributes of :class:`.Watch`; the thread looks at
those a few times in :data:`.places.PATIENCE`, and hands over to :mod:`.places` where a rank came to
none for nearly so long. A run in which no rank is late sends nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref

from shardcast.comm.group import TensorCollectives
from shardcast.comm.watch import Watch
from shardcast.extensions.waiting import places
from shardcast.messages import LOG


class _Observed:
    """The thread's knowledge of one watch: since when the rank came to no new collective."""

    def __init__(self, watch: Watch) -> None:
        self._watch = weakref.ref(watch)
        self._seen, self._since = 0, time.monotonic()
        self._silence: places.Silence | None = None

    def look(self) -> None:
        """Look once."""
        watch = self._watch()
        if watch is None:
            return
        if self._seen != watch.begun:
            self._seen, self._since = watch.begun, time.monotonic()
            self.forget()
            return
        silent = time.monotonic() - self._since
        if silent >= places.PATIENCE * places.WRITES_AT / places.LOOKS:
            self._silence = self._silence or places.Silence(watch)
            self._silence.look(silent)

    def forget(self) -> None:
        """Learn that the rank goes on."""
        silence, self._silence = self._silence, None
        try:
            if silence is not None:
                silence.end()
        finally:
            if (watch := self._watch()) is not None:
                watch.gave_up = False


class Lookout:
    """Looks at all watches of this process, on a thread that lives while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._observed: weakref.WeakKeyDictionary[Watch, _Observed] = weakref.WeakKeyDictionary()
        self._thread: _Thread | None = None
        atexit.register(self.stop)

    def begin(self, watch: Watch) -> None:
        """Look at ``watch`` from now on."""
        with self._lock:
            if watch not in self._observed:
                self._observed[watch] = _Observed(watch)
            if self._thread is None or not self._thread.is_alive():  # nor is it after a fork
                self._thread = _Thread(self)
                self._thread.start()
            else:
                self._thread.changed.set()

    def end(self, watch: Watch) -> None:
        """Look at ``watch`` no more; the thread ends with the last one."""
        with self._lock:
            observed = self._observed.pop(watch, None)
        if observed is not None:
            with contextlib.suppress(Exception):  # the store may have gone
                observed.forget()
        if all(watched.is_idle for watched in list(self._observed)):
            self.stop()

    def last_known(self, comm: TensorCollectives) -> str:
        """Return where the ranks were when one of them told of its wait; empty if none did."""
        return places.last_known(comm)

    def stop(self) -> None:
        """End the thread, now. A process must not end while it is within a call of a store."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            thread.over = True
            thread.changed.set()
            thread.join(1.0)

    def look(self, thread: threading.Thread) -> bool:
        """Look once; whether ``thread`` is to look again, which is decided as the last thing."""
        with self._lock:
            watches = [*self._observed.items()]
        for _, observed in watches:
            try:
                observed.look()
            except Exception as error:  # of a store whose process has ended: nobody is left to tell
                LOG.debug("nothing is known of the other ranks: %s", error)
        with self._lock:
            if self._thread is thread and all(watch.is_idle for watch, _ in watches):
                self._thread = None
            return self._thread is thread


class _Thread(threading.Thread):
    def __init__(self, lookout: Lookout) -> None:
        super().__init__(name="shardcast waiting", daemon=True)
        self._lookout = lookout
        self.changed, self.over = threading.Event(), False

    def run(self) -> None:
        while not self.over:
            self.changed.wait(places.PATIENCE / places.LOOKS)
            self.changed.clear()
            if self.over or not self._lookout.look(self):
                return
