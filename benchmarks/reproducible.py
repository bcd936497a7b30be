"""What it costs to have the same bits at any number of ranks."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from benchmarks.models import WORKLOADS
from benchmarks.step import Plan, Result, one_step, ratio, record
from benchmarks.systems import Shardcast

COLUMNS = ("system", "step ms", "x", "optimizer ms", "x", "sent MB")
NAMES = ("shardcast", "shardcast, reproducible")


def measure(group: dist.ProcessGroup, plan: Plan) -> dict[str, Result]:
    """Both in interleaved rounds."""
    workload, systems = WORKLOADS[plan.model], {}
    for name, total in zip(NAMES, (False, True), strict=True):
        torch.manual_seed(0)
        systems[name] = Shardcast(workload.build(), workload, reproducible=total)
        one_step(systems[name], workload, plan, 0)
    results = {name: Result("") for name in NAMES}
    for number in range(1, plan.rounds + 1):
        for name in NAMES[:: 1 if number % 2 else -1]:
            record(results[name], systems[name], workload, plan, number)
    return results


def rows(results: dict[str, Result]) -> list[tuple[str, ...]]:
    """One row per system; ratios are to the first in the same round."""
    base = results[NAMES[0]]
    return [
        (
            name,
            f"{1e3 * statistics.median(result.step):.0f}",
            f"{ratio(result.step, base.step):.2f}",
            f"{1e3 * statistics.median(result.phase):.0f}",
            f"{ratio(result.phase, base.phase):.2f}",
            "-" if result.sent is None else f"{result.sent / 1e6:.0f}",
        )
        for name, result in results.items()
    ]
