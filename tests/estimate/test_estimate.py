"""The estimate, compared with the memory and messages of real runs."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from models import CASES, run_world
from pairwise import pairwise
from torch import Tensor, nn

import shardcast
from shardcast import ShardcastConfig
from shardcast.estimate import estimate, peers
from shardcast.testing import Collective

Kind = Callable[[nn.Module], Any]


def of_torch(name: str, **options: Any) -> Kind:
    return lambda model: getattr(torch.optim, name)(model.parameters(), **options)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    blocks = [p for n, p in model.named_parameters() if "blocks" in n and p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in blocks)]
    return [torch.optim.Muon(blocks), torch.optim.AdamW(others)]


def frozen(model: nn.Module) -> torch.optim.Optimizer:
    model.blocks[0].requires_grad_(False)
    return torch.optim.AdamW(model.parameters())


FUSED: dict[str, Kind] = {
    "AdamW": of_torch("AdamW"),
    "amsgrad": of_torch("Adam", amsgrad=True),
    "SGD": of_torch("SGD", lr=0.1),
    "momentum": of_torch("SGD", lr=0.1, momentum=0.9),
}
OTHERS: dict[str, Kind] = {
    "centered RMSprop with momentum": of_torch("RMSprop", centered=True, momentum=0.9),
    "Muon and AdamW": muon_and_adamw,
    "frozen": frozen,
    **{
        name: of_torch(name)
        for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
}
FIELDS: dict[str, dict[str, Any]] = {
    "bf16": {"param_dtype": "bf16"},
    "fp32": {"param_dtype": "fp32", "pack_params": 3},
    "kept": {"keep_fp32": "norms", "grad_dtype": "fp32", "pack_mb": 0.002},
    "sharded": {"accumulate": "sharded", "pack_params": 2},
    "bf16 moments": {"moments": "bf16", "offload": True},
    "int8 moments": {"moments": "int8", "keep_fp32": "norms", "alignment": 64},
    "averages": {
        "averages": {"ema": 0.9, "low": {"decay": 0.9, "stored": "bf16"}},
        "pack_params": 3,
        "metrics": True,
    },
}
# Covers each pair of values of fields, kind, number of ranks and partition.
MEMORY = [
    *(
        (fields, kind, 1 + (n + m) % 4, ("even", "whole")[(n + m // 2) % 2])
        for n, fields in enumerate(FIELDS)
        for m, kind in enumerate(FUSED)
    ),
    *(("bf16", kind, 3, "auto") for kind in OTHERS),
]


def ran(group: Any, kind: Kind, fields: dict[str, Any]) -> dict[str, int]:
    """Return a rank's memory report after a step."""
    model = CASES["gpt"].build()
    optimizer = shardcast.shard(model, kind(model), process_group=group, fuse="eager", **fields)
    for _ in range(2):
        for param in model.parameters():
            if param.requires_grad:
                dtype = fields.get("grad_dtype") and torch.float32
                param.grad = torch.ones_like(param, dtype=dtype)
        optimizer.step()
        report = optimizer.memory_report()
        optimizer.zero_grad()
    return report


@pytest.mark.parametrize(("fields", "kind", "size", "partition"), MEMORY)
def test_the_estimate_is_what_the_fullest_rank_holds(
    fields: str, kind: str, size: int, partition: str
):
    chosen, build = {**FIELDS[fields], "partition": partition}, {**FUSED, **OTHERS}[kind]
    with torch.device("meta"):
        model = CASES["gpt"].build()
    found = estimate(model, build(model), size, chosen, "gloo")
    reports = run_world(size, ran, build, chosen)[0]
    assert found.total == max(sum(report.values()) for report in reports)
    assert found.parameters == reports[0]["parameters"]
    assert found.layout.world_size == size and found.imbalance >= 1.0


