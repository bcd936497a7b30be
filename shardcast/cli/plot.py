"""The picture of ``shardcast estimate --plot``: memory and time over world sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

KINDS = ("parameters", "gradients", "masters", "state", "outside")
# Stages as they are drawn, one upon the other, and what of each lies under another one.
STACKED = {
    "compute": "", "reduce": "in_backward", "decide": "", "update": "", "sync": "in_forward",
}  # fmt: skip
STYLES = {  # of lines of others: color, marker
    "DDP + autocast": ("#aa3377", "o"),
    "ZeRO-1": ("#cc3311", "s"),
    "ZeRO-2": ("#228833", "^"),
    "FSDP": ("#555555", "D"),
    "FSDP2": ("#555555", "D"),
    "Megatron": ("#332288", "v"),
    "ZeroRedundancyOptimizer": ("#cc7733", "<"),
    "FlashOptim + DDP": ("#77aadd", ">"),
}
PLOTTED = tuple(2**power for power in range(13))  # world sizes 1 ... 4096
Row = dict[str, Any]  # the figures of one world size


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw memory and time over world sizes into the file ``path``: ours stacked, others' lines.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    figure = empty_figure()
    memory_axes, time = figure.subplots(2)
    sizes = [row["world_size"] for row in rows]
    away = ("masters", "state") if rows[0]["host"] else ()
    parts = {
        f"{kind}{' (host)' * (kind in away)}": [row[kind] / 2**30 for row in rows] for kind in KINDS
    }
    lines = {name: [row["others"][name] / 2**30 for row in rows] for name in rows[0]["others"]}
    peak = [row["setup_peak"] / 2**30 for row in rows]
    memory_axes.plot(
        sizes, peak, color="black", linestyle=":", label="shardcast: peak of setting up"
    )
    memory_axes.set_title(title)
    _stack(memory_axes, sizes, parts, lines, "GiB of the rank that holds most")

    parts = {
        stage: [row["time"][stage] - row["time"].get(beside, 0) for row in rows]
        for stage, beside in STACKED.items()
    }
    lines = {
        name: [row["other_times"][name]["step"] for row in rows] for name in rows[0]["other_times"]
    }
    time.set_title(f"{rows[0]['machine']}, {rows[0]['tokens']:,} tokens of one rank")
    time.set_xlabel("data-parallel ranks (logarithmic)")
    _stack(time, sizes, parts, lines, "predicted seconds of a step")
    figure.savefig(path, dpi=120)


def _stack(
    axes: Any,
    sizes: Sequence[int],
    parts: dict[str, list[float]],
    others: dict[str, list[float]],
    label: str,
) -> None:
    axes.stackplot(
        sizes, list(parts.values()), labels=[f"shardcast: {part}" for part in parts],
        colors=["#4477aa", "#66ccee", "#ccbb44", "#ee9966", "#bbbbbb"], alpha=0.85, linewidth=0,
    )  # fmt: skip
    for name, line in others.items():
        color, marker = STYLES[name]
        axes.plot(sizes, line, color=color, marker=marker, markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlim(sizes[0], sizes[-1])
    axes.set_ylim(bottom=0)
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")


def empty_figure() -> Any:
    """An empty figure without a window, whatever the backend."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            "--plot: expected matplotlib, which is not installed; install it with "
            "pip install matplotlib, or pip install 'shardcast-optim[plot]'"
        ) from error
    return Figure(figsize=(10, 10), layout="constrained")
