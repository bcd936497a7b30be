"""The process group of one rank in a threaded world, and the watch over its buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import BufferHazardError
from .group import Call, DoneWork, RecordedGroup, deliver
from .record import Collective
from .rendezvous import MESSAGE, Rendezvous, Slot

__all__ = ["StrictGroup"]


class StrictGroup(RecordedGroup):
    """One rank's process group in a :class:`~shardcast.testing.ThreadedWorld`.

    One thread per rank may call it, during :meth:`ThreadedWorld.run` only.
    """

    def __init__(self, rank: int, world_size: int, *, poison: bool) -> None:
        super().__init__(rank, world_size, backend="strict")
        self.poison = poison
        self.meeting: Rendezvous | None = None
        """The run that this rank takes part in at present."""
        self._pending: dict[Hashable, Call] = {}
        self._messages: Counter[tuple[int, int, int]] = Counter()

    def begin(self, meeting: Rendezvous, rank_log: list[Collective] | None = None) -> None:
        """Take part in a new run, with an empty log.

        Args:
            rank_log: of this rank of a mesh, beside that of the group.
        """
        self.meeting, self._pending, self.log = meeting, {}, []
        self._messages.clear()
        self.rank_log = self.log if rank_log is None else rank_log
        self._coalescing = None  # a run that failed may have left it

    def check_all_waited_for(self) -> None:
        """Raise ``BufferHazardError`` if a collective was launched and never waited for."""
        if self._pending:
            calls = ", ".join(str(call.record) for call in self._pending.values())
            raise BufferHazardError(f"rank {self.world_rank} never waited for {calls}")

    def _issue(self, call: Call) -> dist.Work:
        meeting = self._here()
        if meeting.run.inject(meeting.ranks[self.rank()]):
            return DoneWork()
        self._note(call.record)
        copies = [tensor.clone() for tensor in call.inputs]
        slot = meeting.launch(self.rank(), replace(call, inputs=copies))
        self._pending[slot.seq] = call
        return _StrictWork(self, meeting, slot, call)

    def _message(self, tensor: Tensor, source: int, dest: int, tag: int) -> dist.Work:
        """A rendezvous of two, where the one that sends does not wait."""
        line = (source, dest, tag)
        sends, meeting = source == self.rank(), self._here().between(*line)
        record = Collective(
            self._messages[line], MESSAGE, tuple(tensor.shape), tensor.dtype, source, dest,
            group=self._name(),
        )  # fmt: skip
        self._messages[line] += 1
        inputs, outputs = ([tensor.detach().clone()], []) if sends else ([], [tensor.data])
        call = Call(record, inputs, outputs)
        slot = meeting.launch(0 if sends else 1, call)
        if sends:
            return DoneWork()
        self._pending[line, slot.seq] = call
        return _Received(self, meeting, slot, line)

    def receive(self, meeting: Rendezvous, slot: Slot, line: Hashable) -> None:
        """Wait for a message and write it."""
        call = self._pending.pop((line, slot.seq))
        meeting.wait(1, slot)
        call.outputs[0].copy_(slot.calls[0].inputs[0])

    def _here(self) -> Rendezvous:
        if self.meeting is None:
            raise RuntimeError("this group works only inside ThreadedWorld.run")
        return self.meeting

    @property
    def world_rank(self) -> int:
        return self.rank() if self.meeting is None else self.meeting.ranks[self.rank()]

    def finish(self, meeting: Rendezvous, slot: Slot) -> None:
        """Wait for the other ranks and write the outputs."""
        call = self._pending.pop(slot.seq)
        meeting.wait(self.rank(), slot)
        sent = [slot.calls[rank].inputs for rank in range(self.size())]
        deliver(self.rank(), call, sent, _reduce_in_rank_order)


class _Received(dist.Work):
    """A message; it is written in ``wait()``."""

    def __init__(self, group: StrictGroup, meeting: Rendezvous, slot: Slot, line: Hashable) -> None:
        super().__init__()
        self._receive: Callable[[], None] | None = partial(group.receive, meeting, slot, line)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._receive is not None:
            self._receive()
            self._receive = None
        return True

    def is_completed(self) -> bool:
        return self._receive is None


class _StrictWork(dist.Work):
    """Outputs are written in ``wait()``, by the rank that waits, and nowhere else."""

    def __init__(self, group: StrictGroup, meeting: Rendezvous, slot: Slot, call: Call) -> None:
        super().__init__()
        self._group, self._meeting, self._slot = group, meeting, slot
        self._record = call.record
        self._done = False
        self._watched: list[tuple[str, Tensor, Tensor]] = []
        if call.record.async_op:
            self._watch(call)

    def _watch(self, call: Call) -> None:
        """Remember all buffers, to see in ``wait()`` whether somebody wrote into them.

        Version counters would not do: views of one pack share one, and writing into the next
        slot of a pack while this one is on its way is no fault.
        """
        if self._group.poison:
            for tensor in call.outputs:
                _fill_with_garbage(tensor)
        for side, tensors in (("output", call.outputs), ("input", call.inputs)):
            self._watched += [(side, tensor, tensor.clone()) for tensor in tensors]

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._done:
            return True
        self._done = True
        changed = [side for side, now, then in self._watched if not _same_bits(now, then)]
        self._watched = []
        self._group.finish(self._meeting, self._slot)
        if changed:  # told only now, so that the other ranks get what they wait for
            raise BufferHazardError(
                f"rank {self._group.world_rank}: an {changed[0]} of {self._record} was written "
                "between its launch and wait()"
            )
        return True

    def is_completed(self) -> bool:
        """Whether ``wait()`` would not block. Before it, the outputs hold nothing."""
        rank, turns = self._group.world_rank, self._meeting.run.turns
        if not self._done and not self._meeting.settled(self._slot):
            turns.wait(rank)  # who polls must let the others run
        return self._done or self._meeting.settled(self._slot)

    def is_success(self) -> bool:
        return self._done


def _reduce_in_rank_order(reduce_op: str, parts: Sequence[Tensor], out: Tensor) -> None:
    steps: dict[str, Callable[..., Tensor]] = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    step = steps[reduce_op]
    out.copy_(parts[0].view_as(out))
    for part in parts[1:]:
        step(out, part.view_as(out), out=out)
    if reduce_op == "AVG":
        out.div_(len(parts))


def _fill_with_garbage(tensor: Tensor) -> None:
    """All bits set, which is NaN in every floating dtype."""
    tensor.view(-1).view(torch.uint8).fill_(255)


def _same_bits(now: Tensor, then: Tensor) -> bool:
    return torch.equal(now.view(-1).view(torch.uint8), then.view(-1).view(torch.uint8))
