"""What several ranks hold stays the same on all of them; where it is not, it is named."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bag import Bag
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import shardcast
from shardcast.testing import threaded_world

pytestmark = pytest.mark.timeout(120)

STEPS, SKIPPED = 40, (16, 17, 30)


def stage(mesh: DeviceMesh) -> Bag:
    """One of two stages; what is plain begins different on every rank."""
    own, weight = ("late", "head") if mesh.get_local_rank("pp") else ("early", "embed")
    model = Bag(**{weight: (5, 8), own: (7, 3), "copy": (9,), "plain": (4, 3)})
    for param in model.parameters():
        nn.init.normal_(param)
    model.place(mesh["tp"], **{weight: Shard(0), own: Shard(1), "copy": Replicate()})
    return model


def local(param: Any) -> Tensor:
    return (param.to_local() if hasattr(param, "to_local") else param).detach()


def gradients(model: Bag, step: int, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Random ones; for plain parameters the same on tensor-parallel ranks, else all different."""
    row = dist.get_process_group_ranks(mesh.get_group("tp"))[0]
    grads = {}
    for name, param in model.named_parameters():
        source = row if name == "plain" else dist.get_rank()
        generator = torch.Generator().manual_seed(1000 * step + source)
        grads[name] = torch.randn(local(param).shape, generator=generator)
    if step in SKIPPED and dist.get_rank() == step % 8:
        next(iter(grads.values())).fill_(float("inf"))
    return grads


def train(mesh: DeviceMesh) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and masters of this rank at the end."""
    model = stage(mesh)
    optimizer = shardcast.shard(
        [model], torch.optim.AdamW(model.parameters(), lr=0.01), mesh=mesh, tied=[("embed", "head")]
    )
    params = {name: local(param) for name, param in model.named_parameters()}
    for step in range(STEPS):
        before = {name: param.clone() for name, param in params.items()}
        model(gradients(model, step, mesh), partial=["copy"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.check_copies()
        for name, param in params.items():
            assert torch.equal(param, before[name]) == (step in SKIPPED), (step, name)
    assert optimizer.skipped_steps == len(SKIPPED)
    state = optimizer.state_dict()["state"].items()
    names = list(params)
    return params, {names[index]: entry["master"] for index, entry in state}


def test_copies_stay_equal_on_all_ranks_through_40_steps_of_which_some_are_skipped():
    ranks = threaded_world({"pp": 2, "dp": 2, "tp": 2}, train)
    for first in range(0, 8, 2):  # and its tensor-parallel neighbour
        (ours, mine), (theirs, yours) = ranks[first : first + 2]
        own = "early" if first < 4 else "late"
        assert not torch.equal(ours[own], theirs[own]), "these are parts"
        for name in {"copy", "plain"} & mine.keys():
            assert torch.equal(mine[name], yours[name])
    for (ours, mine), (theirs, yours) in zip(ranks[:4], ranks[4:], strict=True):
        assert torch.equal(ours["embed"], theirs["head"])
        assert ("embed" in mine) == ("head" in yours)
        assert "embed" not in mine or torch.equal(mine["embed"], yours["head"])
        assert not torch.equal(ours["copy"], theirs["copy"]), "of stages these are others"


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
    for dim in ("(tp)", "(data-"):
        assert f"'second.bias' between ranks 0 and 1 {dim}" in told[rank]
    assert all("'second.bias'" in message and "'first" not in message for message in told)


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
