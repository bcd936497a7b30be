"""What shardcast costs per parameter, from few to many parameters and from few to many tensors.

One process trains without communication and with gradients that cost next to nothing, so what is
left is shardcast: setting up, gathering gradients in the backward, and the optimizer step. Times
are of the processor, on one thread: what else runs on the machine counts less.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import shardcast

SIZE = 100_000  # elements of a tensor where the number of parameters grows
STEPS = 3  # measured in a round, after one that creates the state
COLUMNS = (
    "parameters", "tensors", "set-up ns", "x", "backward ns", "x", "step ns", "x",
)  # fmt: skip


@dataclass
class Cost:
    """Processor seconds per round for a model of equal tensors."""

    tensors: int
    size: int
    setup: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return self.tensors * self.size


class Given(torch.autograd.Function):
    """Gives every parameter the same gradient, in one node of the graph."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *params: Tensor) -> Tensor:
        ctx.grads = grad, len(params)
        return grad.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, count = ctx.grads
        return (None, *[grad] * count)


def measure(most: int, total: int, rounds: int) -> tuple[list[Cost], list[Cost]]:
    """Costs of more and more parameters in equal tensors, and of ``total`` in smaller ones.

    Args:
        most: the greatest number of parameters; the least is a million.
    """
    torch.set_num_threads(1)
    sizes = [n for n in (10**6, 3 * 10**6, 10**7, 3 * 10**7, 10**8, 3 * 10**8) if n <= most]
    more = [Cost(numel // SIZE, SIZE) for numel in sizes]
    finer = [Cost(n, total // n) for n in (10, 100, 1000, 10000) if total // n >= 100]
    for number in range(rounds + 1):
        for cost in [*more, *finer]:
            one(cost if number else Cost(cost.tensors, cost.size))  # the first round warms up
    return more, finer


def one(cost: Cost) -> None:
    """Set up a model, train it a little, and note the times."""
    gc.collect()
    model = nn.ParameterList(torch.ones(cost.size) for _ in range(cost.tensors))
    plain = torch.optim.AdamW(model.parameters(), fused=True)
    start = time.process_time()
    optimizer = shardcast.shard(model, plain, param_dtype=torch.bfloat16)
    cost.setup.append(time.process_time() - start)
    grad = torch.full((cost.size,), 1e-3, dtype=torch.bfloat16)
    times = [train(model, optimizer, grad) for _ in range(1 + STEPS)][1:]
    cost.backward.append(statistics.median(backward for backward, _ in times))
    cost.step.append(statistics.median(step for _, step in times))


def train(
    model: nn.ParameterList, optimizer: torch.optim.Optimizer, grad: Tensor
) -> tuple[float, float]:
    """Processor seconds of forward and backward, and of the step with ``zero_grad``."""
    start = time.process_time()
    Given.apply(grad, *model).backward()
    middle = time.process_time()
    optimizer.step()
    optimizer.zero_grad()
    return middle - start, time.process_time() - middle


def rows(costs: list[Cost]) -> list[tuple[str, ...]]:
    """Nanoseconds per parameter, and ratios of them to the first row's in the same round."""
    found = []
    for cost in costs:
        line = [f"{cost.numel:.0e}".replace("e+0", "e"), f"{cost.tensors:,}"]
        for name in ("setup", "backward", "step"):
            mine = [seconds / cost.numel for seconds in getattr(cost, name)]
            first = [seconds / costs[0].numel for seconds in getattr(costs[0], name)]
            ratio = statistics.median(a / b for a, b in zip(mine, first, strict=True))
            line += [f"{1e9 * statistics.median(mine):.2f}", f"{ratio:.2f}"]
        found.append(tuple(line))
    return found
