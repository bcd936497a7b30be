"""A process group as shardcast uses it.

Tensor collectives run on the current stream: with ``async_op=False`` the process group launches
on the stream that computes (torch >= 2.8, PyTorch PR 148590), so no event, no ``record_stream``
and no side stream is needed, and whatever runs next sees the result. Those that return a work run
beside it until the work is waited for.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardcast import _compat
from shardcast.comm.objects import ObjectCollectives
from shardcast.plan.algorithms import GROUPED, Topology

REMEDY_INIT = (
    "call torch.distributed.init_process_group(...) on every rank before shardcast.shard(...)"
)

BROADCAST = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip

TAG, TURNS = 0x5C000000, 1 << 16  # our sends, apart from those of a script
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Comm(ObjectCollectives):
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
    def is_alive(self) -> bool:
        """Whether the process group was not destroyed."""
        return self._group is None or self._group() is not None

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

    def among(self, ranks: Sequence[int], name: str) -> Comm:
        """A new group of some ranks of this one, this rank among them. All of them must call it."""
        group = self.group
        assert group is not None  # so says the size; for the type checker
        members = dist.get_process_group_ranks(group)
        return Comm(
            dist.new_group(
                [members[rank] for rank in ranks], backend=dist.get_backend_config(group),
                use_local_synchronization=True, group_desc=name,
            )
        )  # fmt: skip

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
        copies = [pieces[self.rank]] * self.size
        return self._send_and_receive(pieces, copies, Waiting(self, "messages", about))

    def all_reduce(
        self, tensor: Tensor, about: object = "", async_op: bool = False
    ) -> Works | None:
        """Replace ``tensor`` by the sum over ranks.

        Args:
            async_op: only start it, and return the work, before whose end nobody may use it.
        """
        if self.size == 1:
            return None
        waiting = Waiting(self, "an all-reduce", about)
        with waiting:
            work = dist.all_reduce(tensor, group=self.group, async_op=async_op)
        return Works([work], waiting) if async_op else None

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

    def all_gather_all(
        self, pairs: Sequence[tuple[Tensor, Tensor]], about: object = "", async_op: bool = False
    ) -> Works | None:
        """:meth:`all_gather` of each ``(output, input)``; one launch where the backend groups.

        One for each dtype: NCCL refuses several in a call.
        """
        if self.size == 1:
            return None
        group = self.group
        assert group is not None  # so says the size; for the type checker
        if len(pairs) == 1 or self.backend(pairs[0][0].device) not in GROUPED:
            works = [self.all_gather(*pair, about, async_op) for pair in pairs]
            return Works(works, Waiting(self, "all-gathers", about)) if async_op else None
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for pair in pairs:
            by_dtype.setdefault(pair[0].dtype, []).append(pair)
        waiting, launches = Waiting(self, "all-gathers", about), []
        with waiting:
            for pairs_of_dtype in by_dtype.values():
                with _compat.coalesced(group, None, async_op) as launch:
                    for output, input in pairs_of_dtype:
                        _compat.all_gather_flat(output, input, group, async_op)
                launches.append(launch)
        return Works(launches, waiting) if async_op else None

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

    def topology(self, device: torch.device) -> Topology:
        """What joins the ranks, equal on all of them; one collective of 8 bytes per rank."""
        backend, on_host = self.backend(device), device.type == "cpu"
        if self.size == 1:
            return Topology(backend, on_host=on_host)
        digest = hashlib.sha256(machine().encode()).digest()[:7]
        own = torch.tensor([int.from_bytes(digest, "little")], device=device)
        gathered = own.repeat(self.size)
        self.all_gather(gathered, own, "the machines")
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


class Waiting:
    """A context within which an error of the backend says what this rank was waiting for.

    Args:
        op: the collective.
        about: whose it is; turned into text only for an error.
    """

    __slots__ = ("_about", "_comm", "_op")

    def __init__(self, comm: Comm, op: str, about: object) -> None:
        self._comm, self._op, self._about = comm, op, about

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        # Subclasses, such as one for a lack of memory, say themselves what is the matter.
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            return
        comm = self._comm
        of = f" of {self._about}" if self._about else ""
        raise RuntimeError(
            f"rank {comm.rank} of {comm.size} waited for the other ranks in {self._op}{of}, "
            f"after {comm.steps} steps, and the process group gave up: {error}. Usually another "
            "rank made other calls (one more batch, two steps, or clip_grad_norm_, "
            "full_state_dict, save or the like on some ranks only), raised an error of its own, or "
            "ended: look at what the others were doing. See 'waited for the other ranks' in "
            "docs/troubleshooting.md"
        ) from error


class Works:
    """Several pieces of asynchronous work, waited for as one."""

    __slots__ = ("_waiting", "_works")

    def __init__(self, works: Sequence[Any], waiting: Waiting) -> None:
        self._works, self._waiting = works, waiting

    def wait(self) -> None:
        """Return when all are done; on an accelerator it is the current stream that waits."""
        with self._waiting:
            for work in self._works:
                work.wait()
