"""Averages of weights, made as docs/optimizers.md says, beside the same on a plain fp32 model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, install
from pairwise import thinned
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import shardcast
from shardcast.testing import ThreadedWorld

pytestmark = pytest.mark.timeout(60)

DECAY, STEPS, LR = 0.995, 200, 1.5e-3
Average = Callable[[nn.Module], tuple[Callable[[nn.Module], Any], Callable[[], list[Tensor]]]]


def torchs(model: nn.Module) -> Any:
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(DECAY))
    return average.update_parameters, lambda: list(average.module.parameters())


def timms(model: nn.Module) -> Any:
    """``timm.utils.ModelEmaV3`` of timm 1.0.31: a copy, whose state moves."""
    average = copy.deepcopy(model).eval()
    average.requires_grad_(False)

    @torch.no_grad()
    def update(model: nn.Module) -> None:
        state = model.state_dict().values()
        for kept, value in zip(average.state_dict().values(), state, strict=True):
            if kept.dtype == value.dtype:
                kept.lerp_(value, 1 - DECAY)
            else:
                kept.mul_(DECAY).add_(value, alpha=1 - DECAY)

    return update, lambda: list(average.parameters())


def diffusers(model: nn.Module) -> Any:
    """``diffusers.training_utils.EMAModel`` of diffusers 0.42: shadows of parameters."""
    shadows = [param.clone().detach() for param in model.parameters()]

    @torch.no_grad()
    def update(model: nn.Module) -> None:
        for shadow, param in zip(shadows, model.parameters(), strict=True):
            shadow.sub_((1 - DECAY) * (shadow - param))

    return update, lambda: shadows


AVERAGES: dict[str, Average] = {"torch": torchs, "timm": timms, "diffusers": diffusers}


def train(average: Average, group: Any = None, before: bool = True, **fields: Any) -> list[Tensor]:
    model = CASES["mlp"].build()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR)
    pair = average(model) if before else None
    if fields:
        optimizer = shardcast.shard(model, optimizer, process_group=group, **fields)
    update, values = pair or average(model)
    update(model)
    for _ in range(STEPS):
        install(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        update(model)
    return [value.detach().float() for value in values()]


def missing(found: list[Tensor], expected: list[Tensor]) -> float:
    """Which part of the movement of an average is not that of the expected one."""
    start = list(CASES["mlp"].build().parameters())
    wrong = sum((one - two).square().sum() for one, two in zip(found, expected, strict=True))
    moved = sum((one - two).square().sum() for one, two in zip(expected, start, strict=True))
    return float((wrong / moved).sqrt())


@pytest.mark.parametrize(("name", "dtype"), thinned(2, AVERAGES, ("fp32", "bf16")))
def test_an_average_made_before_the_model_is_sharded_is_that_of_plain_training(
    name: str, dtype: str
):
    expected = train(AVERAGES[name])
    run = lambda group: train(AVERAGES[name], group, param_dtype=dtype)  # noqa: E731
    for found in ThreadedWorld(2).run(run):
        assert missing(found, expected) < (1e-5 if dtype == "fp32" else 0.1)


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_copied_from_a_sharded_model_is_that_of_plain_training(name: str):
    """But a list of clones in bf16, which nothing tells from other tensors, stands still."""
    found = train(AVERAGES[name], before=False, param_dtype="bf16")
    lost = missing(found, train(AVERAGES[name]))
    assert lost > 0.5 if name == "diffusers" else lost < 0.2
