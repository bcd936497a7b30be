"""A process group as a step uses it.

Tensor collectives run on the current stream: with ``async_op=False`` the process group launches on
the computing stream (torch >= 2.8, PyTorch PR 148590). So no event, ``record_stream`` or side
stream is needed, and later work sees the result. Collectives with ``async_op=True`` run
concurrently until they are waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardcast import _compat
from shardcast._compat import dtensor, groups
from shardcast.comm.watch import Watch
from shardcast.messages import page
from shardcast.plan.algorithms import GROUPED
from shardcast.plan.precision import MASTER_DTYPE

if TYPE_CHECKING:
    from shardcast._compat.groups import Store

BROADCAST = {  # for gloo, which lacks 16-bit integers and fp8; these are sent as bytes
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
}
TAG, TURNS = 0x5C000000, 1 << 16  # tags of our sends, distinct from a script's


class TensorCollectives:
    """The ranks that share one model: a process group, or this process alone.

    Ranks are group ranks, ``0 .. size-1``. All ranks of the group must call every method in the
    same order; with one rank they do nothing. ``about`` names the collective for the error that is
    raised if other ranks do not join it. If a method is called with ``async_op``, or has no such
    argument, the caller must wait for the result. Until then it must not write, free or use the
    tensors.

    Attributes:
        steps: optimizer steps made so far.
        gave_up: a collective failed.
        watch: watch of this rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        # A weak reference: a model that outlives destroy_process_group() must not keep gloo's
        # threads alive. They take the interpreter lock when they release a tensor, and a process
        # that exits at that time is aborted ("terminate called without an active exception").
        self._group = _compat.weak_group(group)
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.steps, self.gave_up = 0, False
        self._turn = 0
        self._backends: dict[str, str] = {}  # backend by kind of device
        self.watch = Watch.begin(self)

    @property
    def is_alive(self) -> bool:
        """Whether the process group still exists."""
        return self._group is None or self._group() is not None

    @property
    def store(self) -> Store | None:
        """Store of the process group; ``None`` without a group, or after it was destroyed."""
        group = None if self._group is None else self._group()
        return None if group is None else groups.store_of(group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; ``None`` for this process alone."""
        if self._group is None:
            return None
        group = self._group()
        if group is None:
            raise RuntimeError(
                "the process group of the sharded model was destroyed: destroy it when training "
                "is over, or shard the model again with a new group"
            )
        return group

    def backend(self, device: torch.device) -> str:
        """Return the name of the backend for tensors on ``device``, e.g. ``gloo`` or ``nccl``."""
        if (cached := self._backends.get(device.type)) is not None:
            return cached
        group = self.group
        if group is None:
            return "none"
        try:
            backend: str = group._get_backend(device).name()
        except RuntimeError:  # a mock group has no backend objects
            backend = group.name()
        self._backends[device.type] = backend
        return backend

    def sends_messages(self, device: torch.device) -> bool:
        """Return whether spans are sent as messages from rank to rank instead of in collectives.

        True on gloo: its all-to-all also copies a rank's own piece, its broadcasts wait for one
        another, and both run on the threads of collectives.
        """
        return device.type == "cpu" and self.backend(device) == "gloo"

    def broadcast(self, tensor: Tensor, source: int, about: object = "") -> None:
        """Overwrite ``tensor`` on every rank with that of ``source``; any dtype and strides."""
        if self.size == 1:
            return
        received = tensor.contiguous()
        is_supported = received.dtype in BROADCAST
        wire = received if is_supported else received.view(-1).view(torch.uint8)
        with Work(self, "a broadcast", about):
            dist.broadcast(wire, group=self.group, group_src=source)
        if received is not tensor:
            copy_strided_(tensor, received)

    def broadcast_all(
        self, pieces: Sequence[tuple[int, Tensor]], about: object = "", async_op: bool = False
    ) -> Work:
        """Overwrite each contiguous float tensor with that of the rank listed with it.

        One launch if the backend groups calls (NCCL), otherwise one per piece.
        """
        work = Work(self, "broadcasts", about)
        calls = [
            partial(dist.broadcast, piece, group=self.group, group_src=source, async_op=async_op)
            for source, piece in pieces
        ]
        with work:
            if len(pieces) > 1 and self.backend(device := pieces[0][1].device) in GROUPED:
                with groups.coalesced(self.group, device, async_op) as launch:
                    for call in calls:
                        call()
                work.launched += [launch] * async_op
            else:
                work.launched += [call() for call in calls]
        return work

    def all_gather_all(
        self, pairs: Sequence[tuple[Tensor, Tensor]], about: object = "", async_op: bool = False
    ) -> Work:
        """:meth:`all_gather` each ``(output, input)``, in one launch if the backend groups calls.

        One launch per dtype, because NCCL refuses several dtypes in a call.
        """
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for pair in pairs if self.size > 1 else ():
            by_dtype.setdefault(pair[0].dtype, []).append(pair)
        work = Work(self, "all-gathers", about)
        with work:
            for alike in by_dtype.values():
                if len(alike) > 1 and self.backend(alike[0][0].device) in GROUPED:
                    work.launched += [groups.all_gather_several(alike, self.group, async_op)]
                else:
                    work.launched += [
                        _compat.all_gather_flat(*pair, self.group, async_op) for pair in alike
                    ]
        return work

    def all_reduce(self, tensor: Tensor, about: object = "", async_op: bool = False) -> Work:
        """Replace ``tensor`` by the sum over ranks."""
        work = Work(self, "an all-reduce", about)
        if self.size > 1:
            with work:
                work.launched += [dist.all_reduce(tensor, group=self.group, async_op=async_op)]
        return work

    def all_gather(self, output: Tensor, input: Tensor, about: object = "") -> None:
        """Concatenate the ranks' 1-d ``input`` of equal length; it may be a view of ``output``."""
        if self.size > 1:
            with Work(self, "an all-gather", about):
                _compat.all_gather_flat(output, input, self.group)

    def reduce_scatter(self, output: Tensor, input: Tensor, about: object = "") -> Work:
        """Start to sum 1-d ``input`` over ranks; each rank gets one piece of equal length."""
        work = Work(self, "a reduce-scatter", about)
        with work:
            flat = _compat.reduce_scatter_flat
            work.launched += [flat(output, input, group=self.group, async_op=True)]
        return work

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        received: Sequence[int] | None = None,
        sent: Sequence[int] | None = None,
        about: object = "",
    ) -> Work:
        """Start to exchange 1-d pieces: ``sent[r]`` elements go to rank ``r``.

        This rank's own piece may be missing in ``output``: read it from ``input``.

        Args:
            received, sent: lengths by rank. Without them all are equal, which saves the host time
                per rank.
        """
        work = Work(self, "an all-to-all", about)
        if self.size == 1:
            return work
        if self.sends_messages(input.device):
            outputs = output.chunk(self.size) if received is None else output.split(list(received))
            inputs = input.chunk(self.size) if sent is None else input.split(list(sent))
            self._send_and_receive(outputs, inputs, work)
            return work
        with work:
            work.launched += [
                dist.all_to_all_single(output, input, received, sent, self.group, async_op=True)
            ]
        return work

    def send_to_all(self, pieces: Sequence[Tensor], about: object = "") -> Work:
        """Start to overwrite ``pieces[r]``, contiguous, with that of rank ``r``.

        Use it if :meth:`sends_messages`. Empty pieces are left out. Wait for it at once: a dropped
        message breaks the connection, and one that outlives a profiler which saw its start corrupts
        memory (torch 2.13).
        """
        work = Work(self, "messages", about)
        self._send_and_receive(pieces, [pieces[self.rank]] * self.size, work)
        return work

    def _send_and_receive(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], work: Work
    ) -> None:
        self._turn = (self._turn + 1) % TURNS  # several may be in flight between the same ranks
        options: dict[str, Any] = {"group": self.group, "tag": TAG + self._turn}
        with work:
            # Receives first. Otherwise, between two ranks, gloo would queue the ready signal behind
            # the data, and the link would be busy in only one direction at a time.
            for distance in range(1, self.size):
                source = (self.rank - distance) % self.size
                if outputs[source].numel():
                    work.launched += [dist.irecv(outputs[source], group_src=source, **options)]
            for distance in range(1, self.size):
                to = (self.rank + distance) % self.size
                if inputs[to].numel():
                    work.launched += [dist.isend(inputs[to], group_dst=to, **options)]


