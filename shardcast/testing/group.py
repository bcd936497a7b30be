"""Shared by all process groups of this package: parse a call, check it, log it.

Functions of ``torch.distributed`` call a process group's methods with option objects, under names
that differ between torch versions. :class:`RecordedGroup` turns each call into one :class:`Call`
and passes it to ``_issue``, the only method that a kind of group has to add. :func:`deliver`
defines the *meaning* of each collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .record import Collective

Combine = Callable[[str, Sequence[Tensor], Tensor], None]
"""``combine(reduce_op, parts, out)`` writes the reduction of all ranks' parts to ``out``."""

REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


@dataclass(frozen=True)
class Call:
    """A collective of one rank: its inputs, and where its results go::

        op               inputs                    outputs
        all_reduce       [t]                       [t]
        reduce           [t]                       [t] on dest
        broadcast        [t] on source             [t] elsewhere
        all_gather*      [t]                       one per rank
        gather           [t]                       one per rank, on dest
        scatter          one per rank, on source   [t]
        reduce_scatter*  one per rank              [t]
        all_to_all*      one per rank              one per rank
        barrier          []                        []

    ``*`` includes ``_single`` variants, whose one big tensor is cut into such chunks. The tensors
    are ``.data``: like real collectives, these write without autograd and version bumps.
    """

    record: Collective
    inputs: list[Tensor]
    outputs: list[Tensor]


def deliver(rank: int, call: Call, sent: Sequence[Sequence[Tensor]], combine: Combine) -> None:
    """Write to ``call.outputs`` what ``rank`` receives if each rank ``r`` sends ``sent[r]``."""
    record, outputs = call.record, call.outputs
    if not outputs:
        return
    if record.reduce_op is not None:
        place = rank if record.op.startswith("reduce_scatter") else 0
        combine(record.reduce_op, [parts[place] for parts in sent], outputs[0])
        return
    if record.source is not None:
        place = rank if record.op == "scatter" else 0
        arriving = [sent[record.source][place]]
    else:
        place = rank if record.op.startswith("all_to_all") else 0
        arriving = [parts[place] for parts in sent]
    for output, chunk in zip(outputs, arriving, strict=True):
        output.copy_(chunk.view_as(output))


