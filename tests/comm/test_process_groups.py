"""``shard_ranks``: runs of ranks share masters and state, and each run holds a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import models
import pytest
import torch
import torch.distributed as dist
from models import CASES, adamw, assert_same_bits, on_each_rank, values
from torch.distributed.device_mesh import DeviceMesh

import shardcast
from shardcast import checkpoint
from shardcast.estimate import estimate
from shardcast.testing import Collective, SpawnedWorld, StrictGroup, threaded_world

WORLD = {"runs": 2, "within": 2}
COPIES = "dp_replicate"


class Trained(NamedTuple):
    held: dict[str, int]
    layout: str
    calls: list[Collective]  # of the last step
    beside: int  # number of these before the last gradient


def train(mesh: DeviceMesh, options: dict[str, Any]) -> Trained:
    """Run two steps on the rank's own batches."""
    case = CASES["gpt"]
    model, log = case.build(), mesh.get_group("runs").rank_log
    optimizer = shardcast.shard(model, adamw(model), pack_params=4, max_grad_norm=1.0, **options)
    first, begun = 0, list[int]()
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: begun.append(len(log)))
    for step in range(2):
        first = len(log)
        case.loss(model, case.batch(4 * step + mesh.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    report, calls = optimizer.memory_report(), log[first:]
    return Trained(report, str(optimizer.layout), calls, begun[-1] - first)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, "all"])
def test_each_rank_holds_one_part_of_so_many(ranks: int | str):
    shared = ranks if isinstance(ranks, int) and ranks < 4 else 4
    model = CASES["gpt"].build()
    numel = sum(param.numel() for param in model.parameters())
    options = {"shard_ranks": ranks, "pack_params": 4}
    found = estimate(model, adamw(model), 4, options, "strict", 4)
    most = estimate(model, adamw(model), 4, options, "gloo", 4).total  # on a CPU, as here
    for trained in threaded_world(WORLD, train, {"shard_ranks": ranks}):
        assert trained.held["masters"] == pytest.approx(4 * numel / shared, rel=0.35)
        assert f"world size {shared}" in trained.layout
        assert any(call.group == COPIES for call in trained.calls) == (shared < 4)
        assert sum(trained.held.values()) <= most, "at most the estimate for the fullest rank"
        assert found.collectives == len({(call.group, call.launch) for call in trained.calls})
    assert found.layout.world_size == shared


def test_sums_travel_between_copies_beside_the_backward():
    """Each asynchronous sum is launched after the next pack's exchange, in the backward."""
    for trained in threaded_world(WORLD, train, {"shard_ranks": 2}):
        kinds = [
            "sum" if call.group == COPIES else "exchange"
            for call in trained.calls
            if call.async_op and call.op in ("all_reduce", "all_to_all_single")
        ]
        packs = kinds.count("exchange")
        assert packs > 3 and kinds.count("sum") == packs
        assert kinds[:5] == ["exchange", "exchange", "sum", "exchange", "sum"]
        beside = trained.calls[: trained.beside]
        assert sum(call.async_op and call.group == COPIES for call in beside) == packs - 2


def saved(mesh: DeviceMesh, folder: Path) -> dict[str, torch.Tensor]:
    model = CASES["gpt"].build()
    optimizer = shardcast.shard(model, adamw(model), shard_ranks=2)
    models.train(model, optimizer, [mesh.get_rank()], "gpt")
    checkpoint.save(folder, model, optimizer, step=1)
    return values(model)


def loaded(_mesh: DeviceMesh, folder: Path) -> dict[str, torch.Tensor]:
    model = CASES["gpt"].build()
    optimizer = shardcast.shard(model, adamw(model), shard_ranks="all")
    checkpoint.load(folder, model, optimizer)
    return values(model)


def test_a_checkpoint_of_runs_is_loaded_by_all_ranks_together(tmp_path: Path):
    before = threaded_world(WORLD, saved, tmp_path)
    for after in threaded_world(WORLD, loaded, tmp_path):
        assert_same_bits(after, before[0])


def refused(mesh: DeviceMesh, by_rank: list[Any], on_mesh: bool) -> str:
    model = CASES["mlp"].build()
    options = {"mesh": mesh, "dp": ("runs", "within")} if on_mesh else {}
    with pytest.raises((ValueError, RuntimeError), match="shard_ranks") as told:
        shardcast.shard(model, adamw(model), shard_ranks=by_rank[mesh.get_rank()], **options)
    return type(told.value).__name__


@pytest.mark.parametrize(
    ("by_rank", "on_mesh", "error"),
    [
        ([3] * 4, False, "ValueError"),
        ([2] * 4, True, "ValueError"),
        ([2, 2, 2, "all"], False, "RuntimeError"),
        ([0] * 4, False, "ValueError"),
        (["auto"] * 4, False, "ValueError"),
    ],
    ids=["does not divide", "beside a mesh", "ranks differ", "none", "dropped"],
)
def test_what_cannot_be_shared_is_refused_on_every_rank(
    by_rank: list[Any], on_mesh: bool, error: str
):
    assert threaded_world(WORLD, refused, by_rank, on_mesh) == [error] * 4


@on_each_rank(4)
def test_a_mock_group_that_torch_does_not_know_is_refused_by_name(group: StrictGroup):
    model = CASES["mlp"].build()
    with pytest.raises(ValueError, match=r"^shard_ranks: .*got StrictGroup") as told:
        shardcast.shard(model, adamw(model), process_group=group, shard_ranks=2)
    assert all(param.dtype == torch.float32 for param in model.parameters())
    message = str(told.value)
    assert "ThreadedWorld({'dp': 4}) without process_group=" in message


def shards_and_closes(_group: Any) -> tuple[list[int], dict[str, torch.Tensor]]:
    counts = []
    for _ in range(3):
        model = CASES["mlp"].build()
        optimizer = shardcast.shard(model, adamw(model), shard_ranks=1)
        models.advance(model, optimizer, 0, 1)
        assert optimizer.layout.world_size == 1
        optimizer.close()
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts, values(model)


def test_phases_of_one_training_share_their_groups(gloo: SpawnedWorld):
    found = gloo.run(shards_and_closes)
    assert_same_bits(*(weights for _, weights in found))
    for (first, *others), _ in found:
        assert others == [first, first]
