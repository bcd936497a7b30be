"""Gradients summed within each node first: exact values, messages and their dtypes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from models import CASES, assert_same_bits, run_world, sharded, train, values
from torch import Tensor

from shardcast.comm import REDUCTIONS, Comm, objects
from shardcast.comm.reduction import MANY, Buffer
from shardcast.plan.algorithms import Algorithms, Topology
from shardcast.plan.layout import PackLayout, Slot, Span
from shardcast.testing import assert_same_sequence

BF16 = torch.bfloat16
COUNT = 5  # elements of a span
CPU = torch.device("cpu")


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function: ``nodes("aabb")`` puts a threaded world's ranks on these machines."""

    def on(machines: str) -> None:
        def machine() -> str:
            return machines[int(threading.current_thread().name.removeprefix("rank "))]

        monkeypatch.setattr(objects, "machine", machine)

    return on


def pack_of(world: int, count: int, node: int = 1) -> PackLayout:
    spans = tuple(Span(rank, rank * count, (rank + 1) * count) for rank in range(world))
    slot = Slot("weight", (world * count,), 0, world * count)
    return PackLayout(
        0, "cpu", BF16, True, "", world * count, (slot,), spans, Algorithms(node=node)
    )


def gradient(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return integers whose sums are exact in fp32, but not always in ``dtype``."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-128, 128, (numel,), generator=generator).to(dtype)


def reduced(
    process_group: Any, algorithm: str, node: int, dtype: torch.dtype
) -> tuple[Tensor, torch.dtype, bool]:
    """Return the sum of received pieces, their dtype, and whether there is one for each rank."""
    comm = Comm(process_group)
    pack = pack_of(comm.size, COUNT, node)
    sent = gradient(comm.rank, pack.numel, dtype)
    before, span = sent.clone(), pack.spans[comm.rank]

    def take(numel: int) -> Buffer:
        buffer = Buffer(numel, dtype, CPU)
        buffer.data.fill_(7)  # old contents
        return buffer

    own = sent[span.start : span.stop]
    reduction = REDUCTIONS[algorithm](comm, pack, sent, own, take)
    pieces = reduction.wait()
    assert torch.equal(sent, before), "sent values are unchanged"
    return sum(piece.double() for piece in pieces), pieces[0].dtype, reduction.by_rank  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("algorithm", "world", "node", "dtype"),
    [
        *(
            ("two_level", world, node, dtype)
            for world, node in ((4, 2), (6, 3), (8, 4))
            for dtype in (BF16, torch.float16, torch.float32)
        ),
        ("all_to_all", MANY - 1, 1, BF16),
        ("all_to_all", MANY, 1, BF16),
    ],
    ids=str,
)
def test_every_owner_gets_the_exact_sum_over_all_ranks(
    algorithm: str, world: int, node: int, dtype: torch.dtype
):
    """The sum has two levels, or one call adds the pieces of many ranks."""
    ranks, _ = run_world(world, reduced, algorithm, node, dtype)
    total = sum(gradient(rank, world * COUNT, dtype).double() for rank in range(world))
    assert isinstance(total, Tensor)
    if (world, dtype) == (8, BF16):
        assert not torch.equal(total.to(BF16).double(), total), "negative control: bf16 would round"
    for rank, (own, kind, by_rank) in enumerate(ranks):
        assert torch.equal(own, total[rank * COUNT : (rank + 1) * COUNT])
        if algorithm == "two_level":
            assert kind == (torch.float64 if dtype == torch.float32 else torch.float32)
        else:
            assert by_rank == (world < MANY)


def test_between_nodes_one_sum_of_each_node_is_sent_in_fp32():
    _, world = run_world(8, reduced, "two_level", 4, BF16)
    for rank, log in enumerate(world.logs):
        first, second = log
        home, number = divmod(rank, 4)
        assert first.dtype == BF16 and second.dtype == torch.float32
        assert first.input_splits == tuple(10 if r // 4 == home else 0 for r in range(8))
        assert second.input_splits == tuple(5 if r % 4 == number else 0 for r in range(8))


def topology(process_group: Any) -> Topology:
    return Comm(process_group).topology(CPU)


@pytest.mark.parametrize(
    ("machines", "node"),
    [
        ("aabb", 2),
        ("aaaa", 4),
        ("aaabbb", 3),
        ("aab", 1),
        ("abab", 1),
        ("aabc", 1),
        ("abba", 1),
        ("aaab", 1),
    ],
)
def test_ranks_of_a_node_are_found_where_they_are_numbered_node_by_node(
    nodes: Any, machines: str, node: int
):
    nodes(machines)
    world = len(machines)
    assert run_world(world, topology)[0] == [Topology("strict", node)] * world


def trained(process_group: Any, case: str, fields: dict[str, Any]) -> Any:
    model = CASES[case].build()
    optimizer = sharded(model, process_group, param_dtype=BF16, **fields)
    train(model, optimizer, (10 * step + process_group.rank() for step in range(3)), case)
    return values(model), {pack.algorithms.reduce for pack in optimizer.layout.packs}


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("gpt", {"pack_params": 3, "alignment": 8, "accumulate": "sharded"}),
        ("tied_reentrant", {"alignment": 8}),
    ],
)
def test_training_by_two_levels_stays_as_close_as_another_order_of_sums(
    case: str, fields: dict[str, Any], nodes: Any
):
    nodes("aabb")
    plain, _ = run_world(4, trained, case, {"reduce": "all_to_all", **fields})
    ranks, world = run_world(4, trained, case, {"reduce": "two_level", **fields})
    assert_same_sequence(world.logs)
    assert [ways for _, ways in ranks] == [{"two_level"}] * 4
    for found, _ in ranks:
        assert_same_bits(found, ranks[0][0])
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, plain[0][0][name], rtol=0.02, atol=0.02)


def test_one_node_is_reduced_at_one_level(nodes: Any):
    nodes("aaaa")
    ranks, _ = run_world(4, trained, "mlp", {"reduce": "two_level"})
    assert [ways for _, ways in ranks] == [{"all_to_all"}] * 4
