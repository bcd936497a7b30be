"""One rank of a world of any size, in one process, with imagined peers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, overload

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ._compat import separate_process_groups
from .faults import BufferHazardError
from .group import Call, MockWork, RecordedGroup, deliver
from .mesh import Shape, rank_of_mesh, ranks_of
from .record import Collective


@overload
def fake_world(world_size: int, rank: int = 0) -> AbstractContextManager[FakeGroup]: ...
@overload
def fake_world(
    world_size: Mapping[str, int], rank: int = 0
) -> AbstractContextManager[DeviceMesh]: ...
@contextmanager
def fake_world(world_size: Shape, rank: int = 0) -> Iterator[Any]:
    """Yield the process group of ``rank`` in a world of ``world_size``, with imagined peers.

    The other ranks are *replicas*: they hold the same tensors as this one and make the same calls.
    So values are as if every rank did the same:

    * ``all_reduce``, ``reduce``, ``reduce_scatter``: SUM multiplies by ``world_size``, PRODUCT
      raises to that power, BXOR leaves 0 when it is even; AVG, MIN, MAX, BAND, BOR change nothing;
    * ``broadcast`` changes nothing, ``all_gather`` copies this rank's tensor ``world_size`` times;
    * ``all_to_all`` receives from each peer what it would send with the same input and splits: this
      rank's own chunk for itself, ``world_size`` times.

    Use it to check layout, memory and the sequence of collectives (``group.log``) of any rank of a
    large world. A world of 1,024 costs as much as one rank. It copies only what a real group would
    copy, and accepts meta tensors. For real values use
    :func:`~shardcast.testing.threaded_world`.

    If you pass mesh sizes by name, outer dimension first, it yields the ``DeviceMesh`` of
    ``rank``, and inside the block this thread is that rank of a default process group.
    ``parallelize_module``, DTensors, functional collectives and ``new_group`` work. Peers are
    replicas in each group. ``mesh.get_group("tp").rank_log`` has the collectives of all groups in
    order. Tensors received by scatter or broadcast keep their values: pass
    ``src_data_rank=None`` to ``distribute_tensor`` and ``parallelize_module``. Functional
    collectives on meta tensors reach no group, so they are not logged.

    Example::

        with fake_world(1024, rank=1023) as group:
            dist.all_reduce(tensor, group=group)
        assert [c.op for c in group.log] == ["all_reduce"]

        with fake_world({"pp": 4, "dp": 32, "tp": 8}, rank=17) as mesh:
            model = parallelize_module(model, mesh["tp"], plan, src_data_rank=None)

    Raises:
        BufferHazardError: at the end of the block, if an ``async_op=True`` collective was never
            waited for.
        ValueError: a call makes no sense on this rank, or its output splits do not match peers
            with the same input splits.
    """
    if isinstance(world_size, Mapping):
        groups: list[FakeGroup] = []
        rank_log: list[Collective] = []

        def make(_key: str, ranks: tuple[int, ...]) -> FakeGroup:
            group = FakeGroup(ranks.index(rank), len(ranks))
            group.rank_log = rank_log
            groups.append(group)
            return group

        with separate_process_groups(), rank_of_mesh(world_size, rank, make) as mesh:
            yield mesh
    else:
        groups = [FakeGroup(rank, ranks_of(world_size))]
        yield groups[0]
    pending = [record for group in groups for record in group.pending.values()]
    if pending:
        raise BufferHazardError(f"rank {rank} never waited for {', '.join(map(str, pending))}")


class FakeGroup(RecordedGroup):
    """The process group that :func:`fake_world` yields."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size, backend="fake")
        self.pending: dict[int, Collective] = {}
        """Collectives that were not waited for yet, by ``seq``."""

    def _issue(self, call: Call) -> dist.Work:
        rank, record = self.rank(), call.record
        if record.op.startswith("all_to_all"):
            expected = call.inputs[rank].shape
            if any(chunk.shape != expected for chunk in call.outputs):
                self._refuse(
                    record.op,
                    f"every peer sends {list(expected)} here, as this rank does to itself, "
                    f"but the outputs are {[list(chunk.shape) for chunk in call.outputs]}",
                )
        self._note(record)
        if record.source in (None, rank):  # otherwise the received values are there already
            deliver(rank, call, [call.inputs] * self.size(), _scale)
        self.pending[record.seq] = record
        return MockWork(partial(self.pending.pop, record.seq))

    def _message(self, tensor: Tensor, source: int, dest: int, tag: int) -> dist.Work:
        return MockWork()  # a received message changes nothing


def _scale(reduce_op: str, parts: Sequence[Tensor], out: Tensor) -> None:
    """Reduce equal ``parts`` without a temporary; ``out`` may be one of them."""
    world = len(parts)
    out.copy_(parts[0].view_as(out))
    if reduce_op == "SUM":
        out.mul_(world)
    elif reduce_op == "PRODUCT":
        out.pow_(world)
    elif reduce_op == "BXOR" and world % 2 == 0:
        out.zero_()
