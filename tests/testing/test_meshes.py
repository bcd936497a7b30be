"""Worlds with a mesh: torch's DeviceMesh, DTensor and functional collectives over mock groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardcast.testing import (
    BufferHazardError,
    CollectiveMismatchError,
    RankLeftError,
    ThreadedWorld,
    assert_same_sequence,
    fake_world,
    threaded_world,
)

GRID = {"dp": 2, "tp": 2}
PLAN: dict[str, Any] = {
    "0": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
    "2": RowwiseParallel(output_layouts=Shard(0)),
    "3": SequenceParallel(sequence_dim=0),
}


def mlp(width: int = 7) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 5), nn.LayerNorm(5))


def ones(value: float = 1.0) -> Tensor:
    return torch.full((2,), value)


# -- threads -------------------------------------------------------------------------------------


def sums(mesh: DeviceMesh) -> Any:
    """Yield the sums of 2 ** rank over groups of all kinds."""
    assert mesh.get_rank() == dist.get_rank() and dist.get_world_size() == 4
    row = mesh.get_group("tp")
    assert row is mesh["tp"].get_group() and row.size() == 2
    assert dist.get_process_group_ranks(row) == mesh["tp"].mesh.tolist()
    yield mesh.get_local_rank("dp"), mesh.get_local_rank("tp"), row.rank()
    mine = ones(2.0 ** dist.get_rank())
    flat = mesh["dp", "tp"]._flatten("everyone")
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    twos = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    here = [0, 2] if dist.get_rank() in (0, 2) else [1, 3]
    columns = dist.new_group(here, use_local_synchronization=True)
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    for group in (dp, tp, flat.get_group(), None, columns, *twos):
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(out := mine.clone(), group=group)
            yield int(out[0])
    yield int(functional.all_reduce(mine, "sum", mesh["dp"])[0])
    yield int(functional.all_reduce(mine, "sum", (pairs, 1))[0])
    dist.broadcast(out := mine.clone(), src=3)
    yield int(out[0])
    dist.all_gather_object(everyone := [None] * 4, mesh.get_local_rank("tp"))
    yield everyone


def test_each_rank_has_its_place_and_groups_of_all_kinds_add_up_their_own_ranks():
    results = threaded_world(GRID, lambda mesh: list(sums(mesh)))
    places = [0, 1, 0, 1]
    assert results == [
        [(0, 0, 0), 5, 3, 15, 15, 5, 9, 5, 3, 8, places],
        [(0, 1, 1), 10, 3, 15, 15, 10, 6, 10, 3, 8, places],
        [(1, 0, 0), 5, 12, 15, 15, 5, 6, 5, 12, 8, places],
        [(1, 1, 1), 10, 12, 15, 15, 10, 9, 10, 12, 8, places],
    ]


def parallel_gradients(mesh: DeviceMesh) -> list[tuple[Tensor, Any]]:
    """Return a tensor-parallel model's full gradients and their placements."""
    model = parallelize_module(mlp(), mesh["tp"], PLAN)
    half = inputs().chunk(2)[mesh.get_local_rank("tp")]
    model(half).square().sum().backward()
    grads = [param.grad for param in model.parameters()]
    assert all(isinstance(grad, DTensor) for grad in grads)
    return [(grad.full_tensor(), grad.placements[0]) for grad in grads]


def inputs() -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1))


def test_a_tensor_parallel_model_has_the_gradients_of_a_plain_one_and_runs_repeat_exactly():
    model = mlp()
    model(inputs()).square().sum().backward()
    world = ThreadedWorld(GRID)
    results = world.run(parallel_gradients)
    for found in results:
        for param, (grad, _) in zip(model.parameters(), found, strict=True):
            torch.testing.assert_close(grad, param.grad)
        placed = ["S(0)", "S(0)", "S(1)", "R", "P(sum)", "P(sum)"]
        assert [str(placement) for _, placement in found] == placed
    logs = world.logs
    assert_same_sequence(logs)
    assert {call.group for call in logs[0]} == {"tp"} and len(logs[0]) > 6
    for found, before in zip(world.run(parallel_gradients), results, strict=True):
        assert all(
            torch.equal(now, then) for (now, _), (then, _) in zip(found, before, strict=True)
        )
    assert world.logs == logs


