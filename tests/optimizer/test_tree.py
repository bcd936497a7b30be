"""Layers that are replaced after ``shard()``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import shardcast
from shardcast.testing import ThreadedWorld


def trained(group: Any, change: Any, ranks: tuple[int, ...], steps: int = 3) -> str:
    """What a rank meets when ``ranks`` change the model after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = shardcast.shard(model, optimizer, process_group=group, param_dtype="fp32")
    try:
        for step in range(steps):
            if step == 1 and group.rank() in ranks:
                change(model)
            model(torch.ones(3, 4) + group.rank()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return f"step {step}: {error}"
    return "ok"


def replaced(model: Any) -> None:
    model[1][1] = nn.Linear(8, 8)


def replaced_parameter(model: Any) -> None:
    model[2].weight = nn.Parameter(torch.ones(1, 8))


def wrapped(model: Any) -> None:
    model[1] = nn.Sequential(nn.Identity(), model[1])


def deleted(model: Any) -> None:
    del model[1][1]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (replaced, "'1.1.weight', '1.1.bias'"),
        (replaced_parameter, "'2.weight'"),
        (deleted, "'1.1.weight', '1.1.bias'"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_layer_that_one_rank_replaces_is_an_error_of_all_in_the_same_step(
    change: Any, names: str, rank: int
):
    errors = ThreadedWorld(2).run(trained, change, (rank,))
    assert errors[0] == errors[1]
    assert errors[0].startswith("step 1: ")
    assert "no longer in the model differs (rank 0: " in errors[0]
    assert names in errors[0].split(f"rank {rank}: ")[1]
    assert names not in errors[0].split(f"rank {1 - rank}: ")[1].split("rank")[0]
    assert "before shardcast.shard" in errors[0] and "close()" in errors[0]


@pytest.mark.parametrize(
    ("change", "ranks"), [(replaced, (0, 1)), (wrapped, (1,)), (copy.deepcopy, (0,))]
)
def test_what_all_ranks_do_alike_or_keeps_the_parameters_is_no_error(
    change: Any, ranks: tuple[int, ...]
):
    assert ThreadedWorld(2).run(trained, change, ranks) == ["ok", "ok"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resize_is_refused_by_name_and_works_after_close(world_size: int):
    """As ``resize_token_embeddings`` of transformers does it."""

    def resize(model: Any) -> None:
        model[2].weight.data = torch.ones(3, 8)
        model[2].bias.data = torch.ones(3)

    def then_closed(group: Any) -> tuple[int, ...]:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        for change in (None, resize):
            if change:
                change(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            sharded = shardcast.shard(model, optimizer, process_group=group)
            model(torch.ones(3, 4)).float().square().mean().backward()
            sharded.step()
            sharded.close()
        return tuple(model[2].weight.shape)

    for error in ThreadedWorld(world_size).run(trained, resize, (0, 1)):
        assert "parameter '2.weight' was resized after shardcast.shard: expected (1, 8)" in error
        assert "optimizer.close()" in error
    assert ThreadedWorld(world_size).run(then_closed) == [(3, 8)] * world_size


def test_parametrizations_that_keep_the_parameter_are_no_error():
    class Scaled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    def change(model: Any) -> None:
        parametrize.register_parametrization(model[2], "weight", Scaled())

    errors = ThreadedWorld(2).run(trained, change, (0, 1))
    assert errors == ["ok", "ok"]
