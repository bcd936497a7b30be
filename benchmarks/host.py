"""What backward and ``step()`` cost the host of an accelerator, by the number of packs, compiled.

A CPU passes for the accelerator, collectives return at once, and spans are so small that what is
computed costs next to nothing. Times are of the processor, on one thread.
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

ELEMENTS = 128  # of the span of a rank
COLUMNS = ("packs", "ranks", "backward us", "least", "step us", "least", "us per pack")


@dataclass
class Costs:
    """Processor seconds of some steps."""

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


def one(costs: Costs, rounds: int) -> Costs:
    """Train some steps, and note the times."""
    shape = 2, ELEMENTS * costs.ranks // 2
    model = nn.ParameterList(torch.ones(shape) for _ in range(costs.packs))
    optimizer = shardcast.shard(
        model, torch.optim.AdamW(model.parameters()), process_group=Idle(0, costs.ranks),
        param_dtype=torch.bfloat16, pack_params=1, fuse="compile", max_grad_norm=1.0,
    )  # fmt: skip
    grad = torch.full(shape, 1e-3, dtype=torch.bfloat16)
    for number in range(rounds + 3):
        loss = Given.apply(grad, *model)
        begin = time.process_time()
        loss.backward()
        middle = time.process_time()
        optimizer.step()
        end = time.process_time()
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
