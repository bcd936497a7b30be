"""torch's record of process groups, which :mod:`shardcast.testing` gives each rank's thread anew.

Private interfaces of ``torch.distributed``, which nothing else of the package may use.
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

MOCK = "mock"  # the backend under which torch knows the groups of own_process_groups
NAMES = 10**6  # names of groups are numbers; each world has so many of its own


def keep_device_guard() -> None:
    """Call it on a thread that outlives those that trace with fake tensors, as DTensors do.

    Where a build for CUDA sees no GPU, torch 2.11 puts an object of the first such thread in the
    place of the device guard, and the next one crashes once it is gone (PyTorch PR 178950).
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
        # Names that no other world has had: what finds a group by its name, such as a DTensor,
        # never finds that of another rank.
        self.group_count = self.number * NAMES

    def __getattr__(self, name: str) -> Any:
        """Return what else this torch records, by group and by name; nothing of its own."""
        c10d: Any = dist.distributed_c10d
        value = type(getattr(c10d._world.shared, name))()
        setattr(self, name, value)
        return value


class _Worlds:
    """Stands in for torch's record: each thread that has a world of its own sees that one."""

    def __init__(self, shared: Any) -> None:
        vars(self).update(shared=shared, own=threading.local())

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self.own, "world", self.shared), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(getattr(self.own, "world", self.shared), name, value)


_worlds = itertools.count(1)


@contextmanager
def separate_process_groups() -> Iterator[None]:
    """Have :func:`own_process_groups` work inside it, in any thread.

    Does what torch's tests with threads do: puts another object in the place of
    ``distributed_c10d._world``. And marks each ``DeviceMesh`` with the world that it was made in:
    DTensor's caches take meshes of equal shape and names for the same one, whichever rank's.
    Groups that were made outside are not found by name inside.
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
    """Make this thread ``rank`` of a default process group of its own inside it.

    ``torch.distributed`` functions see that group and those that ``new_group`` makes here, and
    nothing of the rest of the process.

    Args:
        make: ``make(key, ranks)`` gives the process group of this rank, for the default one and
            then for each new group that it is in. A group has the same key on all its ranks.
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
