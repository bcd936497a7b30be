"""Whole steps of several systems, in one run, in interleaved rounds."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.counters import Casts, sent
from benchmarks.models import WORKLOADS, Workload
from benchmarks.systems import LOCAL, LR, SYSTEMS, System

WARM_UP = 6  # steps whose losses are compared with the reference


@dataclass
class Result:
    """What was measured of one system; lists have one entry per round, in the same order.

    Attributes:
        step, phase: seconds of the slowest rank: of the step, and of its optimizer phase.
        sent: bytes that all ranks together sent in a step, the least seen.
        casts: of parameters, in forward and backward, with 1 and with 4 micro-batches.
        off: largest difference of the mean loss from one process in fp32, warm-up steps.
    """

    autocast: bool
    step: list[float] = field(default_factory=list)
    phase: list[float] = field(default_factory=list)
    sent: int | None = None
    casts: tuple[int, int] = (0, 0)
    off: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What to run. ``names`` are those of :data:`benchmarks.systems.SYSTEMS`."""

    model: str
    names: tuple[str, ...]
    rounds: int
    micros: int = 1


def measure(group: dist.ProcessGroup, plan: Plan) -> dict[str, Result]:
    """The body of one rank; all ranks return the same times."""
    workload = WORKLOADS[plan.model]
    expected = reference(workload, plan.micros, group.size())
    systems, results = {}, {}
    for name in plan.names:
        torch.manual_seed(0)
        system = SYSTEMS[name](workload.build(), workload)
        losses = [mean_loss(one_step(system, workload, plan.micros, n)[2]) for n in range(WARM_UP)]
        systems[name], results[name] = system, Result(system.autocast)
        if name not in LOCAL:
            pairs = zip(losses, expected, strict=True)
            results[name].off = max(abs(mine - theirs) for mine, theirs in pairs)
        results[name].casts = (
            casts(system, workload, 1),
            casts(system, workload, 4),
        )
    names = list(plan.names)
    for number in range(plan.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            record(results[name], systems[name], workload, plan.micros, WARM_UP + number)
    return results


def one_step(
    system: System, workload: Workload, micros: int, number: int
) -> tuple[float, float, Tensor]:
    """Seconds of a step on this rank and of its optimizer phase, and the mean loss here."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = [workload.batch((number * micros + m) * world + rank) for m in range(micros)]
    dist.barrier()
    start = time.perf_counter()
    losses = [
        system.micro(batch, position + 1 == micros, micros)
        for position, batch in enumerate(batches)
    ]
    middle = time.perf_counter()
    system.step()
    end = time.perf_counter()
    return end - start, end - middle, torch.stack(losses).float().mean()


def record(result: Result, system: System, workload: Workload, micros: int, number: int) -> None:
    """Time one step after an unmeasured one, which brings the system's memory into the caches."""
    one_step(system, workload, micros, number)
    dist.barrier()
    before = sent()
    step, phase, _ = one_step(system, workload, micros, number)
    slowest = torch.tensor([step, phase], dtype=torch.float64)
    dist.barrier()
    after = sent()
    if before is not None and after is not None:
        traffic = after - before
        result.sent = traffic if result.sent is None else min(result.sent, traffic)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    result.step.append(slowest[0].item())
    result.phase.append(slowest[1].item())


def casts(system: System, workload: Workload, micros: int) -> int:
    """Parameters cast on this rank in the forwards and backwards of one step."""
    with Casts(system.model.parameters()) as counter:
        for position in range(micros):
            system.micro(workload.batch(position), position + 1 == micros, micros)
    system.step()
    return counter.count


def mean_loss(loss: Tensor) -> float:
    """The mean over ranks."""
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def reference(workload: Workload, micros: int, world: int) -> list[float]:
    """Losses of plain AdamW in fp32 on one process that sees the batches of all ranks."""
    torch.manual_seed(0)
    model: nn.Module = workload.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for number in range(WARM_UP):
        batches = [workload.batch(number * micros * world + n) for n in range(micros * world)]
        tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ratio(times: list[float], of: list[float]) -> float:
    """Median over rounds of the ratio within a round: what slows a whole round cancels."""
    return statistics.median(a / b for a, b in zip(times, of, strict=True))


def exposed(results: dict[str, Result], name: str) -> list[float]:
    """Per round, the step minus the same compute without communication or update."""
    local = results["local, autocast" if results[name].autocast else "local, bf16"]
    return [step - alone for step, alone in zip(results[name].step, local.step, strict=True)]
