"""From a model and an optimizer to a :class:`ShardedOptimizer`; memory-bounded set-up."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardcast import _compat
from shardcast.comm import Comm, same_everywhere
from shardcast.config import ShardcastConfig
from shardcast.memory.convert import convert_tensor_
from shardcast.memory.shard import build_shard
from shardcast.optimizer.model_hooks import is_marked
from shardcast.optimizer.sharded import ShardedOptimizer
from shardcast.plan import validate as checks
from shardcast.plan.packing import describe, plan_packs
from shardcast.plan.precision import Precision
from shardcast.step.update.execute import compiles
from shardcast.step.update.fused import ELEMENTWISE, make_update

REFUSED: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "it needs the whole gradient as one vector",
    torch.optim.SparseAdam: "it works on sparse gradients",
}


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: ShardcastConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    materialize: Callable[[nn.Module], Any] | None = None,
    **fields: Any,
) -> ShardedOptimizer:
    """Shard the fp32 masters and the state of ``optimizer`` over the data-parallel ranks.

    Converts ``model`` in place: its parameters become views of packs in ``param_dtype``, equal on
    all ranks (rank 0's values), and this rank keeps fp32 masters of its spans. Use neither DDP
    nor autocast beside it. Every rank of the group must call it, with the same model and options.

    Peak memory: the fp32 model, one pack and this rank's shard.

    Args:
        model: on its device, materialised; usually fp32.
        optimizer: a torch optimizer over parameters of ``model``. Its ``step`` is disabled.
        config: a config, a mapping, or a YAML file; ``None`` reads the environment, see
            :meth:`ShardcastConfig.load`.
        process_group: the ranks to shard over; default: the default group, or this process alone
            where ``torch.distributed`` is not initialised.
        materialize: gives a model built on ``meta`` its storage and values, for example
            ``lambda model: model.to_empty(device="cuda").apply(initialise)``; parameters keep
            their identity. Only rank 0's values count.
        fields: single options, which win over ``config``.

    Returns:
        The optimizer to use from now on.

    Raises:
        TypeError, ValueError: an argument that cannot be used; says which and what to do.
        RuntimeError: ``shard`` was called before on this model, the process group is missing, or
            the ranks hold different models or options.
    """
    config = _resolve(config, fields)
    _check(model, optimizer)
    inner = _compat.unwrapped(model)
    if materialize is not None:
        with _compat.swapped_params():
            materialize(inner)
    with torch.no_grad(), _without_collector():
        names = {param: name for name, param in inner.named_parameters()}
        groups = _check_groups(names, optimizer)
        mine = {name: param for param, name in names.items() if param in groups}
        rest = {name: param for param, name in names.items() if param not in groups}
        checks.check_params(mine)
        comm = Comm.resolve(process_group)
        precision = Precision(inner, config)
        checks.check_embeddings(inner, groups, precision.storage_dtype, config)
        if _compat.is_ddp(model):
            _check_ddp(mine, precision, config)
        infos = describe(mine, config, groups, precision.storage_dtype)
        layout = plan_packs(infos, comm.size, partition_of(optimizer, config), config)
        device = next(iter(mine.values())).device
        facts = layout.lines() + checks.describe_groups(optimizer, optimizer.param_groups)
        facts += [f"{key} = {value}" for key, value in config.to_dict().items()]
        same_everywhere(comm, facts, device)
        make_update(optimizer, config, comm)  # what it refuses, before the model is converted
        compiles(config, device)

        _convert_rest(inner, rest, precision, comm)
        masters = [
            build_shard(pack, [mine[slot.name] for slot in pack.slots], comm, config)
            for pack in layout.packs
        ]
        for param in mine.values():
            param.grad = None
        return ShardedOptimizer(optimizer, model, layout, masters, comm, precision, config)


@contextmanager
def _without_collector() -> Iterator[None]:
    """So many objects are made for each parameter that the collector would take half the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _resolve(config: Any, fields: Mapping[str, Any]) -> ShardcastConfig:
    if isinstance(config, ShardcastConfig):
        return config.replace(**fields) if fields else config
    if config is None or isinstance(config, (str, os.PathLike, Mapping)):
        return ShardcastConfig.load(config, **fields)
    raise TypeError(
        "config: expected a ShardcastConfig, a mapping, a path or None, got "
        f"{type(config).__name__}; pass options by keyword otherwise"
    )


def _check(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}; "
            "build one over model.parameters() and pass the object, not the class"
        )
    if isinstance(optimizer, ShardedOptimizer) or is_marked(_compat.unwrapped(model)):
        raise RuntimeError(
            "shard() was called before on this model or optimizer; call it once, with one "
            "optimizer that has all parameters in its groups"
        )
    for refused, reason in REFUSED.items():
        if isinstance(optimizer, refused):
            raise TypeError(
                f"optimizer: {type(optimizer).__name__} cannot be sharded ({reason}); use a "
                "first-order optimizer on dense gradients, such as AdamW"
            )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            "optimizer: differentiable=True cannot be sharded, the update runs without autograd; "
            "use differentiable=False"
        )


