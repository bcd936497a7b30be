"""Part 8: shardcast next to DDP, ZeRO, FSDP2 and Megatron-FSDP; needs two cards or more."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.models import WORKLOADS, Workload
from benchmarks.systems import BF16, LR, OWN, PEERS, System
from gpt import GPT, Block, GPTConfig
from torch import nn

from gpu.bench import Bench
from gpu.ranks import on_ranks

LARGE = GPTConfig(50304, 1024, 1024, 24, 16)
OURS = ("shardcast", "shardcast, overlap_sync")


def run(bench: Bench) -> None:
    ranks = 2 if bench.dry else torch.cuda.device_count()
    if ranks < 2:
        bench.note(skipped="one card: the table of peers needs two")
        return
    names = list(systems())
    if bench.dry:
        names = ["shardcast", "DDP + autocast", "FSDP2, reduce in bf16"]
    for figure in on_ranks(bench, measure, names, bench, ranks=ranks, share=0.9)[0]:
        bench.note(**figure)


def systems() -> dict[str, Callable[[nn.Module, Workload], System]]:
    """Return the compared systems, without those that are not installed."""
    found = {name: OWN[name] for name in OURS}
    found.update({n: make for n, make in PEERS.items() if not n.startswith(("DeepSpeed", "fair"))})
    if importlib.util.find_spec("megatron_fsdp") is not None:
        found["Megatron-FSDP"] = MegatronFSDP
    return found


class MegatronFSDP(System):
    """Used as in its quick start, with sharded parameters, gradients and state."""

    def __init__(self, model: nn.Module, workload: Workload) -> None:
        from megatron_fsdp import fully_shard_model, fully_shard_optimizer

        sharded = fully_shard_model(module=model.to(BF16), fsdp_unit_modules=[workload.block])
        super().__init__(sharded, "bf16")
        plain = torch.optim.AdamW(sharded.parameters(), lr=LR, fused=True)
        self.optimizer = fully_shard_optimizer(optimizer=plain)


def measure(group: dist.ProcessGroup, names: list[str], bench: Bench) -> list[dict[str, Any]]:
    """Run every system for a few steps on one rank."""
    bench = bench.of_rank(group.rank())
    workload = Workload("GPT 350 M", partial(GPT, LARGE), Block, 50304, 4, 1024)
    workload = WORKLOADS["tiny"] if bench.dry else workload
    return [_one(name, workload, group, bench) for name in names]


def _one(name: str, workload: Workload, group: dist.ProcessGroup, bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = {"system": name, "ranks": group.size()}
    try:
        torch.manual_seed(0)
        x, y = workload.batch(group.rank())
        batch = x.to(bench.device), y.to(bench.device)
        with bench.peak(found, "peak bytes"):
            system = systems()[name](workload.build().to(bench.device), workload)
            losses = []

            def step() -> None:
                losses.append(system.micro(batch, True, 1))
                system.step()

            found["ms"] = bench.time(step, rounds=6)
        found["tokens/s"] = 1e3 * batch[0].numel() * group.size() / found["ms"]
        mean = losses[-1].float().clone()
        dist.all_reduce(mean)
        found["last loss"] = mean.item() / group.size()
    except Exception as error:  # a peer's API may have changed; all ranks raise alike
        found["error"] = f"{type(error).__name__}: {error}"[:500]
    gc.collect()
    if not bench.dry:
        torch.cuda.empty_cache()
    return found
