"""The verb: :func:`shard`, from a model and an optimizer to a :class:`ShardedOptimizer`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
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
from shardcast.plan.originals import Originals
from shardcast.step.update.execute import compiles
from shardcast.step.update.several import Updates

REFUSED: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "it needs the whole gradient as one vector",
    torch.optim.SparseAdam: "it works on sparse gradients",
}


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
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
        optimizer: a torch optimizer over parameters of ``model``, or a sequence of them, such as
            ``[muon, adamw]``, that hold every trained parameter once. Elementwise ones are cut
            evenly, parameters of the others have one owner each; one reduction, one norm, one
            decision and one sync serve all. Their own ``step`` is disabled; see
            :attr:`ShardedOptimizer.optimizers`.
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
    originals = _check(model, optimizer)
    if materialize is not None:
        with _compat.swapped_params():
            materialize(_compat.unwrapped(model))
    comm = Comm.resolve(process_group)
    device = _device(model)

    def planned() -> setup.Plan:
        plan = setup.plan_for(model, originals, config, comm.size)
        validate.check_memory(plan.params)
        Updates(originals, config, comm)  # what it refuses, before the model is converted
        compiles(config, device)
        return plan

    plan = setup.check(comm.together(planned, device, "shard"), comm, device)
    with torch.no_grad(), setup.without_collector():
        setup.convert_rest(plan, comm)
        shards = setup.allocate(plan, comm)
        for param in plan.params.values():
            param.grad = None
        launched.note_sharded(comm.rank)
        return ShardedOptimizer(Engine(plan, shards, comm, originals))


def _device(model: nn.Module) -> torch.device:
    """Where the ranks tell each other how planning went; the host for what has no memory yet."""
    first = next(model.parameters(), torch.empty(0))
    return torch.device("cpu") if first.is_meta else first.device


def _check(
    model: nn.Module, given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> Originals:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    optimizers: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "optimizer: expected a torch.optim.Optimizer, or a list of them, got "
                f"{type(optimizer).__name__}; build one over model.parameters() and pass the "
                "object, not the class"
            )
        for refused, reason in REFUSED.items():
            if isinstance(optimizer, refused):
                raise TypeError(
                    f"optimizer: {type(optimizer).__name__} cannot be sharded ({reason}); use a "
                    "first-order optimizer on dense gradients, such as AdamW"
                )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise ValueError(
                "optimizer: differentiable=True cannot be sharded, the update runs without "
                "autograd; use differentiable=False"
            )
    if not optimizers:
        raise ValueError("optimizer: expected at least one, got an empty list")
    sharded = any(isinstance(optimizer, ShardedOptimizer) for optimizer in optimizers)
    if sharded or is_marked(_compat.unwrapped(model)):
        raise RuntimeError(
            "shard() was called before on this model or optimizer; call it once, with one "
            "optimizer or a list of them that has all parameters: shard(model, [muon, adamw])"
        )
    return Originals(optimizers)
