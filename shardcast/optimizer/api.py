"""The verb: :func:`shard`, from a model and an optimizer to a :class:`ShardedOptimizer`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardcast import _compat, launched
from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.optimizer import setup
from shardcast.optimizer.engine import Engine
from shardcast.optimizer.model_hooks import is_marked
from shardcast.optimizer.sharded import ShardedOptimizer
from shardcast.plan import validate
from shardcast.step.update.execute import compiles
from shardcast.step.update.interface import make_update

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
    config = ShardcastConfig.load(config, **fields)
    _check(model, optimizer)
    if materialize is not None:
        with _compat.swapped_params():
            materialize(_compat.unwrapped(model))
    comm = Comm.resolve(process_group)
    plan = setup.plan_for(model, optimizer, config, comm.size)
    validate.check_memory(plan.params)
    make_update(optimizer, config, comm)  # what it refuses, before the model is converted
    device = next(iter(plan.params.values())).device
    plan = setup.check(plan, comm, device)
    compiles(config, device)
    with torch.no_grad(), setup.without_collector():
        setup.convert_rest(plan, comm)
        shards = setup.allocate(plan, comm)
        for param in plan.params.values():
            param.grad = None
        launched.note_sharded(comm.rank)
        return ShardedOptimizer(Engine(plan, shards, comm, optimizer))


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
