"""Draw one or more runs: loss curves, and memory over ranks above them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metrics import Record, curve

INK = "#8b949e"  # text and frames, readable on white and on black
STYLES: dict[str, dict[str, Any]] = {  # these colors are readable on both, too
    "shardcast": {"color": "#2f81f7", "marker": "o", "linewidth": 2.5, "zorder": 3},
    "shardcast, lean": {"color": "#2f81f7", "marker": "o", "linestyle": "--"},
    "DDP + autocast": {"color": "#db6d28", "marker": "s", "linewidth": 2.5},
}
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
RANDOM_BYTES = 5.545  # ln 256: nats per byte of an untrained model


def loss_curves(runs: dict[str, list[Record]], path: Path) -> str:
    """Draw training (thin) and validation (dots) losses by step; return the path as a message."""
    try:
        from matplotlib.figure import Figure  # draws without a display
    except ImportError:
        return "no picture: it needs matplotlib (the extra `plot`)"
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per byte)")
    for number, (name, records) in enumerate(runs.items()):
        color = f"C{number}"
        train, validation = curve(records, "train"), curve(records, "validation")
        axes.plot(train.keys(), train.values(), color=color, alpha=0.4, linewidth=1)
        axes.plot(
            validation.keys(),
            validation.values(),
            color=color,
            linestyle="-" if number == 0 else "--",
            marker="o" if number == 0 else "x",
            label=f"{name}, validation",
        )
    axes.axhline(RANDOM_BYTES, color="grey", linestyle=":", linewidth=1, label="random bytes")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return f"picture: {path}"


def memory_and_losses(
    memory: dict[str, dict[int, float]],
    measured: dict[str, tuple[int, int]],
    runs: dict[str, list[Record]],
    titles: tuple[str, str],
    path: Path,
) -> str:
    """Draw bytes per rank over ranks, and below them the loss curves of two runs.

    Args:
        memory: bytes by system and number of ranks.
        measured: number of ranks and bytes of each run, drawn as a ring on its line.
        runs: records by name, drawn in the color of the same name above.
        titles: titles of both parts.
        path: a PNG or SVG, readable on light and dark pages.
    """
    try:
        figure = empty_figure(6)  # its letters match the text's size on a phone
    except RuntimeError:
        return "no picture: it needs matplotlib (the extra `plot`)"
    above, below = figure.subplots(2, 1)
    unit = draw_memory(above, memory)
    above.set_ylim(top=1.15 * max(max(by_size.values()) for by_size in memory.values()) / unit)
    above.legend(frameon=False, labelcolor=INK, loc="center right")
    rings = {"marker": "o", "linestyle": "", "fillstyle": "none", "markersize": 13}
    for number, (name, (ranks, nbytes)) in enumerate(measured.items()):
        above.plot([ranks], [nbytes / unit], color=_color(name, number), **rings)
    for number, (name, records) in enumerate(runs.items()):
        train, validation = curve(records, "train"), curve(records, "validation")
        color, first = _color(name, number), number == 0
        line = {"linewidth": 4, "alpha": 0.6} if first else {"linewidth": 1.5}
        dots = {"linestyle": "", "marker": "o" if first else "x", "markersize": 9 if first else 6}
        below.plot(train.keys(), train.values(), color=color, label=f"{name}, training", **line)
        label = f"{name}, held-out text"
        below.plot(validation.keys(), validation.values(), color=color, label=label, **dots)
    below.legend(frameon=False, labelcolor=INK, loc="upper right")
    below.set(xlabel="step", ylabel="loss, nats per byte")
    for axes, title in zip((above, below), titles, strict=True):
        axes.set_title(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)
    return f"picture: {path}"


def held_out_losses(runs: dict[str, list[Record]], path: Path) -> str:
    """Draw the losses on held-out text of several runs, for light and dark pages."""
    figure = empty_figure(3.5)
    axes = figure.subplots()
    for number, (name, records) in enumerate(runs.items()):
        losses = curve(records, "validation")
        # The first line is broad, so that both are visible if they coincide.
        style = {"color": _color(name, number), "linewidth": 6 if number == 0 else 2, "marker": "o"}
        axes.plot(losses.keys(), losses.values(), label=name, **style)
    axes.set(xlabel="step", ylabel="loss on held-out text, nats per byte")
    axes.legend(frameon=False, labelcolor=INK)
    save(figure, path)
    return f"picture: {path}"


def ratios_of_layers(ratios: dict[str, dict[int, float]], path: Path) -> str:
    """Draw update-to-weight over steps, one line per layer, for light and dark pages."""
    figure = empty_figure(3.5)
    axes = figure.subplots()
    colors = ("#db6d28", "#a371f7", "#2f81f7", "#39a0a0", "#3fb950", "#f85149")
    for number, (name, by_step) in enumerate(ratios.items()):
        style = {"color": colors[number % len(colors)], "linewidth": 1.5}
        axes.plot(by_step.keys(), by_step.values(), label=name, **style)
    axes.axhline(1e-3, color=INK, linestyle=":", linewidth=1)
    axes.set(xlabel="step", ylabel="update / weight, norms", yscale="log")
    axes.legend(frameon=False, labelcolor=INK, ncols=2, fontsize="small")
    save(figure, path)
    return f"picture: {path}"


def changes_and_losses(
    shares: Mapping[str, Mapping[float, float]],
    losses: Mapping[str, Mapping[int, float]],
    rate: float,
    path: Path,
) -> str:
    """Draw the share of published values that change per step, and losses, for all pages.

    Args:
        shares: share by form and learning rate.
        losses: loss on held-out text by form and step, with the learning rate ``rate``.
    """
    figure = empty_figure(6)
    above, below = figure.subplots(2, 1)
    colors = dict(zip(shares, ("#db6d28", "#2f81f7", "#39a0a0", "#a371f7"), strict=True))
    for number, form in enumerate(shares):
        # The first lines are broader, so that all are visible if they coincide.
        style = {"color": colors[form], "linewidth": (6, 4, 2, 2)[number], "marker": "o"}
        percent = [100 * share for share in shares[form].values()]
        above.plot(shares[form].keys(), percent, label=form, **style)
        below.plot(losses[form].keys(), losses[form].values(), **style)
    above.set(xlabel="learning rate", ylabel="values that change in a step, %")
    above.set(xscale="log", yscale="log")
    below.set(xlabel=f"step, learning rate {rate:g}", ylabel="held-out loss, nats per byte")
    below.legend(*above.get_legend_handles_labels(), frameon=False, labelcolor=INK)
    save(figure, path)
    return f"picture: {path}"


def _color(name: str, number: int) -> str:
    return str(style_of(name).get("color", "#a371f7" if number else "C0"))


def agreement(runs: dict[str, list[Record]], *paths: Path) -> str:
    """Draw training losses and, below, their relative differences from the first run's."""
    try:
        figure = empty_figure(5)
    except RuntimeError:
        return "no picture: it needs matplotlib (the extra `plot`)"
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    curves = {name: curve(records, "train") for name, records in runs.items()}
    first = next(iter(curves.values()))
    for number, (name, losses) in enumerate(curves.items()):
        color = ("#db6d28", "#2f81f7", "#a371f7", "#39a0a0")[number % 4]
        style = {"color": color, "linestyle": "-" if number == 0 else (number, (2, 2))}
        above.plot(losses.keys(), losses.values(), label=name, **style)
        if number > 0:
            steps = sorted(losses.keys() & first.keys())
            apart = [abs(losses[step] - first[step]) / first[step] for step in steps]
            below.plot(steps, apart, ".", color=color)
    above.set_ylabel("loss, nats per byte")
    above.legend(frameon=False, labelcolor=INK)
    below.set(xlabel="step", ylabel="relative difference", ylim=(0, None))
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(figure, path)
    return f"picture: {paths[0]}"


