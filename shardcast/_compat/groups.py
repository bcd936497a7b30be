"""Process groups next to the one that is given, stores, and several collectives in one launch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardcast._compat import weak_group

_groups: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def group_of(ranks: Sequence[int], name: str, backend: str | None = None) -> dist.ProcessGroup:
    """Return a group of some ranks of the default group, made once; all of them must call it.

    Groups are shared, not destroyed when a sharded model is closed: torch names them by their ranks
    and how many groups there are, so that one made anew would find the addresses of the old one in
    the store, and wait for it until the time-out.
    """
    made = _groups.setdefault(dist.group.WORLD, {})  # ranks that are threads have one each
    key = tuple(ranks), str(backend)
    group: dist.ProcessGroup | None = made[key]() if key in made else None
    if group is None:
        group = dist.new_group(
            list(ranks), backend=backend, use_local_synchronization=True, group_desc=name
        )
        made[key] = weak_group(group)
    return group


def default_store() -> Any:
    """The store through which the processes of the default group met."""
    return dist.distributed_c10d._get_default_store()


def all_gather_several(
    pairs: Sequence[tuple[Tensor, Tensor]], group: Any, async_op: bool
) -> dist.Work | None:
    """One launch of the all-gathers of each ``(output, input)`` of one dtype.

    As ``coalesced`` of several ``dist.all_gather_into_tensor``, without the time of each of them.
    """
    options: Any = torch._C._distributed_c10d.AllgatherOptions()
    options.asyncOp = async_op
    name = "all_gather_single_coalesced"  # of torch >= 2.13, and the one before
    launch: Any = getattr(group, name, None) or group.allgather_into_tensor_coalesced
    work: dist.Work = launch([pair[0] for pair in pairs], [pair[1] for pair in pairs], options)
    if not async_op and work is not None:
        work.wait()
        return None
    return work


def coalesced(group: Any, device: torch.device, async_op: bool = False) -> Any:
    """A context within which collectives on ``device`` make one launch (NCCL's group calls).

    Not ``async_op``: on the current stream, as each of them alone. Else what the context gives has
    a ``wait()``, and each collective within must be ``async_op`` too, its work not waited for.
    """
    return dist.distributed_c10d._coalescing_manager(group, device, async_op)


def store_of(group: dist.ProcessGroup) -> Any:
    """The store through which the processes of ``group`` met; None of a mock without one."""
    if (store := getattr(group, "store", None)) is not None:  # of a mock whose ranks are threads
        return store
    _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
    return store
