"""Reports about ranks that wait long for others, with the script line of every rank.

No option turns this on: :func:`shardcast.shard` does so for several ranks. One thread per process
runs from the first sharded optimizer until the last one, or its process group, is gone. Collectives
only note their begin and end, in two attributes of :class:`.Watch`; the thread checks these a few
times in :data:`PATIENCE`. If no rank is late, nothing is sent.

A rank that entered no collective for nearly :data:`PATIENCE` writes a line into the store of its
process groups: its current call, and the script line that its thread has reached. A rank that waits
longer than that in a collective reads the lines of the others, and logs which of them are
elsewhere, and where.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardcast import _compat
from shardcast.comm import ProcessGroups
from shardcast.comm.group import TensorCollectives, Work
from shardcast.comm.watch import Watch
from shardcast.messages import LOG, by_rank

if TYPE_CHECKING:
    from types import FrameType

WAKES = 0.25  # seconds within which the thread notices the process's end, which waits for it


class Lookout:
    """Checks watches of this process, on a thread that lives while there are any."""

    def __init__(self) -> None:
        # Reentrant: whatever holds it may drop the last reference to an optimizer, or start the
        # garbage collector, and an optimizer that is collected ends its watch.
        self._lock = threading.RLock()
        self._observed: weakref.WeakKeyDictionary[Watch, Silence] = weakref.WeakKeyDictionary()
        self._thread: _Thread | None = None

    def begin(self, watch: Watch) -> None:
        """Start to check ``watch``."""
        watch.lookout = self
        with self._lock:
            if watch not in self._observed:
                self._observed[watch] = Silence(watch)
            # it is not alive after a fork, either
            if self._thread is None or not self._thread.is_alive():
                self._thread = _Thread(self)
                self._thread.start()

    def end(self, watch: Watch) -> None:
        """Stop checking ``watch``; the thread ends with the last one."""
        watch.lookout = None
        with self._lock:
            observed = self._observed.pop(watch, None)
        if observed is not None:
            with contextlib.suppress(Exception):  # the store may be gone
                observed.end()
        with self._lock:
            last = self._is_over()
            thread, self._thread = self._thread, None if last else self._thread
        if last and thread is not None:
            thread.over.set()
            if thread is not threading.current_thread():
                thread.join(1.0)

    def _is_over(self) -> bool:
        """Return whether all groups of all watches are gone."""
        # A list, because an optimizer that is collected meanwhile removes its watch.
        watches = [ref() for ref in self._observed.keyrefs()]
        return all(watch is None or _is_over(watch) for watch in watches)

    def last_known(self, comm: TensorCollectives) -> str:
        """Return where the ranks were when one of them reported its wait; empty if none did."""
        store = comm.store
        try:
            return store.get(TOLD).decode() if store is not None and store.check([TOLD]) else ""
        except Exception:  # the store ended with its process, and the caller has an error to raise
            return ""

    def look(self, thread: threading.Thread) -> bool:
        """Check all once; return whether ``thread`` must check again, which is decided last."""
        with self._lock:
            watches = [ref() for ref in self._observed.keyrefs()]
        for watch in watches:
            observed = None if watch is None else self._observed.get(watch)
            if observed is None:
                continue
            try:
                observed.look()
            # the store's process has ended, so no rank is left to report to
            except Exception as error:
                LOG.debug("the other ranks' calls are unknown: %s", error)
        with self._lock:
            if self._thread is thread and self._is_over():
                self._thread = None
            return self._thread is thread


class _Thread(threading.Thread):
    """Checks until the process ends or nothing is left to check.

    It is not a daemon, because a process that exits during a call of a store is aborted.
    """

    def __init__(self, lookout: Lookout) -> None:
        super().__init__(name="shardcast waiting", daemon=False)
        self._lookout, self.over = lookout, threading.Event()

    def run(self) -> None:
        main = threading.main_thread()
        while not self.over.wait(min(WAKES, PATIENCE / LOOKS)) and main.is_alive():
            if not self._lookout.look(self):
                return


def _is_over(watch: Watch) -> bool:
    """Return whether all groups of ``watch`` are gone."""
    return not any(comm.is_alive for comm in watch.comms)


_LOOKOUT = Lookout()


@contextlib.contextmanager
def look_after(process_groups: ProcessGroups) -> Iterator[None]:
    """Watch the ranks of an optimizer that is created in this block, until it is closed."""
    comm = process_groups.everyone
    if comm.size > 1:
        _LOOKOUT.begin(comm.watch)
    try:
        yield
    except BaseException:
        process_groups.end_watch()
        raise


PATIENCE = 30.0  # seconds that a rank waits before it logs anything
LOOKS = 6  # number of checks in that time
WRITES_AT = 4  # check at which a line is written, so that it exists when others read it
PLACE, TOLD = "shardcast/waiting/{}", "shardcast/waiting"  # keys in a group's store
# Packages with frames between a script's line and a collective; others run scripts.
INSIDE = {"shardcast", "torch"} | sys.stdlib_module_names - {"__main__"}
RUNS_SCRIPTS = ("shardcast.run", "shardcast.cli", "shardcast.testing")


class Silence:
    """A rank of this process, from its last new collective on.

    Attributes:
        since: when it entered that, by the thread's clock.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch, self._begun = weakref.ref(watch), 0
        self._begin()

    def _begin(self) -> None:
        self.since = time.monotonic()
        # seconds of silence at the last line, and at the next report
        self._written_at = self._next = 0.0
        self._told_in: Any = None  # the store, if this rank is the one that reports

    def look(self) -> None:
        """Write a line, or report, when it is due."""
        watch = self._watch()
        if watch is None:
            return
        if self._begun != watch.begun:
            self._begun = watch.begun
            self.end()
            return
        silent, work = time.monotonic() - self.since, watch.waits
        if silent - self._written_at >= PATIENCE * (1 if self._written_at else WRITES_AT / LOOKS):
            self._written_at = silent
            _write(watch, json.dumps(_place(watch, work)))
        if work is not None and silent >= max(PATIENCE, self._next):
            self._next = max(2 * self._next, 2 * PATIENCE)
            self._tell(watch, work, silent)

    def end(self) -> None:
        """Remove the line and the report, because the rank continues.

        If a collective failed, the report stays for the errors of other ranks.
        """
        watch, was_written, told_in = self._watch(), bool(self._written_at), self._told_in
        self._begin()
        if watch is None:
            return
        try:
            if was_written:
                _write(watch, "")
            if told_in is not None and not watch.gave_up:
                told_in.delete_key(f"{TOLD}/told")
                told_in.delete_key(TOLD)
        finally:
            watch.gave_up = False

    def _tell(self, watch: Watch, work: Work, silent: float) -> None:
        """Log which ranks wait for which; one of the waiting ranks does it for all."""
        comm = work.comm
        store = comm.store
        first = store is None or self._told_in is not None or store.add(f"{TOLD}/told", 1) == 1
        if not first:
            return
        self._told_in = store
        report = _report(comm, _place(watch, work))
        if store is not None:
            store.set(TOLD, report)
        LOG.warning(
            "rank %d of %d has waited %.3g s for the other ranks in %s, after %d steps. %s. It "
            "fails at the process group's timeout unless all ranks reach this call (is it under "
            "`if rank == 0:`?)",
            *(comm.rank, comm.size, silent, work, watch.steps, report),
        )


