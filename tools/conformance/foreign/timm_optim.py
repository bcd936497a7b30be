"""The functions that timm's tests of optimizers call; ``create_optimizer_v2`` shards.

Every process runs the same file with equal random numbers.
"""

from __future__ import annotations

import functools
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision_operators  # noqa: F401 before timm imports torchvision
from torch import nn
from zero_redundancy import holder_of

import shardcast

if "RANK" in os.environ:
    dist.init_process_group("gloo")


def create_optimizer_v2(model_or_params: Any, opt: str = "sgd", **options: Any) -> Any:
    """Shard timm's optimizer in fp32, for the model or for a module that holds the parameters."""
    from timm.optim import create_optimizer_v2 as of_timm

    optimizer = of_timm(model_or_params, opt=opt, **options)
    if os.environ.get("STOCK"):
        return optimizer
    is_model = isinstance(model_or_params, nn.Module)
    model = model_or_params if is_model else holder_of(optimizer)
    return shardcast.shard(model, optimizer, {"param_dtype": "fp32", "fuse": "eager"})


def noted(check: Callable[..., None]) -> Callable[..., None]:
    """Record this rank's error in a check, and continue with the next check of the test."""

    @functools.wraps(check)
    def call(*args: Any, **kwargs: Any) -> None:
        torch.manual_seed(0)
        try:
            check(*args, **kwargs)
            error = ""
        except Exception:
            error = traceback.format_exc()
        test = os.environ["PYTEST_CURRENT_TEST"].partition("::")[2].partition(" ")[0]
        path = Path(os.environ["CHECKS"]) / f"{os.environ.get('RANK', 0)}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([test, check.__name__, error]) + "\n")

    return call
