"""Hashes: ``replica_check`` names ranks that differ, and ``digest()`` covers all state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from bag import Bag
from models import CASES, job, on_each_rank, run_world, sharded
from spoiled import Flip, master, received, spoil_after_sync
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardcast
from shardcast import _compat
from shardcast.memory.hashing import COLUMNS, ROWS_ON_HOST, Hasher
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import threaded_world


def first_error(optimizer: Any, backward: Callable[[], Any], steps: int) -> str:
    """Return the first error and its step, or "" if no step raises."""
    for step in range(1, steps + 1):
        try:
            backward()
            optimizer.step()
        except RuntimeError as error:
            return f"step {step}: {error}"
        optimizer.zero_grad()
    return ""


def outcome(group: Any, bad_rank: int, change: Flip, spoiled: int, **fields: Any) -> str:
    """Return the first error of seven steps, one of which is spoiled on one rank."""
    model = CASES["mlp"].build()
    model.register_buffer("statistics", torch.zeros(3))
    optimizer = sharded(model, group, **{"replica_check": 1, "pack_params": 2, **fields})
    if group.rank() == bad_rank:
        spoil_after_sync(optimizer, model, change, spoiled)
    case, batch = CASES["mlp"], CASES["mlp"].batch(group.rank())
    return first_error(optimizer, lambda: case.loss(model, batch).backward(), 7)


def test_a_buffer_that_one_rank_made_another_is_told_by_its_warning_alone():
    def other(_optimizer: Any, model: nn.Module) -> None:
        model.statistics = torch.zeros(3, dtype=torch.float64)

    with pytest.warns(UserWarning, match="broadcast_buffers: 'statistics' was"):
        results, _ = run_world(3, lambda group: outcome(group, 1, other, 2))
    assert results == [""] * 3


@pytest.mark.parametrize("options", [{}, {"overlap_sync": True}])
def test_weights_written_on_one_rank_are_named_before_the_sync_hides_them(options: dict[str, Any]):
    def run(group: Any, writer: int) -> str:
        case, batch = CASES["mlp"], CASES["mlp"].batch(group.rank())
        model = case.build()
        optimizer = sharded(model, group, replica_check=2, **options)
        weight, steps = next(model.parameters()), iter(range(9))

        def backward() -> None:
            case.loss(model, batch).backward()
            if next(steps) == 3 and group.rank() in (writer, 0):
                with torch.no_grad():
                    weight.mul_(1.0 if group.rank() != writer else 0.5)

        return first_error(optimizer, backward, 6)

    for writer in (1, 2):  # each owns a different part
        for text in run_world(3, run, writer)[0]:
            assert f"step 4: replica_check: before step 4 parameters of rank {writer}" in text, text
            assert "the script changed them on that rank" in text


@on_each_rank({"pp": 2, "dp": 2})
def test_tied_weights_of_two_stages_are_compared(mesh: DeviceMesh):
    name = ("embed", "head")[mesh.get_local_rank("pp")]
    model = Bag(**{name: (6, 5)})
    optimizer = shardcast.shard(
        [model],
        torch.optim.AdamW(model.parameters()),
        mesh=mesh,
        tied=[("embed", "head")],
        replica_check=1,
    )
    if mesh.get_local_rank("pp"):
        spoil_after_sync(optimizer, model, master, 2)
    text = first_error(optimizer, lambda: model({name: torch.ones(6, 5)}).backward(), 4)
    assert text.startswith("step 2: ") and "replica_check: after step 2 masters of" in text
    assert "along 'tie of embed and head'" in text, text


def test_ranks_of_other_model_parallel_groups_raise_too():
    def run(mesh: DeviceMesh) -> str:
        model = CASES["mlp"].build()
        optimizer = shardcast.shard(
            model, torch.optim.AdamW(model.parameters()), mesh=mesh, dp="dp", replica_check=2
        )
        if mesh.get_rank() == 3:
            spoil_after_sync(optimizer, model, received, 2)
        case, batch = CASES["mlp"], CASES["mlp"].batch(mesh.get_local_rank("dp"))
        return first_error(optimizer, lambda: case.loss(model, batch).backward(), 5)

    texts = threaded_world({"dp": 2, "tp": 2}, run)
    for rank, text in enumerate(texts):
        named = "parameters of rank 1 differ" if rank % 2 else "parameters of rank 1 along 'tp'"
        assert text.startswith("step 2: ") and f"replica_check: after step 2 {named}" in text, text


def test_between_two_checks_and_without_the_option_nothing_is_hashed_or_sent():
    def calls(every: int) -> list[tuple[str, Any]]:
        _, world = run_world(2, lambda group: job(group, 6, replica_check=every))
        return [(call.op, call.shape) for call in world.logs[0]]

    assert shardcast.ShardcastConfig().replica_check == 0
    plain, checked = calls(0), calls(3)
    step = next(n for n in range(1, len(plain)) if plain[-n:] == plain[-2 * n : -n])  # per step
    # Before the update and after the sync, one for the hashes and one for errors.
    assert Counter(checked) - Counter(plain) == {("all_gather_single", (1,)): 8}
    start, due = len(plain) - 4 * step, step + 4  # steps 3 and 6 check
    assert checked[:start] == plain[:start]
    assert checked[start + due : -due] == plain[start + step : -step]


def test_one_rank_alone_hashes_nothing(monkeypatch: pytest.MonkeyPatch):
    fails = mock.Mock(side_effect=AssertionError("hashed"))
    monkeypatch.setattr(Hasher, "__call__", fails)
    run_world(1, lambda group: job(group, 3, replica_check=1))


def test_on_an_accelerator_the_rank_is_named_as_well(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    for text in run_world(3, lambda group: outcome(group, 2, received, 3))[0]:
        assert "replica_check: after step 3 parameters of rank 2 differ" in text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float64])
def test_a_hash_changes_with_every_bit_and_place(dtype: torch.dtype):
    hasher = Hasher(torch.device("cpu"))
    count = 4 * ROWS_ON_HOST * COLUMNS // dtype.itemsize + 3 * COLUMNS + 5
    data = torch.randint(0, 255, (count * dtype.itemsize,), dtype=torch.uint8)
    values, seen = data.view(dtype), set()
    seen.add(int(hasher(values)))
    places = [0, 1, 3, 4 * COLUMNS, 8 * COLUMNS + 1, data.numel() - 1, data.numel() - 6]
    for place in places:
        for bit in (0, 6, 7):
            data[place] ^= 1 << bit
            seen.add(int(hasher(values)))
            data[place] ^= 1 << bit
    assert len(seen) == 1 + 3 * len(places)
    before = int(hasher(values))
    # Two flipped signs, which would cancel in a sum of products with odd numbers.
    data[3] ^= 128
    data[7] ^= 128
    assert int(hasher(values)) != before
    data[3] ^= 128
    data[7] ^= 128
    data[:8], data[8:16] = data[8:16].clone(), data[:8].clone()  # two places are exchanged
    assert int(hasher(values)) != before


# -- digest() -------------------------------------------------------------------------------------


def test_a_digest_sees_one_bit_of_a_master_and_of_a_moment_and_two_that_change_places():
    def run(group: Any) -> list[str]:
        model = nn.Linear(3, 5)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.linspace(-1.0, 1.0, param.numel()).view(param.shape))
        optimizer = shardcast.shard(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            process_group=group,
            param_dtype="fp32",
            alignment=8,
        )
        model(torch.linspace(-1.0, 1.0, 6).view(2, 3)).square().mean().backward()
        optimizer.step()
        digests = [optimizer.digest(), optimizer.digest()]
        if group.rank() == group.size() - 1:
            bits = packed_of(optimizer).shards[0].data.view(torch.int32)
            bits[1] ^= 1
        digests.append(optimizer.digest())
        if group.rank() == group.size() - 1:
            bits[1] ^= 1
            bits[:2] = bits[:2].flip(0)
        return [*digests, optimizer.digest()]

    for ranks in (run_world(1, run)[0], run_world(3, run)[0]):
        for first, again, flipped, swapped in ranks:
            assert first == again and len({first, flipped, swapped}) == 3


def test_a_digest_sees_the_experts_of_every_rank():
    def run(mesh: Any, seeds: tuple[int, int]) -> str:
        generator = torch.Generator().manual_seed(seeds[mesh.get_local_rank("ep")])
        model = nn.ParameterDict({"expert": nn.Parameter(torch.randn(8, 8, generator=generator))})
        optimizer = shardcast.shard(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            mesh=mesh,
            dp=("ep", "edp"),
            experts={"edp": ["expert"]},
        )
        return optimizer.digest()

    seeds = [(0, 1), (0, 2), (3, 1)]
    digests = [set(threaded_world({"ep": 2, "edp": 2}, run, it)) for it in seeds]
    assert all(len(of_ranks) == 1 for of_ranks in digests)
    assert len(set.union(*digests)) == 3
