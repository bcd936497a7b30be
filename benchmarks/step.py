"""Whole steps of several systems, in one run, in interleaved rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.counters import Casts, Collectives, Growth, in_use, sent
from benchmarks.models import WORKLOADS, Workload
from benchmarks.systems import LR, SYSTEMS, System

WARM_UP = 6  # steps whose losses are compared with the reference

CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    # Includes the collectives' threads and the kernel, but no waiting and no other programs.
    "processor": time.process_time,
}


@dataclass
class Result:
    """Measurements of one system; lists have one entry per round, in the same order.

    Attributes:
        local: name of the system that does only the compute.
        step, phase: seconds of a step, and of its optimizer phase, on the slowest rank, by the
            plan's clock.
        sent: bytes that all ranks together sent in a step, the least seen.
        casts: casts of parameters in forwards and backwards, with 1 and with 4 micro-batches.
        collectives: collectives of a rank in a step, and messages that the rank sends.
        held: bytes per parameter on the fullest rank, between the last backward and the optimizer
            phase of a step after the first, minus those before the model was built.
        growth: bytes per parameter by which resident memory rises in a step, on the fullest rank:
            gradients that were freed, activations, buffers.
        off: largest difference of the mean loss from one process in fp32, over the warm-up steps.
    """

    local: str
    step: list[float] = field(default_factory=list)
    phase: list[float] = field(default_factory=list)
    sent: int | None = None
    casts: tuple[int, int] = (0, 0)
    collectives: tuple[int, int] = (0, 0)
    held: float | None = None
    growth: float | None = None
    off: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        names: systems that train. The compute alone also runs, for comparison.
        clock: one of :data:`CLOCKS`.
    """

    model: str
    names: tuple[str, ...]
    rounds: int
    micros: int = 1
    clock: str = "wall"

    @property
    def now(self) -> Callable[[], float]:
        """Return seconds of the wall clock, or of processor time of this process."""
        return CLOCKS[self.clock]


def measure(group: dist.ProcessGroup, plan: Plan) -> dict[str, Result]:
    """Measure on one rank; all ranks return the same times."""
    workload = WORKLOADS[plan.model]
    expected = reference(workload, plan.micros, group.size())
    systems, results = {}, {}
    for name in plan.names:
        systems[name], results[name], losses = prepare(name, workload, plan)
        pairs = zip(losses, expected, strict=True)
        results[name].off = max(abs(mine - theirs) for mine, theirs in pairs)
    for name in sorted({result.local for result in results.values()}):
        systems[name], results[name], _ = prepare(name, workload, plan)
    names = list(systems)
    for number in range(plan.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            record(results[name], systems[name], workload, plan, WARM_UP + number)
    return results


def prepare(name: str, workload: Workload, plan: Plan) -> tuple[System, Result, list[float]]:
    """Run the first steps of a system; return it, its counts and its losses."""
    # An unmeasured step, because imports, compiled code and kernels' buffers belong to no system.
    one_step(SYSTEMS[name](workload.build(), workload), workload, plan, 0)
    before = in_use()
    torch.manual_seed(0)
    model = workload.build()
    numel = sum(param.numel() for param in model.parameters())
    system = SYSTEMS[name](model, workload)
    del model
    held: list[int | None] = []
    losses = [one_step(system, workload, plan, n)[2] for n in range(WARM_UP - 1)]
    with Growth() as growth:
        last = one_step(system, workload, plan, WARM_UP - 1, lambda: held.append(in_use()))
    with Collectives() as collectives:
        one_step(system, workload, plan, WARM_UP)
    result = Result(
        system.local,
        casts=(casts(system, workload, 1), casts(system, workload, 4)),
        collectives=(collectives.count, collectives.messages),
        held=fullest(held[0], before, numel),
        growth=fullest(growth.bytes, 0, numel),
    )
    return system, result, [mean_loss(loss) for loss in [*losses, last[2]]]


def fullest(now: int | None, before: int | None, numel: int) -> float | None:
    """Return the bytes per parameter on the rank with the most."""
    if now is None or before is None:
        return None
    most = torch.tensor((now - before) / numel, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def one_step(
    system: System,
    workload: Workload,
    plan: Plan,
    number: int,
    between: Callable[[], object] | None = None,
) -> tuple[float, float, Tensor]:
    """Return the seconds of a step and of its optimizer phase, and this rank's mean loss.

    ``between`` is called after the last backward; the times are then meaningless.
    """
    rank, world, micros, now = dist.get_rank(), dist.get_world_size(), plan.micros, plan.now
    batches = [workload.batch((number * micros + m) * world + rank) for m in range(micros)]
    dist.barrier()
    start = now()
    losses = [
        system.micro(batch, position + 1 == micros, micros)
        for position, batch in enumerate(batches)
    ]
    middle = now()
    if between is not None:
        between()
    system.step()
    end = now()
    return end - start, end - middle, torch.stack(losses).float().mean()


def record(result: Result, system: System, workload: Workload, plan: Plan, number: int) -> None:
    """Time one step after an untimed one, which brings the system's memory into the caches."""
    one_step(system, workload, plan, number)
    dist.barrier()
    before = sent()
    step, phase, _ = one_step(system, workload, plan, number)
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
    """Return the number of parameters cast on this rank in the forwards and backwards of a step."""
    with Casts(system.model.parameters()) as counter:
        for position in range(micros):
            system.micro(workload.batch(position), position + 1 == micros, micros)
    system.step()
    return counter.count


def mean_loss(loss: Tensor) -> float:
    """Return the mean over ranks."""
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def reference(workload: Workload, micros: int, world: int) -> list[float]:
    """Return losses of plain AdamW in fp32 on one process with the batches of all ranks."""
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
    """Return the median over rounds of the ratio within a round; slow rounds cancel out."""
    return statistics.median(a / b for a, b in zip(times, of, strict=True))


def exposed(results: dict[str, Result], name: str) -> list[float]:
    """Return, per round, the step minus the same compute without communication or update."""
    local = results[results[name].local]
    return [step - alone for step, alone in zip(results[name].step, local.step, strict=True)]


def compute(result: Result) -> list[float]:
    """Return, per round, forward and backward: the step without the optimizer phase."""
    return [step - phase for step, phase in zip(result.step, result.phase, strict=True)]
