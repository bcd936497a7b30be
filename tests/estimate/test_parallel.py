"""Estimates beside tensor and pipeline parallelism, against models that torch has cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardcast
from shardcast.estimate import estimate
from shardcast.estimate.parallel import stages_of
from shardcast.plan.originals import OptimizerList
from shardcast.testing import fake_world

CONFIG = {"param_dtype": "bf16"}
PLAN = {"*.up.*": 0, "*.down.weight": 1}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Embedding(20, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.end = nn.Linear(6, 20, bias=False)
        self.end.weight = self.start.weight


def stages(tp: int, pp: int, plan: dict[str, int]) -> list[tuple[nn.Module, OptimizerList]]:
    with torch.device("meta"):
        model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    return stages_of(model, OptimizerList([optimizer]), tp, pp, plan)


def slots(layout: Any) -> dict[str, tuple[int, ...]]:
    return {slot.name: slot.shape for _, slot in layout.slots()}


def test_what_tensor_parallelism_leaves_is_what_shard_finds():
    (part,) = stages(4, 1, PLAN)
    found = estimate(part[0], part[1].optimizers, 2, CONFIG)
    with fake_world({"dp": 2, "tp": 4}) as mesh:
        model = Net()
        plan: Any = {f"layers.{n}.up": ColwiseParallel() for n in range(5)}
        plan |= {f"layers.{n}.down": RowwiseParallel() for n in range(5)}
        parallelize_module(model, mesh["tp"], plan)
        optimizer = torch.optim.AdamW(model.parameters())
        sharded = shardcast.shard(model, optimizer, CONFIG, mesh=mesh)
        assert slots(found.layout) == slots(sharded.layout)
    (whole,) = stages(1, 1, {})  # the control: without the plan nothing is cut
    assert slots(estimate(whole[0], whole[1].optimizers, 2, CONFIG).layout) != slots(found.layout)


def test_stages_share_the_model_and_each_holds_what_it_computes():
    parts = stages(1, 2, {})
    names = [[name for name, _ in model.named_parameters()] for model, _ in parts]
    assert names[0][0] == "start.weight" and names[1][-1] == "end.weight"  # tied: both hold it
    layers = [{name.split(".")[1] for name in some if name.startswith("layers")} for some in names]
    assert layers == [{"0", "1"}, {"2", "3", "4"}]
    for model, originals in parts:
        held = sum(p.numel() for group in originals.groups for p in group["params"])
        assert held == sum(param.numel() for param in model.parameters())


def test_tensor_parallel_neighbours_leave_fewer_data_parallel_ranks_to_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., str]
):
    (tmp_path / "wide_to_cut.py").write_text(
        "import torch\ndef build(): return torch.nn.Linear(4096, 4096, bias=False)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words, found = "estimate wide_to_cut:build --world_size 16 --json".split(), []
    for options in ((), ("--tp", "4", "--tp_plan", "weight=0")):
        (row,) = json.loads(command(*words, *options))
        found.append((row["ranks_per_node"], row["algorithms"][0]["algorithms"].split()[1]))
    assert found == [(8, "two_level"), (2, "all_to_all")]