def draw_memory(axes: Any, memory: Mapping[str, Mapping[int, float]]) -> float:
    """Draw bytes per rank by name and world size; return the axis's unit in bytes."""
    most = max(max(by_size.values()) for by_size in memory.values())
    unit, word = next((unit for unit in UNITS if most >= unit[0]), UNITS[-1])
    for name, by_size in memory.items():
        values = [nbytes / unit for nbytes in by_size.values()]
        axes.plot(list(by_size), values, label=name, **style_of(name))
    axes.set_ylabel(f"memory per rank, {word}")
    _over_ranks(axes, list(next(iter(memory.values()))))
    return unit


def style_of(name: str) -> dict[str, Any]:
    """Return keywords of ``Axes.plot`` for the line of a system."""
    return {"markersize": 4, "linewidth": 1.5, **STYLES.get(name, {})}


def _over_ranks(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes], fontsize="small")
    axes.set_xlabel("data-parallel ranks")
    axes.set_ylim(bottom=0)


def empty_figure(height: float) -> Any:
    """Return an empty figure of this height in inches, without a window for any backend.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            "expected matplotlib, which is not installed; install it with pip install matplotlib"
        ) from error
    return Figure(figsize=(5.5, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a picture for light and dark pages; equal figures give equal bytes."""
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
