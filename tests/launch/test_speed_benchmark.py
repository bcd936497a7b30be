"""The benchmark runs and counts correctly; no test depends on times."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks import __main__ as benchmark
from benchmarks import digests, report, step, systems
from benchmarks.counters import Casts
from benchmarks.models import WORKLOADS, Encoder, Workload
from benchmarks.systems import OWN, SYSTEMS
from models import MLP
from shared_fixtures import started
from torch import nn

from shardcast.testing import SpawnedWorld


def test_casts_of_parameters_are_counted_and_those_of_activations_are_not():
    model, x = MLP(), torch.randn(2, 7)
    with Casts(model.parameters()) as counter, torch.autocast("cpu", torch.bfloat16):
        model(x)
    assert counter.count == 6
    with Casts(model.parameters()) as counter:
        x.bfloat16().float()
        torch._foreach_copy_([torch.empty(13, 7).half()], [model.a.weight.detach()])
    assert counter.count == 1


class Hoarder(systems.DDP):
    """DDP with one more fp32 value per parameter."""

    def __init__(self, model: nn.Module, workload: Workload, **options: Any) -> None:
        numel = sum(param.numel() for param in model.parameters())
        super().__init__(model, workload, **options)
        self.hoard = torch.zeros(numel)


def _count(_group: dist.ProcessGroup) -> dict[str, step.Result]:
    """Return the benchmark's counts for some systems on a model of 1.05 million parameters."""
    # With so few tensors, torch's allocations per tensor are negligible.
    small = Encoder(vocabulary=1 << 15, width=32, depth=0, heads=1, context=8)
    workload = replace(WORKLOADS["tiny"], build=lambda: deepcopy(small), vocabulary=1 << 15)
    systems.SYSTEMS["hoarder"] = partial(Hoarder, compute="fp32")
    plan = step.Plan("", ("shardcast", "DDP, fp32", "hoarder", "ZeroRedundancyOptimizer"), 1)
    return {name: step.prepare(name, workload, plan)[1] for name in plan.names}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_memory_and_collectives_of_known_systems():
    # Needs new processes: memory that earlier tests freed would count as free.
    with started(2) as world:
        found = world.run(_count)[0]
    if found["shardcast"].held is None:
        pytest.skip("memory is counted in glibc's allocator, which is not here")
    expected = {
        # Parameters; half of gradients, masters and moments; and the buffers kept on a CPU for
        # sending and receiving, as large as the model, because it has only two packs.
        "shardcast": 2 + (2 + 12) / 2 + (2 + 2),
        "DDP, fp32": 16,  # parameters, moments, and gradients that are views of buckets
        "hoarder": 20,
        # Gradients exist twice, because only DDP knows its buckets; and the rank that owns the only
        # large tensor has all of its moments.
        "ZeroRedundancyOptimizer": 4 + 4 + 4 + 8,
    }
    assert {name: found[name].held for name in expected} == pytest.approx(expected, abs=0.6)
    # One for norm and skip, and one each for gradients and parameters of two packs: matrices with
    # their biases in bf16, and norms, which stay fp32 under autocast.
    assert found["shardcast"].collectives == (1, 4)
    assert found["DDP, fp32"].collectives == (2, 0)  # the first bucket is small
    assert found["ZeroRedundancyOptimizer"].collectives[0] > found["DDP, fp32"].collectives[0]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_systems_are_measured_next_to_each_other(
    gloo: SpawnedWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def shared(function: Callable[..., Any], _size: int, *args: Any, timeout: float) -> list[Any]:
        return gloo.run(function, *args)

    monkeypatch.setattr(benchmark, "spawn", shared)
    words = "peers --model tiny --rounds 1 --micros 2 --clock processor --markdown --systems"
    benchmark.main([*words.split(), "floor", "lean", "autocast", "views", "in fp32"])
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert "WRONG" not in printed
    measured = {row.split("|")[1].strip() for row in rows[2:]}
    assert {"shardcast", "crude floor", "DDP + autocast"} <= measured <= set(SYSTEMS)
    own = [row for row in rows if row.split("|")[1].strip() in OWN]
    place = 1 + report.COLUMNS.index("casts 1 / 4")
    assert own and all(row.split("|")[place].strip() == "0 / 0" for row in own), "casts of weights"


@pytest.mark.filterwarnings("ignore:step skipped", "ignore:state_dict")
def test_a_digest_is_that_of_the_bits(monkeypatch: pytest.MonkeyPatch):
    run = digests.RUNS["offloaded"]
    first = digests.hashed(run())
    assert digests.hashed(run()) == first
    monkeypatch.setattr("shardcast.step.decide.norm.EPS", 2e-6)
    assert digests.hashed(run()) != first
