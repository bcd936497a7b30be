"""Who waits for whom: ranks that come to a call late, or never, by the lines that they are at.

Collectives only note that they begin and end, in two attributes. A thread of this process, one for
all that is sharded here, looks at those a few times in :data:`PATIENCE`. A rank that came to no
collective for nearly so long puts a line into the store of its process groups: the call it is in,
and the line of the script that its thread has reached. One that waits longer than that in a
collective reads the lines of the others, and logs which of them are elsewhere, and where. A run
in which no rank is late sends nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import linecache
import os
import sys
import textwrap
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from shardcast import _compat
from shardcast.messages import LOG, by_rank

if TYPE_CHECKING:  # it imports this module
    from shardcast.comm.group import TensorCollectives, Work

PATIENCE = 30.0  # seconds that a rank waits for the others without a word
LOOKS = 6  # in that time
WRITES_AT = 4  # of those, so that what is read then is there
PLACE, TOLD = "shardcast/waiting/{}", "shardcast/waiting"  # keys in the store of a group
# Whose frames lie between the line of a script and a collective; the others run scripts.
INSIDE = {"shardcast", "torch"} | sys.stdlib_module_names - {"__main__"}
RUNS_SCRIPTS = ("shardcast.run", "shardcast.cli", "shardcast.testing")


class Watch:
    """A rank of this process: whether it waits, and where its thread is.

    Attributes:
        waits: the collective that the rank is in; set and taken back by that.
        begun: how many it came to, for the same purpose.
        gave_up: one of them failed, so that what was told stays for the errors of other ranks.
    """

    gave_up = False

    def __init__(self) -> None:
        self.waits: Work | None = None
        self.begun = 0
        self._thread = threading.get_ident()
        self._comms: weakref.WeakSet[TensorCollectives] = weakref.WeakSet()
        self._seen, self._since = 0, time.monotonic()
        self._written_at = self._next = 0.0  # of the silence, in seconds; when to tell (again)
        self._told_in: Any = None  # the store, where this rank is the one that tells

    @classmethod
    def begin(cls, comm: TensorCollectives) -> Watch:
        """The one of this thread, which looks after ``comm`` too while that lives."""
        watch: Watch | None = getattr(_of_thread, "watch", None)
        if watch is None:
            watch = _of_thread.watch = cls()
        if comm.size > 1:
            watch._comms.add(comm)
            _Lookout.ensure(watch)
        return watch

    @classmethod
    def widest(cls) -> TensorCollectives | None:
        """The most ranks that this thread, or else this process, works with."""
        own: Watch | None = getattr(_of_thread, "watch", None)
        watches = [own] if own is not None and not own.is_idle else list(_Lookout.watches)
        comms = [
            comm
            for watch in watches
            for comm in list(watch._comms)
            if comm.size == 1 or comm.store is not None  # not of a group that was destroyed
        ]
        return max(comms, key=lambda comm: comm.size, default=None) if len(watches) == 1 else None

    @property
    def steps(self) -> int:
        """Steps made so far, of the optimizer that made most."""
        return max((comm.steps for comm in list(self._comms)), default=0)

    def end(self, comm: TensorCollectives) -> None:
        """Look after ``comm`` no more; the thread ends with the last one."""
        if {*self._comms} <= {comm}:
            with contextlib.suppress(Exception):  # the store may have gone
                self._forget()
        self._comms.discard(comm)
        if not self._comms:
            _Lookout.leave(self)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to look after."""
        return not self._comms

    def look(self) -> None:
        """Look at this rank once, on the thread of the lookout: write, or tell, where it is due."""
        now, work = time.monotonic(), self.waits
        if self._seen != self.begun:
            self._seen, self._since = self.begun, now
            self._forget()
            return
        silent = now - self._since
        if silent - self._written_at >= PATIENCE * (1 if self._written_at else WRITES_AT / LOOKS):
            self._written_at = silent
            place = json.dumps(self._place(work))
            for comm in list(self._comms):
                if (store := comm.store) is not None:
                    store.set(PLACE.format(comm.rank), place)
        if work is not None and silent >= max(PATIENCE, self._next):
            self._next = max(2 * self._next, 2 * PATIENCE)
            self._tell(work)

    def _tell(self, work: Work) -> None:
        """Log who waits for whom; one of the ranks that wait does it for all."""
        comm = work.comm
        store = comm.store
        first = store is None or self._told_in is not None or store.add(f"{TOLD}/told", 1) == 1
        if not first:
            return
        self._told_in = store
        report = self._report(comm, self._place(work))
        if store is not None:
            store.set(TOLD, report)
        LOG.warning(
            "rank %d of %d has waited %.3g s for the other ranks in %s, after %d steps. %s. It "
            "ends with the time-out of the process group unless all ranks come to the same call "
            "(`if rank == 0:` around it?)",
            *(comm.rank, comm.size, time.monotonic() - self._since, work, comm.steps, report),
        )

    def _report(self, comm: TensorCollectives, own: dict[str, Any]) -> str:
        """Where each rank is, those that are in the same call apart."""
        facts, store = [], comm.store
        for rank in range(comm.size) if store is not None else ():
            key = PLACE.format(rank)
            place = own if rank == comm.rank else None
            if place is None and store.check([key]):
                place = json.loads(store.get(key) or "null")
            facts.append((rank, _told(place)))
        return by_rank(facts) or _told(own)

    def _place(self, work: Work | None) -> dict[str, Any]:
        """Where this rank is: values of JSON."""
        frame = _compat.frame_of_thread(self._thread)
        try:
            call, line = _place_of(frame)
        finally:
            del frame
        return {"call": call, "line": line, "waits": str(work) if work else "", "steps": self.steps}

    def _forget(self) -> None:
        """Take back what was written and told: this rank goes on."""
        if self._written_at:
            for comm in list(self._comms):
                if (store := comm.store) is not None:
                    store.set(PLACE.format(comm.rank), "")
        if self._told_in is not None and not self.gave_up:
            self._told_in.delete_key(f"{TOLD}/told")
            self._told_in.delete_key(TOLD)
        self._written_at = self._next = 0.0
        self._told_in, self.gave_up = None, False


