"""Flat intervals of local tensors as boxes of whole ones, and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardcast.checkpoint.dcp import Reader, Writer
from shardcast.checkpoint.region import IndexRange, Region, ShardView, slices_of
from shardcast.checkpoint.source import from_tensors
from shardcast.testing import fake_world

pytestmark = pytest.mark.timeout(60)
SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def dealt(size: int, hands: Sequence[int]) -> list[tuple[IndexRange, ...]]:
    """Indices of a dimension, dealt to as many ranks as ``hands`` names, as runs of each."""
    found: list[list[IndexRange]] = [[] for _ in range(max(hands, default=0) + 1)]
    for index in range(size):
        runs = found[hands[index]]
        if runs and runs[-1].first + runs[-1].size == index:
            runs[-1] = IndexRange(runs[-1].first, runs[-1].size + 1)
        else:
            runs.append(IndexRange(index, 1))
    return [tuple(runs) for runs in found]


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """The regions of all ranks that a tensor is cut over: rows, columns, strided, uneven, empty."""
    dims = []
    for size in shape:
        hands = st.lists(st.integers(0, 2), min_size=size, max_size=size)
        dims.append(dealt(size, draw(st.one_of(st.just([0] * size), hands.map(sorted), hands))))
    return [Region(shape, tuple(runs)) for runs in itertools.product(*dims)]


def local_of(whole: Tensor, region: Region) -> Tensor:
    """What a rank holds, taken index by index."""
    for dim, runs in enumerate(region.runs):
        index = [i for run in runs for i in range(run.first, run.first + run.size)]
        whole = whole.index_select(dim, torch.tensor(index, dtype=torch.int64))
    return whole.contiguous()


def cut(draw: Any, numel: int) -> list[tuple[int, int]]:
    """``[0, numel)`` as adjacent intervals, some of them empty."""
    ends = sorted(draw(st.lists(st.integers(0, numel), max_size=3)))
    return list(zip([0, *ends], [*ends, numel], strict=True))


@given(SHAPES, st.data())
@settings(max_examples=150, deadline=None)
def test_intervals_of_all_ranks_are_few_contiguous_boxes_that_tile_the_tensor(
    shape: tuple[int, ...], data: Any
):
    whole = torch.arange(math.prod(shape)).view(shape)
    seen = torch.zeros(shape, dtype=torch.int64)
    for region in data.draw(grids(shape)):
        local = local_of(whole, region)
        assert region.local == tuple(local.shape)
        assert region.is_whole == (local.shape == whole.shape)
        assert region.is_first == (local.numel() > 0 and int(local.view(-1)[0]) == 0)
        for begin, end in cut(data.draw, local.numel()):
            view = ShardView((), region, begin, local.view(-1)[begin:end])
            found = list(view.chunks()) if math.prod(shape) else []
            if all(len(runs) == 1 for runs in region.runs):
                assert len(found) <= max(1, 2 * len(shape) - 1)
                assert all(part.is_contiguous() for _, part in found)
                elements = [part.flatten() for _, part in found]
                assert torch.equal(torch.cat([local.view(-1)[:0], *elements]), view.flat)
            for box, part in found:
                assert torch.equal(whole[slices_of(box)], part)
                seen[slices_of(box)] += 1
    assert torch.equal(seen, torch.ones_like(seen))


@given(SHAPES.filter(math.prod), st.data())
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@settings(max_examples=20, deadline=None)
def test_what_one_grid_writes_any_other_one_reads(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], data: Any
):
    folder, path = tmp_path_factory.mktemp("grid"), ("model", "w")
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    written = []
    for rank, region in enumerate(data.draw(grids(shape))):
        local = local_of(whole, region).view(-1)
        intervals = cut(data.draw, local.numel())
        views = [ShardView(path, region, begin, local[begin:end]) for begin, end in intervals]
        written.append(Writer(folder, rank).write(views))
    Writer(folder, 0).write_metadata(written)
    check(folder, whole)
    stored, plain = Reader(folder), from_tensors("", {"w": whole}, {})
    for region in data.draw(grids(shape)):
        local = local_of(whole, region).view(-1)
        for begin, end in cut(data.draw, local.numel()):
            for read in (stored.read, plain.read):
                flat = torch.full((end - begin,), -1.0)
                read([ShardView(path, region, begin, flat)])
                assert torch.equal(flat, local[begin:end])


def check(folder: Path, whole: Tensor) -> None:
    """torch's own functions read it."""
    import torch.distributed.checkpoint as dcp

    state = {"model": {"w": torch.full(whole.shape, -1.0)}}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["model"]["w"], whole)


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
