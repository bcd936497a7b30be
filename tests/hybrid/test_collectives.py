"""The collectives of a hybrid job's step: those of a data-parallel one, and little more.

Recorded on one rank of a large mesh, in a fake world.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from bag import Bag
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import shardcast
from shardcast.testing import Collective, assert_same_sequence, fake_world

SHAPES: dict[str, tuple[int, ...]] = {f"layer{n}": (64, 64) for n in range(4)}


def second_step(model: Bag, log: list[Collective], **options: Any) -> list[Collective]:
    """Return the collectives of the second step."""
    optimizer = shardcast.shard(
        model, torch.optim.AdamW(model.parameters()), pack_params=1, alignment=8, **options
    )
    for _ in range(2):
        started = len(log)
        model({name: torch.ones(()) for name, _ in model.named_parameters()}).backward()
        optimizer.step()
        optimizer.zero_grad()
    return log[started:]


def of_mesh(mesh: DeviceMesh, kind: Any, **options: Any) -> list[Collective]:
    """Return the collectives for layers cut over ``tp``, and two norms placed as ``kind``."""
    model = Bag(**SHAPES, norm1=(64,), norm2=(64,))
    model.place(mesh["tp"], **dict.fromkeys(SHAPES, Shard(0)))
    if kind is not None:
        model.place(mesh["tp"], norm1=kind, norm2=kind)
    return second_step(model, mesh.get_group("tp").rank_log, mesh=mesh, **options)


def counted(log: list[Collective]) -> Counter[tuple[str, str]]:
    return Counter((call.group, call.op) for call in log)


DATA_PARALLEL = {
    ("dp", "all_to_all_single"): 6,  # reduce: one per pack
    ("dp", "all_reduce"): 1,  # decide
    ("dp", "all_gather_single"): 6,  # sync
}


def test_model_parallelism_costs_one_small_collective_and_one_for_each_pack_that_is_summed():
    with fake_world({"dp": 32, "tp": 8}, rank=17) as mesh:
        log, summed = of_mesh(mesh, None), of_mesh(mesh, Replicate())
    expected = {**DATA_PARALLEL, ("tp", "all_gather_single"): 1}
    assert counted(log) == expected
    (extra,) = [call for call in log if call.group == "tp"]
    assert extra.nbytes <= 8 * 8 * (32 + 64), "a few numbers per rank"
    assert counted(summed) == {**expected, ("tp", "all_reduce"): 2}
    spans = [call for call in summed if (call.group, call.op) == ("tp", "all_reduce")]
    # The own span, and a number for whether there is a gradient.
    assert [(call.nbytes, call.dtype) for call in spans] == [(4 * (4 + 1), torch.float32)] * 2


def test_replicas_cost_one_sum_of_the_own_span_for_each_pack():
    with fake_world({"copies": 4, "dp": 32, "tp": 8}, rank=100) as mesh:
        log = of_mesh(mesh, None, dp=("copies", "dp"))
    found = counted(log)
    assert found["dp", "all_to_all_single"] == found["dp", "all_gather_single"] == 6
    assert found["copies", "all_reduce"] == 6 and found["tp", "all_gather_single"] == 1
    spans = [call.nbytes for call in log if call.group == "copies"]
    assert sorted(spans) == [16] * 2 + [64] * 4, "1/32 of a pack in fp32, aligned"


def test_stages_of_a_pipeline_agree_in_one_collective_over_all_model_parallel_ranks():
    with fake_world({"pp": 4, "dp": 32, "tp": 8}, rank=1000) as mesh:
        found = counted(of_mesh(mesh, None))
    extra = [(group, count) for (group, _), count in found.items() if group != "dp"]
    assert extra == [("pp_tp", 1)]


def test_data_parallelism_alone_sends_what_it_sends_without_a_mesh():
    """This includes meshes with more dimensions of size one."""
    with fake_world(32, rank=5) as group:
        plain = second_step(Bag(**SHAPES), group.log, process_group=group)
    for grid in ({"dp": 32}, {"pp": 1, "dp": 32, "tp": 1}):
        with fake_world(grid, rank=5) as mesh:
            log = second_step(Bag(**SHAPES), mesh.get_group("dp").rank_log, mesh=mesh)
        assert_same_sequence([[*plain], [*log]])
        assert [call.nbytes for call in log] == [call.nbytes for call in plain]


def test_all_ranks_of_a_mesh_make_the_same_calls():
    logs = []
    for rank in (0, 3, 9, 255):
        with fake_world({"dp": 32, "tp": 8}, rank) as mesh:
            logs.append(of_mesh(mesh, Replicate()))
    assert_same_sequence(logs)
