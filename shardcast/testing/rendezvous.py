"""Where the ranks of a threaded world meet: every call is checked against every other rank's.

Launching never blocks, as with real asynchronous collectives: a rank leaves a copy of what it
sends in the slot of that sequence number and goes on. Waiting blocks until every rank has
launched. Within one group that cannot deadlock: whoever waits in a slot has launched all slots
before it, so the lowest slot that anybody waits in is filled by all who wait. Ranks that wait for
each other in different groups are found out at once, since all of them stand in line.

A rank reads only the copies which the others left in a slot, never their memory: what a rank does
to its tensors after the launch cannot reach another rank, it can only be found out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from .errors import CollectiveMismatchError, RankDied, RankLeftError, RendezvousTimeoutError
from .faults import Death, Delay, Drop, Fault
from .group import Call
from .record import Collective, name_ranks
from .turns import Turns

MESSAGE = "message"  # the op of what one rank sends to one other


@dataclass
class Slot:
    """One collective: what each rank that has launched it left for the others."""

    ranks: tuple[int, ...]
    """The ranks of the world that take part, by rank in the group."""
    record: Collective
    """That of the first of them to come."""
    calls: dict[int, Call] = field(default_factory=dict)
    """By rank in the group."""

    def __str__(self) -> str:
        kind = MESSAGE if self.record.op == MESSAGE else "collective"
        of_group = f" of {self.record.group}" if self.record.group else ""
        return f"{kind} {self.record.seq}{of_group}"

    @property
    def full(self) -> bool:
        """Whether all ranks have launched it."""
        return len(self.calls) == len(self.ranks)

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of the world that have not launched this collective."""
        return tuple(r for number, r in enumerate(self.ranks) if number not in self.calls)

    def table(self) -> str:
        """What each rank called here, one line each."""
        lines = [":"]
        for number, rank in enumerate(self.ranks):
            call = self.calls.get(number)
            lines.append(f"  rank {rank}: {call.record if call else 'not there yet'}")
        return "\n".join(lines)


class Run:
    """The state that the ranks of one run share."""

    def __init__(self, world_size: int, timeout: float, faults: Iterable[Fault]) -> None:
        self.world_size, self.timeout = world_size, timeout
        self.turns = Turns(world_size)
        self.left: dict[int, BaseException | None] = {}
        """Who has returned (``None``) or raised, in this order."""
        self.unreached = list(faults)
        self.failure: Callable[[], Exception] | None = None
        """Makes the error that every rank raises; each its own, with what is known by then."""
        self.attempts = [0] * world_size
        """How many collectives each rank has come to."""
        self.waiting: dict[int, Slot] = {}
        self._groups: dict[str, Rendezvous] = {}

    def group(self, key: str, ranks: Sequence[int]) -> Rendezvous:
        """The rendezvous of a process group, which has the same key on all its ranks."""
        group = self._groups.setdefault(key, Rendezvous(self, key, tuple(ranks)))
        if group.ranks != tuple(ranks):
            raise ValueError(
                f"process group {key} of this rank has the {name_ranks(ranks)}, that of "
                f"others the {name_ranks(group.ranks)}: all ranks must make all groups (new_group, "
                "meshes) in the same order"
            )
        return group

    def inject(self, rank: int) -> bool:
        """Let the faults of this rank's present collective happen; whether to skip it."""
        at = self.attempts[rank]
        self.attempts[rank] += 1
        due = [fault for fault in self.unreached if (fault.rank, fault.at) == (rank, at)]
        self.unreached = [fault for fault in self.unreached if fault not in due]
        for fault in due:
            if isinstance(fault, Delay):
                self.turns.sleep(rank, fault.seconds, lambda: self.failure is not None)
        if any(isinstance(fault, Death) for fault in due):
            raise RankDied(f"rank {rank} died at its collective {at}, as injected")
        return any(isinstance(fault, Drop) for fault in due)

    def leave(self, rank: int, error: BaseException | None) -> None:
        """Let the others know that this rank will not come any more."""
        with self.turns.changed:
            self.left[rank] = error
            self.turns.leave(rank)

    def fail(self, failure: Callable[[], Exception]) -> None:
        """Make every rank raise: at once where it waits, else at its next collective."""
        with self.turns.changed:
            self.failure = self.failure or failure
            self.turns.changed.notify_all()  # those that sleep
            self.turns.pass_on()

    def fail_stuck(self) -> None:
        """Fail: every rank that has not left waits for another one, in another group."""
        lines, calls = ["no rank can go on, each waits for another one:"], {}
        for rank, slot in sorted(self.waiting.items()):
            calls[rank] = slot.calls[slot.ranks.index(rank)].record
            lines.append(
                f"  rank {rank} waits in {slot} for {name_ranks(slot.missing)}: {calls[rank]}"
            )
        self.fail(lambda: CollectiveMismatchError("\n".join(lines), calls))

    def check_received(self) -> None:
        """Raise if a message was sent that nobody has received, for which a real rank may wait."""
        for slot in self._oldest():
            if slot.record.op == MESSAGE:
                calls = {slot.ranks[0]: slot.record}
                raise CollectiveMismatchError(f"{slot} was never received{slot.table()}", calls)

    def fail_late(self) -> None:
        """Fail, unless failed already: the turn has not changed hands for ``timeout`` seconds."""
        slots, holder = self._oldest(), self.turns.holder
        if holder is not None:  # the other late ones have only been waiting for their turn
            slots.sort(key=lambda slot: holder not in slot.missing)
            late: tuple[int, ...] = (holder,)
        elif slots:
            late = slots[0].missing
        else:
            late = tuple(rank for rank in range(self.world_size) if rank not in self.left)
        where, table = (str(slots[0]), slots[0].table()) if slots else ("any collective", "")
        have = "has" if len(late) == 1 else "have"
        message = f"{name_ranks(late)} {have} not arrived at {where} within {self.timeout} s"
        self.fail(lambda: RendezvousTimeoutError(message + table, late))
        self.turns.end()

    def _oldest(self) -> list[Slot]:
        """Of each group the first collective that not all ranks have launched."""
        oldest = [group.oldest() for group in list(self._groups.values())]
        return [slot for slot in oldest if slot is not None]

    def wait(self, rank: int, slot: Slot) -> None:
        """Block until the slot is full; raise if it never will be."""
        if not self.settled(slot):
            self.waiting[rank] = slot
            self.turns.wait(rank, lambda: self.settled(slot))
            del self.waiting[rank]
        self.check(slot)

    def settled(self, slot: Slot) -> bool:
        """Whether waiting for this slot would not block."""
        return slot.full or self.failure is not None or self._lost(slot) is not None

    def check(self, slot: Slot) -> None:
        """Raise if the run has failed, or a rank that the slot waits for has left."""
        if self.failure is not None:
            raise self.failure()
        lost = self._lost(slot)
        if lost is None:
            return
        error = self.left[lost]
        did = "returned" if error is None else f"raised {type(error).__name__}: {error}"
        raise RankLeftError(
            f"rank {lost} has left after {self.attempts[lost]} collectives (it {did}), "
            f"{slot} waits for it{slot.table()}",
            lost,
        ) from error

    def _lost(self, slot: Slot) -> int | None:
        """The first rank that left without having launched this collective."""
        return next((rank for rank in self.left if rank in slot.missing), None)


