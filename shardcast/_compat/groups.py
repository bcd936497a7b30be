"""Additional process groups, stores, and several collectives in one launch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardcast._compat import weak_group

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as Store

_groups = weakref.WeakKeyDictionary[object, dict[object, Any]]()


def group_of(ranks: Sequence[int], name: str, backend: str | None = None) -> dist.ProcessGroup:
    """Return a cached group of some ranks of the default group. Collective: all of these ranks.

    Groups are shared, and not destroyed when a sharded model is closed. torch names a group by its
    ranks and the number of groups. So a second group of these ranks would find the first one's
    addresses in the store, and wait for them until the timeout.
    """
    made = _groups.setdefault(dist.group.WORLD, {})  # if ranks are threads, each has its own
    key = tuple(ranks), str(backend)
    group: dist.ProcessGroup | None = made[key]() if key in made else None
    if group is None:
        group = dist.new_group(
            list(ranks), backend=backend, use_local_synchronization=True, group_desc=name
        )
        made[key] = weak_group(group)
    return group


def default_store() -> Store:
    """Return the store through which the default group's processes met."""
    return dist.distributed_c10d._get_default_store()


def all_gather_several(
    pairs: Sequence[tuple[Tensor, Tensor]], group: Any, async_op: bool
) -> dist.Work | None:
    """Launch the all-gathers of each ``(output, input)`` of one dtype at once.

    Like ``coalesced`` with several ``dist.all_gather_into_tensor``, without their host time.
    """
    options: Any = torch._C._distributed_c10d.AllgatherOptions()
    options.asyncOp = async_op
    name = "all_gather_single_coalesced"  # the name in torch >= 2.13, and the earlier one
    launch: Any = getattr(group, name, None) or group.allgather_into_tensor_coalesced
    work: dist.Work = launch([pair[0] for pair in pairs], [pair[1] for pair in pairs], options)
    if not async_op and work is not None:
        work.wait()
        return None
    return work


def coalesced(group: Any, device: torch.device, async_op: bool) -> Any:
    """Return a context in which collectives on ``device`` are one launch (NCCL's group calls).

    Without ``async_op`` they run on the current stream, as each of them alone would. With it, the
    context yields an object with ``wait()``; each collective inside must also be ``async_op``, and
    its own work must not be waited for.
    """
    return dist.distributed_c10d._coalescing_manager(group, device, async_op)


def store_of(group: dist.ProcessGroup) -> Store | None:
    """Return the store through which ``group``'s processes met; None for a mock without one."""
    # a mock whose ranks are threads has one
    store: Store | None = getattr(group, "store", None)
    if store is not None:
        return store
    _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
    return store
