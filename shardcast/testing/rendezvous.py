"""The meeting point of a threaded world's ranks, which checks every call against the others'.

Launching never blocks, like a real asynchronous collective: a rank leaves a copy of its inputs in
the exchange of that sequence number and continues. Waiting blocks until every rank has launched.
Within one group this cannot deadlock: a rank that waits in an exchange has launched all earlier
ones, so the earliest exchange that anybody waits in is filled by those who wait. Ranks that wait
for each other in different groups are detected at once, because all of them are in the queue.

A rank reads only copies that the others left in an exchange, never their memory. If a rank changes
its tensors after the launch, no other rank sees it; it can only be detected.

Ranks are threads that take turns: one runs at a time, and only a collective passes the turn on.
Real ranks are processes and share nothing, but threads share torch's random generator and every
module-level variable, and would interleave differently in each run. With turns, and a random state
per rank, every run and every failure repeats exactly. Ranks start with different seeds, like
processes, so a test notices if a script forgets to broadcast its initial weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from .faults import (
    CollectiveMismatchError,
    RankLeftError,
    RendezvousTimeoutError,
)
from .group import Call
from .record import Collective, name_ranks

MESSAGE = "message"  # the op of a message from one rank to another
# Fraction of time that a computing process gets a processor on a very busy machine.
BUSY = 0.05


@dataclass
class PendingCollective:
    """One collective, with the inputs of each rank that has launched it."""

    ranks: tuple[int, ...]
    """Participating ranks of the world, by rank in the group."""
    record: Collective
    """Record of the first rank to arrive."""
    calls: dict[int, Call] = field(default_factory=dict)
    """Calls, by rank of the world."""

    def __str__(self) -> str:
        kind = MESSAGE if self.record.op == MESSAGE else "collective"
        group = f" of {self.record.group}" if self.record.group else ""
        return f"{kind} {self.record.seq}{group}"

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of the world that have not launched this collective."""
        return tuple(rank for rank in self.ranks if rank not in self.calls)

    def table(self) -> str:
        """Return each rank's call here, one line each."""
        called = {rank: str(call.record) for rank, call in self.calls.items()}
        lines = [f"  rank {rank}: {called.get(rank, 'not there yet')}" for rank in self.ranks]
        return "\n".join([":", *lines])

    def difference(self, rank: int, call: Call) -> str | None:
        """Return how ``call`` of ``rank`` differs from another rank's."""
        for peer, expected in self.calls.items():
            pair = name_ranks(sorted((rank, peer)))
            for name in ("op", "dtype", "source", "dest", "reduce_op"):
                if getattr(call.record, name) != getattr(expected.record, name):
                    return f"{pair} differ in {name}"
            if not call.record.op.startswith("all_to_all"):
                if call.record.shape != expected.record.shape:
                    return f"{pair} differ in shape"
                continue
            for sender, sent, receiver, received in (
                (rank, call.inputs, peer, expected.outputs),
                (peer, expected.inputs, rank, call.outputs),
            ):
                sends = list(sent[self.ranks.index(receiver)].shape)
                expects = list(received[self.ranks.index(sender)].shape)
                if sends != expects:
                    return (
                        f"rank {sender} sends {sends} to rank {receiver}, which expects {expects}"
                    )
        return None


