"""DTensors and meshes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardcast._compat import is_dtensor
from shardcast._compat.groups import group_of

if TYPE_CHECKING:  # slow to import
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement as Placement


def placements(tensor: Any) -> dict[str, Placement]:
    """Return the placements of a DTensor by mesh dimension; empty for a plain tensor.

    Raises:
        TypeError: the dimensions of its mesh have no names.
    """
    if not is_dtensor(tensor):
        return {}
    names = tensor.device_mesh.mesh_dim_names
    if names is None:
        raise TypeError(
            "optimizer: a parameter is a DTensor over a mesh whose dimensions have no names; "
            "pass mesh_dim_names= to init_device_mesh"
        )
    return dict(zip(names, tensor.placements, strict=True))


def mesh_line(mesh: DeviceMesh, dim: str) -> tuple[int, ...]:
    """Return the ranks of this rank's group along a mesh dimension, in its order."""
    return tuple(mesh[dim].mesh.flatten().tolist())


def indices_of(tensor: Any, dim: int) -> Tensor:
    """Return the indices of a DTensor's dimension in its local tensor, 1-d and ascending.

    torch splits the indices like the tensor; ``src_data_rank=None`` uses local values and sends
    nothing.
    """
    from torch.distributed.tensor import Replicate, distribute_tensor

    shape = [tensor.shape[dim] if d == dim else 1 for d in range(tensor.dim())]
    along = [p if getattr(p, "dim", None) == dim else Replicate() for p in tensor.placements]
    every = torch.arange(tensor.shape[dim], device=tensor.device).view(shape)
    indices = distribute_tensor(every, tensor.device_mesh, along, src_data_rank=None)
    return indices.to_local().flatten()


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Put a DTensor over ``local``, of the same shape and any dtype; it stays the same object.

    ``tensor.data = ...`` would change the dtype that it shows but keep the old memory.
    """
    same = tensor._spec.placements
    wrapped = wrap_local(local, tensor, same)
    if wrapped.dtype != tensor.dtype:
        tensor.data = wrapped
    tensor._local_tensor, tensor._spec = local, wrapped._spec


def wrap_local(local: Tensor, like: Any, placements: Sequence[Placement]) -> DTensor:
    """Return a DTensor over ``local`` itself, with the mesh and shape of ``like``."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    template = like._spec.tensor_meta
    meta = TensorMeta(template.shape, template.stride, local.dtype)
    spec = DTensorSpec(like.device_mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def norm_over(whole: Any, norm: Tensor, p: float) -> Tensor:
    """Return the ``p``-norm of the DTensor ``whole``, given that of its local tensor, 0-dim.

    Each part counts once, and copies of it do not count. Collective: every rank of its mesh.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    is_maximum = math.isinf(p)
    places = [
        Replicate()
        if place.is_replicate() or place.is_partial()
        else Partial("max" if is_maximum else "sum")
        for place in whole.placements
    ]
    power = norm.double() if is_maximum else norm.double().pow(p)
    total = DTensor.from_local(power, whole.device_mesh, places, run_check=False).full_tensor()
    return (total if is_maximum else total.pow(1.0 / p)).to(norm.dtype)


def arrived(local: Tensor) -> Tensor:
    """Return the result of a functional collective, after waiting for it."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def mesh_group(mesh: Any, dims: Sequence[str]) -> dist.ProcessGroup:
    """Return the group of some dimensions of a mesh; several dimensions get a new group.

    Collective: every rank of the mesh. The user's mesh is not flattened for it, because torch 2.13
    returns wrong values from ``full_tensor()`` of unevenly split DTensors over a flattened mesh.
    """
    if len(dims) == 1:
        group: dist.ProcessGroup = mesh.get_group(dims[0])
        return group
    names = list(mesh.mesh_dim_names)
    along = [position for position, name in enumerate(names) if name in dims]
    size = math.prod(mesh.mesh.shape[position] for position in along)
    lines = mesh.mesh.movedim(along, [*range(len(along))]).reshape(size, -1).T.tolist()
    ranks = next(line for line in lines if dist.get_rank() in line)
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD  # type: ignore[return-value]
    name = "_".join(names[position] for position in along)
    return group_of(ranks, name)
