"""Write the report: everything in JSON, tables in Markdown, curves as pictures."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass
class Result:
    """The result of one part.

    Attributes:
        error: why the part failed, or None; rows may have their own errors.
    """

    name: str
    seconds: float
    figures: list[dict[str, Any]]
    error: str | None

    @property
    def verdict(self) -> str:
        """Return a short summary."""
        rows = sum("error" in figure for figure in self.figures)
        told = "failed" if self.error else "good"
        told += f", {len(self.figures)} figures"
        return told + (f", {rows} with an error" if rows else "")


def write(folder: Path, results: list[Result], dry: bool) -> None:
    """Write the results so far."""
    everything = {"dry_run": dry, "parts": [asdict(result) for result in results]}
    (folder / "report.json").write_text(json.dumps(everything, indent=1))
    lines = ["# shardcast on a GPU", ""]
    if dry:
        lines += ["A dry run on the CPU with tiny sizes: **the figures mean nothing.**", ""]
    for result in results:
        lines += [f"## {result.name}", "", f"{result.verdict}, {result.seconds:.0f} s", ""]
        lines += [*tables(result.figures)]
        if result.error:
            lines += ["```text", result.error.strip(), "```", ""]
    (folder / "report.md").write_text("\n".join(lines))


def tables(figures: list[dict[str, Any]]) -> list[str]:
    """Return a table with all columns of any row."""
    columns = list(dict.fromkeys(key for figure in figures for key in figure))
    if not columns:
        return []
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    for figure in figures:
        cells = [_text(figure[key]) if key in figure else "" for key in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000:
        return f"{value:,}"
    return " ".join(str(value).replace("|", "/").split())


def draw(folder: Path, results: list[Result]) -> None:
    """Draw bandwidth by size and times of whole steps, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure  # draws without a display
    except ImportError:
        return
    figures = {result.name: result.figures for result in results}
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in figures.get("bandwidth", []):
        if "GB/s" in row:
            curves[row["form"]].append((row["elements"], row["GB/s"]))
    for name, points in curves.items():
        left.plot(*zip(*points, strict=True), marker="o", label=name)
    left.set(xscale="log", xlabel="elements", ylabel="GB/s, 30 bytes per element", title="update")
    if curves:
        left.legend()
    rows = [row for row in figures.get("end_to_end", []) if "tokens/s" in row]
    names = [f"{row['model']}, {row['system']}" for row in rows][::-1]
    right.barh(names, [row["tokens/s"] for row in rows][::-1])
    right.set(xlabel="tokens per second", title="training")
    figure.savefig(folder / "report.png", dpi=130)
