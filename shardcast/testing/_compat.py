"""torch's record of process groups, with a separate one for each rank's thread.

It uses private interfaces of ``torch.distributed``, which nothing else in the package may use.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

MOCK = "mock"  # name of the backend of groups from own_process_groups
NAMES = 10**6  # number of group names (which are numbers) that each world has


def keep_device_guard() -> None:
    """Keep torch's device guard alive. Call it on a thread that outlives those that trace.

    If a CUDA build sees no GPU, torch 2.11 replaces the device guard with an object of the first
    thread that traces with fake tensors, as DTensors do. Other threads crash once that thread is
    gone (PyTorch PR 178950).
    """
    if torch.version.cuda is not None and not torch.cuda.is_available():
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            pass


class _OwnWorld:
    """torch's record of its process groups, for one thread (``distributed_c10d._World``)."""

    def __init__(self, make: Callable[[str, tuple[int, ...]], dist.ProcessGroup]) -> None:
        self.make, self.number = make, next(_worlds)
        self.default_pg: dist.ProcessGroup | None = None
        # Names that no other world had, so that a DTensor, which finds a group by name, never finds
        # another rank's.
        self.group_count = self.number * NAMES

    def __getattr__(self, name: str) -> Any:
        """Return torch's other records by group and by name, empty."""
        c10d: Any = dist.distributed_c10d
        value = type(getattr(c10d._world.shared, name))()
        setattr(self, name, value)
        return value


class _Worlds:
    """Replaces torch's record: each thread with its own world sees that world."""

    def __init__(self, shared: Any) -> None:
        vars(self).update(shared=shared, own=threading.local())

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self.own, "world", self.shared), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(getattr(self.own, "world", self.shared), name, value)


_worlds = itertools.count(1)


@contextmanager
def separate_process_groups() -> Iterator[None]:
    """Let :func:`own_process_groups` work inside the block, in any thread.

    Like torch's own threaded tests it replaces ``distributed_c10d._world``. It also marks each
    ``DeviceMesh`` with its world, because DTensor's caches treat meshes of equal shape and names as
    the same one, even of different ranks. Groups that were made outside are not found by name
    inside.
    """
    from torch.distributed.device_mesh import DeviceMesh

    c10d: Any = dist.distributed_c10d
    mesh_type: Any = DeviceMesh
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    init, shared, worlds = mesh_type.__init__, c10d._world, _Worlds(c10d._world)

    def marked(mesh: Any, *args: Any, **fields: Any) -> None:
        init(mesh, *args, **fields)
        if (world := getattr(worlds.own, "world", None)) is not None:
            mesh._thread_id = world.number  # part of its hash and of ``==``

    c10d._world, mesh_type.__init__ = worlds, marked
    isolate(True)
    try:
        yield
    finally:
        c10d._world, mesh_type.__init__ = shared, init
        isolate(isinstance(shared, _Worlds))


@contextmanager
def own_process_groups(
    rank: int, world_size: int, make: Callable[[str, tuple[int, ...]], dist.ProcessGroup]
) -> Iterator[None]:
    """Make this thread ``rank`` of its own default process group inside the block.

    Functions of ``torch.distributed`` see that group and those that ``new_group`` makes here, and
    no other group of the process.

    Args:
        make: ``make(key, ranks)`` returns this rank's process group, for the default group and then
            for each new group that it is in. A group has the same key on all its ranks.
    """
    c10d: Any = dist.distributed_c10d
    store = dist.HashStore()  # type: ignore[attr-defined]
    if MOCK not in dist.Backend.backend_list:
        dist.Backend.register_backend(MOCK, _mock_group, extended_api=True, devices=["cpu", "cuda"])
    own, hook = c10d._world.own, sys.excepthook
    outer = getattr(own, "world", None)
    own.world = world = _OwnWorld(make)
    try:
        dist.init_process_group(MOCK, store=store, rank=rank, world_size=world_size)
        sys.excepthook = hook
        yield
    finally:
        for name in world.pg_names.values():
            torch._C._distributed_c10d._unregister_process_group(name)
        own.world = outer
        if outer is None:
            del own.world


def _mock_group(options: Any, _backend_options: Any) -> dist.ProcessGroup:
    world: Any = dist.distributed_c10d._world
    ranks = options.global_ranks_in_group or range(options.group_size)
    name = options.group_id  # a number, or a hash of the ranks: use_local_synchronization=True
    members = "_".join(map(str, ranks))
    if name.isdigit():
        key = str(int(name) - world.number * NAMES)
    elif name == hashlib.sha1(f"{members}_{world.group_count - 1}".encode()).hexdigest():
        key = f"{members}_{world.group_count - world.number * NAMES}"  # torch >= 2.15
    else:
        key = name
    made: dist.ProcessGroup = world.make(key, tuple(ranks))
    return made
