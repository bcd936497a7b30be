"""The estimate against what real runs hold and send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, run_world

import shardcast
from shardcast.cli import main
from shardcast.estimate import estimate, peers

pytestmark = pytest.mark.timeout(60)
KINDS = {
    "AdamW": lambda params: torch.optim.AdamW(params),
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def ran(group: Any, kind: str, fields: dict[str, Any]) -> dict[str, int]:
    """What a rank holds after a step."""
    model = CASES["gpt"].build()
    inner = KINDS[kind](model.parameters())
    optimizer = shardcast.shard(model, inner, process_group=group, **fields)
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.ones_like(param, dtype=fields.get("grad_dtype") and torch.float32)
        optimizer.step()
        report = optimizer.memory_report()
        optimizer.zero_grad()
    return report


@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "fields",
    [
        {"param_dtype": "bf16"},
        {"param_dtype": "fp32", "pack_params": 3},
        {"keep_fp32": "norms", "grad_dtype": "fp32", "pack_mb": 0.002},
        {"grads": "sharded", "pack_params": 2},
    ],
    ids=["bf16", "fp32", "kept", "sharded"],
)
def test_the_estimate_is_what_the_fullest_rank_holds(
    fields: dict[str, Any], kind: str, size: int, partition: str
):
    fields = {**fields, "partition": partition}
    with torch.device("meta"):
        model = CASES["gpt"].build()
    found = estimate(model, KINDS[kind](model.parameters()), size, fields)
    reports = run_world(size, ran, kind, fields)[0]
    fullest = max(sum(report.values()) for report in reports)
    assert found.total == fullest
    assert found.parameters == reports[0]["parameters"]
    assert found.layout.world_size == size and found.balance >= 1.0


def ran_frozen(group: Any) -> dict[str, int]:
    model = CASES["mlp"].build()
    model.a.requires_grad_(False)
    optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters()), process_group=group)
    for param in (*model.b.parameters(), *model.c.parameters()):
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer.memory_report()


def test_frozen_parameters_of_the_optimizer_have_masters_but_no_gradients_and_no_state():
    model = CASES["mlp"].build()
    model.a.requires_grad_(False)
    found = estimate(model, torch.optim.AdamW(model.parameters()), 2)
    report = run_world(2, ran_frozen)[0][0]
    assert {kind: getattr(found, kind) for kind in report} == report


OTHERS: dict[str, dict[str, Any]] = {
    "Adadelta": {},
    "Adagrad": {},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {},
    "RMSprop, centered, momentum": {"centered": True, "momentum": 0.9},
    "Rprop": {},
}


def ran_other(group: Any, kind: Any, options: dict[str, Any]) -> dict[str, int]:
    model = CASES["gpt"].build()
    optimizer = shardcast.shard(model, kind(model.parameters(), **options), process_group=group)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer.memory_report()


@pytest.mark.parametrize("name", OTHERS)
def test_the_state_of_other_elementwise_optimizers_is_known_too(name: str):
    kind, options = getattr(torch.optim, name.partition(",")[0]), OTHERS[name]
    with torch.device("meta"):
        model = CASES["gpt"].build()
    found = estimate(model, kind(model.parameters(), **options), 3)
    reports = run_world(3, ran_other, kind, options)[0]
    assert found.total == max(sum(report.values()) for report in reports)


def counted(group: Any, fields: dict[str, Any]) -> None:
    model = CASES["gpt"].build()
    inner = torch.optim.AdamW(model.parameters())
    optimizer = shardcast.shard(model, inner, process_group=group, **fields)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer._comm.all_reduce(torch.zeros(7))  # what comes after it is the step's
    optimizer.step()


@pytest.mark.parametrize("sync", ["broadcast", "all_gather"])
def test_the_collectives_of_a_step_are_as_many(sync: str):
    fields = {"sync": sync, "pack_params": 2}
    _, world = run_world(2, counted, fields)
    names = [(call.op, call.nbytes) for call in world.logs[0]]
    begin = next(n for n, name in enumerate(names) if name == ("all_reduce", 28))
    model = CASES["gpt"].build()
    found = estimate(model, torch.optim.AdamW(model.parameters()), 2, fields)
    assert found.collectives == len(names) - begin - 1


def test_peers_hold_what_is_known_of_them_at_two_ranks():
    held = peers(1, 2, 2)
    assert held == {"DDP + autocast": 16, "ZeRO-1": 10, "ZeRO-2": 9, "FSDP": 8}


def test_other_optimizers_are_refused():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"expected one of ASGD, Ada.*SGD, got Adafactor"):
        estimate(model, torch.optim.Adafactor(model.parameters()), 2)


def test_the_command_prints_a_table_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "mine.py").write_text(
        "import torch\ndef build(): return torch.nn.Linear(30000, 30000)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ["estimate", "mine:build", "--world_size", "1", "1024"]
    assert main(arguments) == 0
    assert "900,030,000 parameters, AdamW" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    first, last = json.loads(capsys.readouterr().out)
    assert 0 <= first["state"] - 8 * 900_030_000 < 10_000, "padding aside"
    assert last["masters"] < first["masters"] / 1000 and last["total"] < first["total"]


@pytest.mark.parametrize("name", ["nothing_like_that:build", "torch:nothing", "torch", ""])
def test_a_model_that_cannot_be_imported_is_told(name: str, capsys: pytest.CaptureFixture[str]):
    assert main(["estimate", name]) == 2
    assert "expected MODULE:FUNCTION" in capsys.readouterr().err
