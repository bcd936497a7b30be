"""The cost model of `shardcast estimate` against this machine: gloo, on one node.

Every round exchanges single tensors, up to the size of a pack, sums some, and then reduces and
syncs all packs of a model. From the medians of the former come alpha, beta and the bandwidth of
memory, with which `estimate` predicts the medians of the latter. Not from the least of each: times
of one exchange between two busy cores spread by a factor of two even if nothing else runs, and the
luckiest of a few long syncs is no sum of usual exchanges. Each tensor lies elsewhere than the one
before, for no pack is in a cache when its turn comes; and memory that was freed is kept, as by the
allocator of an accelerator.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import shardcast
from benchmarks.models import WORKLOADS
from benchmarks.step import CLOCKS
from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.estimate import PRESETS, Machine, Protocol, StepTime, estimate, step_time
from shardcast.step.reduce.mean import mean_in_chunks_

SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes that are exchanged; a pack has 2^24
REPEATS = 7
SPAN = 1 << 20  # elements of a piece that is summed
COLD = 1 << 27  # bytes of what is sent or summed, more than caches hold
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt
STAGES = ("reduce", "sync")
COLUMNS = ("stage", "predicted ms", "median ms", "predicted / median", "quartiles ms")


@dataclass
class Result:
    """What a run found: the machine, its prediction, and seconds of every round per stage."""

    machine: Machine
    predicted: StepTime
    measured: dict[str, list[float]] = field(default_factory=dict)


def measure(group: dist.ProcessGroup, model: str, rounds: int, clock: str) -> Result:
    """The body of one rank; all ranks find the same."""
    keep_freed_memory()
    torch.manual_seed(0)
    module, config = WORKLOADS[model].build(), ShardcastConfig()
    inner = torch.optim.AdamW(module.parameters())
    found = estimate(module, inner, group.size(), config)
    numel = sum(param.numel() for param in module.parameters())
    optimizer = shardcast.shard(module, inner, config)
    grads = [torch.randn_like(param) * 1e-3 for param in module.parameters()]
    comm = Comm(group)
    exchanges: dict[int, list[float]] = {size: [] for size in SIZES}
    sums: list[float] = []
    measured: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for number in range(rounds + 1):
        small = {size: exchanged(comm, size, clock) for size in SIZES}
        summed_in = summed(comm, clock)
        for param, grad in zip(module.parameters(), grads, strict=True):
            param.grad = grad.clone()
        whole = stages_of_a_step(optimizer, clock)
        if number:  # the first round warms up
            sums += summed_in
            for size in SIZES:
                exchanges[size] += small[size]
            for stage in STAGES:
                measured[stage].append(whole[stage])
    medians = [statistics.median(exchanges[size]) for size in SIZES]
    machine = machine_of(comm.size, medians, statistics.median(sums))
    return Result(machine, step_time(found, config, machine, numel, tokens=1), measured)


def keep_freed_memory() -> None:
    """Have the C library not give freed memory back: with its defaults every reduction has its
    buffers from the system anew, and page by page, which is no collective's cost.
    """
    for parameter, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)):
        if not ctypes.CDLL(None).mallopt(parameter, value):
            raise RuntimeError("mallopt: the C library refused it")


def stages_of_a_step(optimizer: Any, clock: str) -> dict[str, float]:
    """Seconds of each stage."""
    times: dict[str, float] = {}

    def timed(call: Callable[[], None], name: str) -> Callable[[], None]:
        def run() -> None:
            times[name] = seconds(call, clock)

        return run

    optimizer.reduce.finish = timed(optimizer.reduce.finish, "reduce")
    optimizer.send = timed(optimizer.send, "sync")
    optimizer.step()
    del optimizer.reduce.finish, optimizer.send
    return times


def seconds(call: Callable[[], object], clock: str) -> float:
    """From the moment when the first rank begins ``call`` to that when the last one ends it.

    All ranks are on one machine and have one clock. A rank that waits for a core has not begun,
    which its own clock would not show. Of processor time: that of the rank that takes most.
    """
    now = CLOCKS[clock]
    dist.barrier()
    start = now()
    call()
    first, last = torch.tensor([[start], [now()]], dtype=torch.float64)
    if clock == "wall":
        dist.all_reduce(first, dist.ReduceOp.MIN)
    else:
        first, last = torch.zeros_like(first), last - first
    dist.all_reduce(last, dist.ReduceOp.MAX)
    return (last - first).item()


def exchanged(comm: Comm, nbytes: int, clock: str) -> list[float]:
    """Seconds of each of several exchanges of ``nbytes`` on each rank."""
    sent = torch.ones(COLD // nbytes, nbytes // 2, dtype=torch.bfloat16)
    received = torch.zeros_like(sent)

    def exchange(number: int) -> None:
        row = number % len(sent)
        comm.all_to_all(received[row], sent[row]).wait()

    return repeated(exchange, clock)


def summed(comm: Comm, clock: str) -> list[float]:
    """Seconds in which gradients are copied into a pack of :data:`SPAN` elements for each rank,
    and the mean of such a span is taken over ranks; several times.
    """
    pieces = torch.ones(COLD // 2 // SPAN, SPAN, dtype=torch.bfloat16)

    def mean(number: int) -> None:
        first = 2 * number * comm.size
        chosen = [pieces[(first + n) % len(pieces)] for n in range(2 * comm.size)]
        pack, grads = chosen[: comm.size], chosen[comm.size :]
        torch._foreach_copy_(pack, grads)
        mean_in_chunks_(pack, comm.size, None, pack[0])

    return repeated(mean, clock)


def repeated(call: Callable[[int], object], clock: str) -> list[float]:
    """The times of :data:`REPEATS` calls, after one that is not counted."""
    return [seconds(partial(call, n), clock) for n in range(REPEATS + 1)][1:]


def machine_of(ranks: int, exchanges: Sequence[float], sum_in: float) -> Machine:
    """The machine that exchanges :data:`SIZES`, and copies and sums :data:`SPAN` ones, so fast."""
    begin, each = fitted(SIZES, exchanges)
    inside = (ranks - 1) / ranks / each
    memory = memory_of(ranks, sum_in)
    return Machine(
        "here", ranks, inside, inside, memory, memory, PRESETS["gloo"].flops,
        (Protocol(begin, 0.0, 0.0),), exchanged=1, backend="gloo", launch=0.0,
    )  # fmt: skip


def memory_of(ranks: int, sum_in: float) -> float:
    """Bytes per second of memory, by the seconds of :func:`summed`."""
    return (2 * ranks + ranks + 1) * SPAN * torch.bfloat16.itemsize / sum_in


def fitted(sizes: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """Seconds to begin and per byte: the line with the least squares of relative errors."""
    weights = [1 / seconds**2 for seconds in times]
    total = sum(weights)
    size = sum(w * n for w, n in zip(weights, sizes, strict=True)) / total
    mean = sum(w * t for w, t in zip(weights, times, strict=True)) / total
    points = list(zip(weights, sizes, times, strict=True))
    above = sum(w * (n - size) * (t - mean) for w, n, t in points)
    each = above / sum(w * (n - size) ** 2 for w, n, _ in points)
    if each <= 0:
        raise RuntimeError(f"bigger exchanges took less time: {times}; the machine is too busy")
    return max(0.0, mean - each * size), each


def rows(result: Result) -> list[tuple[str, ...]]:
    """The prediction beside the median of all rounds, per stage, and their quartiles."""
    found = []
    for stage, times in result.measured.items():
        predicted = 1e3 * getattr(result.predicted, stage)
        low, median, high = (1e3 * seconds for seconds in statistics.quantiles(times, n=4))
        cells = (f"{predicted:.1f}", f"{median:.1f}", f"{predicted / median:.2f}")
        found.append((stage, *cells, f"{low:.1f} to {high:.1f}"))
    return found


def as_yaml(machine: Machine) -> str:
    """The machine as a file for ``shardcast estimate --machine``."""
    (protocol,) = machine.protocols
    return (
        f"base: gloo\nranks_per_node: {machine.ranks_per_node}\n"
        f"inside: {machine.inside / 1e9:.3f}\nbetween: {machine.between / 1e9:.3f}\n"
        f"memory: {machine.memory / 1e9:.3f}\nbegin_us: {max(protocol.begin * 1e6, 0.1):.1f}"
    )