def _check_groups(
    names: Mapping[nn.Parameter, str], optimizer: torch.optim.Optimizer
) -> dict[nn.Parameter, int]:
    """The number of the group of each of the optimizer's parameters, all among ``names``."""
    groups: dict[nn.Parameter, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        checks.check_limit(group, optimizer.defaults, number)
        for param in group["params"]:
            if param not in names:
                raise ValueError(
                    f"optimizer: it holds a parameter of shape {tuple(param.shape)} that is not "
                    "one of the model's; build the optimizer from model.parameters() of this very "
                    "model"
                )
            if param in groups:
                raise ValueError(
                    f"optimizer: parameter {names[param]!r} is in its groups twice; list it once"
                )
            groups[param] = number
    if not groups:
        raise ValueError("optimizer: its groups hold no parameter; add the model's parameters")
    return groups


def _check_ddp(
    mine: Mapping[str, nn.Parameter], precision: Precision, config: ShardcastConfig
) -> None:
    """DDP keeps gradient buckets of the dtype it found; parameters cannot be cast under it."""
    if config.grads == "sharded":
        raise ValueError(
            "grads: 'sharded' has no meaning beside DDP, whose buckets hold all gradients; pass "
            "the bare model"
        )
    for name, param in mine.items():
        if precision.storage_dtype(param) != param.dtype:
            raise ValueError(
                f"model: it is wrapped in DDP, whose buckets hold {param.dtype} gradients, but "
                f"parameter {name!r} is to be stored as {precision.storage_dtype(param)}; pass the "
                "bare model (shardcast reduces gradients itself), or param_dtype=fp32"
            )


def partition_of(optimizer: torch.optim.Optimizer, config: ShardcastConfig) -> str:
    """``auto``: even only where the update of an element needs nothing but that element."""
    equal = [
        (name, value)
        for name, value in (("sync", config.sync), ("reduce", config.reduce))
        if value in ("all_gather", "reduce_scatter")
    ]
    elementwise = config.elementwise
    if elementwise is None:
        elementwise = type(optimizer) in ELEMENTWISE
    if config.partition == "auto":
        partition = "even" if elementwise else "whole"
    else:
        partition = config.partition
    if equal and partition == "whole":
        raise ValueError(
            f"{equal[0][0]}: {equal[0][1]} needs equal spans, but {type(optimizer).__name__} is "
            f"sharded with partition 'whole'; use the default {equal[0][0]}"
        )
    if config.partition == "even" and not elementwise:
        raise ValueError(
            f"partition: 'even' cuts parameters, and {type(optimizer).__name__} is not known to "
            "be elementwise; use 'whole' or 'auto', or declare elementwise=True if its update of "
            "an element depends on nothing but that element's gradient and state"
        )
    return partition


def _convert_rest(
    model: nn.Module, rest: Mapping[str, nn.Parameter], precision: Precision, comm: Comm
) -> None:
    """Make equal on all ranks, and cast, what the optimizer does not hold: parameters, buffers."""
    for name, tensor in (*rest.items(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"model: {name!r} is on the meta device and was never materialised; let "
                "materialize= give every parameter and buffer its storage, frozen ones too"
            )
    for param in rest.values():
        param.data = param.data.contiguous()
        comm.broadcast(param.data, 0)
        convert_tensor_(param, precision.storage_dtype(param))
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            comm.broadcast(buffer, 0)
            module._buffers[name] = buffer.to(precision.buffer_dtype(module, buffer))
