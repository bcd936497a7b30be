"""Weights that two pipeline stages share, in any order and state."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from bag import Bag
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardcast
from shardcast.testing import threaded_world


def test_patterns_of_dtypes_need_to_match_on_one_stage_only():
    def dtypes(mesh: DeviceMesh) -> dict[str, torch.dtype]:
        names = ("norm", "head") if mesh.get_local_rank("pp") else ("words",)
        model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in names})
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        shardcast.shard([model], sgd, mesh=mesh, keep_fp32=["norm.*"])
        return {name: p.dtype for name, p in model.named_parameters()}

    first, last = threaded_world({"dp": 1, "pp": 2}, dtypes)
    assert set(first.values()) == {torch.bfloat16}
    assert (last["norm.weight"], last["head.weight"]) == (torch.float32, torch.bfloat16)


class Tables(nn.Module):
    """A stage with a copy of a buffer that every stage has, and its own layer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(3.0) + number)
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 3)})


def test_two_stages_of_a_rank_may_each_have_a_buffer_of_one_name() -> None:
    def run(mesh: DeviceMesh) -> list[Tensor]:
        stages = [Tables(number) for number in (mesh.get_local_rank("pp"), 2)]
        params = [p for stage in stages for p in stage.parameters()]
        shardcast.shard(stages, torch.optim.SGD(params, lr=1.0), mesh=mesh, cast_buffers=True)
        return [stage.angles for stage in stages]

    for first, second in threaded_world({"dp": 2, "pp": 1}, run):
        assert first.dtype == second.dtype == torch.bfloat16
        assert (first.tolist(), second.tolist()) == ([0.0, 1.0, 2.0], [2.0, 3.0, 4.0])


PAIRS = [("a", "y"), ("b", "x")]
ORDERS = [("a", "b"), ("z",), ("x", "y")]  # the last stage has its ties in another order
GRADIENTS = {"a": 1.0, "b": 10.0, "x": 100.0, "y": 1000.0, "z": 1.0}


def in_other_order(mesh: DeviceMesh, frozen: bool) -> dict[str, float]:
    """Return each parameter after a step from its own value, or without a step if left out."""
    names = ORDERS[:: 2 // (mesh["pp"].size() - 1)][mesh.get_local_rank("pp")]
    model = Bag(**dict.fromkeys(names, (4, 3)))
    for name, param in model.named_parameters():
        nn.init.constant_(param, 2.0 + ord(name))
    params = [nn.Parameter(torch.zeros(1))] if frozen else list(model.parameters())
    if frozen:
        model.register_parameter(f"own{names[0]}", params[0])
    optimizer = torch.optim.SGD(params, lr=1.0)
    optimizer = shardcast.shard([model], optimizer, mesh=mesh, tied=PAIRS, param_dtype="fp32")
    for name in () if frozen else names:
        param = model.get_parameter(name)
        param.grad = torch.full_like(param, GRADIENTS[name])
    optimizer.step()
    return {name: model.get_parameter(name)[0, 0].item() for name in names}


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "left out"])
def test_two_stages_may_hold_their_ties_in_two_orders(stages: int, frozen: bool):
    first, *_, last = threaded_world({"dp": 1, "pp": stages}, in_other_order, frozen)
    a, b = (2.0 + ord("a"), 2.0 + ord("b")) if frozen else (99.0 - 1001.0, 100.0 - 110.0)
    assert (first, last) == ({"a": a, "b": b}, {"x": b, "y": a})


def test_a_tied_weight_has_one_owner_on_both_stages_where_owners_have_whole_parameters():
    """The stages' other parameters differ, and they influence the balance of owners."""

    def train(mesh: DeviceMesh) -> Tensor:
        last = mesh.get_local_rank("pp")
        model = Bag(c=(16, 4), d=(9, 9), head=(6, 4)) if last else Bag(embed=(6, 4), a=(3, 3))
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        optimizer = shardcast.shard([model], optimizer, mesh=mesh, tied=[("embed", "head")])
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
        return (model.head if last else model.embed).detach()

    first, *rest = threaded_world({"pp": 2, "dp": 3}, train)
    assert first.any() and all(torch.equal(first, other) for other in rest)


def trained_in_one_place(mesh: DeviceMesh, clears: bool) -> list[float]:
    """Make three steps; in the first, only one rank has a gradient of each shared parameter."""
    stage, part = mesh.get_local_rank("pp"), mesh.get_local_rank("tp")
    model = Bag(**{("embed", "head")[stage]: (6, 4), "parts": (5,)})
    copy, parts = model.parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    optimizer = shardcast.shard(
        [model],
        optimizer,
        mesh=mesh,
        tied=[("embed", "head")],
        divisor=1,
        param_dtype="fp32",
        grad_sum_over={"tp": ["parts"]},
    )
    found = []
    for step in range(3):
        if step == 0 and mesh.get_local_rank("dp") == 0:
            if stage == 0:
                copy.grad = torch.ones_like(copy)
            if part == 0:
                parts.grad = torch.ones_like(parts)
        if clears and step == 1:
            optimizer.clip_grad_norm_(1.0)  # reduces gradients
        if clears:
            copy.grad = parts.grad = None
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        found += [copy[0, 0].item(), parts[0].item()]
    return found


def test_a_gradient_of_one_copy_trains_all_copies_and_none_leaves_them_alone():
    grid = {"pp": 2, "dp": 2, "tp": 2}
    assert threaded_world(grid, trained_in_one_place, False) == [[-1.0, -1.0] * 3] * 8
    assert threaded_world(grid, trained_in_one_place, True) == [[0.0, 0.0] * 3] * 8


def test_copies_that_were_frozen_train_from_the_first_gradient_of_one_of_them_on():
    def train(mesh: DeviceMesh) -> list[float]:
        last = mesh.get_local_rank("pp")
        model = Bag(**{"head" if last else "embed": (6, 4)}, own=(2,))
        copy, own = model.parameters()
        copy.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = shardcast.shard(
            [model], optimizer, mesh=mesh, tied=[("embed", "head")], param_dtype="fp32"
        )
        copy.requires_grad_(True)
        (copy if last else own).grad = torch.ones_like(copy if last else own)
        optimizer.step()
        return [copy[0, 0].item(), own[0].item()]

    assert threaded_world({"pp": 2, "dp": 1}, train) == [[-1.0, -1.0], [-1.0, 0.0]]


# -- copies stay equal, or the difference is named ------------------------------------------------


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
