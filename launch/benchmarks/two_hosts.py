"""Steps of two hosts with a few ranks each beside what the cost model predicts of them.

A program for torchrun, which launch/two_hosts.sh starts on two hosts. Exchanges of two ranks inside
a host, and between the hosts, give the constants of a machine, as in :mod:`benchmarks.costmodel`;
the compute alone gives its rate of operations.
"""

from __future__ import annotations

import argparse
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

from benchmarks import costmodel, report
from benchmarks.models import Workload
from benchmarks.step import Plan, one_step
from benchmarks.systems import DDP, LOCAL, Build, Shardcast, System, TorchZeRO
from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.estimate import Machine, Protocol, estimate, peer_times, step_time, units_of

WORKLOAD = Workload(
    "GPT",
    partial(GPT, GPTConfig(2048, 32, width=384, depth=4)),
    Block,
    2048,
    sequences=2,
    tokens=32,
)
STEPS = 2  # that are timed together
WIRE = Path("/sys/class/net/wire/statistics")  # of the link between the hosts
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
COLUMNS = (
    "system", "step ms", "x", "step - local ms", "predicted ms", "predicted / measured",
    "link MB, there / back", "bits",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    costmodel.keep_freed_memory()
    systems: dict[str, System] = {}
    builds = {name: partial(Shardcast, **fields) for name, fields in OWN.items()} | PEERS
    for name, build in {**builds, "local, bf16": LOCAL["local, bf16"]}.items():
        torch.manual_seed(0)
        systems[name] = build(WORKLOAD.build(), WORKLOAD)
    systems["local, autocast"] = LOCAL["local, autocast"](WORKLOAD.build(), WORKLOAD)
    links = Links(int(os.environ["LOCAL_WORLD_SIZE"]))
    times: dict[str, list[float]] = {name: [] for name in systems}
    names = list(systems)
    for number in range(args.rounds + 1):
        links.measure()
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds = torch.tensor(seconds_of(systems[name], number), dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number:  # the first round warms up
                times[name].append(seconds.item())
    bits = {name: digest(systems[name].model) for name in OWN}
    medians = {name: statistics.median(values) for name, values in times.items()}
    crossed = {name: crossing(systems[name]) for name in builds}
    machine = links.machine(medians["local, bf16"])
    predicted = predictions(machine)
    if dist.get_rank() == 0:
        print(f"{args.title}; load of the machine {os.getloadavg()[0]:.1f}\n")
        print(f"{costmodel.as_yaml(machine)}; tflops: {machine.flops / 1e12:.4f}\n")
        lines = []
        for name in builds:
            alone = medians[systems[name].local]
            base, added = medians["shardcast"], medians[name] - alone
            cells = (
                f"{1e3 * medians[name]:.0f}",
                f"{medians[name] / base:.2f}",
                f"{1e3 * added:.0f}",
            )
            ahead = f"{1e3 * predicted[name]:.0f}", f"{predicted[name] / added:.2f}"
            both = " / ".join(f"{nbytes / 1e6:.1f}" for nbytes in crossed[name])
            lines.append((name, *cells, *ahead, both, bits.get(name, "")))
        print(report.table(COLUMNS, lines, True))
    dist.destroy_process_group()


def seconds_of(system: System, number: int) -> float:
    """Seconds of one of several steps, each of which waits for the sync of the one before it."""
    plan, first = Plan("", (), 0), number * (STEPS + 1)
    one_step(system, WORKLOAD, plan, first)
    start = time.perf_counter()
    for step in range(STEPS):
        one_step(system, WORKLOAD, plan, first + 1 + step)
    return (time.perf_counter() - start) / STEPS


def crossing(system: System) -> tuple[float, float]:
    """Bytes that cross the link in a step: from the first host, and to it."""

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


class Links:
    """Exchanges of pairs of ranks, all pairs at a time: inside each host, and between the hosts."""

    def __init__(self, per_host: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        if per_host % 2 or size != 2 * per_host:
            raise SystemExit(f"two hosts of an even number of ranks are needed, got {size} ranks")
        self.per_host, self.comms, self.times = per_host, {}, {}
        pairs_of = {
            "inside": [(first, first + 1) for first in range(0, size, 2)],
            "between": [(first, first + per_host) for first in range(per_host)],
        }
        for link, pairs in pairs_of.items():
            groups = {pair: dist.new_group(pair) for pair in pairs}
            own = next(pair for pair in pairs if rank in pair)
            self.comms[link] = Comm(groups[own])
            self.times[link] = {size: [] for size in costmodel.SIZES}
        self.sums: list[float] = []

    def measure(self) -> None:
        for link, comm in self.comms.items():
            for size in costmodel.SIZES:
                self.times[link][size] += costmodel.exchanged(comm, size, "wall")[:2]
        self.sums += costmodel.summed(Comm(dist.group.WORLD), "wall")[:2]

    def machine(self, local: float) -> Machine:
        """The machine that exchanges and sums so fast, and computes a step in ``local`` seconds."""
        begins, bandwidths = {}, {}
        for link, times in self.times.items():
            medians = [statistics.median(times[size]) for size in costmodel.SIZES]
            begins[link], each = costmodel.fitted(costmodel.SIZES, medians)
            bandwidths[link] = 0.5 / each  # a rank sends half of what is exchanged
        memory = costmodel.memory_of(2 * self.per_host, statistics.median(self.sums))
        numel = sum(param.numel() for param in WORKLOAD.build().parameters())
        flops = 6 * numel * WORKLOAD.sequences * WORKLOAD.tokens / local
        protocol = Protocol(begins["inside"], 0.0, max(0.0, begins["between"] - begins["inside"]))
        return Machine(
            "here", self.per_host, bandwidths["inside"], bandwidths["between"], memory, memory,
            flops, (protocol,), exchanged=1, backend="gloo", launch=0.0,
        )  # fmt: skip


def predictions(machine: Machine) -> dict[str, float]:
    """Seconds beyond the compute, of each system."""
    torch.manual_seed(0)
    model = WORKLOAD.build()
    numel = sum(param.numel() for param in model.parameters())
    group, tokens = machine.group(2 * machine.ranks_per_node), WORKLOAD.sequences * WORKLOAD.tokens
    found = {}
    for name, fields in OWN.items():
        config = ShardcastConfig(**fields)
        inner = torch.optim.AdamW(model.parameters())
        parts = estimate(model, inner, group.size, config, machine)
        found[name] = step_time(parts, config, machine, numel, tokens).added
    ddp = peer_times(units_of(model), 2, group, tokens)["DDP + autocast"]
    found["DDP + autocast"] = ddp.added
    # DDP's, with a part of the update, and then every owner's fp32 weights to all others.
    sync = group.broadcasts(4 * numel, len(list(model.parameters())))
    found["ZeroRedundancyOptimizer"] = ddp.added - (1 - 1 / group.size) * ddp.update + sync
    return found


def digest(model: nn.Module) -> str:
    """The first digits of a hash of all parameters, which all ranks must have."""
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
