"""Where the ranks of a threaded world meet: every call is checked against every other rank's.

Launching never blocks, as with real asynchronous collectives: a rank leaves a copy of what it
sends in the slot of that sequence number and goes on. Waiting blocks until every rank has
launched. That cannot deadlock: whoever waits in a slot has launched all slots before it, so the
lowest slot that anybody waits in is filled by all who wait.

A rank reads only the copies which the others left in a slot, never their memory: what a rank does
to its tensors after the launch cannot reach another rank, it can only be found out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from .errors import CollectiveMismatchError, RankDied, RankLeftError, RendezvousTimeoutError
from .faults import Death, Delay, Drop, Fault
from .group import Call
from .record import name_ranks
from .turns import Turns

__all__ = ["Rendezvous", "Slot"]


@dataclass
class Slot:
    """One collective: what each rank that has launched it left for the others."""

    seq: int
    calls: dict[int, Call] = field(default_factory=dict)


class Rendezvous:
    """The state that the ranks of one run share."""

    def __init__(self, world_size: int, timeout: float, faults: Iterable[Fault]) -> None:
        self.world_size, self.timeout = world_size, timeout
        self.turns = Turns(world_size)
        self.left: dict[int, BaseException | None] = {}
        """Who has returned (``None``) or raised, in this order."""
        self.unreached = list(faults)
        self.failure: Callable[[], Exception] | None = None
        """Makes the error that every rank raises; each its own, with what is known by then."""
        self._open: dict[int, Slot] = {}  # without the full ones, which only their ranks hold
        self._attempts = [0] * world_size

    def inject(self, rank: int) -> bool:
        """Let the faults of this rank's present collective happen; whether to skip it."""
        at = self._attempts[rank]
        self._attempts[rank] += 1
        due = [fault for fault in self.unreached if (fault.rank, fault.at) == (rank, at)]
        self.unreached = [fault for fault in self.unreached if fault not in due]
        for fault in due:
            if isinstance(fault, Delay):
                self.turns.sleep(rank, fault.seconds, lambda: self.failure is not None)
        if any(isinstance(fault, Death) for fault in due):
            raise RankDied(f"rank {rank} died at its collective {at}, as injected")
        return any(isinstance(fault, Drop) for fault in due)

    def launch(self, rank: int, call: Call) -> Slot:
        """Leave ``call`` in its slot; raise if it differs from what is there already."""
        seq = call.record.seq
        slot = self._open.setdefault(seq, Slot(seq))
        if self.failure is None:
            for other, theirs in slot.calls.items():
                difference = _difference(rank, call, other, theirs)
                if difference is not None:
                    self.fail(partial(self._mismatch, slot, difference))
                    break
        slot.calls[rank] = call
        if len(slot.calls) == self.world_size:
            self._open.pop(seq, None)
        self._check(slot)
        return slot

    def wait(self, rank: int, slot: Slot) -> None:
        """Block until the slot is full; raise if it never will be."""
        if not self.settled(slot):
            self.turns.wait(rank, lambda: self.settled(slot))
        self._check(slot)

    def settled(self, slot: Slot) -> bool:
        """Whether waiting for this slot would not block."""
        full = len(slot.calls) == self.world_size
        return full or self.failure is not None or self._lost(slot) is not None

    def leave(self, rank: int, error: BaseException | None) -> None:
        """Let the others know that this rank will not come any more."""
        with self.turns.changed:
            self.left[rank] = error
            self.turns.give(rank)

    def fail(self, failure: Callable[[], Exception]) -> None:
        """Make every rank raise: at once where it waits, else at its next collective."""
        with self.turns.changed:
            self.failure = self.failure or failure
            self.turns.changed.notify_all()

    def fail_late(self) -> None:
        """Fail, unless failed already: the turn has not changed hands for ``timeout`` seconds."""
        holder, slot = self.turns.holder, self._open.get(min(list(self._open), default=-1))
        here = slot.calls if slot else self.left
        late = tuple(rank for rank in range(self.world_size) if rank not in here)
        if holder is not None:  # the other late ones have only been waiting for their turn
            late = (holder,)
        where = f"collective {slot.seq}" if slot else "any collective"
        have = "has" if len(late) == 1 else "have"
        message = f"{name_ranks(late)} {have} not arrived at {where} within {self.timeout} s"
        self.fail(lambda: RendezvousTimeoutError(message + _table(self.world_size, slot), late))
        self.turns.end()

    def _check(self, slot: Slot) -> None:
        if self.failure is not None:
            raise self.failure()
        lost = self._lost(slot)
        if lost is None:
            return
        error = self.left[lost]
        did = "returned" if error is None else f"raised {type(error).__name__}: {error}"
        raise RankLeftError(
            f"rank {lost} has left after {self._attempts[lost]} collectives (it {did}), "
            f"collective {slot.seq} waits for it{_table(self.world_size, slot)}",
            lost,
        ) from error

    def _lost(self, slot: Slot) -> int | None:
        """The first rank that left without having launched this collective."""
        return next((rank for rank in self.left if rank not in slot.calls), None)

    def _mismatch(self, slot: Slot, difference: str) -> CollectiveMismatchError:
        calls = {rank: call.record for rank, call in sorted(slot.calls.items())}
        message = f"collective {slot.seq} does not match: {difference}"
        return CollectiveMismatchError(message + _table(self.world_size, slot), calls)


def _table(world_size: int, slot: Slot | None) -> str:
    """What each rank called in this slot, one line each."""
    if slot is None:
        return ""
    calls = [slot.calls.get(rank) for rank in range(world_size)]
    told = [str(call.record) if call else "not there yet" for call in calls]
    return ":" + "".join(f"\n  rank {rank}: {line}" for rank, line in enumerate(told))


def _difference(rank: int, call: Call, other: int, theirs: Call) -> str | None:
    """In which respect two calls cannot be the same collective, in words."""
    mine, yours = call.record, theirs.record
    pair = name_ranks(sorted((rank, other)))
    for name in ("op", "dtype", "source", "dest", "reduce_op"):
        if getattr(mine, name) != getattr(yours, name):
            return f"{pair} differ in {name}"
    if not mine.op.startswith("all_to_all"):
        return None if mine.shape == yours.shape else f"{pair} differ in shape"
    for sender, sends, receiver, expects in (
        (rank, call.inputs[other], other, theirs.outputs[rank]),
        (other, theirs.inputs[rank], rank, call.outputs[other]),
    ):
        if sends.shape != expects.shape:
            return (
                f"rank {sender} sends {list(sends.shape)} to rank {receiver}, "
                f"which expects {list(expects.shape)}"
            )
    return None
