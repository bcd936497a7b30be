"""What several ranks hold stays the same on all of them; where it is not, it is named."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import shardcast
from shardcast.testing import threaded_world

pytestmark = pytest.mark.timeout(120)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 3)


PAIR = Pair()


def edited(mesh: Any, rank: int | None) -> str:
    model = copy.deepcopy(PAIR)
    optimizer = shardcast.shard(model, torch.optim.SGD(model.parameters()), mesh=mesh)
    if mesh.get_rank() == rank:
        with torch.no_grad():
            model.second.bias[1] += 1
    try:
        optimizer.check_copies()
    except RuntimeError as error:
        return str(error)
    return "equal"


@pytest.mark.parametrize("rank", [None, 1, 2])
def test_copies_are_compared_over_data_and_tensor_parallel_ranks(rank: int | None):
    told = threaded_world({"dp": 2, "tp": 2}, edited, rank)
    if rank is None:
        assert told == ["equal"] * 4
        return
    for dim in ("", " along 'tp'"):
        assert f"parameters of rank 1{dim} differ from those of rank 0" in told[rank]
    assert all("first 'second.bias' (1 in all)" in message for message in told)


@pytest.mark.parametrize("seeds", [1, 2])
def test_plain_parts_that_were_cut_by_hand_do_not_pass_for_copies_silently(seeds: int):
    pairs = []
    for number in range(2):
        torch.manual_seed(number % seeds)
        pairs.append(Pair())

    def taken(mesh: Any) -> None:
        model = copy.deepcopy(pairs[mesh.get_local_rank("tp")])
        shardcast.shard(model, torch.optim.SGD(model.parameters()), mesh=mesh)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threaded_world({"dp": 1, "tp": 2}, taken)
    told = [str(one.message) for one in caught if "use the same seed" in str(one.message)]
    assert len(told) == seeds - 1
    assert all("'first.weight'" in message and "DTensor.from_local" in message for message in told)
