"""Compare two runs of launch/train.py: a picture, a table, and the difference of losses."""

from __future__ import annotations

import argparse
from pathlib import Path

import metrics
import torch
from gpt import GPT, GPTConfig
from metrics import Record
from plot import memory_and_losses

import shardcast
from shardcast.estimate import estimate, peers

SIZES = (1, 2, 4, 8, 16, 32, 64)
# Validation losses of the quickstart with seeds 0 to 3 in DDP + autocast. With the same seeds,
# shardcast ended at 2.0823, 2.0743, 2.0819 and 2.0865.
DDP_LOSSES, RECORDED = (2.1101, 2.0756, 2.0838, 2.1037), "recorded on 2026-11-28"
NAMES = {None: "shardcast", "ddp": "DDP + autocast", "bf16": "bf16 without masters"}


def compare(directories: list[Path], output: Path) -> None:
    """Draw two runs in one picture; print a table of them and the picture's path."""
    runs = {name_of(metrics.read(directory)): metrics.read(directory) for directory in directories}
    if len(runs) < len(directories):  # two runs of one kind
        runs = {str(directory): metrics.read(directory) for directory in directories}
    memory = {name: memory_over_ranks(records) for name, records in runs.items()}
    measured = {name: measured_memory(records) for name, records in runs.items()}
    titles = "memory of this model (rings: measured)", "loss of both runs"
    picture = memory_and_losses(memory, measured, runs, titles, output / "comparison.png")
    apart = metrics.compare(*runs.values())
    print("\n".join(["", *table(runs, memory, measured), "", str(apart), noise(), picture]))


def noise() -> str:
    """Return the spread of DDP's final losses over seeds, to judge the difference of two runs."""
    low, high = min(DDP_LOSSES), max(DDP_LOSSES)
    return (
        f"for comparison: DDP + autocast alone, 300 steps with {len(DDP_LOSSES)} seeds, ended "
        f"between {low:.4f} and {high:.4f}, {100 * (high / low - 1):.2f} % apart ({RECORDED})"
    )


def name_of(records: list[Record]) -> str:
    return NAMES[metrics.values_of(records, "run")["arguments"]["baseline"]]


def measured_memory(records: list[Record]) -> tuple[int, int]:
    """Return the number of ranks, and the bytes that the first rank held."""
    report = metrics.values_of(records, "memory")
    total = sum(value for key, value in report.items() if key != "kind")
    return metrics.values_of(records, "run")["world"], total


def memory_over_ranks(records: list[Record]) -> dict[int, float]:
    """Return the estimated bytes per rank of a run's model for several numbers of ranks."""
    run = metrics.values_of(records, "run")
    with torch.device("meta"):
        model = GPT(GPTConfig.of(argparse.Namespace(**run["arguments"])))
    if run["arguments"]["baseline"] is not None:
        numel = sum(param.numel() for param in model.parameters())
        share = 0.5 if run["arguments"]["baseline"] == "bf16" else 1.0
        return {size: share * peers(numel, 2, size)["DDP + autocast"] for size in SIZES}
    optimizer = torch.optim.AdamW(model.parameters())
    config = shardcast.ShardcastConfig(**run["config"])
    on_cpu = run["arguments"]["device"] == "cpu" or not torch.cuda.is_available()
    backend = "gloo" if on_cpu else "nccl"
    return {size: float(estimate(model, optimizer, size, config, backend).total) for size in SIZES}


def table(
    runs: dict[str, list[Record]],
    memory: dict[str, dict[int, float]],
    measured: dict[str, tuple[int, int]],
) -> list[str]:
    """Return lines with loss, memory and time of each run."""
    validations = {name: metrics.curve(records, "validation") for name, records in runs.items()}
    step = max(set.intersection(*(set(losses) for losses in validations.values())))
    world = max(ranks for ranks, _ in measured.values())
    rows = {
        "": list(runs),
        f"validation loss after {step} steps": [f"{v[step]:.4f}" for v in validations.values()],
        f"MB per rank, {world} rank{'s' * (world > 1)}": [
            f"{nbytes / 1e6:.2f}" for _, nbytes in measured.values()
        ],
        "MB per rank, 8 ranks (estimate)": [f"{m[8] / 1e6:.2f}" for m in memory.values()],
        "processor seconds per step": [
            f"{metrics.processor_seconds(run):.3f}" for run in runs.values()
        ],
    }
    label = max(map(len, rows))
    widths = [max(10, len(name)) for name in runs]
    return [
        "  ".join([f"{name:<{label}}", *(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))])
        for name, cells in rows.items()
    ]
