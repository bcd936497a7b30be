"""What a step costs the host in larger and larger worlds: launches, for nothing is sent.

One rank of each world trains on a process group whose collectives return at once, with the same
model and the same packs everywhere. Times are of the processor, on one thread.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardcast
from shardcast.testing import FakeGroup

PACKS, SIZE = 40, 1 << 16  # elements of a pack, which 1,024 aligned spans divide
STEPS = 5  # measured in a round, after one that creates the state
COLUMNS = ("ranks", "backward us per pack", "x", "step us per pack", "x")


class Idle(FakeGroup):
    """A fake group without the part of it whose cost grows with the world."""

    def _issue(self, call: Any) -> dist.Work:
        raise NotImplementedError

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        tensors[0].mul_(self.size())
        return _Done()

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return _Done()

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return _Done()

    def all_to_all_single(self, output: Tensor, input: Tensor, *_args: Any) -> dist.Work:
        output.copy_(input)  # gradients of no world are NaN
        return _Done()

    _allgather_base, alltoall_base = all_gather_single, all_to_all_single


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


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


@dataclass
class World:
    """Processor seconds per round of one rank."""

    size: int
    backward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)


def measure(sizes: list[int], rounds: int) -> list[World]:
    """Costs of the same model in worlds of ``sizes``, in interleaved rounds."""
    torch.set_num_threads(1)
    worlds = [World(size) for size in sizes]
    for number in range(rounds + 1):
        for world in worlds:
            one(world if number else World(world.size))  # the first round warms up
    return worlds


def one(world: World) -> None:
    """Train a little in one world, and note the times."""
    gc.collect()
    model = nn.ParameterList(torch.ones(2, SIZE // 2) for _ in range(PACKS))
    plain = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = shardcast.shard(
        model, plain, process_group=Idle(0, world.size), param_dtype=torch.bfloat16, pack_params=1
    )
    grad = torch.full((2, SIZE // 2), 1e-3, dtype=torch.bfloat16)
    times = [train(model, optimizer, grad) for _ in range(1 + STEPS)][1:]
    world.backward.append(statistics.median(backward for backward, _ in times))
    world.step.append(statistics.median(step for _, step in times))


def rows(worlds: list[World]) -> list[tuple[str, ...]]:
    """Microseconds per pack, and ratios to the first world's in the same round."""
    found = []
    for world in worlds:
        line = [f"{world.size:,}"]
        for name in ("backward", "step"):
            mine, first = getattr(world, name), getattr(worlds[0], name)
            ratio = statistics.median(a / b for a, b in zip(mine, first, strict=True))
            line += [f"{1e6 * statistics.median(mine) / PACKS:.0f}", f"{ratio:.2f}"]
        found.append(tuple(line))
    return found