@pytest.mark.parametrize("held", [False, True])
def test_the_estimate_and_the_line_of_shard_say_what_is_not_trained_and_stays_fp32(
    held: bool, caplog: pytest.LogCaptureFixture
):
    def adapted(**fields: Any) -> tuple[int, int, str]:
        """Return the estimate's frozen and total bytes, and the log of ``shard()``."""
        model = nn.Sequential(nn.Linear(250, 1000), nn.Linear(1000, 1))
        model[0].requires_grad_(False)
        params = [param for param in model.parameters() if held or param.requires_grad]
        optimizer, fields = torch.optim.SGD(params), {"param_dtype": "bf16", **fields}
        found = estimate(model, optimizer, 1, fields)
        caplog.clear()
        shardcast.shard(model, optimizer, **fields)
        return found.frozen, found.total, caplog.text

    caplog.set_level("INFO", "shardcast")
    nbytes, total, line = adapted()
    assert nbytes == (0 if held else 251_000 * 4)
    assert ("1.004 MB of parameters that are not trained stay in fp32" in line) is not held
    none, less, line = adapted(convert_rest=True)
    assert none == 0 and "not trained" not in line
    assert held or total - less == nbytes / 2
    assert adapted(param_dtype="fp32")[0] == 0, "there is nothing to convert"


class Wide(nn.Module):
    """Matrices, some of whose sizes are not divisible by the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((1000, 3), (32, 32), (41, 25), (7, 1), (64, 32), (1, 1))
        self.all = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)

    def forward(self) -> Tensor:
        return sum(param.sum() for param in self.parameters())  # type: ignore[return-value]


def accumulated(group: Any, fields: dict[str, Any], micro_batches: int) -> dict[str, int]:
    model = Wide()
    optimizer = shardcast.shard(
        model, torch.optim.AdamW(model.parameters()), process_group=group, fuse="eager", **fields
    )
    reports = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(
            lambda _: reports.append(optimizer.memory_report())
        )
    for _ in range(2):
        for _ in range(micro_batches - 1):
            with optimizer.no_sync():
                optimizer.scale_loss(model().float()).backward()
        optimizer.scale_loss(model().float()).backward()
        optimizer.step()
        reports.append(optimizer.memory_report())
        optimizer.zero_grad()
    reduces = group.size() > 1 or "loss_scale" in fields
    waits = micro_batches > 1 and fields["accumulate"] == "local" and reduces
    # The maximum is at the start of the last backward, during which gradients are sent.
    return max(reports, key=lambda report: report["gradients"]) if waits else reports[-1]


@pytest.mark.parametrize(
    ("fields", "size", "accumulate", "micro_batches"),
    [
        *pairwise(
            ({}, {"partition": "whole", "pack_params": 2}, {"grad_dtype": "bf16"}),
            (1, 2, 4),
            ("local", "sharded"),
            (1, 2, 8, 9),
        ),
        ({"loss_scale": 2.0}, 1, "local", 2),
        ({"loss_scale": 2.0}, 1, "sharded", 2),
    ],
)
def test_the_estimate_has_local_gradients_and_their_long_sums(
    fields: dict[str, Any], size: int, accumulate: str, micro_batches: int
):
    chosen = {**fields, "accumulate": accumulate}
    with torch.device("meta"):
        model = Wide()
    adamw = torch.optim.AdamW(model.parameters())
    found = estimate(model, adamw, size, chosen, "gloo", micro_batches=micro_batches)
    reports = run_world(size, accumulated, chosen, micro_batches)[0]
    assert found.total == max(sum(report.values()) for report in reports)
    assert found.gradients in [report["gradients"] for report in reports]
    if size > 1 and micro_batches > 1 and (accumulate == "local" or "grad_dtype" in fields):
        once = estimate(model, adamw, size, chosen, "gloo")
        assert found.gradients >= once.gradients * 2, "negative control: fp32 or unsharded"


def gpt() -> nn.Module:
    return CASES["gpt"].build()


def calls_of_a_step(
    size: int, fields: dict[str, Any], build: Callable[[], nn.Module] = gpt, kind: str = "AdamW"
) -> list[list[Collective]]:
    """Return the collectives of each rank in a step."""

    def run(group: Any) -> list[Collective]:
        model = build()
        optimizer = shardcast.shard(model, of_torch(kind)(model), process_group=group, **fields)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        group.barrier().wait()
        begun = len(group.log)
        optimizer.step()
        return list(group.log[begun:])

    return run_world(size, run)[0]


def leaves(call: Collective, rank: int, size: int) -> int:
    """Return the bytes that a rank sends to others, counted once per receiver."""
    if call.op == "all_to_all_single":
        return (sum(call.input_splits) - call.input_splits[rank]) * call.dtype.itemsize
    if call.op == "broadcast":
        return (size - 1) * call.nbytes * (call.source == rank)
    if call.op == "all_gather_single":
        return (size - 1) * math.prod(call.shape) * call.dtype.itemsize
    return 0  # the small all-reduce


@pytest.mark.parametrize("overlap_sync", [False, True])
@pytest.mark.parametrize(
    ("partition", "sync"), [("even", "broadcast"), ("even", "all_gather"), ("whole", "broadcast")]
)
def test_what_is_sent_is_that_of_the_rank_that_sends_most_in_as_many_collectives(
    partition: str, sync: str, overlap_sync: bool
):
    fields = {"sync": sync, "partition": partition, "pack_params": 1, "overlap_sync": overlap_sync}
    model = CASES["gpt"].build()
    found = estimate(model, torch.optim.AdamW(model.parameters()), 3, fields)
    assert partition == "even" or found.sender != 0
    by_rank = calls_of_a_step(3, fields)
    sent = [sum(leaves(call, rank, 3) for call in calls) for rank, calls in enumerate(by_rank)]
    assert found.collectives == len({call.launch for call in by_rank[0]})
    assert found.sent == max(sent) == sent[found.sender]


@pytest.mark.parametrize("accumulate", ["local", "sharded"])
def test_sharded_gradients_are_sent_in_each_micro_batch(accumulate: str):
    fields = {"accumulate": accumulate, "pack_params": 2}

    def run(group: Any) -> list[Collective]:
        model = Wide()
        optimizer = shardcast.shard(model, of_torch("SGD")(model), process_group=group, **fields)
        group.barrier().wait()
        begun = len(group.log)
        for number in range(3):
            with nullcontext() if number == 2 else optimizer.no_sync():
                model().float().backward()
        optimizer.step()
        return list(group.log[begun:])

    model = Wide()
    found = estimate(model, of_torch("SGD")(model), 3, fields, micro_batches=3)
    by_rank = run_world(3, run)[0]
    sent = [sum(leaves(call, rank, 3) for call in calls) for rank, calls in enumerate(by_rank)]
    assert found.sent == max(sent) == sent[found.sender]
    assert found.collectives == len({call.launch for call in by_rank[0]})


class Blocks(nn.Module):
    """Two layers whose matrices consist of whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(256, 384), nn.Linear(384, 128)