_of_thread = threading.local()


class _Lookout(threading.Thread):
    """The thread that looks at all watches of this process, while there are any."""

    _lock = threading.Lock()
    watches: ClassVar[weakref.WeakSet[Watch]] = weakref.WeakSet()
    _running: _Lookout | None = None

    def __init__(self) -> None:
        super().__init__(name="shardcast waiting", daemon=True)
        self._changed = threading.Event()
        self._over = False

    @classmethod
    def ensure(cls, watch: Watch) -> None:
        with cls._lock:
            cls.watches.add(watch)
            if cls._running is None or not cls._running.is_alive():  # nor is it after a fork
                cls._running = cls()
                cls._running.start()
            else:
                cls._running._changed.set()

    @classmethod
    def leave(cls, watch: Watch) -> None:
        with cls._lock:
            cls.watches.discard(watch)
            done = all(watch.is_idle for watch in cls.watches)
        if done:
            cls.stop()

    @classmethod
    def stop(cls) -> None:
        """End the thread, now. A process must not end while it is within a call of a store."""
        with cls._lock:
            running, cls._running = cls._running, None
        if running is not None and running.is_alive():
            running._over = True
            running._changed.set()
            running.join(1.0)

    def run(self) -> None:
        while not self._over:
            self._changed.wait(PATIENCE / LOOKS)
            self._changed.clear()
            if self._over or self._ended():
                return

    def _ended(self) -> bool:
        """Look once. True, as the last thing that it does, where nothing is left to look after."""
        watches = list(self.watches)
        for watch in watches:
            try:
                watch.look()
            except (
                Exception
            ) as error:  # of a store whose process has ended: nobody is there to tell
                LOG.debug("nothing is known of the other ranks: %s", error)
        with self._lock:
            if self._running is self and all(watch.is_idle for watch in watches):
                type(self)._running = None
            return self._running is not self


atexit.register(_Lookout.stop)


def last_known(comm: TensorCollectives) -> str:
    """Where the ranks were when one of them told of its wait; empty if none did."""
    store = comm.store
    try:
        return store.get(TOLD).decode() if store is not None and store.check([TOLD]) else ""
    except Exception:  # the store went with its process: the caller has an error to raise
        return ""


def _told(place: dict[str, Any] | None) -> str:
    if not place:
        return "unknown, it may have ended"
    where = f"in {place['call']}" if place["call"] else "in no call of shardcast"
    line = f" at {place['line']}" if place["line"] else ""
    waits = f", waiting in {place['waits']}" if place["waits"] else ""
    return f"{where}{line}{waits}, after {place['steps']} steps"


def _place_of(frame: Any) -> tuple[str, str]:
    """The call of this library that a thread is in, and the line of the script it is at.

    Args:
        frame: the innermost one.
    """
    calls, inside = [], False
    while frame is not None:
        module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        package = module.split(".")[0]
        if package not in INSIDE or (inside and module.startswith(RUNS_SCRIPTS)):
            break
        inside = inside or (package == "shardcast" and not module.startswith(RUNS_SCRIPTS))
        if name == "backward" or (package == "shardcast" and name[0] not in "_<"):
            calls.append(name)
        frame = frame.f_back
    call = calls[-1] if inside and calls else ""
    if frame is None:
        return call, ""
    file, number = frame.f_code.co_filename, frame.f_lineno
    source = textwrap.shorten(linecache.getline(file, number), 80)
    return call, f"{os.path.basename(file)}:{number}{f' `{source}`' if source else ''}"
