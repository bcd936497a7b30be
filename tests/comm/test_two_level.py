"""Gradients summed within each node first: exact values, what is sent, and in which dtype."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from models import CASES, assert_same_bits, run_world, sharded, values
from torch import Tensor

from shardcast.comm import REDUCTIONS, Comm, objects
from shardcast.comm.reduction import MANY
from shardcast.plan.algorithms import Algorithms, Topology
from shardcast.plan.layout import PackLayout, Slot, Span
from shardcast.testing import assert_same_sequence

pytestmark = pytest.mark.timeout(60)

BF16 = torch.bfloat16
CPU = torch.device("cpu")


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``nodes("aabb")``: from now on, the ranks of a threaded world are on these machines."""

    def on(machines: str) -> None:
        def machine() -> str:
            return machines[int(threading.current_thread().name.removeprefix("rank "))]

        monkeypatch.setattr(objects, "machine", machine)

    return on


def pack_of(world: int, count: int, node: int = 1) -> PackLayout:
    spans = tuple(Span(rank, rank * count, (rank + 1) * count) for rank in range(world))
    slot = Slot("weight", (world * count,), 0, world * count)
    return PackLayout(
        0, "cpu", BF16, True, 0, "", world * count, (slot,), spans, Algorithms(node=node)
    )


def gradient(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Integers, whose sums over ranks are exact in fp32 and need not be in ``dtype``."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-128, 128, (numel,), generator=generator).to(dtype)


def pieces_of(
    process_group: Any, algorithm: str, pack: PackLayout, dtype: torch.dtype
) -> tuple[list[Tensor], bool]:
    comm = Comm(process_group)
    sent = gradient(comm.rank, pack.numel, dtype)
    before, span = sent.clone(), pack.spans[comm.rank]
    own = sent[span.start : span.stop]
    reduction = REDUCTIONS[algorithm](
        comm, pack, sent, own, lambda n: torch.full((n,), 7, dtype=dtype)
    )
    pieces = reduction.wait()
    assert torch.equal(sent, before), "what is sent stays as it is"
    return pieces, reduction.by_rank


def reduced(process_group: Any, node: int, count: int, dtype: torch.dtype) -> tuple[Tensor, str]:
    pack = pack_of(process_group.size(), count, node)
    (total,), _ = pieces_of(process_group, "two_level", pack, dtype)
    return total, str(total.dtype)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("world", "node"), [(4, 2), (6, 3), (8, 4)])
def test_every_owner_gets_the_exact_sum_over_all_ranks(world: int, node: int, dtype: torch.dtype):
    ranks, _ = run_world(world, reduced, node, 5, dtype)
    everything = sum(gradient(rank, world * 5, dtype).double() for rank in range(world))
    assert isinstance(everything, Tensor)
    if (world, dtype) == (8, BF16):
        assert not torch.equal(everything.to(BF16).double(), everything), "rounding would show"
    for rank, (total, kind) in enumerate(ranks):
        assert torch.equal(total.double(), everything[rank * 5 : (rank + 1) * 5])
        assert kind == ("torch.float64" if dtype == torch.float32 else "torch.float32")


def test_between_nodes_one_sum_of_each_node_is_sent_in_fp32():
    _, world = run_world(8, reduced, 4, 5, BF16)
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
    for step in range(3):
        batch = CASES[case].batch(10 * step + process_group.rank())
        CASES[case].loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model), {pack.algorithms.reduce for pack in optimizer.layout.packs}


@pytest.mark.parametrize("grads", ["full", "sharded"])
@pytest.mark.parametrize("case", ["gpt", "tied_reentrant"])
def test_training_by_two_levels_stays_as_close_as_another_order_of_sums(
    case: str, grads: str, nodes: Any
):
    nodes("aabb")
    fields = {"pack_params": 3, "alignment": 8, "grads": grads}
    if case == "tied_reentrant":
        fields = {"alignment": 8}
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


def summed_at_once(process_group: Any) -> tuple[Tensor, bool]:
    pack = pack_of(process_group.size(), 3)
    pieces, by_rank = pieces_of(process_group, "all_to_all", pack, BF16)
    return sum(piece.float() for piece in pieces), by_rank  # type: ignore[return-value]


@pytest.mark.parametrize("world", [MANY - 1, MANY])
def test_pieces_of_many_ranks_are_summed_by_one_call_and_as_exactly(world: int):
    ranks, _ = run_world(world, summed_at_once)
    everything = sum(gradient(rank, world * 3, BF16).float() for rank in range(world))
    assert isinstance(everything, Tensor)
    for rank, (total, by_rank) in enumerate(ranks):
        assert torch.equal(total, everything[rank * 3 : (rank + 1) * 3])
        assert by_rank == (world < MANY)
