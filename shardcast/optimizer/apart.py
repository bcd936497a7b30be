"""Which models and optimizers of a script are sharded together, and which apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from shardcast.config import ShardcastConfig


class Together(NamedTuple):
    """Optimizers that have a model in common, and all models that they train."""

    optimizers: list[torch.optim.Optimizer]
    models: list[nn.Module]


def models_of(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of the ``models`` that ``optimizer`` trains."""
    params = {param for group in optimizer.param_groups for param in group["params"]}
    return [model for model in models if not params.isdisjoint(model.parameters())]


def clusters(
    optimizers: Iterable[torch.optim.Optimizer], models: Sequence[nn.Module]
) -> list[Together]:
    """The ``optimizers`` with the models that they train, those together that share one."""
    found: list[Together] = []
    for optimizer in optimizers:
        joined = Together([optimizer], models_of(optimizer, models))
        for cluster in [it for it in found if not set(joined.models).isdisjoint(it.models)]:
            found.remove(cluster)
            both = dict.fromkeys(cluster.models + joined.models)
            joined = Together(cluster.optimizers + joined.optimizers, list(both))
        found.append(joined)
    return found


def check_loss_scales(configs: Sequence[ShardcastConfig]) -> None:
    """Optimizers that are sharded apart, in a framework that has one way to scale a loss.

    Raises:
        ValueError: their loss scales differ, or would in time.
    """
    scales = {
        "dynamic" if it.loss_scale is None and it.param_dtype == torch.float16 else it.loss_scale
        for it in configs
    }
    if len(configs) > 1 and (len(scales) > 1 or "dynamic" in scales):
        raise ValueError(
            "loss_scale: expected one fixed number beside several optimizers that are sharded "
            f"apart, got {', '.join(map(str, scales))}: each would change a scale of its own, and "
            "whose loss a backward gets is not known. Set loss_scale in the shardcast "
            "configuration, or train in bf16"
        )
