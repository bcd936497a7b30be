"""Time saving and loading of shardcast next to torch's own ways, of one state on one disk.

    python -m benchmarks checkpoint --elements 100000000

AdamW over that many fp32 parameters: three times as many elements of state. torch gathers the state
on rank 0 (`consolidate_state_dict`) and saves it there with `torch.save`; shardcast's ranks each
write their own, with checksums and flushes to the disk. `torch.save` and `dcp.save` write a state
that is gathered already: the one on rank 0 alone, the other deals its tensors to both ranks. Two
gloo processes, one run, alternating.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import shardcast
from shardcast import checkpoint
from shardcast.testing import spawn

WIDTH = 1024


def model_of(elements: int) -> nn.Module:
    blocks = max(1, elements // (WIDTH * WIDTH))
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks)])


def stepped(model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()


def flushed(value: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def measure(group: Any, folder: str, elements: int, rounds: int) -> dict[str, list[float]]:
    base, rank = Path(folder), group.rank()
    plain = model_of(elements)
    zero = ZeroRedundancyOptimizer(plain.parameters(), torch.optim.AdamW, lr=1e-3)
    stepped(plain, zero)
    ours = model_of(elements)
    optimizer = shardcast.shard(ours, torch.optim.AdamW(ours.parameters()), param_dtype="fp32")
    stepped(ours, optimizer)

    def zero_save() -> None:
        zero.consolidate_state_dict(0)
        if rank == 0:
            flushed({"model": plain.state_dict(), "optim": zero.state_dict()}, base / "zero.pt")

    def zero_load() -> None:
        loaded = torch.load(base / "zero.pt", weights_only=True)
        plain.load_state_dict(loaded["model"])
        zero.load_state_dict(loaded["optim"])

    gathered = {
        "model": plain.state_dict(),
        "optim": {
            name: {key: torch.ones_like(param) for key in ("exp_avg", "exp_avg_sq")}
            for name, param in plain.named_parameters()
        },
    }

    def torch_save() -> None:
        if rank == 0:
            flushed(gathered, base / "torch.pt")

    def dcp_save() -> None:
        if rank == 0:
            shutil.rmtree(base / "dcp", ignore_errors=True)
        dist.barrier()
        dcp.save(gathered, checkpoint_id=base / "dcp")

    step = 0

    def ours_save() -> None:
        nonlocal step
        step += 1
        checkpoint.save(base / "ours", ours, optimizer, step=step, keep=1)

    def ours_background() -> None:
        nonlocal step
        step += 1
        pending.append(checkpoint.save_async(base / "ours", ours, optimizer, step=step, keep=1))

    def ours_load() -> None:
        checkpoint.load(base / "ours", ours, optimizer)

    pending: list[Any] = []
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], None]) -> None:
        dist.barrier()
        begun = time.perf_counter()
        call()
        dist.barrier()
        times.setdefault(name, []).append(time.perf_counter() - begun)

    for _ in range(rounds):
        timed("ZeroRedundancyOptimizer save", zero_save)
        timed("torch.save, of what is gathered already", torch_save)
        timed("dcp.save, of what is gathered already", dcp_save)
        timed("shardcast save", ours_save)
        timed("ZeroRedundancyOptimizer load", zero_load)
        timed("shardcast load", ours_load)
        timed("shardcast save_async, until training goes on", ours_background)
        pending.pop().wait()
    return times


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks checkpoint", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--elements", type=int, default=100_000_000, help="of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", help="where to save; default: the temporary directory")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        given = (folder, args.elements, args.rounds)
        times = spawn(measure, 2, *given, timeout=3600.0)[0]
    print(f"{args.elements:,} parameters, {3 * args.elements:,} elements of state, 2 processes")
    for name, found in times.items():
        verb = "load" if name.endswith("load") else "save"
        beside = times[f"ZeroRedundancyOptimizer {verb}"]
        ratio = statistics.median(a / b for a, b in zip(found, beside, strict=True))
        print(f"{name:46} {statistics.median(found):7.2f} s   x {ratio:.2f}")
