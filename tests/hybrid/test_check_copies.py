"""What must be equal on several ranks is compared, and named where it is not."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import shardcast
from shardcast.testing import threaded_world


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 3)


PAIR = Pair()


def broken(mesh: Any, edited: int | None) -> str:
    model = copy.deepcopy(PAIR)
    optimizer = shardcast.shard(
        model, torch.optim.SGD(model.parameters()), mesh=mesh, param_dtype="fp32"
    )
    rank = mesh.get_rank()
    if rank == edited:
        with torch.no_grad():
            model.second.bias[1] += 1
    try:
        optimizer.check_copies()
    except RuntimeError as error:
        return str(error)
    return "equal"


@pytest.mark.parametrize("edited", [None, 1, 2])
def test_copies_are_compared_over_data_and_tensor_parallel_ranks(edited: int | None):
    found = threaded_world({"dp": 2, "tp": 2}, broken, edited)
    if edited is None:
        assert found == ["equal"] * 4
        return
    by_tp, by_dp = ("'second.bias' between ranks 0 and 1 " + how for how in ("(tp)", "(data-"))
    assert by_tp in found[edited] and by_dp in found[edited]
    assert all("'second.bias'" in message and "'first" not in message for message in found)


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
    told = [str(one.message) for one in caught if "taken for a copy" in str(one.message)]
    assert len(told) == seeds - 1
    assert all("'first.weight'" in message and "DTensor.from_local" in message for message in told)
