"""Loss curves of one or more runs as a PNG."""

from __future__ import annotations

from pathlib import Path

from metrics import Record, curve

RANDOM_BYTES = 5.545  # ln 256: nats per byte of a model that knows nothing


def loss_curves(runs: dict[str, list[Record]], path: Path) -> str:
    """Draw training (thin) and validation (dots) losses by step; say where the picture is."""
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


def agreement(runs: dict[str, list[Record]], path: Path) -> str:
    """Draw training losses above, and their relative differences from the first run's below."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: it needs matplotlib (the extra `plot`)"
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    curves = {name: curve(records, "train") for name, records in runs.items()}
    first = next(iter(curves.values()))
    for number, (name, losses) in enumerate(curves.items()):
        style = {"color": f"C{number}", "linestyle": "-" if number == 0 else (number, (2, 2))}
        above.plot(losses.keys(), losses.values(), label=name, **style)
        if number > 0:
            steps = sorted(losses.keys() & first.keys())
            apart = [abs(losses[step] - first[step]) / first[step] for step in steps]
            below.plot(steps, apart, ".", color=f"C{number}")
    above.set_ylabel("loss (nats per byte)")
    above.legend()
    below.set(xlabel="step", ylabel="relative difference", ylim=(0, None))
    for axes in (above, below):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    return f"picture: {path}"
