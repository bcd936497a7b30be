"""What ``step()`` costs the host of an accelerator, by the number of packs, with compiled updates.

A CPU passes for the accelerator, collectives return at once, and spans are so small that what is
computed costs next to nothing. Times are of the processor, on one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import nn

import shardcast
from benchmarks.worlds import Given, Idle
from shardcast import _compat

SIZE, RANKS = 1 << 10, 8  # elements of a pack
COLUMNS = ("packs", "step us", "least", "us per pack")


def measure(counts: Sequence[int], rounds: int) -> list[tuple[int, list[float]]]:
    """Seconds of the processor of some steps, for each number of packs."""
    torch.set_num_threads(1)
    is_host, _compat.is_host = _compat.is_host, lambda _device: False
    try:
        return [(count, one(count, rounds)) for count in counts]
    finally:
        _compat.is_host = is_host


def one(packs: int, rounds: int) -> list[float]:
    model = nn.ParameterList(torch.ones(2, SIZE // 2) for _ in range(packs))
    optimizer = shardcast.shard(
        model, torch.optim.AdamW(model.parameters()), process_group=Idle(0, RANKS),
        param_dtype=torch.bfloat16, pack_params=1, fuse="compile", max_grad_norm=1.0,
    )  # fmt: skip
    grad, seconds = torch.full((2, SIZE // 2), 1e-3, dtype=torch.bfloat16), []
    for _ in range(rounds + 3):
        Given.apply(grad, *model).backward()
        begin = time.process_time()
        optimizer.step()
        seconds.append(time.process_time() - begin)
        optimizer.zero_grad()
    return seconds[3:]  # state, graphs and operands are there


def rows(results: Sequence[tuple[int, list[float]]]) -> list[tuple[str, ...]]:
    """A row for each number of packs."""
    found = []
    for packs, seconds in results:
        median = 1e6 * statistics.median(seconds)
        least = 1e6 * min(seconds)
        found.append((str(packs), f"{median:.0f}", f"{least:.0f}", f"{median / packs:.0f}"))
    return found
