"""Muon on the matrices of the blocks and AdamW on the rest, sharded and as others run the two.

Both clocks are read in one run: the wall's, and what each process keeps processors busy.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardcast
from benchmarks.models import WORKLOADS, Workload
from benchmarks.step import ratio
from benchmarks.systems import BF16, DDP, FSDP2, LR, System

COLUMNS = ("system", "clock", "step ms", "x", "optimizer ms", "x", "loss")
BASE = "DDP + autocast"
Times = dict[str, dict[str, list[float]]]  # by "wall step" and the like, per round


class Both:
    """Two optimizers as one."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def pair(model: nn.Module, workload: Workload) -> list[torch.optim.Optimizer]:
    """Muon on the matrices of the blocks, AdamW on embeddings, norms and biases."""
    blocks = [module for module in model.modules() if isinstance(module, workload.block)]
    inside = {p for block in blocks for p in block.parameters() if p.dim() == 2}
    rest = [p for p in model.parameters() if p not in inside]
    ordered = [p for p in model.parameters() if p in inside]
    return [torch.optim.Muon(ordered, lr=LR), torch.optim.AdamW(rest, lr=LR, fused=True)]


class MuonDDP(DDP):
    """Every rank orthogonalises every matrix."""

    def __init__(self, model: nn.Module, workload: Workload) -> None:
        super().__init__(model, workload, compute="autocast")
        self.optimizer = Both(pair(model, workload))


class MuonFSDP2(FSDP2):
    """``torch.optim.Muon`` on DTensors, whose products gather what they need."""

    def __init__(self, model: nn.Module, workload: Workload) -> None:
        super().__init__(model, workload, reduce=BF16)
        self.optimizer = Both(pair(model, workload))


class MuonShardcast(System):
    def __init__(self, model: nn.Module, workload: Workload) -> None:
        super().__init__(model, "bf16")
        self.optimizer = shardcast.shard(model, pair(model, workload), param_dtype=BF16)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


SYSTEMS: dict[str, Any] = {
    "shardcast": MuonShardcast,
    BASE: MuonDDP,
    "FSDP2, reduce in bf16": MuonFSDP2,
}


def measure(group: dist.ProcessGroup, model: str, rounds: int) -> tuple[Times, dict[str, float]]:
    """Times of the slowest rank per round, in rotated order, and the last mean losses."""
    workload, systems = WORKLOADS[model], {}
    for name, build in SYSTEMS.items():
        torch.manual_seed(0)
        systems[name] = build(workload.build(), workload)
    times: Times = {name: {} for name in systems}
    losses = {}
    names = list(systems)
    for number in range(-2, rounds):  # two to warm up
        for name in names[number % len(names) :] + names[: number % len(names)]:
            losses[name], found = _step(systems[name], workload, number, group)
            if number >= 0:
                for key, seconds in found.items():
                    times[name].setdefault(key, []).append(seconds)
    return times, losses


def _step(
    system: System, workload: Workload, number: int, group: dist.ProcessGroup
) -> tuple[float, dict[str, float]]:
    batch = workload.batch(max(0, number) * group.size() + group.rank())
    dist.barrier()
    marks = [(time.perf_counter(), time.process_time())]
    loss = system.micro(batch, True, 1)
    marks.append((time.perf_counter(), time.process_time()))
    system.step()
    marks.append((time.perf_counter(), time.process_time()))
    start, middle, end = marks
    seconds = [end[0] - start[0], end[1] - start[1], end[0] - middle[0], end[1] - middle[1]]
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    mean = loss.float() / group.size()
    dist.all_reduce(mean)
    keys = ("wall step", "processor step", "wall phase", "processor phase")
    return mean.item(), dict(zip(keys, slowest.tolist(), strict=True))


def rows(results: tuple[Times, dict[str, float]]) -> list[tuple[str, ...]]:
    """One row per system and clock; ratios are to DDP in the same round."""
    times, losses = results
    found = []
    for clock in ("wall", "processor"):
        for name, mine in times.items():
            cells = [name, clock]
            for part in ("step", "phase"):
                seconds, base = mine[f"{clock} {part}"], times[BASE][f"{clock} {part}"]
                cells.append(f"{1e3 * statistics.median(seconds):.0f}")
                cells.append(f"{ratio(seconds, base):.2f}")
            found.append((*cells, f"{losses[name]:.3f}"))
    return found
