"""The rest of a model: parameters that no optimizer holds, and buffers."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import Comm, ProcessGroups, is_dense, warn_first
from shardcast.memory.convert import convert_tensor_
from shardcast.memory.pack import as_packed
from shardcast.messages import SHOWN, page
from shardcast.optimizer.setup import Plan
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.reduce.reducer import is_reduced


def convert_rest(plan: Plan, stages: Sequence[nn.Module], process_groups: ProcessGroups) -> None:
    """Make the rest equal on all ranks, and cast what is not to stay as it came. Collective.

    Args:
        stages: the model, or the stages of it that this rank has.
    """
    precision = plan.precision
    for name, param in sorted(
        plan.outside.items(),
        key=lambda pair: process_groups.parallel_dims.set_up_order(
            plan.pack_groups_by_name[pair[0]]
        ),
    ):
        local, pack_groups = as_packed(param), plan.pack_groups_by_name[name]
        for comm in (
            *process_groups.comms(pack_groups.replicate),
            process_groups.data_parallel(pack_groups),
        ):
            comm.broadcast(local.data, 0)
        convert_tensor_(local, precision.rest_dtype(param))
    for module in (module for stage in stages for module in stage.modules()):
        for name, buffer in module.named_buffers(recurse=False):
            equal = _broadcast(name, buffer, process_groups.dp)
            module._buffers[name] = equal.to(precision.buffer_dtype(module, buffer))


def _broadcast(name: str, buffer: Tensor, comm: Comm) -> Tensor:
    """Return rank 0's buffer; on other ranks a sparse or quantized one is another object then."""
    local = _compat.local_tensor(buffer)
    if is_dense(local):
        comm.broadcast(local, 0)
        return buffer
    if comm.size == 1:
        return buffer

    def pickled() -> bytes:
        try:
            return pickle.dumps(local.cpu()) if comm.rank == 0 else b""
        except (NotImplementedError, RuntimeError, TypeError, pickle.PicklingError) as error:
            raise TypeError(
                f"model: buffer {name!r} is {local.layout} {local.dtype}, which cannot be sent to "
                f"other ranks ({error}); expected a dense tensor, or one that can be pickled"
            ) from error

    data = comm.share(comm.together(pickled, buffer.device, "shard"), buffer.device)
    return buffer if comm.rank == 0 else pickle.loads(data).to(buffer.device)


def restore_rest(stages: Sequence[nn.Module], dtypes: Sequence[Mapping[str, torch.dtype]]) -> None:
    """Undo the casts of :func:`convert_rest`, whose rounding stays. Local.

    Args:
        dtypes: of :func:`.setup.dtypes_of`, before.
    """
    for stage, dtype_of in zip(stages, dtypes, strict=True):
        for name, param in stage.named_parameters():
            convert_tensor_(as_packed(param), dtype_of.get(name, param.dtype))
        for prefix, module in stage.named_modules():
            for name, buffer in module.named_buffers(prefix, recurse=False):
                own_name = name.rpartition(".")[2]
                module._buffers[own_name] = buffer.to(dtype_of.get(name, buffer.dtype))


def warn_of_averages(plan: Plan) -> None:
    """Warn of buffers that begin with the values of parameters which become low precision. Local.

    So EMA classes keep their averages. Many of them cast an average to the dtype of its parameter.
    """
    buffers = {name: _compat.local_tensor(buffer) for name, buffer in plan.model.named_buffers()}
    shapes = {buffer.shape for buffer in buffers.values()}
    lowered: dict[Any, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, param in plan.params.items():
        local = _compat.local_tensor(param).detach()
        becomes_low = plan.precision.storage_dtype(param) != MASTER_DTYPE
        if local.shape in shapes and param.requires_grad and becomes_low:
            lowered[_sample(local)].append((name, local))
    lowered.pop(None, None)
    found = ((name, _equal(buffer, lowered)) for name, buffer in buffers.items() if lowered)
    begun = [(name, its) for name, its in found if its is not None]
    if begun:
        (buffer, its), more = begun[0], f" and {len(begun) - 1} more" if len(begun) > 1 else ""
        low = plan.config.param_dtype
        warn_first(
            f"buffer {buffer!r}{more} begins with the values of parameter {its!r}, as averages of "
            f"weights do, and shardcast.shard makes the parameter {low}: an average that is cast "
            f"to {low} loses its small steps. Use shardcast.shard(..., averages={{'ema': 0.999}}), "
            f"or store parameters in fp32, too: keep_fp32={its!r}, or param_dtype='fp32' "
            f"({page('optimizers')})"
        )


def _sample(tensor: Tensor) -> Any:
    """Return a few values of a tensor with its shape; ``None`` where all values may be equal."""
    if tensor.layout is not torch.strided or not tensor.is_floating_point() or tensor.numel() < 2:
        return None
    flat = tensor.reshape(-1)
    places = torch.arange(8, device=flat.device) * (len(flat) - 1) // 7
    values = flat[places].tolist()
    return (tuple(tensor.shape), *values) if len({*values}) > 1 else None


def _equal(buffer: Tensor, lowered: Mapping[Any, list[tuple[str, Tensor]]]) -> str | None:
    """Return the name of a parameter with the values of a buffer in other memory."""
    for name, param in lowered.get(_sample(buffer), ()):
        same = buffer.dtype == param.dtype and buffer.device == param.device
        if same and buffer.data_ptr() != param.data_ptr() and torch.equal(buffer, param):
            return name
    return None


def name_unheld(outside: Mapping[str, nn.Parameter]) -> None:
    """Warn once of parameters that have a gradient and that no sharded optimizer holds. Local.

    Nobody averages these gradients. Called after the first step.
    """
    unheld = [
        repr(name)
        for name, param in outside.items()
        if param.requires_grad and param.grad is not None and not is_reduced(param)
    ]
    if unheld:
        listed = ", ".join(unheld[:SHOWN]) + ", ..." * (len(unheld) > SHOWN)
        warn_first(
            f"{listed} of a sharded model have gradients, and no optimizer that was given to "
            "shardcast.shard holds them: DDP would average these gradients over the ranks, here "
            "each rank keeps its own. If another optimizer trains them, shard both together, "
            "shardcast.shard(model, [one, other]); if none does, freeze them: requires_grad_(False)"
        )
