"""Cost of ``replica_check``: steps with and without a check, and without the option."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from benchmarks.models import WORKLOADS
from benchmarks.step import Plan, Result, one_step, record
from benchmarks.systems import Shardcast

EVERY = 100  # steps between two checks
NEVER = 1 << 40
COLUMNS = ("system", "step ms", "added ms", "share of a step", f"every {EVERY} steps")
SYSTEMS = {"without replica_check": 0, "a step between two checks": NEVER, "a step with a check": 1}


def measure(group: dist.ProcessGroup, plan: Plan) -> dict[str, Result]:
    """Measure both in interleaved rounds."""
    workload, systems = WORKLOADS[plan.model], {}
    for name, period in SYSTEMS.items():
        torch.manual_seed(0)
        systems[name] = Shardcast(workload.build(), workload, replica_check=period)
        one_step(systems[name], workload, plan, 0)
    results = {name: Result("") for name in SYSTEMS}
    for number in range(1, plan.rounds + 1):
        for name in [*SYSTEMS][:: 1 if number % 2 else -1]:
            record(results[name], systems[name], workload, plan, number)
    return results


def rows(results: dict[str, Result]) -> list[tuple[str, ...]]:
    """Return one row per system, with the median difference to the first one within a round.

    The difference is that of the optimizer phase, where all checks run, because forwards and
    backwards vary by themselves. The last column is for one check every :data:`EVERY` steps.
    """
    first = next(iter(results.values()))
    lines = []
    shares = dict[str, float]()
    for name, result in results.items():
        pairs = zip(result.phase, first.phase, strict=True)
        more = statistics.median(one - other for one, other in pairs)
        shares[name] = more / statistics.median(first.step)
        medians = f"{1e3 * statistics.median(result.step):.1f}", f"{1e3 * more:.2f}"
        lines.append((name, *medians, f"{shares[name]:.2%}", ""))
    *_, checked = shares.values()
    lines[-1] = (*lines[-1][:-1], f"{checked / EVERY:.3%}")
    return lines