class Work:
    """The collectives of one call: wait for all of them at once, and launch them in its context.

    In both cases an error of the backend names what this rank was waiting for, and a long wait is
    reported.

    Args:
        op: the collective.
        about: its purpose; converted to text only for messages.
    """

    __slots__ = ("_about", "_op", "comm", "launched")

    def __init__(self, comm: TensorCollectives, op: str, about: object) -> None:
        self.comm, self._op, self._about = comm, op, about
        self.launched: list[Any] = []  # None: already finished

    def __str__(self) -> str:
        return f"{self._op} of {self._about}" if self._about else self._op

    def __enter__(self) -> None:
        watch = self.comm.watch
        watch.begun += 1
        watch.waits = self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        comm = self.comm
        comm.watch.waits = None
        # Subclasses, such as out-of-memory errors, explain themselves.
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            return
        comm.watch.gave_up = comm.gave_up = True
        lookout = comm.watch.lookout
        places = "" if lookout is None else lookout.last_known(comm)
        sentence = f"Where they were seen last: {places}. " if places else ""
        raise RuntimeError(
            f"rank {comm.rank} of {comm.size} waited for the other ranks in {self}, after "
            f"{comm.watch.steps} steps, and the process group gave up: {error}. "
            f"{sentence}Usually another rank made different calls (one more batch, two steps, or "
            "a call such as clip_grad_norm_, full_state_dict or save on some ranks only), "
            "raised an error, or exited: check the other ranks' logs. See 'waited for the other "
            f"ranks' in {page('troubleshooting')}"
        ) from error

    def wait(self) -> None:
        """Wait for all of them; on an accelerator the current stream waits."""
        with self:
            for launched in self.launched:
                if launched is not None:
                    launched.wait()


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are all stored, so that it can be sent as it is."""
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested)


def copy_strided_(tensor: Tensor, values: Tensor) -> None:
    """Run ``tensor.copy_(values)``; along an expanded dimension write the shared element once."""
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    tensor[once].copy_(values[once])


def redistributed(grad: Any, placements: Sequence[Any]) -> Tensor:
    """Return the local tensor of a DTensor with other placements, in its own dtype.

    Sums are made in the dtype of masters, because torch would sum in the gradient's. Collective:
    every rank of its mesh.
    """
    sums = any(placement.is_partial() for placement in grad.placements)
    exact = grad.to(MASTER_DTYPE) if sums else grad
    moved = exact.redistribute(placements=placements).to(grad.dtype)
    return dtensor.arrived(moved.to_local()).contiguous()
