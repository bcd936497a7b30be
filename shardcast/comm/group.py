"""A process group as shardcast uses it: tensors of a step, and values of set-up.

Tensor collectives run on the current stream: with ``async_op=False`` the process group launches
on the stream that computes (torch >= 2.8, PyTorch PR 148590), so no event, no ``record_stream``
and no side stream is needed, and whatever runs next sees the result. Those that return a work run
beside it until the work is waited for.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardcast import _compat
from shardcast.comm.agreement import raise_together, told
from shardcast.comm.waiting import Waiting, Works
from shardcast.plan.algorithms import GROUPED, Topology

REMEDY_INIT = (
    "call torch.distributed.init_process_group(...) on every rank before shardcast.shard(...)"
)

BROADCAST = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip

T = TypeVar("T")
TAG, TURNS = 0x5C000000, 1 << 16  # our sends, apart from those of a script
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Comm:
    """The ranks that share one model: a process group, or this process alone.

    Ranks here are group ranks, ``0 .. size-1``. Every method must be called by all ranks of the
    group in the same order; on a world of one they do nothing. ``about`` says whose collective it
    is, for the error that comes when other ranks do not join it.

    Attributes:
        steps: optimizer steps made so far, for that error.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        # Held weakly: a model that outlives destroy_process_group() must not keep the threads of
        # gloo, which take the interpreter when they let go of a tensor. A process that ends while
        # they do is aborted ("terminate called without an active exception").
        self._group = _compat.weak_group(group)
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.steps = 0
        self._turn = 0
        self._backends: dict[str, str] = {}  # by kind of device

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None for this process alone."""
        if self._group is None:
            return None
        group = self._group()
        if group is None:
            raise RuntimeError(
                "the process group of the sharded model was destroyed: destroy it when training "
                "is over, or shard the model again with a new group"
            )
        return group

    @classmethod
    def resolve(cls, process_group: dist.ProcessGroup | None) -> Comm:
        """The group to use: the given one, else the default one, else this process alone.

        Raises:
            ValueError: this rank is not a member of ``process_group``.
            RuntimeError: ``WORLD_SIZE`` announces several processes but no group joins them.
        """
        announced = int(os.environ.get("WORLD_SIZE", "1"))
        if process_group is not None:
            member = isinstance(process_group, dist.ProcessGroup)
            if not member or process_group.rank() < 0:
                raise ValueError(
                    "process_group: expected a group that contains this rank, got "
                    f"{process_group!r}; call shard() only on the ranks of the group"
                )
            return cls(process_group)
        if dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
            assert group is not None  # is_initialized() says so; for the type checker
            if announced > 1 and group.size() == 1:
                raise RuntimeError(
                    f"process_group: WORLD_SIZE is {announced} but the default process group has "
                    "one rank: each process would train alone; initialise the group with all "
                    "ranks (for Accelerate on CPU: ACCELERATE_USE_CPU=true accelerate launch "
                    "--multi_gpu --num_processes N)"
                )
            return cls(group)
        if announced > 1:
            raise RuntimeError(
                f"process_group: WORLD_SIZE is {announced} but torch.distributed is not "
                f"initialised; {REMEDY_INIT}"
            )
        return cls(None)

    # -- tensors, in a step -----------------------------------------------------------------

    def broadcast(self, tensor: Tensor, source: int, about: object = "") -> None:
        """Overwrite ``tensor`` (any shape and strides) on every rank by that of ``source``."""
        if self.size == 1:
            return
        received = tensor.contiguous()
        # As bytes what gloo does not know: 16-bit integers, fp8.
        known = received.dtype in BROADCAST
        wire = received if known else received.view(-1).view(torch.uint8)
        with Waiting(self, "a broadcast", about):
            dist.broadcast(wire, group=self.group, group_src=source)
        if received is not tensor:
            copy_strided_(tensor, received)

    def broadcast_all(
        self, pieces: Sequence[tuple[int, Tensor]], about: object = "", async_op: bool = False
    ) -> Works | None:
        """Overwrite each contiguous float tensor by that of the rank beside it.

        One launch where the backend groups calls (NCCL), else one for each piece.

        Args:
            async_op: only start it, and return the work; nobody may write a piece on its source,
                or use it elsewhere, until ``work.wait()``.
        """
        group, device = self.group, pieces[0][1].device

        def each() -> list[Any]:
            return [
                dist.broadcast(piece, group=group, group_src=source, async_op=async_op)
                for source, piece in pieces
            ]

        waiting = Waiting(self, "broadcasts", about)
        with waiting:
            if len(pieces) > 1 and self.backend(device) in GROUPED:
                assert group is not None  # so says the size; for the type checker
                with _compat.coalesced(group, device, async_op) as launch:
                    each()
                works = [launch]
            else:
                works = each()
        return Works(works, waiting) if async_op else None

    def send_to_all(self, pieces: Sequence[Tensor], about: object = "") -> Works:
        """Start to overwrite ``pieces[r]``, contiguous, by that of rank ``r``; returns the work.

        Where :meth:`sends_messages`. Empty pieces are left out. It must be waited for, at once:
        a message that is dropped breaks the connection, and one that outlives a profiler that
        saw its start corrupts memory (torch 2.13).
        """
        mine = [pieces[self.rank]] * self.size
        return self._send_and_receive(pieces, mine, Waiting(self, "messages", about))

    def all_reduce(self, tensor: Tensor, about: object = "") -> None:
        """Replace ``tensor`` by the sum over ranks."""
        if self.size > 1:
            with Waiting(self, "an all-reduce", about):
                dist.all_reduce(tensor, group=self.group)

    def all_gather(
        self, output: Tensor, input: Tensor, about: object = "", async_op: bool = False
    ) -> Works | None:
        """Concatenate the ranks' 1-d ``input`` of equal length; it may be a view of ``output``.

        Args:
            async_op: only start it, and return the work, before whose end nobody may use either.
        """
        if self.size == 1:
            return None
        assert self.group is not None  # so says the size; for the type checker
        waiting = Waiting(self, "an all-gather", about)
        with waiting:
            work = _compat.all_gather_flat(output, input, self.group, async_op)
        return Works([work], waiting) if async_op else None

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        received: Sequence[int] | None = None,
        sent: Sequence[int] | None = None,
        about: object = "",
    ) -> Works:
        """Start to exchange 1-d pieces: ``sent[r]`` elements go to rank ``r``; returns the work.

        The caller must keep both tensors unchanged and alive until ``work.wait()``. The piece
        that stays here need not be in ``output``: read it from ``input``.

        Args:
            received, sent: lengths by rank; without them all are equal, which takes the host no
                time for each rank.
        """
        waiting = Waiting(self, "an all-to-all", about)
        if self.size == 1:
            return Works([], waiting)
        if self.sends_messages(input.device):
            outputs = output.chunk(self.size) if received is None else output.split(list(received))
            inputs = input.chunk(self.size) if sent is None else input.split(list(sent))
            return self._send_and_receive(outputs, inputs, waiting)
        splits = (
            None if received is None else list(received),
            None if sent is None else list(sent),
        )
        with waiting:
            work = dist.all_to_all_single(output, input, *splits, group=self.group, async_op=True)
        return Works([work], waiting)

    def sends_messages(self, device: torch.device) -> bool:
        """Whether spans travel as messages from rank to rank rather than in collectives.

        On gloo: its all-to-all copies the own piece too, its broadcasts wait for one another,
        and both run on the threads of collectives (``launch/benchmark.py collectives``).
        """
        return device.type == "cpu" and self.backend(device) == "gloo"

    def _send_and_receive(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], waiting: Waiting
    ) -> Works:
        self._turn = (self._turn + 1) % TURNS  # several may be under way between the same ranks
        options: dict[str, Any] = {"group": self.group, "tag": TAG + self._turn}
        works = []
        with waiting:
            for distance in range(1, self.size):
                to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
                if inputs[to].numel():
                    works.append(dist.isend(inputs[to], group_dst=to, **options))
                if outputs[source].numel():
                    works.append(dist.irecv(outputs[source], group_src=source, **options))
        return Works(works, waiting)

    def reduce_scatter(self, output: Tensor, input: Tensor, about: object = "") -> Works:
        """Start to sum 1-d ``input`` over ranks, one equal piece for each; returns the work."""
        assert self.group is not None
        waiting = Waiting(self, "a reduce-scatter", about)
        with waiting:
            work = _compat.reduce_scatter_flat(output, input, group=self.group, async_op=True)
        return Works([work], waiting)

    # -- values, for set-up and errors: never in a step ----------------------------------------

    def exchange(self, value: Any, device: torch.device) -> list[Any]:
        """All ranks' picklable values, in rank order; small ones, every rank gets all of them."""
        if self.size == 1:
            return [value]
        data = _bytes(value, device)
        lengths = self._lengths(data)
        padded = data.new_zeros(max(lengths))
        padded[: data.numel()] = data
        gathered = padded.new_empty(padded.numel() * self.size)
        self.all_gather(gathered, padded, "values")
        rows = gathered.cpu().view(self.size, -1)
        return _unpickled(row[:length] for row, length in zip(rows, lengths, strict=True))

    def gather(self, value: Any, device: torch.device) -> list[Any]:
        """All ranks' picklable values, in rank order, on rank 0; nothing on the others."""
        if self.size == 1:
            return [value]
        data = _bytes(value, device)
        lengths = self._lengths(data)
        sent = [data.numel()] + [0] * (self.size - 1)
        received = lengths if self.rank == 0 else [0] * self.size
        gathered = data.new_empty(sum(received))  # not padded: one rank may have nearly everything
        self.all_to_all(gathered, data, received, sent, "values").wait()
        if self.rank != 0:
            return []
        gathered[: data.numel()] = data
        return _unpickled(gathered.cpu().split(lengths))

    def share(self, value: T, device: torch.device) -> T:
        """Rank 0's picklable value on every rank; what the others give is not looked at."""
        if self.size == 1:
            return value
        data = _bytes(value, device) if self.rank == 0 else None
        length = torch.tensor([0 if data is None else data.numel()], device=device)
        self.broadcast(length, 0, "values")
        if data is None:
            data = torch.empty(int(length), dtype=torch.uint8, device=device)
        self.broadcast(data, 0, "values")
        shared: T = _unpickled([data.cpu()])[0]
        return shared

    def _lengths(self, data: Tensor) -> list[int]:
        lengths = torch.empty(self.size, dtype=torch.int64, device=data.device)
        mine = torch.tensor([data.numel()], device=data.device)
        self.all_gather(lengths, mine, "values")
        return [int(length) for length in lengths.tolist()]

    def together(self, fn: Callable[[], T], device: torch.device, call: str = "") -> T:
        """Run ``fn`` on this rank; what it returns if all ranks succeed, else all ranks raise.

        The one way in which something that may fail on one rank alone is done on all of them: a
        rank that raised by itself would leave the others waiting in their next collective. All
        ranks must call it, for their own ``fn``, which must not contain collectives of this
        group. Where all succeed it costs one collective of 16 bytes per rank.

        Args:
            device: where the flags are exchanged, of a kind that the group's backend serves.
            call: what is being done, for example ``"save"``; ranks that meet here in different
                calls all raise an error that names each rank's.

        Raises:
            Exception: on a rank whose ``fn`` raised: that very exception.
            ValueError, TypeError, RuntimeError: on the other ranks, with the ranks that failed
                and their messages; of the kind that was raised there if that is ValueError or
                TypeError, else RuntimeError.
        """
        error: Exception | None = None
        try:
            value = fn()
        except Exception as raised:  # whatever it is, the other ranks must hear of it
            error = raised
        if self.size > 1:
            known = hashlib.sha256(call.encode()).digest()[:7]
            mine = torch.tensor(
                [error is not None, int.from_bytes(known, "little")], dtype=torch.int64
            ).to(device)
            flags = mine.repeat(self.size)
            self.all_gather(flags, mine, call)
            everyone = flags.view(self.size, 2).tolist()
            if any(failed or theirs != everyone[0][1] for failed, theirs in everyone):
                raise_together(self.exchange((call, told(error)), device), error)
        if error is not None:
            raise error
        return value

    def collect(self, fn: Callable[[], T], device: torch.device, call: str = "") -> list[T]:
        """:meth:`together` for values that all ranks need: those of all ranks, in rank order.

        Args:
            fn: what it returns should be small: every rank gets all of it, pickled.
        """
        mine = self.together(lambda: pickle.dumps(fn()), device, call)
        return [pickle.loads(value) for value in self.exchange(mine, device)]

    def topology(self, device: torch.device) -> Topology:
        """What joins the ranks, equal on all of them; one collective of 8 bytes per rank."""
        backend, on_host = self.backend(device), device.type == "cpu"
        if self.size == 1:
            return Topology(backend, on_host=on_host)
        digest = hashlib.sha256(machine().encode()).digest()[:7]
        mine = torch.tensor([int.from_bytes(digest, "little")], device=device)
        gathered = mine.repeat(self.size)
        self.all_gather(gathered, mine, "the machines")
        machines = gathered.tolist()
        node = machines.count(machines[0])
        firsts = machines[::node]
        apart = len(set(firsts)) == len(firsts)
        apart &= machines == [first for first in firsts for _ in range(node)]
        return Topology(backend, node if apart else 1, on_host)

    def backend(self, device: torch.device) -> str:
        """Name of the backend that moves tensors of ``device``, e.g. ``gloo`` or ``nccl``."""
        group = self.group
        if group is None:
            return "none"
        if device.type not in self._backends:
            try:
                self._backends[device.type] = group._get_backend(device).name()
            except RuntimeError:  # a mock group has no backend objects
                self._backends[device.type] = group.name()
        return self._backends[device.type]


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie in memory one by one, so that it can be sent as it is."""
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested)


def copy_strided_(tensor: Tensor, values: Tensor) -> None:
    """``tensor.copy_(values)``; along an expanded dimension elements share memory: writes one."""
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    tensor[once].copy_(values[once])


def machine() -> str:
    """What processes of one machine have in common, containers on it too."""
    try:
        return BOOT_ID.read_text()
    except OSError:  # not Linux
        return socket.gethostname()


def _bytes(value: Any, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)


def _unpickled(pieces: Iterable[Tensor]) -> list[Any]:
    """Values of contiguous bytes on the host."""
    return [
        pickle.loads(ctypes.string_at(piece.data_ptr(), piece.numel()))  # needs no numpy
        for piece in pieces
    ]
