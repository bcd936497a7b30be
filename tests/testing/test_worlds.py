"""Worlds of 8 to 4,096 ranks, seen by one rank: a step's launches do not grow with the world.

They are ``fake_world``s. The 7 B model is only planned: its packs would not fit in memory.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from models import adamw, sharded
from torch import nn

import shardcast
from shardcast.comm import Comm
from shardcast.plan.algorithms import Topology
from shardcast.plan.layout import GroupId, Layout, ParamInfo
from shardcast.plan.packing import MESSAGE, MIB, plan_packs, with_algorithms
from shardcast.plan.parallel_dims import ParallelDims
from shardcast.testing import Collective, fake_world

BF16 = torch.bfloat16
WORLDS = (8, 64, 1024)


def seven_billion() -> list[ParamInfo]:
    """Return names and shapes like those of Llama 2 7B: 6.7 G parameters in 291 tensors."""
    dim, hidden, vocab = 4096, 11008, 32000
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocab, dim)}
    for layer in range(32):
        shapes |= {f"{layer}.{name}": (dim, dim) for name in ("q", "k", "v", "o")}
        shapes |= {f"{layer}.{name}": (hidden, dim) for name in ("gate", "up")}
        shapes |= {f"{layer}.down": (dim, hidden)}
        shapes |= {f"{layer}.{name}": (dim,) for name in ("norm1", "norm2")}
    shapes |= {"norm": (dim,), "head": (vocab, dim)}
    return [ParamInfo(name, shape, BF16) for name, shape in shapes.items()]


def layout_of(
    world_size: int, partition: str = "even", topology: Topology | None = None, **fields: Any
) -> Layout:
    config = shardcast.ShardcastConfig(**fields)
    dims, partitions = ParallelDims(world_size), {GroupId(): partition}
    layout = plan_packs(seven_billion(), dims, partitions, config)
    return with_algorithms(layout, config, topology or Topology("nccl", min(8, world_size)))


def log_of_a_step(world_size: int, **fields: Any) -> tuple[Layout, list[Collective]]:
    """Return the layout of 9 packs and rank 3's collectives of the second step."""
    with fake_world(world_size, rank=3) as group:
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(9)))
        optimizer = sharded(model, group, param_dtype=BF16, pack_params=1, alignment=8, **fields)
        for _ in range(2):
            started = len(group.log)
            model(torch.ones(2, 32)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.layout, group.log[started:]


@pytest.mark.parametrize("fields", [{}, {"partition": "whole"}, {"sync": "broadcast"}], ids=str)
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_step_makes_as_many_launches_in_every_world_and_sends_every_pack_once(
    world_size: int, fields: dict[str, Any]
):
    layout, log = log_of_a_step(world_size, **fields)
    launched = [next(c for c in log if c.launch == n) for n in sorted({c.launch for c in log})]
    ops = [call.op for call in launched]
    assert ops[:9] == ["all_to_all_single"] * 9, "reduce: one per pack"
    assert ops[9] == "all_reduce", "decide"
    assert len(ops) == 11 and len(layout.packs) == 9, "sync: one for all packs"
    if not fields:
        nbytes = [pack.numel * 2 for pack in layout.packs]
        assert [call.nbytes for call in log if call.op == "all_to_all_single"] == nbytes[::-1]
        assert [call.nbytes for call in log if call.op == "all_gather_single"] == nbytes
    assert launched[9].nbytes <= 8 * (2 * world_size + 64), "two numbers per rank"


def calls_of_a_step(world_size: int) -> int:
    """Return the number of Python calls in this package per step, with resumed generators."""
    calls = 0

    def count(frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal calls
        path = frame.f_code.co_filename
        calls += event == "call" and "shardcast/" in path and "/testing/" not in path

    with fake_world(world_size, rank=3) as group:
        model = nn.Linear(64, 64, bias=False)
        optimizer = sharded(model, group, param_dtype=BF16, fuse="eager")
        for step in range(3):
            model.weight.grad = torch.ones_like(model.weight)
            sys.setprofile(count if step == 2 else None)
            optimizer.step()
            sys.setprofile(None)
    return calls


def test_a_step_takes_the_host_no_more_calls_in_a_larger_world():
    assert calls_of_a_step(1024) < 1.1 * calls_of_a_step(8)


@pytest.mark.parametrize("world_size", [*WORLDS, 4096])
def test_no_message_of_a_7_b_model_is_shorter_than_256_kib_and_none_is_added(world_size: int):
    layout = layout_of(world_size)
    assert shortest_message(layout) >= MESSAGE == MIB // 4
    assert len(layout.packs) <= len(layout_of(8).packs) <= 226
    assert sum(len(pack.slots) for pack in layout.packs) == 291
    largest = max(pack.numel * 2 for pack in layout.packs)
    bound = max(16 * MIB, world_size * MESSAGE)
    assert largest < 2 * bound + 32000 * 4096 * 2, "less than two of the smallest packs more"
    assert algorithms(layout, "sync") == {"all_gather"}


def shortest_message(layout: Layout) -> int:
    return min(pack.spans[0].numel * 2 for pack in layout.packs)


def algorithms(layout: Layout, stage: str) -> set[str]:
    return {getattr(pack.algorithms, stage) for pack in layout.packs}


def test_pack_mb_is_honoured_in_every_world_and_makes_short_messages():
    """Negative control of the test above, with packs of 16 MiB."""
    layout = layout_of(1024, pack_mb=16.0)
    single = {slot.name for _, slot in layout.slots() if slot.numel * 2 > 16 * MIB}
    for pack in layout.packs:
        assert pack.numel * 2 <= 17 * MIB or pack.slots[0].name in single
    assert shortest_message(layout) < MESSAGE


def test_whole_parameters_are_broadcast_by_the_ranks_that_own_some():
    layout = layout_of(64, "whole")
    assert algorithms(layout, "sync") == {"broadcast"}
    for pack in layout.packs:
        owners = [span.owner for span in pack.owned_spans]
        assert owners == [rank for rank in range(64) if pack.fragments(rank)]


APART = Topology("nccl", 1)  # one rank on each node


def test_nodes_are_summed_in_first_where_there_are_several_and_it_is_possible():
    for layout, expected in (
        (layout_of(8), "all_to_all"),
        (layout_of(64), "two_level"),
        (layout_of(1024), "two_level"),
        (layout_of(1024, topology=APART), "all_to_all"),
        (layout_of(64, "whole"), "all_to_all"),
    ):
        assert algorithms(layout, "reduce") == {expected}
    with pytest.raises(ValueError, match="two_level needs equal spans"):
        layout_of(64, "whole", reduce="two_level")
    with pytest.raises(ValueError, match="two_level needs several ranks on every node"):
        layout_of(64, topology=APART, reduce="two_level")


def test_algorithms_are_shown_with_reasons_but_are_no_part_of_the_digest():
    plain, apart = layout_of(64), layout_of(64, topology=Topology("gloo", 1))
    assert plain.lines() != apart.lines() and plain.digest() == apart.digest()
    reduce = "reduce two_level (one sum of 8 ranks leaves a node)"
    assert plain.lines()[1].endswith(f"{reduce}, sync all_gather (spans are equal)")
    assert "sync broadcast (as asked)" in layout_of(8, sync="broadcast").lines()[1]


@pytest.mark.parametrize("sync", ["auto", "broadcast"])
def test_gloo_sends_no_messages_from_the_memory_of_a_card(sync: str):
    """Gloo would treat GPU addresses as host addresses and lose the connection."""
    for on_host in (True, False):
        layout = layout_of(8, topology=Topology("gloo", on_host=on_host), sync=sync)
        assert ("sync messages" in layout.lines()[1]) == on_host


@pytest.mark.parametrize("world_size", WORLDS)
def test_setting_up_takes_as_many_collectives_in_every_world(world_size: int):
    with fake_world(world_size) as group:
        model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32))
        shardcast.shard(model, adamw(model), process_group=group, pack_params=2, alignment=8)
        meetings, weights, state = group.log[:3], group.log[3:-1], group.log[-1:]
        assert {call.op for call in (*meetings, *state)} == {"all_gather_single"}
        assert [call.op for call in weights] == ["broadcast"] * 6
        assert sum(call.nbytes for call in (*meetings, *state)) == world_size * 4 * 8


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_succeeds_together_and_what_is_gathered_takes_few_round_trips(world_size: int):
    with fake_world(world_size, rank=1) as group:
        comm, cpu = Comm(group), torch.device("cpu")
        comm.together(lambda: None, cpu, "save")
        assert comm.gather(bytes(1000), cpu) == [], "only rank 0 has them"
        *numbers, sent = group.log
        received = [(call.op, call.nbytes) for call in numbers]
        assert received == [("all_gather_single", 8 * world_size)] * 2
        assert sent.op == "all_to_all_single" and sent.nbytes < 2000


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_whole_state_comes_to_rank_0_alone_in_two_collectives_for_each_pack(world_size: int):
    with fake_world(world_size, rank=1) as group:
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
        optimizer = sharded(model, group, param_dtype=BF16, pack_params=1, alignment=8)
        started = len(group.log)
        assert optimizer.full_state_dict() == {} and optimizer.full_parameters() == {}
        log = group.log[started:]
        # Ranks first agree to begin; after the lengths and after the values of each pack, they
        # agree that no rank has failed.
        pack = ["all_gather_single"] * 2 + ["all_to_all_single"]
        assert [call.op for call in log] == (["all_reduce"] + pack * 3 + ["all_gather_single"]) * 2
        own = 4096 if world_size < 1024 else 2048
        for call in log:  # an all-reduce has the slots of a decision
            limit = 8 * (world_size + 64) if call.op == "all_reduce" else 8 * world_size + 1
            assert call.nbytes < max(own, limit)