@pytest.mark.parametrize("form", ["mxfp8", "mxfp4", "fp8_block128"])
@pytest.mark.parametrize("sync", ["broadcast", "auto"])
def test_codes_and_scales_are_sent_in_as_many_bytes(form: str, sync: str):
    """bf16 takes 2 bytes per element, the codes 1 + 1/32, 1/2 + 1/32 and 1 + 1/16384."""
    sent = {}
    for wire in ("codes", "bf16"):
        fields = {"sync": sync, "published": {form: "?.weight", "wire": wire}, "autocast": False}
        model = Blocks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = estimate(model, optimizer, 3, fields, "strict")
        by_rank = [
            sum(leaves(call, rank, 3) for call in calls)
            for rank, calls in enumerate(calls_of_a_step(3, fields, Blocks, "SGD"))
        ]
        assert found.sent == max(by_rank) == by_rank[found.sender]
        sent[wire] = sum(by_rank)
    of_block = {"mxfp8": 33 / 32, "mxfp4": 17 / 32, "fp8_block128": 16385 / 16384}[form]
    elements = 256 * 384 + 384 * 128
    saved = (2 - of_block) * elements * 2  # to two others
    more = 0 if sync == "broadcast" else 3 * 2 * 16  # gathered parts are rounded up
    assert saved - more <= sent["bf16"] - sent["codes"] <= saved + 2 * 2 * 3 * 128


# -- real runs ----------------------------------------------------------------------------------


def test_peers_hold_what_is_known_of_them_at_two_ranks():
    assert peers(1, 2, 2) == {
        "DDP + autocast": 16,
        "ZeroRedundancyOptimizer": 12,
        "ZeRO-1": 10,
        "ZeRO-2": 9,
        "FSDP2": 8,
        "Megatron": 12,
        "FlashOptim + DDP": 7,
    }


