"""What backward and ``step()`` cost the host of an accelerator, by the number of packs, compiled.

Collectives return at once, and spans are so small that what is computed costs next to nothing.
Without an accelerator a CPU passes for one, and times are of the processor, on one thread; with one
they are of the wall, which the host has to itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

import shardcast
from benchmarks.worlds import Given, Idle
from shardcast import _compat

CPU = torch.device("cpu")
ELEMENTS = 128  # of the span of a rank
COLUMNS = ("packs", "ranks", "backward us", "least", "step us", "least", "us per pack")


@dataclass
class Costs:
    """Seconds of some steps, on the host."""

    packs: int
    ranks: int
    backward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)


def measure(counts: Sequence[int], ranks: int, rounds: int) -> list[Costs]:
    """Costs for each number of packs."""
    torch.set_num_threads(1)
    is_host, _compat.is_host = _compat.is_host, lambda _device: False
    try:
        return [one(Costs(count, ranks), rounds) for count in counts]
    finally:
        _compat.is_host = is_host


def one(costs: Costs, rounds: int, device: torch.device = CPU, fuse: str = "compile") -> Costs:
    """Train some steps, and note the times."""
    on_cpu = device.type == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter
    shape = 2, ELEMENTS * costs.ranks // 2
    model = nn.ParameterList(torch.ones(shape, device=device) for _ in range(costs.packs))
    optimizer = shardcast.shard(
        model,
        torch.optim.AdamW(model.parameters()),
        process_group=Idle(0, costs.ranks),
        param_dtype=torch.bfloat16,
        pack_params=1,
        fuse=fuse,
        max_grad_norm=1.0,
    )
    grad = torch.full(shape, 1e-3, dtype=torch.bfloat16, device=device)
    for number in range(rounds + 3):
        loss = Given.apply(grad, *model)
        if not on_cpu:  # else the host might wait for room in a queue
            torch.cuda.synchronize(device)
        begin = clock()
        loss.backward()
        middle = clock()
        optimizer.step()
        end = clock()
        optimizer.zero_grad()
        if number >= 3:  # state, graphs and operands are there
            costs.backward.append(middle - begin)
            costs.step.append(end - middle)
    return costs


def rows(results: Sequence[Costs]) -> list[tuple[str, ...]]:
    """A row for each number of packs; microseconds per pack are of both, the least."""
    lines = []
    for costs in results:
        times = [
            f"{1e6 * of(seconds):.0f}"
            for seconds in (costs.backward, costs.step)
            for of in (statistics.median, min)
        ]
        both = 1e6 * (min(costs.backward) + min(costs.step)) / costs.packs
        lines.append((str(costs.packs), str(costs.ranks), *times, f"{both:.0f}"))
    return lines
