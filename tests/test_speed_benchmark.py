"""The benchmark runs, and what it counts is right; nothing here looks at a clock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import report, step
from benchmarks.counters import Casts
from benchmarks.models import WORKLOADS
from benchmarks.systems import OWN, SYSTEMS
from models import MLP
from torch import nn

pytestmark = pytest.mark.timeout(60)

LAUNCH = Path(__file__).parent.parent / "launch"


def test_casts_of_parameters_are_counted_and_those_of_activations_are_not():
    model, x = MLP(), torch.randn(2, 7)
    with Casts(model.parameters()) as counter, torch.autocast("cpu", torch.bfloat16):
        model(x)
    assert counter.count == 6
    with Casts(model.parameters()) as counter:
        x.bfloat16().float()
        torch._foreach_copy_([torch.empty(13, 7).half()], [model.a.weight.detach()])
    assert counter.count == 1


def test_ratios_are_medians_of_ratios_within_a_round():
    assert step.ratio([1.0, 20.0, 3.0], [2.0, 10.0, 1.0]) == 2.0


def test_what_is_exposed_is_the_step_less_the_same_compute():
    results = {
        "local, bf16": step.Result(False, [1.0, 2.0]),
        "local, autocast": step.Result(True, [3.0, 4.0]),
        "low": step.Result(False, [5.0, 5.0]),
        "cast": step.Result(True, [5.0, 5.0]),
    }
    assert step.exposed(results, "low") == [4.0, 3.0]
    assert step.exposed(results, "cast") == [2.0, 1.0]


def test_a_system_whose_losses_are_off_is_marked():
    def result(off: float) -> step.Result:
        return step.Result(False, [2.0], [1.0], 10**6, (0, 0), off)

    results = {"local, bf16": step.Result(False, [1.0], [0.0]), "shardcast": result(0.001)}
    assert "WRONG" not in str(report.rows(results))
    assert "WRONG" in str(report.rows({**results, "other": result(0.5)})[1])


def test_a_table_in_markdown_has_aligned_columns():
    lines = report.table(("name", "ms"), [("a", "1.5"), ("long", "22.0")], markdown=True)
    assert lines.split("\n") == [
        "| name |   ms |", "| ---- | ---: |", "| a    |  1.5 |", "| long | 22.0 |",
    ]  # fmt: skip


def test_a_plot_has_a_bar_for_every_system_that_trains(tmp_path: Path):
    results = {
        "local, bf16": step.Result(False, [1.0], [0.0]),
        "shardcast": step.Result(False, [2.0], [1.0]),
    }
    report.plot(results, "a model", tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "tensors", "millions"), [("gpt", 101, 33.6), ("ernie", 393, 5.8)])
def test_the_models_have_the_sizes_that_the_tables_name(name: str, tensors: int, millions: float):
    params: list[nn.Parameter] = list(WORKLOADS[name].build().parameters())
    assert len(params) == tensors
    assert abs(sum(param.numel() for param in params) / 1e6 - millions) < 0.1


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "arguments",
    [
        ["update", "--elements", "4096", "--rounds", "1"],
        ["flatten", "--model", "tiny", "--rounds", "1"],
        ["collectives", "--elements", "4096", "--rounds", "1"],
        ["peers", "--model", "tiny", "--rounds", "1", "--micros", "2", "--systems", "floor",
         "plain", "DDP", "Zero", "FSDP2"],
    ],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_every_command_prints_its_table(arguments: list[str]):
    command = [sys.executable, str(LAUNCH / "benchmark.py"), *arguments, "--markdown"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stderr
    rows = [line for line in run.stdout.splitlines() if line.startswith("|")]
    assert len(rows) >= 5
    assert "WRONG" not in run.stdout
    if arguments[0] == "peers":
        measured = {row.split("|")[1].strip() for row in rows[2:]}
        assert {"shardcast", "crude floor", "DDP + autocast"} <= measured <= set(SYSTEMS)
        own = [row for row in rows if row.split("|")[1].strip() in OWN]
        assert all(row.split("|")[8].strip() == "0 / 0" for row in own), "no casts of parameters"
