"""The names that tests of ZeroRedundancyOptimizer use, on ``shardcast.shard``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torchvision_operators  # noqa: F401 before the tests import torchvision
from torch import nn
from torch.optim import Optimizer

import shardcast


def ZeroRedundancyOptimizer(  # noqa: N802, torch's name
    params: Any,
    optimizer_class: type[Optimizer],
    process_group: dist.ProcessGroup | None = None,
    parameters_as_bucket_view: bool = False,
    overlap_with_ddp: bool = False,
    model: nn.Module | None = None,
    **defaults: Any,
) -> Optimizer:
    """Shard ``optimizer_class`` in fp32, for ``model`` or a module that holds the parameters."""
    optimizer = optimizer_class(params, **defaults)
    model = model or holder_of(optimizer)
    sharded = shardcast.shard(
        model, optimizer, {"param_dtype": "fp32", "fuse": "eager"}, process_group=process_group
    )
    own, add = sharded.state_dict, sharded.add_param_group
    whole: dict[str, Any] = {}

    def consolidate_state_dict(to: int = 0) -> None:
        whole.update(sharded.full_state_dict())

    def state_dict() -> dict[str, Any]:
        return whole or own()

    def add_param_group(group: dict[str, Any]) -> None:
        for param in group["params"]:
            if not any(param is known for known in model.parameters()):
                _register(model, param)
        add(group)

    sharded.consolidate_state_dict = consolidate_state_dict
    sharded.state_dict = state_dict
    sharded.add_param_group = add_param_group
    sharded.optim = sharded  # the tests read its state
    return sharded


def holder_of(optimizer: Optimizer) -> nn.Module:
    """Return a module that holds an optimizer's parameters."""
    model = nn.Module()
    for group in optimizer.param_groups:
        for param in group["params"]:
            _register(model, param)
    return model


def unwrapped(module: nn.Module, **_: Any) -> nn.Module:
    """Replace DDP: return the sharded model itself."""
    return module


def _register(model: nn.Module, param: torch.Tensor) -> None:
    param._is_param = True  # the tests pass plain tensors and read them later
    model.register_parameter(f"param{sum(1 for _ in model.parameters())}", param)