class Rendezvous:
    """The collectives of one process group in a run.

    Args:
        ranks: of the world, by rank in the group.
    """

    def __init__(self, run: Run, key: str, ranks: tuple[int, ...]) -> None:
        self.run, self.key, self.ranks = run, key, ranks
        self._open: dict[int, Slot] = {}  # without the full ones, which only their ranks hold

    def between(self, source: int, dest: int, tag: int) -> Rendezvous:
        """Of the messages of one rank to another one with that tag."""
        key = f"{self.key}: {source} to {dest}, tag {tag}"
        return self.run.group(key, (self.ranks[source], self.ranks[dest]))

    def launch(self, rank: int, call: Call) -> Slot:
        """Leave ``call`` of a rank of the group in its slot; raise if it differs from others."""
        seq = call.record.seq
        slot = self._open.setdefault(seq, Slot(self.ranks, call.record))
        if self.run.failure is None:
            for peer, peer_call in slot.calls.items():
                difference = _difference(self.ranks, rank, call, peer, peer_call)
                if difference is not None:
                    self.run.fail(partial(_mismatch, slot, difference))
                    break
        slot.calls[rank] = call
        if slot.full:
            self._open.pop(seq, None)
        self.run.check(slot)
        return slot

    def oldest(self) -> Slot | None:
        """The first collective that not all ranks have launched."""
        return self._open.get(min(list(self._open), default=-1))


def _mismatch(slot: Slot, difference: str) -> CollectiveMismatchError:
    calls = {slot.ranks[number]: call.record for number, call in sorted(slot.calls.items())}
    message = f"{slot} does not match: {difference}{slot.table()}"
    return CollectiveMismatchError(message, calls)


def _difference(
    ranks: Sequence[int], rank: int, call: Call, other: int, theirs: Call
) -> str | None:
    """In which respect two calls cannot be the same collective, in words."""
    record, yours = call.record, theirs.record
    pair = name_ranks(sorted((ranks[rank], ranks[other])))
    for name in ("op", "dtype", "source", "dest", "reduce_op"):
        if getattr(record, name) != getattr(yours, name):
            return f"{pair} differ in {name}"
    if not record.op.startswith("all_to_all"):
        return None if record.shape == yours.shape else f"{pair} differ in shape"
    for sender, sends, receiver, expects in (
        (rank, call.inputs[other], other, theirs.outputs[rank]),
        (other, theirs.inputs[rank], rank, call.outputs[other]),
    ):
        if sends.shape != expects.shape:
            return (
                f"rank {ranks[sender]} sends {list(sends.shape)} to rank {ranks[receiver]}, "
                f"which expects {list(expects.shape)}"
            )
    return None
