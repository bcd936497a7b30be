"""Host time of a compiled backward and ``step()`` of an accelerator, by number of packs.

Collectives return at once, and spans are so small that their computation takes almost no time.
Without an accelerator a CPU takes its place, and times are processor times on one thread. With an
accelerator they are wall-clock times, because the host does nothing else.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardcast
from shardcast import _compat
from shardcast.testing import FakeGroup

CPU = torch.device("cpu")
ELEMENTS = 128  # elements of a rank's span
COLUMNS = ("packs", "ranks", "backward us", "least", "step us", "least", "us per pack")


class Idle(FakeGroup):
    """Fake group without the operations whose cost grows with the world size."""

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
        output.copy_(input)  # a fake group gives NaN
        return _Done()

    _allgather_base, alltoall_base = all_gather_single, all_to_all_single


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class Given(torch.autograd.Function):
    """Autograd function that gives every parameter the same gradient, in one graph node."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *params: Tensor) -> Tensor:
        ctx.grads = grad, len(params)
        return grad.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, count = ctx.grads
        return (None, *[grad] * count)


@dataclass
class Costs:
    """Host seconds of some steps."""

    packs: int
    ranks: int
    backward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)


def measure(counts: Sequence[int], ranks: int, rounds: int) -> list[Costs]:
    """Return the costs for each number of packs."""
    torch.set_num_threads(1)
    is_host, _compat.is_host = _compat.is_host, lambda _device: False
    try:
        return [one(Costs(count, ranks), rounds) for count in counts]
    finally:
        _compat.is_host = is_host


def one(costs: Costs, rounds: int, device: torch.device = CPU, fuse: str = "compile") -> Costs:
    """Train some steps, and record the times."""
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
        if not on_cpu:  # so that the host never waits for room in a queue
            torch.cuda.synchronize(device)
        begin = clock()
        loss.backward()
        middle = clock()
        optimizer.step()
        end = clock()
        optimizer.zero_grad()
        if number >= 3:  # state, graphs and operands exist by then
            costs.backward.append(middle - begin)
            costs.step.append(end - middle)
    return costs


def rows(results: Sequence[Costs]) -> list[tuple[str, ...]]:
    """Return a row per number of packs; the last column adds both minima, per pack."""
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
