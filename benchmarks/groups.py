"""Cost of parameter groups per step: collectives, launches on an accelerator, CPU time.

The model has small tensors, so that the cost per group is visible. A recorded group counts the
collectives. Launches are counted on the path of accelerators, with a CPU in place of one. Times are
processor times in alternating rounds, with collectives that return at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardcast
from benchmarks.host import Idle
from shardcast import _compat
from shardcast.step.update import fusion
from shardcast.testing import fake_world

TENSORS, WIDTH, RANKS = 300, 32, 8
COLUMNS = ("groups", "packs", "collectives", "launches", "CPU step us", "x", "least x")


@dataclass
class Cost:
    """Counts and times for one number of groups."""

    groups: int
    packs: int = 0
    collectives: int = 0
    launches: int = 0
    seconds: list[float] = field(default_factory=list)


class Run:
    """Training run with groups of neighboring tensors, each with its own learning rate."""

    def __init__(self, groups: int, process_group: Any, **fields: Any) -> None:
        self.model = nn.ParameterList(torch.ones(WIDTH, WIDTH) for _ in range(TENSORS))
        params = [*self.model]
        size = -(-TENSORS // groups)
        parts = [params[start : start + size] for start in range(0, TENSORS, size)]
        inner = torch.optim.AdamW(
            [{"params": part, "lr": 1e-3 * 0.99**number} for number, part in enumerate(parts)]
        )
        self.optimizer = shardcast.shard(
            self.model,
            inner,
            process_group=process_group,
            param_dtype=torch.bfloat16,
            max_grad_norm=1.0,
            **fields,
        )
        self.packs = len(self.optimizer.layout.packs)

    def backward(self) -> None:
        """Give each parameter a gradient."""
        torch.autograd.backward(list(self.model), [torch.full_like(p, 1e-3) for p in self.model])

    def step(self) -> float:
        """Make a step, and return its processor seconds."""
        self.backward()
        begin = time.process_time()
        self.optimizer.step()
        seconds = time.process_time() - begin
        self.optimizer.zero_grad()
        return seconds


class Launches(TorchDispatchMode):
    """Counter of operations, without views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += not func.is_view and "empty" not in str(func) and func.namespace == "aten"
        return func(*args, **(kwargs or {}))


@contextmanager
def accelerator() -> Iterator[None]:
    """Treat a CPU as an accelerator, with one operation per updated range, as if compiled."""
    is_host, in_pieces = _compat.is_host, fusion.in_pieces
    _compat.is_host = lambda _device: False
    fusion.in_pieces = lambda _fusion, operands, *_: operands[-1].relu_()
    try:
        yield
    finally:
        _compat.is_host, fusion.in_pieces = is_host, in_pieces


def launches(groups: int, **fields: Any) -> int:
    """Return the launches of a step on an accelerator."""
    with accelerator():
        run = Run(groups, Idle(0, RANKS), fuse="eager", **fields)
        for _ in range(2):
            run.step()
        run.backward()
        with Launches() as counter:
            run.optimizer.step()
    return counter.count


def measure(counts: Sequence[int], rounds: int) -> list[Cost]:
    """Return the costs for each number of groups."""
    torch.set_num_threads(1)
    costs = [Cost(count) for count in counts]
    for cost in costs:
        with fake_world(RANKS, rank=0) as group:
            run = Run(cost.groups, group)
            for _ in range(2):  # the first step makes the state
                before = len(group.rank_log)
                run.step()
            cost.packs, cost.collectives = run.packs, len(group.rank_log) - before
        cost.launches = launches(cost.groups)
    runs = [Run(cost.groups, Idle(0, RANKS)) for cost in costs]
    for number in range(rounds + 3):
        for cost, run in zip(costs, runs, strict=True):
            seconds = run.step()
            if number >= 3:
                cost.seconds.append(seconds)
    return costs


def rows(costs: Sequence[Cost]) -> list[tuple[str, ...]]:
    """Return a row per number of groups, with ratios to the first one in the same rounds."""
    lines = []
    for cost in costs:
        ratios = [own / one for own, one in zip(cost.seconds, costs[0].seconds, strict=True)]
        lines.append(
            (
                *map(str, (cost.groups, cost.packs, cost.collectives, cost.launches)),
                f"{1e6 * statistics.median(cost.seconds):.0f}",
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f}",
            )
        )
    return lines
