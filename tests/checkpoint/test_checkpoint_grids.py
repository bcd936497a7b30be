"""Checkpoints of hybrid jobs, between any grids of tensor, pipeline and data-parallel ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from grids import Job, joined, like
from models import assert_same_bits, install, parts, values, whole
from pairwise import WHOLE
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import shardcast
from shardcast import checkpoint
from shardcast.testing import threaded_world

# Consecutive grids (tp, pp, dp); whole chains include the pairs of Megatron's resharding tests.
CHAINS = {
    "untied": [(1, 1, 1), (2, 1, 2), (1, 1, 4), (2, 1, 2), (8, 1, 1), (1, 2, 1), (1, 1, 1)],
    "tied": [(1, 2, 2), (2, 2, 1), (1, 1, 2), (2, 4, 1), (2, 2, 1)],
}
if WHOLE:
    CHAINS["tied"] += [(2, 4, 1), (4, 2, 1), (2, 2, 2)]


def link(mesh: Any, folder: Path, number: int, tie: bool) -> Any:
    """Resume, train one step, and save; return the state before and after the step."""
    job = Job(mesh, tie)
    if number:
        resumed = checkpoint.resume(folder, job.model, job.optimizer)
        assert resumed is not None and resumed.step == number and resumed.extra == {"n": number}
    before = job.found()
    job.step(number)
    pair, told = (job.model, job.optimizer), {"step": number + 1, "extra": {"n": number + 1}}
    if number % 3 == 2:
        checkpoint.save_async(folder, *pair, **told).wait()
    else:
        checkpoint.save(folder, *pair, **told)
    return before, job.found()


@pytest.mark.parametrize("kind", CHAINS)
def test_each_grid_goes_on_from_the_one_before_it_as_one_process_does(tmp_path: Path, kind: str):
    tie = kind == "tied"
    plain, expected = Job(None, tie), []
    for number in range(len(CHAINS[kind])):
        before = joined([plain.found()], tie)
        plain.step(number)
        expected.append((before, joined([plain.found()], tie)))
    for number, (tp, pp, dp) in enumerate(CHAINS[kind]):
        if tp * pp * dp == 1:
            ranks = [link(None, tmp_path, number, tie)]
        else:
            world = {"pp": pp, "dp": dp, "tp": tp}
            ranks = threaded_world(world, link, tmp_path, number, tie)
        for when in (0, 1):
            assert_same_bits(joined([rank[when] for rank in ranks], tie), expected[number][when])


def everywhere(world: dict[str, int], fn: Any, *args: Any) -> list[str]:
    """Return each rank's error."""

    def caught(mesh: Any) -> str:
        with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
            fn(mesh, *args)
        return str(error.value)

    return threaded_world(world, caught)


def test_an_export_of_a_grid_is_that_of_one_process(tmp_path: Path):
    """The state is in the order of the whole model, so a plain optimizer can load it."""

    def saved(mesh: Any, folder: Path, interleaved: bool) -> None:
        job = Job(mesh, interleaved=interleaved)
        job.step(0)
        checkpoint.save(folder, job.model, job.optimizer, step=1)

    saved(None, tmp_path / "plain", False)
    world = {"pp": 2, "dp": 1, "tp": 2}
    threaded_world(world, saved, tmp_path / "stages", False)
    threaded_world(world, saved, tmp_path / "interleaved", True)
    for kind in ("plain", "stages", "interleaved"):
        checkpoint.export(tmp_path / kind, tmp_path / f"{kind}-out")
    expected = tmp_path / "plain-out"
    weights = load_file(expected / "model.safetensors")
    state = torch.load(expected / "optimizer.pt", weights_only=True)
    assert len(state["state"]) == sum(len(g["params"]) for g in state["param_groups"])
    for kind in ("stages", "interleaved"):
        out = tmp_path / f"{kind}-out"
        assert_same_bits(load_file(out / "model.safetensors"), weights)
        found = torch.load(out / "optimizer.pt", weights_only=True)
        assert found["param_groups"] == state["param_groups"]
        assert found["state"].keys() == state["state"].keys()
        for number, moments in found["state"].items():
            assert_same_bits(moments, state["state"][number])

    def loaded(mesh: Any) -> Any:
        job = Job(mesh)
        files = expected / "model.safetensors", expected / "optimizer.pt"
        checkpoint.load_plain(job.model, job.optimizer, *files)
        return job.found()

    plain = Job()
    checkpoint.load(tmp_path / "interleaved", plain.model, plain.optimizer)
    from_files = joined(threaded_world(world, loaded), True)
    assert_same_bits(from_files, joined([plain.found()], True))