def test_owners_that_cannot_be_grouped_launch_one_by_one():
    model = CASES["gpt"].build()
    optimizer = torch.optim.AdamW(model.parameters())
    config = ShardcastConfig(sync="broadcast", pack_params=4)
    found = [estimate(model, optimizer, 3, config, kind, 1) for kind in ("nccl", "mpi")]
    packs = len(found[0].layout.packs)
    owners = sum(len(pack.owned_spans) for pack in found[1].layout.packs)
    assert [one.collectives for one in found] == [1 + packs + 1, 1 + packs + owners]


def test_other_optimizers_are_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"expected one of ASGD, Ada.*SGD, got Adafactor"):
        estimate(model, torch.optim.Adafactor(model.parameters()), 2)


# -- the command ----------------------------------------------------------------------------------

PAGE = """
import torch
from gpt import *

def wide(): return torch.nn.Sequential(*(torch.nn.Linear(3000, 3000) for _ in range(100)))
def gpt(): return GPT(GPTConfig())
def layers(): return torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(24)))

def pair():
    model = torch.nn.Linear(1000, 1000)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def listed():
    model, sgd = pair()
    return model, [sgd]
"""
Command = Callable[..., str]


@pytest.fixture(autouse=True)
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the functions of :data:`PAGE` importable."""
    (tmp_path / "built.py").write_text(PAGE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_the_command_prints_a_table_and_json(command: Command):
    words = "estimate built:wide --world_size 1 1024".split()
    short = command(*words)
    assert "not trained" not in short
    rows = {line[:36].strip(): line[36:].split() for line in short.splitlines()[1:-1]}
    assert rows["ranks"] == ["1", "1,024"] and rows["GB per rank, shardcast"] == ["14.4", "1.8"]
    assert len({len(line) for line in short.splitlines()[1:-1]}) == 1, "columns are aligned"
    first, last = json.loads(command(*words, "--json"))
    assert (first["sent"], first["collectives"], first["imbalance"]) == (0, 0, 1.0)
    assert 0 <= first["state"] - 8 * 900_300_000 < 10_000, "except for padding"
    assert last["masters"] == pytest.approx(first["masters"] / 1024, rel=0.01)
    assert last["total"] < first["total"]


def test_a_function_may_return_the_model_and_its_optimizer(command: Command):
    for function in ("pair", "listed"):
        printed = command("estimate", f"built:{function}", "--world_size", "2")
        assert "1,001,000 parameters, SGD" in printed


LLAMA = """
import resource, sys
from shardcast.cli import main

status = main(["estimate", "llama:build", "--world_size", "1024", "--json"])
used = resource.getrusage(resource.RUSAGE_SELF)
print("used", used.ru_maxrss, used.ru_utime + used.ru_stime, file=sys.stderr)
sys.exit(status)
"""
SEVENTY = """
from torch import nn

class Layer(nn.Module):
    def __init__(self, width=8192, few=1024, wide=28672):
        super().__init__()
        sizes = {"q": (width, width), "k": (width, few), "v": (width, few), "o": (width, width),
                 "gate": (width, wide), "up": (width, wide), "down": (wide, width)}
        for name, (rows, columns) in sizes.items():
            setattr(self, name, nn.Linear(rows, columns, bias=False))
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)

def build():
    layers = [Layer() for _ in range(80)]
    return nn.Sequential(nn.Embedding(128256, 8192), *layers, nn.RMSNorm(8192),
                         nn.Linear(8192, 128256, bias=False))
"""


@pytest.mark.timeout(240)
def test_seventy_billion_parameters_on_a_thousand_ranks_take_a_minute_and_four_gigabytes(
    tmp_path: Path,
):
    (tmp_path / "llama.py").write_text(SEVENTY)
    finished = subprocess.run(
        [warm.executable(), "-c", LLAMA],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert finished.returncode == 0, finished.stderr
    used = re.search(r"^used (\d+) (\S+)$", finished.stderr, re.MULTILINE)
    assert used is not None
    assert int(used[1]) << 10 < 4e9 and float(used[2]) < 60
    (row,) = json.loads(finished.stdout)
    numel = 70_553_706_496
    assert row["world_size"] == 1024
    assert row["parameters"] == pytest.approx(2 * numel, rel=0.001)
    assert row["masters"] + row["state"] == pytest.approx(12 * numel / 1024, rel=0.01)
    assert row["total"] == pytest.approx((2 + 14 / 1024) * numel, rel=0.001)
