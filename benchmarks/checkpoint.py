"""Time shardcast's checkpoints and torch's own, for one state on one disk.

    python -m benchmarks checkpoint --elements 100000000 --ranks 2 [--only save load]

AdamW with this many fp32 parameters has three times as many elements of state. Rows of one kind
give the same guarantee: a save survives a power cut, and the previous save stays until the new one
is complete. So `torch.save` and `dcp.save` write next to the previous file or directory, flush,
rename, and then delete the previous one, as shardcast does by itself. `torch.save` gets the
gathered state on rank 0. `dcp.save` gets it on all ranks, and each rank writes a part. Rounds are
interleaved, in rotated order, and each row starts after the disk has written everything.
`processor s` is the sum over ranks.
"""

from __future__ import annotations

import argparse
import os
import shlex
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

import shardcast
from benchmarks import report
from shardcast import checkpoint
from shardcast.testing import spawn

WIDTH = 1024
COLUMNS = ("system", "s", "x", "GB/s", "processor s")
# Ratios of each kind are relative to its first row.
KINDS = {
    "save": (
        "torch.save, flushed, renamed",
        "torch.save, not flushed",
        "dcp.save, renamed",
        "shardcast save",
    ),
    "save_async": ("copy of a rank's state in memory", "shardcast save_async, until it returns"),
    "load": ("torch.load, nothing verified", "dcp.load, nothing verified", "shardcast load"),
    "export": ("torch.load, torch.save, flushed, renamed", "shardcast export"),
}


def model_of(elements: int) -> nn.Module:
    blocks = max(1, elements // (WIDTH * WIDTH))
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks)])


def flushed(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def torch_save(value: Any, path: Path, flush: bool = True) -> None:
    new = path.with_suffix(".new")
    torch.save(value, new)
    if flush:
        flushed(new)
    os.replace(new, path)
    if flush:
        flushed(path.parent)


def measure(
    group: Any, folder: str, elements: int, rounds: int, kinds: Sequence[str]
) -> dict[str, list[Any]]:
    """Return wall seconds, and processor seconds of all ranks, of each row in each round."""
    base, rank = Path(folder), group.rank()
    model = model_of(elements)
    optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters()), param_dtype="fp32")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": {
            name: {key: torch.ones_like(param) for key in ("exp_avg", "exp_avg_sq")}
            for name, param in model.named_parameters()
        },
    }
    state_of_a_rank = 3 * elements // group.size() if "save_async" in kinds else 0
    own = torch.ones(state_of_a_rank)
    step, pending = 0, list[Any]()

    def on_rank_0(call: Callable[..., Any], *given: Any) -> None:
        if rank == 0:
            call(*given)

    def save_dcp() -> None:
        new, old = base / "dcp.new", base / "dcp.old"
        dcp.save(state, checkpoint_id=new)
        if rank == 0:
            if (base / "dcp").exists():
                os.replace(base / "dcp", old)
            os.replace(new, base / "dcp")
            flushed(base)
            shutil.rmtree(old, ignore_errors=True)

    def save_ours(save: Callable[..., Any] = checkpoint.save) -> None:
        nonlocal step
        step += 1
        pending.append(save(base / "ours", model, optimizer, step=step, keep=1))

    def export_torch() -> None:
        torch_save(torch.load(base / "torch.pt", weights_only=True), base / "exported.pt")

    def export_ours() -> None:
        new = base / "exported.new"
        checkpoint.export(base / "ours", new)
        shutil.rmtree(base / "exported", ignore_errors=True)
        os.replace(new, base / "exported")

    calls: dict[str, Callable[[], Any]] = {
        "torch.save, flushed, renamed": lambda: on_rank_0(torch_save, state, base / "torch.pt"),
        "torch.save, not flushed": lambda: on_rank_0(torch_save, state, base / "lost.pt", False),
        "dcp.save, renamed": save_dcp,
        "shardcast save": save_ours,
        "copy of a rank's state in memory": own.clone,
        "shardcast save_async, until it returns": lambda: save_ours(checkpoint.save_async),
        "torch.load, nothing verified": lambda: torch.load(base / "torch.pt", weights_only=True),
        "dcp.load, nothing verified": lambda: dcp.load(state, checkpoint_id=base / "dcp"),
        "shardcast load": lambda: checkpoint.load(base / "ours", model, optimizer),
        "torch.load, torch.save, flushed, renamed": lambda: on_rank_0(export_torch),
        "shardcast export": lambda: on_rank_0(export_ours),
    }
    found: dict[str, list[Any]] = {name: [] for name in calls}
    for number in range(-1, rounds):
        for rows in (KINDS[kind] for kind in kinds):
            turn = max(number, 0) % len(rows)
            for name in (*rows[turn:], *rows[:turn]):
                dist.barrier()
                on_rank_0(os.sync)
                dist.barrier()
                begun, busy = time.perf_counter(), time.process_time()
                calls[name]()
                dist.barrier()
                spent = torch.tensor(time.process_time() - busy, dtype=torch.float64)
                seconds = time.perf_counter() - begun
                dist.all_reduce(spent)
                if number >= 0:  # the first round has nothing to delete and no cached files
                    found[name].append((seconds, float(spent)))
                if "async" in name:
                    pending[-1].wait()
    return found


def rows(found: dict[str, list[Any]], nbytes: float) -> list[tuple[str, ...]]:
    lines = []
    for names in KINDS.values():
        for name in names if found[names[0]] else ():
            pairs = zip(found[name], found[names[0]], strict=True)
            ratio = statistics.median(one[0] / other[0] for one, other in pairs)
            seconds, spent = (statistics.median(part) for part in zip(*found[name], strict=True))
            figures = f"{seconds:.2f}", f"{ratio:.2f}", f"{nbytes / seconds / 1e9:.2f}"
            lines.append((name, *figures, f"{spent:.2f}"))
    return lines


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks checkpoint", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--elements", type=int, default=100_000_000, help="elements of the model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--directory", help="where to save; default: the temporary directory")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        given = (folder, args.elements, args.rounds, args.only)
        found = spawn(measure, args.ranks, *given, timeout=3600.0)[0]
    nbytes = 12.0 * sum(p.numel() for p in model_of(args.elements).parameters())
    title = f"{nbytes / 1e9:.2f} GB of masters and AdamW's moments, {args.ranks} rank(s)"
    command = shlex.join(["python", "-m", "benchmarks", "checkpoint", *arguments])
    print("\n".join([title, "", *report.head(command), ""]))
    print(report.table(COLUMNS, rows(found, nbytes), args.markdown))