def mixed(mesh: DeviceMesh) -> None:
    for name in ("tp", "dp", "tp"):
        dist.all_reduce(ones(), group=mesh.get_group(name))
    dist.all_reduce(ones())
    assert [call.seq for call in mesh.get_group("tp").log] == [0, 1]


def test_a_log_names_the_group_and_counts_within_it():
    world = ThreadedWorld(GRID)
    world.run(mixed)
    assert [(call.group, call.seq) for call in world.logs[3]] == [
        *(("tp", 0), ("dp", 0), ("tp", 1), ("", 0))
    ]
    assert str(world.logs[3][1]) == "#0 all_reduce(float32[2], reduce_op=SUM, group=dp)"


def passes_on(mesh: DeviceMesh) -> Any:
    """Pass two messages along the stages, each adding its own value, and send an object list."""
    rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    got = [torch.zeros(2), torch.zeros(2)]
    if rank:
        works = [dist.irecv(out, group=group, group_src=rank - 1) for out in got]
        for work in works[::-1]:
            work.wait()
    if rank < 2:
        dist.isend(got[0] + 1, group=group, group_dst=rank + 1)
        dist.isend(got[1] + 10, group=group, group_dst=rank + 1)
    box = [f"from {dist.get_rank()}"]
    if rank == 0:
        dist.send_object_list(box, group=group, group_dst=2)
    elif rank == 2:
        dist.recv_object_list(box, group=group, group_src=0)
    return got[0].tolist(), got[1].tolist(), box[0]


def test_messages_go_from_rank_to_rank_of_a_group_in_order():
    world = ThreadedWorld({"pp": 3, "dp": 2})
    for rank, (one, other, box) in enumerate(world.run(passes_on)):
        place = rank // 2
        assert one == [place] * 2 and other == [10 * place] * 2
        assert box == (f"from {rank % 2}" if place == 2 else f"from {rank}")
    assert world.logs == [[]] * 6, "messages are not collectives"


# -- errors ---------------------------------------------------------------------------------------


def shapes_differ(mesh: DeviceMesh) -> None:
    dist.all_reduce(torch.ones(3 if dist.get_rank() == 2 else 2), group=mesh.get_group("tp"))


def leaves(mesh: DeviceMesh) -> None:
    if dist.get_rank() != 1:
        dist.all_reduce(ones(), group=mesh.get_group("tp"))


def crosses(mesh: DeviceMesh) -> None:
    """Deadlock in a circle: ranks 0 and 3 begin with their row, the others with their column."""
    names = ("tp", "dp") if dist.get_rank() in (0, 3) else ("dp", "tp")
    for name in names:
        dist.all_reduce(ones(), group=mesh.get_group(name))


def sends_other(mesh: DeviceMesh) -> None:
    group = mesh.get_group("tp")
    if group.rank():
        dist.recv(torch.ones(3), group=group, group_src=0)
    else:
        dist.send(torch.ones(2), group=group, group_dst=1)


def sends_in_vain(mesh: DeviceMesh) -> None:
    if mesh.get_rank() == 2:
        dist.send(ones(), group=mesh.get_group("tp"), group_dst=1)
    dist.barrier()


def both_receive(mesh: DeviceMesh) -> None:
    group = mesh.get_group("tp")
    dist.recv(ones(), group=group, group_src=1 - group.rank())


def receives_from_itself(mesh: DeviceMesh) -> None:
    dist.send(ones(), group=mesh.get_group("tp"), group_dst=5)


def other_order(mesh: DeviceMesh) -> None:
    groups = ([0, 1], [0, 2])
    for ranks in groups if dist.get_rank() else groups[::-1]:
        dist.new_group(ranks)


def forgets(mesh: DeviceMesh) -> None:
    dist.all_reduce(ones(), group=mesh.get_group("dp"), async_op=True)


