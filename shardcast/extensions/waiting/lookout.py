"""The thread of a process that looks whether its ranks come to new collectives.

These only note that they begin and end, in two attributes of :class:`.Watch`; the thread looks at
those a few times in :data:`.places.PATIENCE`, and hands over to :mod:`.places` where a rank came to
none for nearly so long. A run in which no rank is late sends nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator

from shardcast.comm import ProcessGroups
from shardcast.comm.group import TensorCollectives
from shardcast.comm.watch import Watch
from shardcast.extensions.waiting import places
from shardcast.messages import LOG

WAKES = 0.25  # seconds after which the thread sees that the process ends, which waits for it


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
    """Looks at watches of this process, on a thread that lives while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._observed: weakref.WeakKeyDictionary[Watch, _Observed] = weakref.WeakKeyDictionary()
        self._thread: _Thread | None = None

    def begin(self, watch: Watch) -> None:
        """Look at ``watch`` from now on."""
        watch.lookout = self
        with self._lock:
            if watch not in self._observed:
                self._observed[watch] = _Observed(watch)
            if self._thread is None or not self._thread.is_alive():  # nor is it after a fork
                self._thread = _Thread(self)
                self._thread.start()

    def end(self, watch: Watch) -> None:
        """Look at ``watch`` no more; the thread ends with the last one."""
        watch.lookout = None
        with self._lock:
            observed = self._observed.pop(watch, None)
        if observed is not None:
            with contextlib.suppress(Exception):  # the store may have gone
                observed.forget()
        with self._lock:
            last = all(map(_is_over, self._observed))
            thread, self._thread = self._thread, None if last else self._thread
        if last and thread is not None:
            thread.over.set()
            thread.join(1.0)

    def last_known(self, comm: TensorCollectives) -> str:
        """Return where the ranks were when one of them told of its wait; empty if none did."""
        return places.last_known(comm)

    def look(self, thread: threading.Thread) -> bool:
        """Look once, and return whether ``thread`` has to look again; that is decided last."""
        with self._lock:
            watches = [*self._observed.items()]
        for _, observed in watches:
            try:
                observed.look()
            except Exception as error:  # of a store whose process has ended: nobody is left to tell
                LOG.debug("nothing is known of the other ranks: %s", error)
        with self._lock:
            if self._thread is thread and all(map(_is_over, self._observed)):
                self._thread = None
            return self._thread is thread


class _Thread(threading.Thread):
    """Looks until the process ends or nothing is left to look at.

    It is no daemon: a process that ends while one is within a call of a store is aborted.
    """

    def __init__(self, lookout: Lookout) -> None:
        super().__init__(name="shardcast waiting", daemon=False)
        self._lookout, self.over = lookout, threading.Event()

    def run(self) -> None:
        main = threading.main_thread()
        while not self.over.wait(min(WAKES, places.PATIENCE / places.LOOKS)) and main.is_alive():
            if not self._lookout.look(self):
                return


def _is_over(watch: Watch) -> bool:
    """Return whether nobody trains with the groups of ``watch`` any more."""
    return not any(comm.is_alive for comm in list(watch.comms))


_LOOKOUT = Lookout()


@contextlib.contextmanager
def look_after(process_groups: ProcessGroups) -> Iterator[None]:
    """Look after the ranks of an optimizer that is made in this context, until it is closed."""
    comm = process_groups.everyone
    if comm.size > 1:
        _LOOKOUT.begin(comm.watch)
    try:
        yield
    except BaseException:
        process_groups.end_watch()
        raise
