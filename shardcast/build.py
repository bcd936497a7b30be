"""F3: from a model and an optimizer to a :class:`ShardedOptimizer`; memory-bounded set-up."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardcast.comm import Comm, same_everywhere
from shardcast.config import ShardcastConfig
from shardcast.layout import PackLayout
from shardcast.master import Master
from shardcast.optimizer import ShardedOptimizer
from shardcast.pack import Pack, check_materialised, describe, plan_packs
from shardcast.precision import MASTER_DTYPE, Precision, is_packable
from shardcast.update import ELEMENTWISE

MARK = "_shardcast_sharded"  # attribute of a model that was sharded


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: ShardcastConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
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
        fields: single options, which win over ``config``.

    Returns:
        The optimizer to use from now on.

    Raises:
        TypeError, ValueError: an argument that cannot be used; says which and what to do.
        RuntimeError: ``shard`` was called before on this model, the process group is missing, or
            the ranks hold different models or options.
    """
    config = _resolve(config, fields)
    named = _check(model, optimizer)
    comm = Comm.resolve(process_group)
    precision = Precision(model, config)
    groups = {p: number for number, g in enumerate(optimizer.param_groups) for p in g["params"]}
    mine = {name: param for name, param in named.items() if param in groups}
    infos = describe(mine, config, groups, {p: precision.storage_dtype(p) for p in mine.values()})
    layout = plan_packs(infos, comm.size, _partition(optimizer, config), config)
    device = next(iter(mine.values())).device
    facts = layout.lines() + [f"{key} = {value}" for key, value in config.to_dict().items()]
    same_everywhere(comm, facts, device)

    setattr(model, MARK, True)
    with torch.no_grad():
        _convert_rest(model, mine, precision, comm)
        masters = [
            _build(pack, [mine[slot.name] for slot in pack.slots], comm) for pack in layout.packs
        ]
    for param in mine.values():
        param.grad = None
        wanted = precision.grad_dtype(param.dtype)
        if wanted != param.dtype:
            param.grad_dtype = wanted
    return ShardedOptimizer(optimizer, model, layout, masters, comm, precision, config)


def _resolve(config: Any, fields: Mapping[str, Any]) -> ShardcastConfig:
    if isinstance(config, ShardcastConfig):
        return config.replace(**fields) if fields else config
    if config is None or isinstance(config, (str, os.PathLike, Mapping)):
        return ShardcastConfig.load(config, **fields)
    raise TypeError(
        "config: expected a ShardcastConfig, a mapping, a path or None, got "
        f"{type(config).__name__}; pass options by keyword otherwise"
    )


def _check(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """All parameters of the model by name, after checking that they can be sharded."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}; "
            "build one over model.parameters() and pass the object, not the class"
        )
    if isinstance(optimizer, ShardedOptimizer) or getattr(model, MARK, False):
        raise RuntimeError(
            "shard() was called before on this model or optimizer; call it once, with one "
            "optimizer that has all parameters in its groups"
        )
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise TypeError(
            f"optimizer: {type(optimizer).__name__} cannot be sharded ("
            + ("it needs the whole gradient as one vector" if isinstance(
                optimizer, torch.optim.LBFGS) else "it works on sparse gradients")
            + "); use a first-order optimizer on dense gradients such as AdamW"
        )  # fmt: skip
    named = dict(model.named_parameters())
    check_materialised(named)
    names = {param: name for name, param in named.items()}
    seen: set[nn.Parameter] = set()
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        if param not in names:
            raise ValueError(
                f"optimizer: it holds a parameter of shape {tuple(param.shape)} that is not one "
                "of the model's; build the optimizer from model.parameters() of this very model"
            )
        name = names[param]
        if param in seen:
            raise ValueError(f"optimizer: parameter {name!r} is in its groups twice; list it once")
        seen.add(param)
        if not is_packable(param):
            kind = "complex" if param.is_complex() else str(param.dtype)
            raise TypeError(
                f"optimizer: parameter {name!r} is {kind}; expected float32, bfloat16 or float16; "
                "leave it out of this optimizer's groups (complex ones: train a real view)"
            )
    if not seen:
        raise ValueError("optimizer: its groups hold no parameter; add the model's parameters")
    return named


def _partition(optimizer: torch.optim.Optimizer, config: ShardcastConfig) -> str:
    """``auto``: even only where the update of an element needs nothing but that element."""
    elementwise = config.elementwise
    if elementwise is None:
        elementwise = type(optimizer) in ELEMENTWISE
    if config.partition == "auto":
        if config.sync == "all_gather" and not elementwise:
            raise ValueError(
                "sync: all_gather needs equal spans, but the update of "
                f"{type(optimizer).__name__} is not known to be elementwise; use 'broadcast'"
            )
        return "even" if elementwise else "whole"
    if config.partition == "even" and not elementwise:
        raise ValueError(
            f"partition: 'even' cuts parameters, and {type(optimizer).__name__} is not known to "
            "be elementwise; use 'whole' or 'auto', or declare elementwise=True if its update of "
            "an element depends on nothing but that element's gradient and state"
        )
    return config.partition


def _convert_rest(
    model: nn.Module, mine: Mapping[str, nn.Parameter], precision: Precision, comm: Comm
) -> None:
    """Make equal on all ranks, and cast, what the optimizer does not hold: parameters, buffers."""
    held = set(mine.values())
    for param in model.parameters():
        if param not in held:
            comm.broadcast(param.data, 0)
            param.data = param.data.to(precision.storage_dtype(param))
    for buffer in model.buffers():
        comm.broadcast(buffer, 0)


def _build(layout: PackLayout, params: list[nn.Parameter], comm: Comm) -> Master:
    """One pack and its masters: stage in fp32, broadcast from rank 0, keep, cast, free.

    Originals are freed one by one as they are staged, so no more than one pack is held twice.
    """
    pack = Pack(layout, params, layout.spans[comm.rank])
    master = Master(pack, None)
    if comm.size == 1 and layout.dtype == MASTER_DTYPE:
        pack.fill()
        master.fill(None)
        return master
    device = params[0].device
    staged = torch.zeros(layout.numel, dtype=MASTER_DTYPE, device=device)
    for slot, param in zip(layout.slots, params, strict=True):
        staged[slot.offset : slot.end].view(slot.shape).copy_(param.data)
        param.data = torch.empty(0, dtype=layout.dtype, device=device)
    comm.broadcast(staged, 0)
    pack.fill(staged)
    master.fill(staged)
    return master