class MockWork(dist.Work):
    """The handle of a collective. The first ``wait()`` runs the rest of the collective.

    Args:
        finish: the rest; ``None`` if the call did everything.
        ready: whether ``wait()`` would not block.
    """

    def __init__(
        self,
        finish: Callable[[], object] | None = None,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__()
        self._finish, self._ready = finish, ready

    def wait(self, timeout: timedelta | None = None) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        return self._finish is None or self._ready()


class RecordedGroup(dist.ProcessGroup):
    """A process group that needs no ``init_process_group`` and logs every collective.

    Pass it as ``group=`` to functions of ``torch.distributed``, with group ranks (``group_src``,
    ``group_dst``). Tensors must be contiguous. Coalesced operations work if torch passes them to
    the backend one by one (broadcasts). Messages between two ranks are not collectives and are not
    logged.
    """

    log: list[Collective]
    """This rank's calls in this group so far, in order."""
    rank_log: list[Collective]
    """This rank's calls in all groups of its mesh so far, in order; without a mesh, ``log``."""

    def __init__(self, rank: int, world_size: int, backend: str) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        super().__init__(rank, world_size)
        self._backend_name = backend
        self._group_name = ""
        self._coalescing: int | None = None  # seq of the first collective of the current launch
        self._works: list[dist.Work] = []  # works of that launch
        self.log = self.rank_log = []

    def getBackendName(self) -> str:  # noqa: N802, the name under which torch asks
        return self._backend_name

    def _get_backend(self, _device: object) -> object:
        return self  # torch asks the backend what it can coalesce; here nothing

    def _set_group_name(self, name: object) -> None:
        self._group_name = name  # torch leaves this to a backend, and there is none

    @property
    def group_name(self) -> Any:
        """Number by which ``torch.distributed`` finds a group of a mesh; otherwise empty."""
        return self._group_name

    def _issue(self, call: Call) -> dist.Work:
        raise NotImplementedError

    def _message(self, tensor: Tensor, source: int, dest: int, tag: int) -> dist.Work:
        """Send or receive one message between this rank and another one."""
        raise NotImplementedError

    def _note(self, record: Collective) -> None:
        self.log.append(record)
        if self.rank_log is not self.log:
            self.rank_log.append(record)

    def _name(self) -> str:
        """Return the name from a mesh or ``new_group(group_desc=...)``; empty for a default."""
        name = self.group_desc
        unnamed = ("", "undefined", "default_pg", "mesh_default")
        return "" if name in unnamed else name.removeprefix("mesh_")

    # torch.distributed calls the methods below, under these names in torch 2.11, including aliases.
    # Options are optional, because code also calls ``group.barrier()`` directly.

    def allreduce(
        self, tensors: list[Tensor], opts: dist.AllreduceOptions | None = None
    ) -> dist.Work:
        return self._call("all_reduce", tensors, tensors, opts or dist.AllreduceOptions())

    def reduce(self, tensors: list[Tensor], opts: dist.ReduceOptions | None = None) -> dist.Work:
        opts = opts or dist.ReduceOptions()
        outputs = tensors if opts.rootRank == self.rank() else []
        return self._call("reduce", tensors, outputs, opts, dest=opts.rootRank)

    def broadcast(
        self, tensors: list[Tensor], opts: dist.BroadcastOptions | None = None
    ) -> dist.Work:
        opts = opts or dist.BroadcastOptions()
        sends = opts.rootRank == self.rank()
        inputs, outputs = (tensors, []) if sends else ([], tensors)
        return self._call("broadcast", inputs, outputs, opts, source=opts.rootRank)

    def allgather(
        self,
        outputs: list[list[Tensor]],
        inputs: list[Tensor],
        opts: object = None,
    ) -> dist.Work:
        return self._call("all_gather", inputs, outputs[0], opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: object = None) -> dist.Work:
        outputs = self._chunks("all_gather_single", output)
        return self._call("all_gather_single", [input], outputs, opts)

    _allgather_base = all_gather_single

    def gather(
        self,
        outputs: list[list[Tensor]],
        inputs: list[Tensor],
        opts: dist.GatherOptions | None = None,
    ) -> dist.Work:
        opts = opts or dist.GatherOptions()
        return self._call("gather", inputs, outputs[0] if outputs else [], opts, dest=opts.rootRank)

    def scatter(
        self,
        outputs: list[Tensor],
        inputs: list[list[Tensor]],
        opts: dist.ScatterOptions | None = None,
    ) -> dist.Work:
        opts = opts or dist.ScatterOptions()
        details = {"source": opts.rootRank, "shape": tuple(outputs[0].shape)}
        return self._call("scatter", inputs[0] if inputs else [], outputs, opts, **details)

    def reduce_scatter(
        self,
        outputs: list[Tensor],
        inputs: list[list[Tensor]],
        opts: dist.ReduceScatterOptions | None = None,
    ) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        shape = tuple(outputs[0].shape)
        return self._call("reduce_scatter", inputs[0], outputs, opts, shape=shape)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: dist.ReduceScatterOptions | None = None
    ) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        inputs = self._chunks("reduce_scatter_single", input)
        shape = tuple(output.shape)
        return self._call("reduce_scatter_single", inputs, [output], opts, shape=shape)

    _reduce_scatter_base = reduce_scatter_single

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: dist.AllToAllOptions | None = None
    ) -> dist.Work:
        return self._call(
            "all_to_all",
            inputs,
            outputs,
            opts,
            input_splits=tuple(chunk.numel() for chunk in inputs),
            output_splits=tuple(chunk.numel() for chunk in outputs),
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: dist.AllToAllOptions | None = None,
    ) -> dist.Work:
        inputs = self._split("input", input, input_splits)
        outputs = self._split("output", output, output_splits)
        return self._call(
            "all_to_all_single",
            inputs,
            outputs,
            opts,
            shape=tuple(input.shape),
            input_splits=tuple(chunk.size(0) for chunk in inputs),
            output_splits=tuple(chunk.size(0) for chunk in outputs),
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: dist.BarrierOptions | None = None) -> dist.Work:
        return self._call("barrier", [], [], opts)

    def send(self, tensors: list[Tensor], dest: int, tag: int = 0) -> dist.Work:
        return self._message(self._alone("send", tensors, dest), self.rank(), dest, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        return self._message(self._alone("recv", tensors, source), source, self.rank(), tag)

    def _alone(self, op: str, tensors: list[Tensor], peer: int) -> Tensor:
        if len(tensors) != 1 or not tensors[0].is_contiguous():
            self._refuse(op, "expected one contiguous tensor")
        if not 0 <= peer < self.size() or peer == self.rank():
            self._refuse(op, f"rank {peer} is not another one in a world of {self.size()}")
        return tensors[0]

    # Called by functional collectives, with one or several tensors: collectives of one launch.

    def allreduce_coalesced(
        self, tensors: list[Tensor], opts: dist.AllreduceCoalescedOptions | None = None
    ) -> dist.Work:
        launches = [partial(self.allreduce, [tensor], opts) for tensor in tensors]
        return self._together("all_reduce", tensors, launches)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        launches = [partial(self.all_gather_single, *pair, opts) for pair in pairs]
        return self._together("all_gather_single", outputs, launches)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: dist.ReduceScatterOptions | None = None,
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        launches = [partial(self.reduce_scatter_single, *pair, opts) for pair in pairs]
        return self._together("reduce_scatter_single", outputs, launches)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _together(
        self, op: str, tensors: Sequence[Tensor], launches: Sequence[Callable[[], dist.Work]]
    ) -> dist.Work:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:  # like NCCL
            names = ", ".join(sorted(map(str, dtypes)))
            self._refuse(op, f"a launch of several needs tensors of one dtype, got {names}")
        if len(launches) == 1:
            return launches[0]()
        device = torch.device("cpu")
        self._start_coalescing(device)
        for launch in launches:
            launch()
        return self._end_coalescing(device)

    # Called by torch around the collectives of one launch.

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing, self._works = len(self.log), []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalescing, self._works = self._works, None, []
        return MockWork(
            lambda: [work.wait() for work in works],
            lambda: all(work.is_completed() for work in works),
        )

    # Parsing and checking, before any other rank is involved.

    def _call(
        self, op: str, inputs: list[Tensor], outputs: list[Tensor], opts: Any, **details: Any
    ) -> dist.Work:
        tensors = [*inputs, *outputs]
        self._check(op, inputs, outputs, details)
        if tensors:
            details.setdefault("shape", tuple(tensors[0].shape))
            details["dtype"] = tensors[0].dtype
        if hasattr(opts, "reduceOp"):
            details["reduce_op"] = self._reduce_op(op, opts.reduceOp, tensors[0].dtype)
        record = Collective(
            len(self.log),
            op,
            launched_with=self._coalescing,
            async_op=bool(getattr(opts, "asyncOp", False)),
            group=self._name(),
            nbytes=max(sum(t.nbytes for t in inputs), sum(t.nbytes for t in outputs)),
            **details,
        )
        work = self._issue(Call(record, [t.data for t in inputs], [t.data for t in outputs]))
        if self._coalescing is not None:
            self._works.append(work)
        return work

    def _check(
        self, op: str, inputs: list[Tensor], outputs: list[Tensor], details: dict[str, Any]
    ) -> None:
        tensors = [*inputs, *outputs]
        roots = [details[name] for name in ("source", "dest") if name in details]
        for root in roots:
            if not 0 <= root < self.size():
                self._refuse(op, f"rank {root} is not in a world of {self.size()}")
        optional = bool(roots) or op == "barrier"  # then a rank may have no inputs or no outputs
        many_in = op.startswith(("scatter", "reduce_scatter", "all_to_all"))
        many_out = op.startswith(("gather", "all_gather", "all_to_all"))
        for side, many in ((inputs, many_in), (outputs, many_out)):
            expected = self.size() if many else 1
            if len(side) != expected and (side or not optional):
                self._refuse(op, f"expected {expected} tensor(s), got {len(side)}")
        if len({tensor.dtype for tensor in tensors}) > 1:
            dtypes = sorted({str(tensor.dtype) for tensor in tensors})
            self._refuse(op, f"inputs and outputs have different dtypes: {', '.join(dtypes)}")
        if not op.startswith("all_to_all") and len({tensor.numel() for tensor in tensors}) > 1:
            sizes = sorted({tensor.numel() for tensor in tensors})
            self._refuse(op, f"inputs and outputs have different sizes: {sizes} elements")
        if op.startswith("all_to_all"):
            sends, expects = (list(side[self.rank()].shape) for side in (inputs, outputs))
            if sends != expects:
                self._refuse(op, f"sends {sends} to itself, where it expects {expects}")
        if not all(tensor.is_contiguous() for tensor in tensors):
            self._refuse(op, "tensors must be contiguous")

    def _chunks(self, op: str, tensor: Tensor) -> list[Tensor]:
        """Cut a tensor into one flat chunk of equal size per rank."""
        world = self.size()
        if not tensor.is_contiguous():
            self._refuse(op, "tensors must be contiguous")
        if tensor.numel() % world:
            self._refuse(op, f"{tensor.numel()} elements do not divide by {world} ranks")
        return list(tensor.detach().view(-1).tensor_split(world))

    def _split(self, side: str, tensor: Tensor, splits: Sequence[int]) -> list[Tensor]:
        """Cut a tensor's rows by ``splits``; evenly without them."""
        world, rows = self.size(), len(tensor)
        if not splits and rows % world:
            self._refuse("all_to_all_single", f"{side}: {rows} rows do not divide by {world} ranks")
        splits = list(splits) or [rows // world] * world
        if len(splits) != world or sum(splits) != rows:
            self._refuse(
                "all_to_all_single", f"{side} splits {splits} do not cut {rows} rows for {world}"
            )
        return list(torch.split(tensor.detach(), splits))

    def _reduce_op(self, op: str, reduce_op: object, dtype: torch.dtype) -> str:
        name = next((n for n in REDUCE_OPS if reduce_op == getattr(dist.ReduceOp, n)), None)
        if name is None:
            self._refuse(op, f"this reduce op is not supported; known are {', '.join(REDUCE_OPS)}")
        if name == "AVG" and not dtype.is_floating_point:
            self._refuse(op, f"there is no average of {dtype}")
        return name

    def _refuse(self, op: str, why: str) -> NoReturn:
        raise ValueError(f"rank {self.rank()}: {op}: {why}")
