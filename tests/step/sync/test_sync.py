"""The collectives of a step: kinds, number and order, equal on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import CASES, on_each_rank, run_world, sharded
from pairwise import pairwise
from torch import nn

import shardcast
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import Collective

BF16 = torch.bfloat16


def log_of_a_step(group: Any, case: str, fields: dict[str, Any]) -> dict[str, list[Collective]]:
    """Return the collectives of each phase of the second step."""
    model = CASES[case].build()
    optimizer = sharded(model, group, **fields)
    phases: dict[str, list[Collective]] = {}

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        before = len(group.log)
        yield
        phases[name] = phases.get(name, []) + list(group.log[before:])

    for step in range(2):
        phases.clear()
        for micro in range(2):
            with phase("no_sync"), optimizer.no_sync():
                CASES[case].loss(model, CASES[case].batch(10 * step + micro)).backward()
        with phase("forward"):
            loss = CASES[case].loss(model, CASES[case].batch(10 * step + 5 + group.rank()))
        with phase("backward"):
            loss.backward()
        with phase("step"):
            optimizer.step()
        with phase("zero_grad"):
            optimizer.zero_grad()
    phases["layout"] = optimizer.layout  # type: ignore[assignment]
    return phases


@pytest.mark.parametrize(("case", "size", "partition"), pairwise(CASES, (2, 3), ("even", "whole")))
def test_a_step_has_one_exchange_per_pack_one_small_all_reduce_and_one_launch_of_the_sync(
    case: str, size: int, partition: str
):
    fields = {
        "param_dtype": BF16,
        "partition": partition,
        "pack_params": 5,
        "alignment": 16,
        "sync": "broadcast",
        "autocast": False,
    }
    ranks, _ = run_world(size, log_of_a_step, case, fields)  # asserts that the sequences agree
    for phases in ranks:
        layout: Any = phases["layout"]
        assert phases["no_sync"] == phases["forward"] == phases["zero_grad"] == []
        exchanges = phases["backward"]
        assert {call.op for call in exchanges} == {"all_to_all_single"}
        if case != "tied_reentrant":  # which may add gradients to a pack after it was sent
            assert [sum(c.input_splits) for c in exchanges] == [
                pack.numel for pack in reversed(layout.packs)
            ]
        small, *sync = phases["step"]
        assert small.op == "all_reduce" and small.nbytes < 8 * (3 * size + 64)
        assert not small.async_op
        expected = [
            (span.numel, span.owner)
            for pack in layout.packs
            for span in pack.spans
            if pack.fragments(span.owner)
        ]
        assert [(call.shape[0], call.source) for call in sync] == expected
        assert len({call.launch for call in sync}) == 1, "one launch for all packs"
        assert all(c.op == "broadcast" and not c.async_op and c.dtype == BF16 for c in sync)


@pytest.mark.parametrize("partition", ["even", "whole"])
def test_by_itself_sync_goes_the_way_that_the_layout_shows_for_each_pack(partition: str):
    fields = {"param_dtype": BF16, "autocast": False}  # all packs have one dtype
    fields |= {"partition": partition, "pack_params": 4, "alignment": 16}
    ranks, _ = run_world(3, log_of_a_step, "gpt", fields)
    layout: Any = ranks[0]["layout"]
    ways = [pack.algorithms.sync for pack in layout.packs]
    assert set(ways) == {"all_gather" if partition == "even" else "broadcast"}
    _, *sync = ranks[0]["step"]
    assert len({call.launch for call in sync}) == 1 < len(layout.packs)
    assert {call.op.removesuffix("_single") for call in sync} == set(ways)


@on_each_rank(3)
def test_packs_that_differ_in_algorithm_or_gather_other_dtypes_take_a_launch_for_each(group: Any):
    """NCCL, like the mock group, gathers one dtype per launch.

    The packs are fp32 norms and bf16 biases, cut evenly, and whole matrices.
    """
    model = nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.Linear(24, 40, bias=False))
    matrices = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    inner = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]
    optimizer = shardcast.shard(model, inner, process_group=group, keep_fp32="norms", pack_params=1)
    before = len(group.log)
    packed_of(optimizer).sync()
    layout, sync = (optimizer.layout, list(group.log[before:]))
    assert {pack.dtype for pack in layout.packs} == {BF16, torch.float32}
    launches: dict[int, set[str]] = {}
    for call in sync:
        launches.setdefault(call.launch, set()).add(call.op)
    assert sorted(map(sorted, launches.values())) == [
        ["all_gather_single"],
        ["all_gather_single"],
        ["broadcast"],
    ]
    assert not any(call.async_op for call in sync)
