"""Placements of parameters on a mesh, and so which groups each of them has."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from shardcast import _compat
from shardcast._compat import dtensor
from shardcast.plan.pack_groups import PLAIN, PackGroups

if TYPE_CHECKING:  # it imports this module
    from shardcast.plan.parallel_dims import ParallelDims


def pack_groups_of(dims: ParallelDims, name: str, param: nn.Parameter) -> PackGroups:
    """Read from a parameter and the patterns of a mesh which groups its pack takes part in.

    Raises:
        TypeError, ValueError: a DTensor does not fit the mesh.
    """
    shard = next((dim for dim, names in dims.experts.items() if matches(name, names)), PLAIN)
    # An expert may be a DTensor over the data-parallel dimensions that tell experts apart.
    allowed = (*dims.model, *(dim for dim in dims.data if shard != PLAIN and dim != shard))
    placed = _placements(name, param, allowed, dims.lines)
    replicate, reduce = [], []
    for dim in dims.replicating:
        if dim not in placed or placed[dim].is_replicate():
            replicate.append(dim)
            # A DTensor's gradient may come as a part of the sum (Partial), or in full.
            if dim in placed or matches(name, dims.sum_over.get(dim, ())):
                reduce.append(dim)
    for tie in dims.ties:
        if name in (tie.first, tie.second):
            replicate.append(tie.group)
            reduce.append(tie.group)
    is_primary = all(dims.coordinate[dim] == 0 for dim in replicate)
    if dims.replicas and shard == PLAIN:
        reduce.append(dims.replicas)
        is_primary = is_primary and dims.coordinate[dims.replicas] == 0
    return PackGroups(shard, tuple(replicate), tuple(reduce), is_primary)


def _placements(
    name: str, param: Any, allowed: Sequence[str], lines: Mapping[str, tuple[int, ...]]
) -> dict[str, dtensor.Placement]:
    """Return how a DTensor lies along each dimension of its mesh; empty for a plain parameter."""
    if _compat.is_dtensor(param) and not allowed:
        raise TypeError(
            f"optimizer: parameter {name!r} is a DTensor; expected a plain tensor: what "
            "fully_shard has cut cannot be sharded again, use the plain optimizer with it; for "
            "tensor parallelism pass mesh= with the model-parallel dimensions"
        )
    placements = dtensor.placements(param)
    for dim, placement in placements.items():
        if placement.is_partial():
            raise TypeError(
                f"optimizer: parameter {name!r} is Partial along {dim!r}; expected Shard or "
                "Replicate: redistribute it before the optimizer is built"
            )
        if dim not in allowed:
            raise TypeError(
                f"optimizer: parameter {name!r} is a DTensor over mesh dimension {dim!r}; expected "
                f"only model-parallel ones, {', '.join(allowed)}: parallelize over "
                "mesh['tp'] alone, and let shard() cut over the data-parallel dimensions"
            )
        line = dtensor.mesh_line(param.device_mesh, dim)
        if line != lines[dim]:
            raise ValueError(
                f"optimizer: parameter {name!r} is a DTensor over another mesh, whose {dim!r} has "
                f"the ranks {line} here; expected {lines[dim]}, as in mesh=: parallelize with the "
                "mesh that shard() is given"
            )
    return placements


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns, as in a shell, is that of the name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
