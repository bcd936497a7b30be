"""Flat intervals of local tensors as boxes of whole tensors, and back; names of all ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardcast.checkpoint.dcp import Reader, Writer
from shardcast.checkpoint.inventory import LocalInventory, Replica, merge
from shardcast.checkpoint.region import IndexRange, Region, ShardView
from shardcast.checkpoint.source import from_tensors
from shardcast.testing import fake_world

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def dealt(size: int, hands: Sequence[int]) -> list[tuple[IndexRange, ...]]:
    """Assign index ``i`` of a dimension to rank ``hands[i]``; return the runs of each rank."""
    ranks: list[list[IndexRange]] = [[] for _ in range(max(hands, default=0) + 1)]
    for index in range(size):
        runs = ranks[hands[index]]
        if runs and runs[-1].first + runs[-1].size == index:
            runs[-1] = IndexRange(runs[-1].first, runs[-1].size + 1)
        else:
            runs.append(IndexRange(index, 1))
    return [tuple(runs) for runs in ranks]


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """Draw the regions of all ranks of a tensor: rows, columns, strided, uneven, empty."""
    dims = []
    for size in shape:
        hands = st.lists(st.integers(0, 2), min_size=size, max_size=size)
        dims.append(dealt(size, draw(st.one_of(st.just([0] * size), hands.map(sorted), hands))))
    return [Region(shape, tuple(runs)) for runs in itertools.product(*dims)]


def local_of(whole: Tensor, region: Region) -> Tensor:
    """Return a rank's local tensor, selected by indices."""
    for dim, runs in enumerate(region.runs):
        index = [i for run in runs for i in range(run.first, run.first + run.size)]
        whole = whole.index_select(dim, torch.tensor(index, dtype=torch.int64))
    return whole.contiguous()


def views_of(draw: Any, local: Tensor, region: Region) -> list[ShardView]:
    """Return a rank's local tensor as adjacent intervals, some of them empty."""
    flat = local.view(-1)
    ends = sorted(draw(st.lists(st.integers(0, len(flat)), max_size=3)))
    intervals = zip([0, *ends], [*ends, len(flat)], strict=True)
    return [ShardView(("model", "w"), region, begin, flat[begin:end]) for begin, end in intervals]


@given(SHAPES, st.data())
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@settings(max_examples=40, deadline=None)
def test_what_one_grid_writes_in_few_boxes_any_other_one_and_torch_read(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], data: Any
):
    folder, written = tmp_path_factory.mktemp("grid"), []
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    for rank, region in enumerate(data.draw(grids(shape))):
        local = local_of(whole, region)
        assert region.local == tuple(local.shape)
        assert region.is_whole == (local.shape == whole.shape)
        assert region.is_first == (local.numel() > 0 and int(local.view(-1)[0]) == 0)
        views = views_of(data.draw, local, region)
        if all(len(runs) == 1 for runs in region.runs):
            for chunks in (list(view.chunks()) for view in views):
                assert len(chunks) <= max(1, 2 * len(shape) - 1)
                assert all(part.is_contiguous() for _, part in chunks)
        written.append(Writer(folder, rank).write(views))
    Writer(folder, 0).write_metadata(written)

    state = {"model": {"w": torch.full(whole.shape, -1.0)}}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["model"]["w"], whole)
    for source in (Reader(folder), from_tensors("", {"w": whole}, {})):
        for region in data.draw(grids(shape)):
            expected = local_of(whole, region)
            local = torch.full_like(expected, -1.0)
            source.read(views_of(data.draw, local, region))
            assert torch.equal(local, expected)


PLACEMENTS = [
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(0)),
    (Shard(0), _StridedShard(0, split_factor=2)),
    (Replicate(), _StridedShard(1, split_factor=2)),
    (Replicate(), Replicate()),
]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_the_region_of_a_dtensor_is_what_torch_gives_to_the_rank(placements: Any):
    whole = torch.arange(7 * 5).view(7, 5)
    for rank in range(6):
        with fake_world({"a": 2, "b": 3}, rank) as mesh:
            cut = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            region = Region.of(cut)
            assert torch.equal(local_of(whole, region), cut.to_local())
            assert region.shape == whole.shape


def held(names: str, region: Region, stage: int = 0) -> LocalInventory:
    replica = Replica(region, True, True, False, (stage,))
    return LocalInventory(dict.fromkeys(names.split(), replica), {}, [names.split()], {})


WHOLE, UPPER = Region.whole((4, 3)), Region((4, 3), ((IndexRange(0, 2),), (IndexRange(0, 3),)))
ORDERS = {
    "one after the other": (["tokens a.0 a.1", "a.2 head"], "tokens a.0 a.1 a.2 head"),
    "interleaved": (["tokens a.0 a.2", "a.1 a.3 head"], "tokens a.0 a.1 a.2 a.3 head"),
    "there and back": (["tokens a.0 a.3 head", "a.1 a.2"], "tokens a.0 a.1 a.2 a.3 head"),
    "beyond nine": (["a.8.w a.8.b a.10.w", "a.9.w a.11.w"], "a.8.w a.8.b a.9.w a.10.w a.11.w"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_parameters_of_all_stages_are_in_the_order_of_the_whole_model(order: str):
    stages, expected = ORDERS[order]
    merged = merge({stage: held(names, WHOLE, stage) for stage, names in enumerate(stages)})
    assert merged.groups == [expected.split()]


def test_a_part_that_no_rank_holds_is_named():
    with pytest.raises(ValueError, match="6 elements of parameter 'w', which has 12"):
        merge({0: held("w", UPPER)})