class ThreadedRun:
    """The state that the ranks of one run share: collectives, turns and failure."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self.world_size, self.timeout = world_size, timeout
        self.left: dict[int, BaseException | None] = {}
        """Ranks that have returned (``None``) or raised, in this order."""
        self.failure: Callable[[], Exception] | None = None
        """Makes each rank's error, with the facts known by then."""
        self.made = [0] * world_size
        """Number of collectives of each rank."""
        self.store = dist.HashStore()  # type: ignore[attr-defined]
        self._groups: dict[str, tuple[int, ...]] = {}
        self._open: dict[
            tuple[str, int], PendingCollective
        ] = {}  # collectives that not all ranks have launched
        lock = threading.RLock()
        # notified if a rank left, none is ready, or the run ends
        self._changed = threading.Condition(lock)
        self._turn = [threading.Condition(lock) for _ in range(world_size)]
        # All ranks queue before the first one runs, so the order does not depend on how fast
        # threads start. Maps each rank to the exchange that it waits in, if any.
        self._line: dict[int, PendingCollective | None] = dict.fromkeys(range(world_size))
        self._holder: int | None = None
        self._last = world_size - 1
        self._begin_turn()
        self._ended = False  # nobody waits for a stuck rank any more
        self._random = [
            torch.Generator().manual_seed(rank).get_state() for rank in range(world_size)
        ]

    # -- turns ----------------------------------------------------------------------------------

    def take_turn(self, rank: int, exchange: PendingCollective | None = None) -> None:
        """Wait until ``exchange`` is settled and it is ``rank``'s turn, or the run ends."""
        with self._changed:
            self._line[rank] = exchange
            self._pass_on()
            self._turn[rank].wait_for(lambda: self._ended or self._next() == rank)
            del self._line[rank]
            if not self._ended:
                self._holder = self._last = rank
                self._begin_turn()
                torch.set_rng_state(self._random[rank])

    def give_turn(self, rank: int) -> None:
        """Pass the turn to the next ready rank."""
        with self._changed:
            if self._holder == rank:
                self._random[rank] = torch.get_rng_state()
                self._holder = None
                self._begin_turn()
            self._pass_on()

    def wait_turn(self, rank: int, exchange: PendingCollective | None = None) -> None:
        """Give the turn and take it again, at once.

        So the order does not depend on which of this rank and the next is faster.
        """
        with self._changed:
            self.give_turn(rank)
            self.take_turn(rank, exchange)

    def leave(self, rank: int, error: BaseException | None) -> None:
        """Give up the turn for good, and let the other ranks know that this rank is gone."""
        with self._changed:
            self.left[rank] = error
            self.give_turn(rank)
            self._changed.notify_all()

    def end(self) -> None:
        """Let all ranks continue at once."""
        with self._changed:
            self._ended = True
            self._begin_turn()
            for condition in (self._changed, *self._turn):
                condition.notify_all()

    def _pass_on(self) -> None:
        rank = self._next()
        if rank is not None:
            self._turn[rank].notify()
        elif self._holder is None:
            self._changed.notify_all()

    def _next(self) -> int | None:
        """Return the first ready rank after the last one, if nobody has the turn."""
        for step in range(1, self.world_size + 1) if self._holder is None else ():
            rank = (self._last + step) % self.world_size
            if rank in self._line and self.settled(self._line[rank]):
                return rank
        return None

    def watch(self) -> None:
        """Wait for all ranks, for up to two timeouts: one to fail, one to let them leave."""
        with self._changed:
            while len(self.left) < self.world_size:
                remaining = self.timeout - self._turn_time()
                in_line = len(self._line) == self.world_size - len(self.left)
                if in_line and not self._ended and self._holder is None and self._next() is None:
                    self._fail_stuck()
                elif remaining > 0:
                    self._changed.wait(remaining)
                elif not self._ended:
                    self._fail_late()
                else:
                    return

    def _begin_turn(self) -> None:
        self._since, self._used = time.monotonic(), time.process_time()

    def _turn_time(self) -> float:
        """Return how long the turn has not changed; processor time, if its rank computes.

        So a rank is not late because other programs had the processor.
        """
        waited, used = time.monotonic() - self._since, time.process_time() - self._used
        return min(waited, used) if used > BUSY * waited else waited

    # -- collectives ----------------------------------------------------------------------------

    def join(self, key: str, ranks: tuple[int, ...]) -> None:
        """Note that a rank made a process group, which has the same ``key`` on all its ranks."""
        known_ranks = self._groups.setdefault(key, ranks)
        if known_ranks != ranks:
            raise ValueError(
                f"process group {key} has the {name_ranks(ranks)} on this rank, but the "
                f"{name_ranks(known_ranks)} on others: all ranks must make all groups (new_group, "
                "meshes) in the same order"
            )

    def launch(self, key: str, ranks: tuple[int, ...], rank: int, call: Call) -> PendingCollective:
        """Put ``call`` of a rank into its exchange; raise if it differs from the others."""
        at = (key, call.record.seq)
        exchange = self._open.setdefault(at, PendingCollective(ranks, call.record))
        difference = None if self.failure else exchange.difference(rank, call)
        exchange.calls[rank] = call
        if not exchange.missing:
            self._open.pop(at, None)  # from now on only its ranks hold it
        if difference is not None:
            self._fail(lambda: _mismatch(exchange, f"does not match: {difference}"))
        self.check(exchange)
        return exchange

    def wait(self, rank: int, exchange: PendingCollective) -> None:
        """Block until the exchange is full; raise if it cannot become full."""
        if not self.settled(exchange):
            self.wait_turn(rank, exchange)
        self.check(exchange)

    def settled(self, exchange: PendingCollective | None) -> bool:
        """Return whether waiting for this exchange would not block."""
        if exchange is None or self.failure is not None:
            return True
        return not exchange.missing or self._lost(exchange) is not None

    def check(self, exchange: PendingCollective) -> None:
        """Raise if the run has failed, or a rank that the exchange waits for has left."""
        if self.failure is not None:
            raise self.failure()
        lost = self._lost(exchange)
        if lost is None:
            return
        error = self.left[lost]
        did = "returned" if error is None else f"raised {type(error).__name__}: {error}"
        raise RankLeftError(
            f"rank {lost} has left after {self.made[lost]} collectives (it {did}); "
            f"{exchange} waits for it{exchange.table()}",
            lost,
        ) from error

    def check_received(self) -> None:
        """Raise if a sent message was never received; a real sender might wait for that."""
        for exchange in self._oldest():
            if exchange.record.op == MESSAGE:
                raise _mismatch(exchange, "was never received")

    def _lost(self, exchange: PendingCollective) -> int | None:
        """Return the first rank that left without launching this collective."""
        return next((rank for rank in self.left if rank in exchange.missing), None)

    def _oldest(self) -> list[PendingCollective]:
        """Return each group's first collective that not all ranks have launched."""
        oldest: dict[str, PendingCollective] = {}
        for (key, _), exchange in [*self._open.items()]:
            oldest.setdefault(key, exchange)
        return [*oldest.values()]

    # -- failure --------------------------------------------------------------------------------

    def _fail(self, failure: Callable[[], Exception]) -> None:
        """Make every rank raise: at once if it waits, otherwise at its next collective."""
        with self._changed:
            self.failure = self.failure or failure
            self._pass_on()

    def interrupt(self) -> None:
        """Make every rank raise, without waiting for any."""
        self._fail(lambda: RuntimeError("the run was interrupted"))
        self.end()

    def _fail_stuck(self) -> None:
        """Fail: every rank still there waits for another one, in another group."""
        lines, calls = ["no rank can go on; each waits for another one:"], {}
        for rank, exchange in sorted(self._line.items()):
            if exchange is not None:
                calls[rank] = record = exchange.calls[rank].record
                peers = name_ranks(exchange.missing)
                lines.append(f"  rank {rank} waits in {exchange} for {peers}: {record}")
        self._fail(lambda: CollectiveMismatchError("\n".join(lines), calls))

    def _fail_late(self) -> None:
        """Fail: the turn has not changed for ``timeout`` seconds."""
        exchanges = self._oldest()
        if self._holder is not None:  # other late ranks were only waiting for their turn
            exchanges.sort(key=lambda exchange: self._holder not in exchange.missing)
            late: tuple[int, ...] = (self._holder,)
        elif exchanges:
            late = exchanges[0].missing
        else:
            late = tuple(rank for rank in range(self.world_size) if rank not in self.left)
        where, table = (
            (str(exchanges[0]), exchanges[0].table()) if exchanges else ("any collective", "")
        )
        have = "has" if len(late) == 1 else "have"
        message = f"{name_ranks(late)} {have} not arrived at {where} within {self.timeout} s"
        self._fail(lambda: RendezvousTimeoutError(message + table, late))
        self.end()


def _mismatch(exchange: PendingCollective, problem: str) -> CollectiveMismatchError:
    calls = {rank: call.record for rank, call in sorted(exchange.calls.items())}
    return CollectiveMismatchError(f"{exchange} {problem}{exchange.table()}", calls)
