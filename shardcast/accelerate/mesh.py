"""The device mesh of Accelerate's ParallelismConfig, for :func:`shardcast.shard`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from shardcast import _compat
from shardcast._compat import dtensor

if TYPE_CHECKING:
    from accelerate import Accelerator

TP = "tp"  # Accelerate's names of the dimensions
CP = "cp"


def options(accelerator: Accelerator, model: nn.Module) -> dict[str, Any]:
    """Return ``mesh=``, ``dp=`` and ``grad_sum_over=``; empty for pure data parallelism.

    Pure tensor parallelism gets a mesh with a data-parallel dimension of size 1. Collective: every
    rank.

    Raises:
        ValueError: the model is tensor-parallel over another number of ranks than the mesh.
    """
    mesh = getattr(accelerator.state, "device_mesh", None)
    if mesh is None:
        return {}
    _check_model(model, accelerator.parallelism_config.tp_size)
    names = mesh.mesh_dim_names
    if names == (TP,):
        from torch.distributed.device_mesh import init_device_mesh

        both = ("dp", TP)
        mesh = init_device_mesh(mesh.device_type, (1, mesh.size()), mesh_dim_names=both)
        options: dict[str, Any] = {"mesh": mesh, "dp": "dp"}
    elif CP in names:  # its ranks have parts of one batch: gradients are averaged over them too
        options = {"mesh": mesh, "dp": mesh["dp_cp"]}  # flattened by Accelerate
    else:
        options = {"mesh": mesh, "dp": tuple(name for name in names if name != TP)}
    if TP in names:
        options["grad_sum_over"] = {TP: _partial(model)}
    return options


def _check_model(model: nn.Module, size: int) -> None:
    sizes = set()
    for param in model.parameters():
        dims = list(dtensor.placements(param))
        if TP in dims:
            sizes.add(param.device_mesh.size(dims.index(TP)))  # type: ignore[attr-defined]
    sizes = sizes or {1}
    if sizes != {size}:
        raise ValueError(
            f"prepare: expected a model that is tensor-parallel over {size} ranks, as the "
            f"parallelism config says, found {', '.join(map(str, sorted(sizes)))}; parallelize it "
            "before its optimizer is built: parallelize_module(model, "
            'accelerator.torch_device_mesh["tp"], plan)'
        )


def _partial(model: nn.Module) -> list[str]:
    """Names of the plain parameters that have a partial gradient on each rank.

    transformers sums these in a hook on ``.grad``, which would sum accumulated gradients again. So
    this removes the hook (before the first forward sets it); the sharded optimizer sums them once
    per step.
    """
    names = []
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if getattr(forward, "__qualname__", "").startswith("ReplicatedWithGradAllReduce."):
            assert callable(forward)
            module.forward = inspect.getclosurevars(forward).nonlocals["original_forward"]
            names += [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
    return names


def refuse_dispatch(accelerator: Accelerator, dispatches: bool) -> None:
    """Refuse a data loader that rank 0 reads for all ranks in a job with tp and dp, or cp.

    There Accelerate sends every rank the same batch, or different batches to ranks that share one.

    Raises:
        ValueError: rank 0 reads for all in such a job.
    """
    config = getattr(accelerator, "parallelism_config", None)
    if config is None or not dispatches:
        return
    if config.cp_enabled or (config.tp_enabled and config.data_parallel_size > 1):
        raise ValueError(
            "prepare: a DataLoader that rank 0 reads for all ranks (dispatch_batches=True, the "
            "default for an IterableDataset) gives wrong batches with tp and dp, or with cp; "
            "expected dispatch_batches=False: DataLoaderConfiguration(dispatch_batches=False)"
        )


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """Replace DTensors by whole tensors, in place. Collective if there are DTensors."""
    for name, value in state.items():
        if _compat.is_dtensor(value):
            state[name] = value.full_tensor()
    return state


def is_cut(model: nn.Module) -> bool:
    """Whether any parameter is a DTensor."""
    return any(map(_compat.is_dtensor, model.parameters()))
