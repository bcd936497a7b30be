"""One rank's part of a model that is split over tensor-parallel ranks and pipeline stages."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardcast.plan.originals import OptimizerList

# The dimension of a weight that each style of transformers' and torch's plans splits.
STYLES = {"colwise": 0, "rowwise": 1, "colwise_rep": 0, "embedding_rowwise": 0}
WHOLE = 1  # number of dimensions of parameters that a rowwise module keeps whole (biases)


def plan_of(model: nn.Module) -> dict[str, int]:
    """Return a transformers model's plan: the split dimension by name pattern; else empty."""
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    return {f"{name}.*": STYLES[style] for name, style in plan.items() if style in STYLES}


def stages_of(
    model: nn.Module, originals: OptimizerList, tp: int, pp: int, plan: Mapping[str, int]
) -> list[tuple[nn.Module, OptimizerList]]:
    """Return each stage's part of its first tensor-parallel rank, the fullest one, on ``meta``.

    The longest list of modules is split into ``pp`` runs. Modules before it belong to the first
    stage, and modules after it to the last one.

    Args:
        model: on ``meta``; unchanged.
        plan: by pattern of parameter names, the dimension that ``tp`` ranks split; all other
            parameters are copies on all of them.

    Raises:
        ValueError: a pattern, or ``pp``, does not fit the model.
    """
    for pattern in plan:
        if not any(fnmatch.fnmatchcase(name, pattern) for name, _ in model.named_parameters()):
            raise ValueError(
                f"tp_plan: the pattern {pattern!r} matches no parameter of the model; patterns "
                "are for names as in model.named_parameters()"
            )
    if tp > 1 and not plan:
        raise ValueError(
            "tp: expected a plan beside it, the model has none of its own; say which dimension of "
            "which parameters is cut: --tp_plan '*.up.weight=0' '*.down.weight=1'"
        )
    return [_part(model, originals, tp, pp, number, plan) for number in range(pp)]


def _part(
    model: nn.Module,
    originals: OptimizerList,
    tp: int,
    pp: int,
    stage: int,
    plan: Mapping[str, int],
) -> tuple[nn.Module, OptimizerList]:
    part = copy.deepcopy(model)
    if pp > 1:
        _keep_stage(part, pp, stage)
    names: dict[nn.Parameter, list[str]] = {}  # a tied parameter may stay under its second name
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    if tp > 1:
        _cut(part, tp, plan)
    params = dict(part.named_parameters())
    optimizers: list[torch.optim.Optimizer] = []
    for optimizer in originals.optimizers:
        kind: Any = type(optimizer)
        groups = [
            {
                **group,
                "params": [params[n] for p in group["params"] for n in names[p] if n in params],
            }
            for group in optimizer.param_groups
        ]
        if any(group["params"] for group in groups):
            optimizers.append(kind(groups))
    return part, OptimizerList(optimizers)


def _keep_stage(model: nn.Module, pp: int, stage: int) -> None:
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict))
    ]
    name, layers = max(lists, key=lambda item: len(list(item[1].children())), default=("", None))
    numbers = [] if layers is None else [key for key, _ in layers.named_children()]
    if len(numbers) < pp:
        raise ValueError(
            f"pp: expected at most as many stages as layers, got {pp} for {len(numbers)} modules "
            f"in {name!r}, the longest nn.ModuleList of the model"
        )
    first, last = (len(numbers) * at // pp for at in (stage, stage + 1))
    gone = {f"{name}.{key}." for key in [*numbers[:first], *numbers[last:]]}
    above = True
    for module_name, module in list(model.named_modules()):
        prefix = f"{module_name}."
        if prefix.startswith(f"{name}."):
            above = False
            own = not any(prefix.startswith(removed) for removed in gone)
        else:
            own = stage == (0 if above else pp - 1)
        for key, _ in [*module.named_parameters(recurse=False)] if not own else []:
            module.register_parameter(key, None)


def _cut(model: nn.Module, tp: int, plan: Mapping[str, int]) -> None:
    for prefix, module in model.named_modules():
        for key, param in list(module.named_parameters(recurse=False)):
            name = f"{prefix}.{key}" if prefix else key
            dim = next(
                (d for pattern, d in plan.items() if fnmatch.fnmatchcase(name, pattern)), None
            )
            if dim is None or (dim and param.dim() == WHOLE):
                continue
            shape = list(param.shape)
            shape[dim] = -(-shape[dim] // tp)
            smaller = torch.empty(shape, dtype=param.dtype, device="meta")
            module.register_parameter(key, nn.Parameter(smaller, param.requires_grad))
