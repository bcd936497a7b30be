"""``shardcast estimate``: what an importable model needs, as a table, JSON or a picture."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardcast.config import ShardcastConfig
from shardcast.estimate import estimate, peers, state_of
from shardcast.plan.partition import ELEMENTWISE

Row = dict[str, Any]  # the figures of one world size

KINDS = ("parameters", "gradients", "masters", "state", "rest")
BYTES = (*KINDS, "total", "host", "setup_peak", "sent")
COUNTS = ("packs", "collectives", "balance")
PLOTTED = tuple(2**power for power in range(11))  # world sizes 1 ... 1024


def run(arguments: list[str]) -> int:
    """Estimate and print; returns the exit status.

    Raises:
        ValueError: a model that cannot be imported or built, or a wrong option.
        RuntimeError: ``--plot`` without matplotlib.
    """
    parsed = _parse(arguments)
    if parsed.plot is not None:
        _figure()  # told before the work is done
    model = _build(parsed.model)
    optimizer = getattr(torch.optim, parsed.optimizer)(model.parameters(), lr=0.1)
    config = ShardcastConfig.load(parsed.config)
    numel = sum(param.numel() for param in model.parameters())
    title = f"{numel:,} parameters, {parsed.optimizer}"
    rows = rows_of(model, optimizer, parsed.world_size, config)
    if parsed.plot is not None:
        plot(rows_of(model, optimizer, PLOTTED, config), title, parsed.plot)
    if parsed.json:
        print(json.dumps(rows, indent=2))
    else:
        print("\n".join(table(rows, title)))
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="shardcast estimate", allow_abbrev=False)
    parser.add_argument("model", metavar="MODULE:FUNCTION", help="called without arguments")
    names = sorted(kind.__name__ for kind in ELEMENTWISE)
    parser.add_argument("--optimizer", choices=names, default="AdamW", help="of torch.optim")
    parser.add_argument("--config", type=Path, metavar="YAML", help="shardcast configuration")
    parser.add_argument("--world_size", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 256])
    parser.add_argument("--json", action="store_true", help="print it for programs, in bytes")
    parser.add_argument(
        "--plot", type=Path, metavar="PNG", help="draw it over world sizes 1 to 1024"
    )
    return parser.parse_args(arguments)


def _build(name: str) -> nn.Module:
    module, _, function = name.partition(":")
    sys.path.insert(0, "")  # as python -m does
    try:
        build = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"model: expected MODULE:FUNCTION that can be imported from here, got {name!r} "
            f"({error})"
        ) from error
    with torch.device("meta"):
        model = build()
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model: expected that {name} returns a torch.nn.Module, got {type(model).__name__}"
        )
    return model


def rows_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sizes: Sequence[int],
    config: ShardcastConfig,
) -> list[Row]:
    """Per world size: :data:`BYTES`, :data:`COUNTS` and what others hold, in bytes."""
    numel = sum(param.numel() for param in model.parameters())
    moments = state_of(optimizer, optimizer.param_groups[0]).moments
    rows = []
    for size in sizes:
        found = estimate(model, optimizer, size, config)
        row: Row = {"world_size": size, **{name: getattr(found, name) for name in BYTES}}
        row["packs"] = len(found.layout.packs)
        row["collectives"], row["balance"] = found.collectives, found.balance
        rows.append(row | peers(numel, moments, size))
    return rows


def table(rows: Sequence[Row], title: str) -> list[str]:
    """Lines for people: what a rank holds, what a step sends, and what others hold."""
    scale, unit = (2**30, "GiB") if rows[0]["total"] >= 2**33 else (2**20, "MiB")
    others = [name for name in rows[0] if name not in ("world_size", *BYTES, *COUNTS)]
    held = ("world_size", *KINDS, "total", "host", "setup_peak")
    lines = [f"{title}; bytes of the rank that holds most, in {unit}"]
    for columns in (held, ("world_size", *others), ("world_size", "sent", *COUNTS)):
        lines += ["", " ".join(f"{name:>14}" for name in columns)]
        for row in rows:
            cells = [
                f"{row[n]:,}" if n in ("world_size", "packs", "collectives")
                else f"{row[n]:.3f}" if n == "balance" else f"{row[n] / scale:,.1f}"
                for n in columns
            ]  # fmt: skip
            lines.append(" ".join(f"{cell:>14}" for cell in cells))
    return lines


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw what a rank holds over world sizes into the file ``path``: ours stacked, others' lines.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    sizes = [row["world_size"] for row in rows]
    figure = _figure()
    axes = figure.subplots()
    parts = [[row[kind] / 2**30 for row in rows] for kind in KINDS]
    away = ("masters", "state") if rows[0]["host"] else ()
    labels = [f"shardcast: {kind}{' (host)' * (kind in away)}" for kind in KINDS]
    colors = ["#4477aa", "#66ccee", "#ccbb44", "#ee9966", "#bbbbbb"]
    axes.stackplot(sizes, parts, labels=labels, colors=colors, alpha=0.85, linewidth=0)
    peak = [row["setup_peak"] / 2**30 for row in rows]
    axes.plot(sizes, peak, color="black", linestyle=":", label="shardcast: peak of setting up")
    others = [name for name in rows[0] if name not in ("world_size", *BYTES, *COUNTS)]
    styles = (("#aa3377", "o"), ("#cc3311", "s"), ("#228833", "^"), ("#555555", "D"))
    for name, (color, marker) in zip(others, styles, strict=True):
        line = [row[name] / 2**30 for row in rows]
        axes.plot(sizes, line, color=color, marker=marker, markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlim(sizes[0], sizes[-1])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("world size (ranks, logarithmic)")
    axes.set_ylabel("GiB of the rank that holds most")
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=120)


def _figure() -> Any:
    """An empty figure without a window, whatever the backend."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            "--plot: expected matplotlib, which is not installed; install it with "
            "pip install matplotlib, or pip install 'shardcast-optim[plot]'"
        ) from error
    return Figure(figsize=(9, 5.5), layout="constrained")