def _write(watch: Watch, place: str) -> None:
    for comm in watch.comms:
        if (store := comm.store) is not None:
            store.set(PLACE.format(comm.rank), place)


def _report(comm: TensorCollectives, own: dict[str, Any]) -> str:
    """Return where each rank is, with ranks in the same call grouped."""
    facts = []
    if (store := comm.store) is not None:
        for rank in range(comm.size):
            key = PLACE.format(rank)
            place = own if rank == comm.rank else None
            if place is None and store.check([key]):
                place = json.loads(store.get(key) or "null")
            facts.append((rank, _told(place)))
    return by_rank(facts) or _told(own)


def _place(watch: Watch, work: Work | None) -> dict[str, object]:
    """Return where a rank of this process is, as JSON values."""
    frame = _compat.frame_of_thread(watch.thread)
    try:
        call, line = _place_of(frame)
    finally:
        del frame
    waits = str(work) if work else ""
    return {"call": call, "line": line, "waits": waits, "steps": watch.steps}


def _told(place: dict[str, Any] | None) -> str:
    if not place:
        return "unknown, it may have ended"
    where = f"in {place['call']}" if place["call"] else "in no call of shardcast"
    line = f" at {place['line']}" if place["line"] else ""
    waits = f", waiting in {place['waits']}" if place["waits"] else ""
    return f"{where}{line}{waits}, after {place['steps']} steps"


def _place_of(frame: FrameType | None) -> tuple[str, str]:
    """Return this library's call that a thread is in, and its current script line.

    Args:
        frame: the innermost frame.
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
