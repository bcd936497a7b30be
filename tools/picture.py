"""Draw docs/memory-and-loss.svg, the picture of README, and other pictures of docs.

    python tools/picture.py                                    # from the recorded run
    bash launch/quickstart.sh                                   # then, from your own run:
    python tools/picture.py --record runs/quickstart/ddp runs/quickstart/shardcast

    python tools/picture.py --bf16-loss            # from recorded runs of tools/bf16_loss.sh
    python tools/picture.py --update-to-weight     # from a run of tools/update_to_weight.sh
    python tools/picture.py --fine-tuning          # from python -m benchmarks fine-tuning

``bash launch/hybrid.sh`` draws docs/hybrid.svg (as runs/hybrid/comparison.svg).

Upper part: bytes per rank for 6.7 billion parameters, from ``shardcast estimate gpt:gpt_7b``. Lower
part: losses of the quickstart, recorded in tools/recorded/quickstart.csv.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "launch"))  # model and plots

import metrics
import torch
from comparison import name_of
from gpt import gpt_7b
from metrics import Record
from plot import changes_and_losses, held_out_losses, memory_and_losses, ratios_of_layers

import shardcast
from shardcast.estimate import estimate, peers

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tools" / "recorded" / "quickstart.csv"
BF16_LOSS = RECORDED.with_name("bf16-loss.csv")
UPDATE_TO_WEIGHT = RECORDED.with_name("update-to-weight.csv")
FINE_TUNING = RECORDED.with_name("fine-tuning.csv")
SIZES = (1, 2, 4, 8, 16, 32, 64)
LEAN = ROOT / "configs" / "lean.yaml"


def record(directories: list[Path], path: Path) -> None:
    """Write the losses of several runs to one small file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", "kind", "step", "loss"])
        for records in map(metrics.read, directories):
            for kind in ("train", "validation"):
                for step, loss in metrics.curve(records, kind).items():
                    writer.writerow([name_of(records), kind, step, f"{loss:.4f}"])


def recorded(path: Path) -> dict[str, list[Record]]:
    """Return records by run, like metrics.read."""
    runs: dict[str, list[Record]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            runs.setdefault(row["run"], []).append(
                {"kind": row["kind"], "step": int(row["step"]), "loss": float(row["loss"])}
            )
    return runs


def record_ratios(directory: Path, path: Path) -> None:
    """Write the update-to-weight ratios of one run to a small file, one column per layer."""
    rows = [row for row in metrics.read(directory) if row["kind"] == "update_to_weight"]
    with path.open("w", newline="", encoding="utf-8") as file:
        layers = [name for name in rows[0] if name not in ("kind", "step")]
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *layers])
        for row in rows:
            writer.writerow([row["step"], *(f"{row[name]:.3e}" for name in layers)])


def recorded_ratios() -> dict[str, dict[int, float]]:
    """Return the ratios by layer and step."""
    with UPDATE_TO_WEIGHT.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    layers = [name for name in rows[0] if name != "step"]
    return {name: {int(row["step"]): float(row[name]) for row in rows} for name in layers}


def fine_tuning() -> tuple[Any, Any, float]:
    """Return each form's shares by learning rate, its losses by step at the largest, and that."""
    with FINE_TUNING.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    rate = max(float(row["rate"]) for row in rows)
    shares: dict[str, dict[float, float]] = {}
    losses: dict[str, dict[int, float]] = {}
    for row in rows:
        shares.setdefault(row["form"], {})[float(row["rate"])] = float(row["share"])
        if float(row["rate"]) == rate:
            losses.setdefault(row["form"], {})[int(row["step"])] = float(row["loss"])
    return shares, losses, rate


def memory_of_7b() -> dict[str, dict[int, float]]:
    """Return bytes per rank by system and number of ranks."""
    with torch.device("meta"):
        model = gpt_7b()
    numel = sum(param.numel() for param in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    bf16 = shardcast.ShardcastConfig(param_dtype="bf16")
    lean = shardcast.ShardcastConfig.load(LEAN)
    return {
        "DDP + autocast": {size: peers(numel, 2, size)["DDP + autocast"] for size in SIZES},
        "shardcast": {size: estimate(model, optimizer, size, bf16).total for size in SIZES},
        "shardcast, lean": {size: estimate(model, optimizer, size, lean).total for size in SIZES},
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw a picture of the documentation.")
    parser.add_argument("--record", nargs="+", type=Path, metavar="DIR", help="record these runs")
    parser.add_argument("--bf16-loss", action="store_true", help="draw bf16-loss.svg")
    parser.add_argument("--update-to-weight", action="store_true", help="draw update-to-weight.svg")
    parser.add_argument("--fine-tuning", action="store_true", help="draw fine-tuning.svg")
    parsed = parser.parse_args(arguments)
    if parsed.fine_tuning:
        print(changes_and_losses(*fine_tuning(), ROOT / "docs" / "fine-tuning.svg"))
        return
    if parsed.update_to_weight:
        if parsed.record:
            record_ratios(parsed.record[0], UPDATE_TO_WEIGHT)
        print(ratios_of_layers(recorded_ratios(), ROOT / "docs" / "update-to-weight.svg"))
        return
    source = BF16_LOSS if parsed.bf16_loss else RECORDED
    if parsed.record:
        record(parsed.record, source)
    if parsed.bf16_loss:
        print(held_out_losses(recorded(source), ROOT / "docs" / "bf16-loss.svg"))
        return
    titles = "6.7 B parameters, AdamW: memory", "quickstart, 0.9 M parameters, 2 ranks: loss"
    path = ROOT / "docs" / "memory-and-loss.svg"
    print(memory_and_losses(memory_of_7b(), {}, recorded(RECORDED), titles, path))


if __name__ == "__main__":
    main()