MISTAKES: list[tuple[Callable[..., None], type[Exception], str]] = [
    (shapes_differ, CollectiveMismatchError, r"of tp does not match: ranks 2, 3 differ in shape"),
    (leaves, RankLeftError, r"rank 1 has left after 0 collectives .* 0 of tp waits for it"),
    (crosses, CollectiveMismatchError, r"can go on.*\n  rank 0 waits in .* 0 of tp for rank 1: #0"),
    (sends_other, CollectiveMismatchError, r"message 0 of tp does not match: .* differ in shape"),
    (sends_in_vain, CollectiveMismatchError, r"message 0 of tp was never received:\n  rank 2: #0"),
    (both_receive, CollectiveMismatchError, r"can go on.*\n  rank 0 waits in message 0 of tp for"),
    (receives_from_itself, ValueError, "(rank 5 is not another one|not in the group)"),
    (other_order, ValueError, r"process group \d+ has the ranks 0, .*on others.*same order"),
    (forgets, BufferHazardError, r"rank \d never waited for #0 all_reduce\(.*group=dp\)"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=[it[0].__name__ for it in MISTAKES])
def test_a_mistake_is_named_at_once(mistake: tuple[Any, type[Exception], str]):
    wrong, error, message = mistake
    world = ThreadedWorld(GRID, timeout=50.0)
    with pytest.raises(error, match=message):
        world.run(wrong)
    assert world.run(lambda mesh: mesh.ndim) == [2] * 4, "the world works again"


@pytest.mark.parametrize("shape", [{}, {"dp": 0}, {"dp": 2, 3: 1}, {"": 2}, {"dp": 1.5}, "dp", 0])
def test_a_shape_that_makes_no_sense_is_refused(shape: Any):
    for world in (threaded_world, fake_world):
        with pytest.raises(ValueError, match=r"a world (is a number of ranks|needs at least one)"):
            world(shape, mixed) if world is threaded_world else world(shape).__enter__()
    for size, rank in ((GRID, 4), (GRID, -1), (2, 2), (2, -1)):
        with pytest.raises(ValueError, match="not in a world of"), fake_world(size, rank):
            pass


def destroys(mesh: DeviceMesh) -> float:
    if dist.get_rank() == 0:
        dist.destroy_process_group()
        return 0.0
    group = mesh.get_group("dp") if dist.get_rank() != 2 else None
    return float(functional.all_reduce(ones(), "sum", group)[0]) if group and group.rank() else 0.0


def test_what_happens_in_a_world_stays_there():
    """The process's own group and its name stay. A rank can destroy only its world's groups."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        own = dist.group.WORLD
        hash_before = hash(init_device_mesh("cpu", (1,)))
        with pytest.raises(RankLeftError):
            threaded_world(GRID, destroys)
        with fake_world(GRID, rank=3):
            assert dist.get_world_size() == 4 and dist.get_rank() == 3
            assert threaded_world({"tp": 2}, lambda mesh: mesh.get_rank()) == [0, 1]
            assert dist.get_rank() == 3
        assert dist.group.WORLD is own and dist.get_world_size() == 1
        assert torch.equal(functional.all_reduce(ones(), "sum", own), ones())
        assert hash(init_device_mesh("cpu", (1,))) == hash_before
    finally:
        dist.destroy_process_group()


# -- one rank of a large mesh ---------------------------------------------------------------------

LARGE = {"pp": 4, "dp": 32, "tp": 8}


def sharded_rows(rank: int) -> tuple[Any, list[int], Any]:
    with fake_world(LARGE, rank) as mesh:
        model = parallelize_module(mlp(50), mesh["tp"], PLAN, src_data_rank=None)
        model(torch.ones(1, 5)).sum().backward()
        dist.all_reduce(ones(), group=mesh.get_group("dp"))
        rows = [param.to_local().shape[0] for param in model.parameters()]
        return mesh.get_coordinate(), rows, mesh.get_group("pp").rank_log


def test_a_rank_of_1024_has_its_shards_and_counts_its_collectives():
    """Ranks follow each other in one process; none uses what DTensor cached for another."""
    seen = {rank: sharded_rows(rank) for rank in (0, 17, 1023)}
    assert [tuple(place) for place, _, _ in seen.values()] == [(0, 0, 0), (0, 2, 1), (3, 31, 7)]
    # 50 rows on 8 ranks: 7 each, and 1 on the last
    assert [rows for _, rows, _ in seen.values()] == [
        *([7, 7, 5, 5, 5, 5], [7, 7, 5, 5, 5, 5], [1, 1, 5, 5, 5, 5])
    ]
    assert_same_sequence([log for _, _, log in seen.values()])
    log = seen[0][2]
    assert [(call.group, call.op) for call in log] == [
        ("tp", "all_gather_single"),
        ("tp", "reduce_scatter_single"),
        ("tp", "all_gather_single"),
        ("dp", "all_reduce"),
    ]
