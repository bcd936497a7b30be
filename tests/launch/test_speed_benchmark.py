"""The benchmark runs, and what it counts is right; nothing here looks at a clock."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks import __main__ as benchmark
from benchmarks import counters, digests, document, report, step, systems, update
from benchmarks.checkpoint import KINDS
from benchmarks.counters import Casts
from benchmarks.models import WORKLOADS, Encoder, Workload
from benchmarks.systems import OWN, SYSTEMS
from models import MLP
from pairwise import thinned
from storages import settle
from torch import nn

from shardcast.testing import SpawnedWorld, spawn_world

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
COMPILED = pytest.mark.needs_compiler


def test_casts_of_parameters_are_counted_and_those_of_activations_are_not():
    model, x = MLP(), torch.randn(2, 7)
    with Casts(model.parameters()) as counter, torch.autocast("cpu", torch.bfloat16):
        model(x)
    assert counter.count == 6
    with Casts(model.parameters()) as counter:
        x.bfloat16().float()
        torch._foreach_copy_([torch.empty(13, 7).half()], [model.a.weight.detach()])
    assert counter.count == 1


def test_ratios_are_within_a_round_and_to_the_same_compute_and_wrong_losses_are_marked(
    tmp_path: Path,
):
    assert step.ratio([1.0, 20.0, 3.0], [2.0, 10.0, 1.0]) == 2.0
    results = {
        "local, bf16": step.Result("local, bf16", [1.0, 2.0], [0.0, 0.0]),
        "local, autocast": step.Result("local, autocast", [3.0, 4.0], [0.0, 0.0]),
        "shardcast": step.Result("local, bf16", [5.0, 5.0], [1.0, 2.0], off=0.001),
        "cast": step.Result("local, autocast", [5.0, 5.0], [1.0, 1.0]),
    }
    assert step.exposed(results, "shardcast") == [4.0, 3.0]
    assert step.exposed(results, "cast") == [2.0, 1.0]
    assert step.compute(results["shardcast"]) == [4.0, 3.0]
    assert "WRONG" not in str(report.rows(results))
    results["cast"].off = 0.5
    assert "WRONG" in str(report.rows(results)[1])
    report.plot(results, "a model", tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


class Hoarder(systems.DDP):
    """Holds one more fp32 value per parameter than DDP does."""

    def __init__(self, model: nn.Module, workload: Workload, **options: Any) -> None:
        numel = sum(param.numel() for param in model.parameters())
        super().__init__(model, workload, **options)
        self.hoard = torch.zeros(numel)


def _count(_group: dist.ProcessGroup) -> dict[str, step.Result]:
    """What the benchmark counts of some systems on a model of 1.05 million parameters."""
    # Of one layer: what torch allocates beside storages, for each tensor, is nothing beside them.
    small = Encoder(vocabulary=1 << 15, width=32, depth=0, heads=1, context=8)
    workload = replace(WORKLOADS["tiny"], build=lambda: deepcopy(small), vocabulary=1 << 15)
    systems.SYSTEMS["hoarder"] = partial(Hoarder, compute="fp32")
    plan = step.Plan("", ("shardcast", "DDP, fp32", "hoarder", "ZeroRedundancyOptimizer"), 1)
    return {name: step.prepare(name, workload, plan)[1] for name in plan.names}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_memory_and_collectives_of_known_systems():
    # Of its own: what earlier tests freed would be counted as what is free.
    with spawn_world(2, timeout=100, start_method="forkserver") as world:
        world.run(settle)  # each count begins with a collection
        found = world.run(_count)[0]
    if found["shardcast"].held is None:
        pytest.skip("memory is counted in glibc's allocator, which is not here")
    expected = {
        "shardcast": 2 + (2 + 12) / 2,  # parameters, half of gradients, masters and moments
        "DDP, fp32": 16,  # parameters, moments, and gradients that are views of buckets
        "hoarder": 20,
        # Gradients twice, for the buckets are known to DDP alone; and the rank that owns the one
        # large tensor has all of its moments.
        "ZeroRedundancyOptimizer": 4 + 4 + 4 + 8,
    }
    assert {name: found[name].held for name in expected} == pytest.approx(expected, abs=0.6)
    # The norm and skip; a message for the gradients of a pack and one for its parameters. There are
    # two packs: of matrices and their biases in bf16, and of norms, which autocast keeps in fp32.
    assert found["shardcast"].collectives == (1, 4)
    assert found["DDP, fp32"].collectives == (2, 0)  # its first bucket is a small one
    assert found["ZeroRedundancyOptimizer"].collectives[0] > found["DDP, fp32"].collectives[0]


def test_the_highest_moment_is_seen_after_it_has_passed():
    with counters.Growth() as growth:
        torch.ones(1 << 24)
    if growth.bytes is None:
        pytest.skip("this kernel does not let a process reset its peak")
    assert growth.bytes > 0.9 * (4 << 24)  # resident memory is counted in batches of pages
    with counters.Growth() as nothing:
        torch.ones(1 << 10)
    assert nothing.bytes is not None
    assert nothing.bytes < 1 << 24


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
        pytest.param(["update", "--elements", "4096", "--rounds", "1"], marks=COMPILED),
        pytest.param(
            [
                "peers",
                "--model",
                "tiny",
                "--rounds",
                "1",
                "--micros",
                "2",
                "--clock",
                "processor",
                "--systems",
                "floor",
                "plain",
                "autocast",
                "views",
                "in fp32",
            ],
            marks=COMPILED,
        ),
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_command_prints_its_table(
    arguments: list[str],
    gloo: SpawnedWorld,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def shared(function: Callable[..., Any], _size: int, *args: Any, timeout: float) -> list[Any]:
        return gloo.run(function, *args, timeout=150)

    monkeypatch.setattr(benchmark, "spawn", shared)
    coded = thinned(len(update.CODED), update.CODED.items())  # each is compiled
    monkeypatch.setattr(update, "CODED", dict(coded))
    benchmark.main([*arguments, "--markdown"])
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(rows) >= 5
    assert "WRONG" not in printed
    if arguments[0] == "peers":
        measured = {row.split("|")[1].strip() for row in rows[2:]}
        assert {"shardcast", "crude floor", "DDP + autocast"} <= measured <= set(SYSTEMS)
        own = [row for row in rows if row.split("|")[1].strip() in OWN]
        place = 1 + report.COLUMNS.index("casts 1 / 4")
        assert all(row.split("|")[place].strip() == "0 / 0" for row in own), "casts of parameters"


def test_each_table_of_the_document_is_replaced_by_what_its_command_prints(tmp_path: Path):
    text, path = (ROOT / "BENCHMARKS.md").read_text(), tmp_path / "tables.md"
    busy, idle = document.commands(text, [], False), document.commands(text, [], True)
    assert len(busy) >= 4 and all(old.startswith(f"`python {run}`: ") for old, run in busy)
    assert all("--clock" not in run for _, run in idle)
    command = "-m benchmarks worlds --sizes 2 --rounds 1 --markdown"
    path.write_text(f"# Title\n\n`python {command}`: before,\nold.\n\n| a |\n| b |\n\nProse.\n")
    benchmark.main(["all", "--document", str(path)])
    after = path.read_text()
    assert f"`python {command}`: processor time of" in after and "torch" in after
    assert after.endswith("\n\nProse.\n") and "| ranks |" in after
    assert "old." not in after and "| b |" not in after


def test_checkpoints_are_timed_next_to_those_of_the_same_promise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given = ["--elements", "1", "--ranks", "1", "--rounds", "1", "--markdown"]
    benchmark.main(["checkpoint", *given, "--directory", str(tmp_path)])
    printed = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed if "|" in line]
    assert [row[0] for row in rows[2:]] == [name for kind in KINDS.values() for name in kind]
    firsts = {kind[0] for kind in KINDS.values()}
    assert all(row[2] == "1.00" for row in rows if row[0] in firsts)
    assert list(tmp_path.iterdir()) == []


def test_two_hosts_are_skipped_with_a_message_without_root(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    script = ROOT / "tools" / "two_hosts.sh"
    run = subprocess.run(
        ["bash", script],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert run.returncode == 0 and run.stdout.startswith("skipped: ")


@pytest.mark.filterwarnings("ignore:step skipped", "ignore:state_dict")
def test_a_digest_is_that_of_the_bits(monkeypatch: pytest.MonkeyPatch):
    run = digests.RUNS["offloaded"]
    first = digests.hashed(run())
    assert digests.hashed(run()) == first
    monkeypatch.setattr("shardcast.step.decide.norm.EPS", 2e-6)
    assert digests.hashed(run()) != first
