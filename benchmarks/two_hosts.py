"""Time steps on two hosts with a few ranks each; started by tools/two_hosts.sh with torchrun."""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, Block, GPTConfig
from torch import nn

from benchmarks import report
from benchmarks.models import Workload
from benchmarks.step import Plan, one_step
from benchmarks.systems import DDP, LOCAL, Build, Shardcast, System, TorchZeRO

WORKLOAD = Workload(
    "GPT",
    partial(GPT, GPTConfig(2048, 32, width=384, depth=4)),
    Block,
    2048,
    sequences=2,
    tokens=32,
)
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt() in glibc
STEPS = 2  # timed together
WIRE = Path("/sys/class/net/wire/statistics")  # the link between the hosts
OWN: dict[str, dict[str, Any]] = {
    "shardcast": {},
    "shardcast, all_to_all": {"reduce": "all_to_all"},
    "shardcast, two_level": {"reduce": "two_level"},
    "shardcast, shard_ranks: 2": {"shard_ranks": 2},
    "shardcast, overlap_sync": {"overlap_sync": True},
    "shardcast, overlap_sync, shard_ranks: 2": {"overlap_sync": True, "shard_ranks": 2},
}
PEERS: dict[str, Build] = {
    "DDP + autocast": partial(DDP, compute="autocast"),
    "ZeroRedundancyOptimizer": partial(TorchZeRO, views=False),
}
COLUMNS = ("system", "step ms", "x", "step - local ms", "link MB, there / back", "bits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    keep_freed_memory()
    systems: dict[str, System] = {}
    builds = {name: partial(Shardcast, **fields) for name, fields in OWN.items()} | PEERS
    for name, build in {**builds, "local, bf16": LOCAL["local, bf16"]}.items():
        torch.manual_seed(0)
        systems[name] = build(WORKLOAD.build(), WORKLOAD)
    systems["local, autocast"] = LOCAL["local, autocast"](WORKLOAD.build(), WORKLOAD)
    times: dict[str, list[float]] = {name: [] for name in systems}
    names = list(systems)
    for number in range(args.rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds = torch.tensor(seconds_of(systems[name], number), dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number:  # the first round warms up
                times[name].append(seconds.item())
    bits = {name: digest(systems[name].model) for name in OWN}
    medians = {name: statistics.median(values) for name, values in times.items()}
    crossed = {name: crossing(systems[name]) for name in builds}
    if dist.get_rank() == 0:
        print(f"{args.title}; load of the machine {os.getloadavg()[0]:.1f}\n")
        lines = []
        for name in builds:
            alone = medians[systems[name].local]
            base, added = medians["shardcast"], medians[name] - alone
            cells = (
                f"{1e3 * medians[name]:.0f}",
                f"{medians[name] / base:.2f}",
                f"{1e3 * added:.0f}",
            )
            both = " / ".join(f"{nbytes / 1e6:.1f}" for nbytes in crossed[name])
            lines.append((name, *cells, both, bits.get(name, "")))
        print(report.table(COLUMNS, lines, True))
    dist.destroy_process_group()


def seconds_of(system: System, number: int) -> float:
    """Return the seconds per step of several steps, each of which waits for the previous sync."""
    plan, first = Plan("", (), 0), number * (STEPS + 1)
    one_step(system, WORKLOAD, plan, first)
    start = time.perf_counter()
    for step in range(STEPS):
        one_step(system, WORKLOAD, plan, first + 1 + step)
    return (time.perf_counter() - start) / STEPS


def crossing(system: System) -> tuple[float, float]:
    """Return the bytes that cross the link in a step: from the first host, and to it."""

    def counters() -> list[int]:
        dist.barrier()
        return [int((WIRE / f"{way}_bytes").read_text()) for way in ("tx", "rx")]

    plan = Plan("", (), 0)
    one_step(system, WORKLOAD, plan, 0)
    first = counters()
    for step in range(STEPS):
        one_step(system, WORKLOAD, plan, step)
    sent, received = (b - a for a, b in zip(first, counters(), strict=True))
    return sent / STEPS, received / STEPS


def keep_freed_memory() -> None:
    """Make the C library keep freed memory.

    With its defaults, every reduction gets its buffers from the system again, page by page, which
    is not a cost of a collective.
    """
    for parameter, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)):
        if not ctypes.CDLL(None).mallopt(parameter, value):
            raise RuntimeError("mallopt: the C library refused it")


def digest(model: nn.Module) -> str:
    """Return the first digits of a hash of all parameters, which must be equal on all ranks."""
    hashed = hashlib.sha256()
    for param in model.parameters():
        hashed.update(param.detach().contiguous().view(torch.uint8).numpy().tobytes())
    every: list[Mapping[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, hashed.hexdigest()[:6])
    if len(set(map(str, every))) > 1:
        raise RuntimeError(f"ranks have different parameters: {every}")
    return hashed.hexdigest()[:6]


if __name__ == "__main__":
    main()
