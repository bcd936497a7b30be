"""The rest of a model: parameters that no optimizer holds, and buffers."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import Comm, ProcessGroups, is_dense
from shardcast.memory.convert import convert_tensor_
from shardcast.memory.pack import as_packed
from shardcast.optimizer.setup import Plan


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
