"""Print the table of a run, for the terminal or in Markdown."""

from __future__ import annotations

import platform
import statistics
from pathlib import Path

import torch
from products import why

from benchmarks.models import WORKLOADS
from benchmarks.step import Plan, Result, compute, exposed, ratio
from benchmarks.systems import LOCAL

WRONG = 0.05  # a larger difference of losses means that a system trains wrongly
COLUMNS = (
    "system",
    "step ms",
    "x",
    "fwd+bwd ms",
    "x",
    "optimizer ms",
    "step - local ms",
    "x",
    "sent MB",
    "collectives",
    "casts 1 / 4",
    "held B",
    "rise B",
    "loss off by",
)


def device() -> str:
    """Return the processor, its cores, and the transport of the ranks."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(names) or "?"
    return f"{names[0] if names else platform.processor()}, {cores} cores, gloo on loopback"


def head(command: str) -> list[str]:
    """Return the command, the machine and the versions."""
    reason = why(torch.device("cpu"))
    every = [f"every system: {reason}"] if reason else []
    return [f"device: {device()}", f"torch: {torch.__version__}", *every, f"command: {command}"]


def rows(results: dict[str, Result]) -> list[tuple[str, ...]]:
    """Return one row per system that trains, with ratios to shardcast in the same round."""
    base = results["shardcast"]
    own = statistics.median(exposed(results, "shardcast"))
    found = []
    for name, result in results.items():
        if name in LOCAL:
            continue
        over = statistics.median(exposed(results, name))
        collectives, messages = result.collectives
        wrong = " WRONG" if result.off > WRONG else ""
        found.append(
            (
                name,
                f"{1e3 * statistics.median(result.step):.0f}",
                f"{ratio(result.step, base.step):.2f}",
                f"{1e3 * statistics.median(compute(result)):.0f}",
                f"{ratio(compute(result), compute(base)):.2f}",
                f"{1e3 * statistics.median(result.phase):.0f}",
                f"{1e3 * over:.0f}",
                f"{over / own:.2f}",
                number(result.sent, 1e6, 0),
                f"{collectives} + {messages}" if messages else f"{collectives}",
                f"{result.casts[0]} / {result.casts[1]}",
                number(result.held, 1, 1),
                number(result.growth, 1, 1),
                f"{result.off:.3f}{wrong}",
            )
        )
    return found


def number(value: float | None, unit: float, digits: int) -> str:
    """Return a figure as text; ``?`` if it could not be measured."""
    return "?" if value is None else f"{value / unit:.{digits}f}"


def title(plan: Plan, ranks: int) -> str:
    """Return the title of the table."""
    workload = WORKLOADS[plan.model]
    params = list(workload.build().parameters())
    numel = sum(param.numel() for param in params)
    local = f"{workload.sequences} x {workload.tokens} tokens"
    accumulated = f", {plan.micros} micro-batches per step" if plan.micros > 1 else ""
    clock = "" if plan.clock == "wall" else f" of {plan.clock} time"
    return (
        f"{workload.title}: {numel / 1e6:.1f} M parameters in {len(params)} tensors, "
        f"{ranks} ranks, {local} per rank{accumulated}, medians of {plan.rounds} rounds{clock}"
    )


def table(columns: tuple[str, ...], lines: list[tuple[str, ...]], markdown: bool) -> str:
    """Return lines under columns, aligned."""
    everything = [columns, *lines]
    widths = [max(len(line[n]) for line in everything) for n in range(len(columns))]
    padded = [
        [
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in everything
    ]
    if not markdown:
        return "\n".join("  ".join(line) for line in padded)
    rule = [("-" * width) if n == 0 else "-" * (width - 1) + ":" for n, width in enumerate(widths)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [padded[0], rule, *padded[1:]])


def plot(results: dict[str, Result], heading: str, path: Path) -> None:
    """Plot a bar per system: the compute alone, and the rest of the step on top of it."""
    from matplotlib.figure import Figure  # draws without a display

    names = [name for name in results if name not in LOCAL][::-1]
    over = [1e3 * statistics.median(exposed(results, name)) for name in names]
    steps = [1e3 * statistics.median(results[name].step) for name in names]
    alone = [step - more for step, more in zip(steps, over, strict=True)]
    figure = Figure(figsize=(9, 0.4 * len(names) + 1.5), layout="constrained")
    axes = figure.add_subplot(xlabel="milliseconds per step", title=heading)
    axes.title.set_fontsize("small")
    axes.barh(names, alone, color="lightgrey", label="the same compute alone")
    axes.barh(names, over, left=alone, color="C0", label="communication and update")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
