"""Meshes of mock process groups, which the worlds of this package yield instead of a group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import _compat

Shape = int | Mapping[str, int]
"""Number of ranks of a world, or mesh sizes by name, outer dimension first."""


def ranks_of(shape: Shape) -> int:
    """Return the number of ranks of a world."""
    if isinstance(shape, int):
        if shape < 1:
            raise ValueError(f"a world needs at least one rank, got {shape}")
        return shape
    sizes = dict(shape) if isinstance(shape, Mapping) else {}
    if not sizes or any(
        not isinstance(name, str) or not name or not isinstance(size, int) or size < 1
        for name, size in sizes.items()
    ):
        raise ValueError(
            "a world is a number of ranks, or the dimensions of a mesh by name, each of one rank "
            f"or more, such as {{'dp': 2, 'tp': 2}}; got {shape!r}"
        )
    return math.prod(sizes.values())


@contextmanager
def rank_of_mesh(
    shape: Mapping[str, int], rank: int, make: Callable[[str, tuple[int, ...]], dist.ProcessGroup]
) -> Iterator[DeviceMesh]:
    """Yield the mesh of ``rank``, while this thread is that rank.

    Args:
        make: ``make(key, ranks)`` makes this rank's process groups, the default one first.
    """
    world_size = ranks_of(shape)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")
    with _compat.own_process_groups(rank, world_size, make):
        yield init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
