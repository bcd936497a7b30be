"""A process group as a step uses it.

Tensor collectives run on the current stream: with ``async_op=False`` the process group launches
on the stream that computes (torch >= 2.8, PyTorch PR 148590), so no event, no ``record_stream``
and no side stream is needed, and whatever runs next sees the result. The work of others runs at
the same time until it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardcast import _compat
from shardcast._compat import dtensor, groups
from shardcast.comm.watch import Watch
from shardcast.messages import page
from shardcast.plan.algorithms import GROUPED
from shardcast.plan.precision import MASTER_DTYPE

BROADCAST = {  # by gloo, which knows no 16-bit integers, no fp8: those go as bytes
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
TAG, TURNS = 0x5C000000, 1 << 16  # our sends, apart from those of a script


class TensorCollectives:
    """The ranks that share one model: a process group, or this process alone.

    Ranks here are group ranks, ``0 .. size-1``. Every method must be called by all ranks of the
    group in the same order; on a world of one they do nothing. ``about`` says whose collective it
    is, for the error that comes when other ranks do not join it. What they return is to be waited
    for where they are called with ``async_op``, or have no such argument; until then nobody may
    write, free or use the tensors.

    Attributes:
        steps: optimizer steps made so far.
        gave_up: a collective failed.
        watch: of this rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        # Held weakly: a model that outlives destroy_process_group() must not keep the threads of
        # gloo, which take the interpreter when they let go of a tensor. A process that ends while
        # they do is aborted ("terminate called without an active exception").
        self._group = _compat.weak_group(group)
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.steps, self.gave_up = 0, False
        self._turn = 0
        self._backends: dict[str, str] = {}  # by kind of device
        self.watch = Watch.begin(self)

    @property
    def is_alive(self) -> bool:
        """Return whether the process group was not destroyed."""
        return self._group is None or self._group() is not None

    @property
    def store(self) -> Any:
        """The store of the process group; None without one, or once it was destroyed."""
        group = None if self._group is None else self._group()
        return None if group is None else groups.store_of(group)

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

    def backend(self, device: torch.device) -> str:
        """Name of the backend that moves tensors of ``device``, e.g. ``gloo`` or ``nccl``."""
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
        """Return whether spans travel as messages from rank to rank rather than in collectives.

        On gloo: its all-to-all copies the own piece too, its broadcasts wait for one another,
        and both run on the threads of collectives.
        """
        return device.type == "cpu" and self.backend(device) == "gloo"

    def broadcast(self, tensor: Tensor, source: int, about: object = "") -> None:
        """Overwrite ``tensor`` on every rank by that of ``source``; of any dtype and strides."""
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
        """Overwrite each contiguous float tensor by that of the rank next to it.

        One launch where the backend groups calls (NCCL), else one for each piece.
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
        """:meth:`all_gather` of each ``(output, input)``; one launch where the backend groups.

        One for each dtype: NCCL refuses several in a call.
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
        """Start to sum 1-d ``input`` over ranks, one equal piece for each."""
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

        The piece that stays here need not be in ``output``: read it from ``input``.

        Args:
            received, sent: lengths by rank; without them all are equal, which takes the host no
                time for each rank.
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
            flat = _compat.all_to_all_flat
            work.launched += [flat(self.group, output, input, received or (), sent or ())]
        return work

    def send_to_all(self, pieces: Sequence[Tensor], about: object = "") -> Work:
        """Start to overwrite ``pieces[r]``, contiguous, by that of rank ``r``.

        Where :meth:`sends_messages`. Empty pieces are left out. It must be waited for, at once:
        a message that is dropped breaks the connection, and one that outlives a profiler that
        saw its start corrupts memory (torch 2.13).
        """
        work = Work(self, "messages", about)
        self._send_and_receive(pieces, [pieces[self.rank]] * self.size, work)
        return work

    def _send_and_receive(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], work: Work
    ) -> None:
        self._turn = (self._turn + 1) % TURNS  # several may be under way between the same ranks
        options: dict[str, Any] = {"group": self.group, "tag": TAG + self._turn}
        with work:
            # Receives first: between two ranks, gloo would have the word that one may begin wait
            # behind what is sent to it, and the link is busy in one direction at a time.
            for distance in range(1, self.size):
                source = (self.rank - distance) % self.size
                if outputs[source].numel():
                    work.launched += [dist.irecv(outputs[source], group_src=source, **options)]
            for distance in range(1, self.size):
                to = (self.rank + distance) % self.size
                if inputs[to].numel():
                    work.launched += [dist.isend(inputs[to], group_dst=to, **options)]


class Work:
    """The collectives of one call, waited for as one, and a context in which they are launched.

    In both an error of the backend says what this rank was waiting for, and a long wait is told.

    Args:
        op: the collective.
        about: whose it is; turned into text only to tell of it.
    """

    __slots__ = ("_about", "_op", "comm", "launched")

    def __init__(self, comm: TensorCollectives, op: str, about: object) -> None:
        self.comm, self._op, self._about = comm, op, about
        self.launched: list[Any] = []  # None: of what has run

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
        # Subclasses, such as one for a lack of memory, say themselves what is the matter.
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            return
        comm.watch.gave_up = comm.gave_up = True
        lookout = comm.watch.lookout
        places = "" if lookout is None else lookout.last_known(comm)
        sentence = f"Where they were seen last: {places}. " if places else ""
        raise RuntimeError(
            f"rank {comm.rank} of {comm.size} waited for the other ranks in {self}, "
            f"after {comm.watch.steps} steps, and the process group gave up: {error}. {sentence}"
            "Usually another rank made other calls (one more batch, two steps, or clip_grad_norm_, "
            "full_state_dict, save or the like on some ranks only), raised an error of its own, or "
            "ended: look at what the others were doing. See 'waited for the other ranks' in "
            f"{page('troubleshooting')}"
        ) from error

    def wait(self) -> None:
        """Return when all are done; on an accelerator it is the current stream that waits."""
        with self:
            for launched in self.launched:
                if launched is not None:
                    launched.wait()


def is_dense(tensor: Tensor) -> bool:
    """Return whether its elements lie in memory one by one, so that it can be sent as it is."""
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested)


def copy_strided_(tensor: Tensor, values: Tensor) -> None:
    """``tensor.copy_(values)``; along an expanded dimension elements share memory: writes one."""
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    tensor[once].copy_(values[once])


def redistributed(grad: Any, placements: Sequence[Any]) -> Tensor:
    """The local tensor of a DTensor that is to lie in another way, in its own dtype.

    Sums are made in the dtype of masters: torch's own reduction would be in that of the gradient.
    All ranks of its mesh must call it.
    """
    sums = any(placement.is_partial() for placement in grad.placements)
    exact = grad.to(MASTER_DTYPE) if sums else grad
    moved = exact.redistribute(placements=placements).to(grad.dtype)
    return dtensor.arrived(moved.to_local()).contiguous()
