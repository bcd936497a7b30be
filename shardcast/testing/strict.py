"""The process group of one rank in a threaded world, with checks of its buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .faults import BufferHazardError
from .group import Call, MockWork, RecordedGroup, deliver
from .record import Collective
from .rendezvous import MESSAGE, PendingCollective, ThreadedRun

DEFAULT = "0"  # key of the default group


class StrictGroup(RecordedGroup):
    """One rank's process group in a :class:`~shardcast.testing.ThreadedWorld`.

    Only the rank's thread may call it, and only during :meth:`ThreadedWorld.run`.

    Args:
        world_rank: this rank in the world, which may be larger than the group.
        ranks: ranks in the world, by rank in the group.
        key: equal on all ranks of the group.
    """

    def __init__(self, world_rank: int, ranks: Sequence[int], key: str = DEFAULT) -> None:
        super().__init__(tuple(ranks).index(world_rank), len(ranks), backend="strict")
        self.world_rank, self.ranks, self.key = world_rank, tuple(ranks), key
        self.run: ThreadedRun | None = None
        """The run that this rank currently takes part in."""
        self._pending: dict[Hashable, Call] = {}
        self._messages: Counter[tuple[int, int, int]] = Counter()

    @property
    def store(self) -> Any:
        """A store that all ranks of the group can write and read during a run."""
        return None if self.run is None else dist.PrefixStore(self.key, self.run.store)  # type: ignore[attr-defined]

    def begin(self, run: ThreadedRun, rank_log: list[Collective] | None = None) -> None:
        """Start a new run with an empty log.

        Args:
            rank_log: log of this rank in all groups of a mesh, besides the group's.
        """
        run.join(self.key, self.ranks)
        self.run, self._pending, self.log = run, {}, []
        self._messages.clear()
        self.rank_log = self.log if rank_log is None else rank_log
        self._coalescing = None  # a failed run may have left it set

    def check_all_waited_for(self) -> None:
        """Raise ``BufferHazardError`` if a collective was launched and never waited for."""
        if self._pending:
            calls = ", ".join(str(call.record) for call in self._pending.values())
            raise BufferHazardError(f"rank {self.world_rank} never waited for {calls}")

    def _issue(self, call: Call) -> dist.Work:
        run = self._present_run()
        run.made[self.world_rank] += 1
        self._note(call.record)
        copies = [tensor.clone() for tensor in call.inputs]
        exchange = run.launch(self.key, self.ranks, self.world_rank, replace(call, inputs=copies))

        def write() -> None:
            sent = [exchange.calls[rank].inputs for rank in self.ranks]
            deliver(self.rank(), call, sent, _reduce_in_rank_order)

        watched = self._watch(call) if call.record.async_op else []
        return self._work(call.record.seq, call, exchange, write, watched)

    def _message(self, tensor: Tensor, source: int, dest: int, tag: int) -> dist.Work:
        """Meet one other rank; the sender does not wait."""
        line = (source, dest, tag)
        pair = (self.ranks[source], self.ranks[dest])
        shape = tuple(tensor.shape) or (1,)  # torch 2.11's pipelines send shape [] and expect [1]
        number, group = self._messages[line], self._name()
        record = Collective(number, MESSAGE, shape, tensor.dtype, source, dest, group=group)
        self._messages[line] += 1
        sends = source == self.rank()
        inputs, outputs = ([tensor.detach().clone()], []) if sends else ([], [tensor.data])
        call = Call(record, inputs, outputs)
        key = f"{self.key}: {source} to {dest}, tag {tag}"
        exchange = self._present_run().launch(key, pair, self.world_rank, call)
        if sends:
            return MockWork()

        def write() -> None:
            outputs[0].copy_(exchange.calls[pair[0]].inputs[0].view_as(outputs[0]))

        return self._work((line, number), call, exchange, write)

    def _work(
        self,
        key: Hashable,
        call: Call,
        exchange: PendingCollective,
        write: Callable[[], None],
        watched: Sequence[tuple[str, Tensor, Tensor]] = (),
    ) -> dist.Work:
        """Return a work whose ``wait()`` writes the outputs, on the rank that waits."""
        run, rank = self._present_run(), self.world_rank
        self._pending[key] = call

        def finish() -> None:
            del self._pending[key]
            changed = [side for side, value, then in watched if not _same_bits(value, then)]
            run.wait(rank, exchange)
            write()
            if changed:  # raised only now, so that the other ranks get their data
                raise BufferHazardError(
                    f"rank {rank}: an {changed[0]} of {call.record} was written "
                    "between its launch and wait()"
                )

        def ready() -> bool:
            if not run.settled(exchange):
                run.wait_turn(rank)  # a polling rank must let the others run
            return run.settled(exchange)

        return MockWork(finish, ready)

    def _watch(self, call: Call) -> list[tuple[str, Tensor, Tensor]]:
        """Return copies of all buffers, for ``wait()`` to detect writes to them.

        Version counters do not suffice: views of one pack share one, and writing to the next slot
        while this one is in flight is allowed.
        """
        for tensor in call.outputs:
            _bytes(tensor).fill_(255)  # NaN in every floating dtype
        sides = (("output", call.outputs), ("input", call.inputs))
        return [(side, tensor, tensor.clone()) for side, tensors in sides for tensor in tensors]

    def _present_run(self) -> ThreadedRun:
        if self.run is None:
            raise RuntimeError("this group works only inside ThreadedWorld.run")
        return self.run


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


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _same_bits(value: Tensor, copy: Tensor) -> bool:
    return torch.equal(_bytes(value), _bytes(copy))