def test_replicas_of_shards_write_once(tmp_path: Path):
    def job(**where: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Linear(3, 2))
        model[2:].requires_grad_(False)
        trained = torch.optim.AdamW(list(model.parameters())[:4])
        return model, shardcast.shard(model, trained, param_dtype="fp32", fuse="eager", **where)

    def saved(mesh: Any) -> Any:
        model, optimizer = job(mesh=mesh, dp=("dp_replicate", "dp_shard"))
        install(model, 0)
        optimizer.step()
        checkpoint.save(tmp_path, model, optimizer, step=1)
        return parts(optimizer), values(model)

    ranks = threaded_world({"dp_replicate": 2, "dp_shard": 2}, saved)
    model, optimizer = job()
    checkpoint.load(tmp_path, model, optimizer)
    for replica in (ranks[:2], ranks[2:]):
        assert_same_bits(whole([parts(optimizer)]), whole(found for found, _ in replica))
    assert_same_bits(values(model), ranks[0][1])


class Experts(nn.Module):
    """Two experts on each of two ranks, as one DTensor or as plain tensors of one name."""

    def __init__(self, mesh: Any, placed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight, self.gate = torch.randn(4, 3, 2), nn.Linear(3, 4)
        if mesh is not None:
            cut = distribute_tensor(weight, mesh["ep"], [Shard(0)], src_data_rank=None)
            weight = cut if placed else cut.to_local()
        self.weight = nn.Parameter(weight)


def with_experts(mesh: Any, model: nn.Module, experts: str) -> Any:
    more: Any = {}
    if mesh is not None:
        dp = mesh["ep", "edp"]._flatten("dp")
        more = {"mesh": mesh, "dp": dp, "experts": {"edp": [experts]}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardcast.shard(model, optimizer, fuse="eager", param_dtype="fp32", **more)


def experts_of(mesh: Any, placed: bool) -> Any:
    model = Experts(mesh, placed)
    optimizer = with_experts(mesh, model, "weight")
    for seed, param in enumerate(model.parameters()):
        grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
        param.grad = like(grad, param)
    optimizer.step()
    return model, optimizer


def test_experts_are_saved_as_parts_of_one_tensor(tmp_path: Path):
    def saved(mesh: Any) -> Any:
        model, optimizer = experts_of(mesh, True)
        checkpoint.save(tmp_path, model, optimizer, step=1)
        return model.weight.to_local().detach().clone()

    ranks = threaded_world({"ep": 2, "edp": 2}, saved)
    model, optimizer = experts_of(None, True)
    with torch.no_grad():
        model.weight.zero_()
    checkpoint.load(tmp_path, model, optimizer)
    for rank, local in enumerate(ranks):
        assert torch.equal(model.weight[2 * (rank // 2) :][:2], local)


def numbered(mesh: Any, wrong: int = 0) -> tuple[nn.Module, Any]:
    """Return the same experts as plain tensors, named by their numbers in the whole model."""
    torch.manual_seed(0)
    weight = torch.randn(4, 3, 2)
    first = 0 if mesh is None else 2 * mesh["ep"].get_local_rank()
    own = range(first, first + (4 if mesh is None else 2))
    shift = wrong if mesh is not None and mesh["edp"].get_local_rank() else 0
    model = nn.Module()
    model.gate = nn.Linear(3, 4)
    model.experts = nn.ParameterDict(
        {f"{number + shift}": nn.Parameter(weight[number].clone()) for number in own}
    )
    optimizer = with_experts(mesh, model, "experts.*")
    grads = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    for number in own:
        model.experts[f"{number + shift}"].grad = grads[number].clone()
    for seed, param in enumerate(model.gate.parameters(), 1):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("copies", [1, 2])
def test_experts_under_their_numbers_train_and_are_saved_as_those_of_one_model(
    copies: int, tmp_path: Path
):
    world = {"ep": 2, "edp": copies}

    def saved(mesh: Any) -> Any:
        model, optimizer = numbered(mesh)
        checkpoint.save(tmp_path, model, optimizer, step=1, digest=True)
        before = values(model)
        with torch.no_grad():
            model.gate.weight.zero_()
        optimizer.step()
        checkpoint.load(tmp_path, model, optimizer)
        assert_same_bits(values(model), before)
        return before, experts_of(mesh, True)[0].weight.to_local().detach().clone()

    ranks = threaded_world(world, saved)
    model, optimizer = numbered(None)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    checkpoint.load(tmp_path, model, optimizer)
    for rank, (found, as_dtensor) in enumerate(ranks):
        first = 2 * (rank // copies)
        for number in range(2):
            name = f"experts.{first + number}"
            assert torch.equal(found[name], as_dtensor[number])
            assert torch.equal(model.get_parameter(name), found[name])
        assert torch.equal(model.gate.weight, found["gate.weight"])


def test_ranks_that_share_an_expert_have_one_number_for_it():
    for message in everywhere({"ep": 2, "edp": 2}, lambda mesh: numbered(mesh, wrong=4)):
        assert re.search(r"experts\.(0.*experts\.4|2.*experts\.6)", message)


def stages_of_one_name(mesh: Any) -> Any:
    model = nn.Linear(3, 2)
    return model, shardcast.shard(model, torch.optim.AdamW(model.parameters()), mesh=mesh)


@pytest.mark.parametrize(
    ("world", "make", "remedy"),
    [
        ({"ep": 2, "edp": 2}, lambda mesh: experts_of(mesh, False), "make experts DTensors"),
        ({"pp": 2, "dp": 2}, stages_of_one_name, "shard(tied=...)"),
    ],
    ids=["experts", "stages"],
)
def test_parameters_of_one_name_are_refused_on_every_rank(
    tmp_path: Path, world: dict[str, int], make: Any, remedy: str
):
    for message in everywhere(world, lambda mesh: checkpoint.save(tmp_path, *make(mesh), step=1)):
        assert "ranks 0 and 2 have different parameters named 'weight'" in message
        assert remedy in message
    assert list(tmp_path.iterdir()) == []


def test_a_local_state_does_not_load_at_another_place_of_the_mesh():
    world = {"dp": 2, "tp": 2}
    states = threaded_world(world, lambda mesh: Job(mesh).optimizer.state_dict())

    def loading(mesh: Any, swap: int) -> None:
        Job(mesh).optimizer.load_state_dict(states[mesh.get_rank() ^ swap])

    threaded_world(world, loading, 0)
    for message in everywhere(world, loading, 1):  # same layout, other half of the rows
        assert "another place in the mesh" in message


def test_a_rank_with_another_model_makes_all_of_the_mesh_raise(tmp_path: Path):
    def acting(mesh: Any, act: Any) -> None:
        job = Job(mesh)
        act(tmp_path, nn.Linear(1, 1) if mesh.get_rank() == 3 else job.model, job.optimizer)

    def save(folder: Path, model: Any, optimizer: Any) -> None:
        checkpoint.save(folder, model, optimizer, step=1)

    job = Job()
    checkpoint.save(tmp_path, job.model, job.optimizer, step=0)

    def load_plain(_folder: Path, model: Any, optimizer: Any) -> None:
        checkpoint.load_plain(model, optimizer, {})

    for act in (save, checkpoint.load, load_plain):
        messages = everywhere({"pp": 2, "dp": 1, "tp": 2}, acting, act)
        assert messages.count(messages[0]) == 3 and messages[0] == f"rank 3: {messages[3]}"
        assert "model: expected the model that was passed to shard() with" in messages[3]
