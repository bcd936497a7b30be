"""The picture of ``shardcast estimate --plot``: memory and time over world sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KINDS = ("parameters", "gradients", "masters", "state", "outside")
INK = "#8b949e"  # of text and frames: readable on white and on black
STYLES: dict[str, dict[str, Any]] = {  # colors that are readable on both, too
    "shardcast": {"color": "#2f81f7", "marker": "o", "linewidth": 2.5, "zorder": 3},
    "shardcast, lean": {"color": "#2f81f7", "marker": "o", "linestyle": "--"},
    "shardcast, peak of shard()": {"color": "#2f81f7", "linestyle": ":"},
    "DDP + autocast": {"color": "#db6d28", "marker": "s", "linewidth": 2.5},
    "ZeRO-1": {"color": "#f85149", "marker": "x", "linestyle": ":", "zorder": 4},
    "ZeRO-2": {"color": "#3fb950", "marker": "^"},
    "FSDP": {"color": "#a371f7", "marker": "D"},
    "FSDP2": {"color": "#a371f7", "marker": "D"},
    "Megatron": {"color": "#39a0a0", "marker": "v"},
    "ZeroRedundancyOptimizer": {"color": "#bb8009", "marker": "<"},
    "FlashOptim + DDP": {"color": "#db61a2", "marker": ">"},
}
PLOTTED = tuple(2**power for power in range(13))  # world sizes 1 ... 4096
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
Row = dict[str, Any]  # the figures of one world size


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw memory and time over world sizes into the file ``path``, a PNG or SVG.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    figure = empty_figure()
    memory_axes, time_axes = figure.subplots(1, 2)
    sizes = [row["world_size"] for row in rows]
    memory = {
        "shardcast": [row["total"] for row in rows],
        "shardcast, peak of shard()": [row["setup_peak"] for row in rows],
        **{name: [row["others"][name] for row in rows] for name in rows[0]["others"]},
    }
    draw_memory(memory_axes, {name: dict(zip(sizes, memory[name], strict=True)) for name in memory})
    memory_axes.set_title(title)
    times = {
        "shardcast": [row["time"]["step"] for row in rows],
        **{
            name: [row["other_times"][name]["step"] for row in rows]
            for name in rows[0]["other_times"]
        },
    }
    for name, seconds in times.items():
        time_axes.plot(sizes, seconds, label=name, **style_of(name))
    time_axes.set_title(f"{rows[0]['machine']}, {rows[0]['tokens']:,} tokens of one rank")
    time_axes.set_ylabel("predicted seconds of a step")
    _over_ranks(time_axes, sizes)
    for axes in (memory_axes, time_axes):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, labelcolor=INK)
    save(figure, path)


def draw_memory(axes: Any, memory: Mapping[str, Mapping[int, float]]) -> float:
    """Draw bytes per rank by name and world size; return the bytes of the unit on the axis."""
    most = max(max(by_size.values()) for by_size in memory.values())
    unit, word = next((unit for unit in UNITS if most >= unit[0]), UNITS[-1])
    for name, by_size in memory.items():
        values = [nbytes / unit for nbytes in by_size.values()]
        axes.plot(list(by_size), values, label=name, **style_of(name))
    axes.set_ylabel(f"memory per rank, {word}")
    _over_ranks(axes, list(next(iter(memory.values()))))
    return unit


def style_of(name: str) -> dict[str, Any]:
    """Keywords of ``Axes.plot`` for the line of a system."""
    return {"markersize": 4, "linewidth": 1.5, **STYLES.get(name, {})}


def _over_ranks(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes], fontsize="small")
    axes.set_xlabel("data-parallel ranks")
    axes.set_ylim(bottom=0)


def empty_figure(width: float = 11, height: float = 5) -> Any:
    """An empty figure of so many inches without a window, whatever the backend.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            "--plot: expected matplotlib, which is not installed; install it with "
            "pip install matplotlib, or pip install 'shardcast-optim[plot]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a picture for light and dark pages, the same bytes for the same figure."""
    import matplotlib

    for axes in figure.axes:
        for spine in axes.spines.values():
            spine.set_color(INK)
        axes.tick_params(which="both", colors=INK)
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
            text.set_color(INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=INK, alpha=0.25)
    with matplotlib.rc_context({"svg.hashsalt": "shardcast"}):
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, transparent=True, metadata=metadata)
