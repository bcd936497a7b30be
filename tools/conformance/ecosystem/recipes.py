"""The list of recipes, with their packages and bounds, and the page of results."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import NamedTuple

from harness import Figures, Recipe


@dataclass(frozen=True)
class Entry:
    title: str
    train: Recipe
    packages: tuple[str, ...]
    fp32: float
    """Largest allowed difference of a weight from DDP's in fp32."""
    ratio: float
    """Largest allowed distance of the bf16 run, relative to that of DDP under autocast."""
    remark: str
    error: type[Exception] | None
    """Class of the error that it must raise instead."""
    match: str
    warned: str
    """Words of the warning that it must raise instead; its figures differ from DDP's."""
    shipped: str | None
    """The parts of the README's diff that are applied, if the package ships the loop."""

    @property
    def id(self) -> str:
        return f"{self.train.__module__}-{self.train.__name__}"


ENTRIES: list[Entry] = []


def recipe(
    title: str,
    *packages: str,
    fp32: float = 1e-6,
    ratio: float = 2.0,
    remark: str = "",
    error: type[Exception] | None = None,
    match: str = "",
    warned: str = "",
    shipped: str | None = None,
) -> Callable[[Recipe], Recipe]:
    """Decorator: add the function to :data:`ENTRIES`."""

    def entered(train: Recipe) -> Recipe:
        entry = Entry(title, train, packages, fp32, ratio, remark, error, match, warned, shipped)
        ENTRIES.append(entry)
        return train

    return entered


class Row(NamedTuple):
    entry: Entry
    figures: Figures | None
    """``None`` if an error was raised."""


PREAMBLE = """# Tested scripts

These scripts are written the way users write them. Each ran on two gloo processes under DDP, under
DDP with bf16 autocast, and with the README's change in fp32 and in bf16. `bash launch/test.sh
--ecosystem` writes this page; with `-k NAME` it writes only some rows.

*fp32* is the largest difference of a weight or buffer from DDP's after a few steps. *bf16* is the
distance of the weights from DDP's in fp32, relative to the distance that training moved them.
*autocast* is the same for DDP under autocast, so it is the noise of bf16 itself. *Refused* means
that every rank raises an error, which names cause and remedy unless it is torch's own. *Warned*
means that the script trains, and a warning says what differs.
"""

SHIPPED = """## Loops that packages ship

{count} loops of {packages} packages, run from the installed packages; nobody from this project
wrote them. {equal} match DDP; {refused} end with an error{rest}. *Changed* lists replacements in
the package's source or objects. *Optimizer*: an optimizer that the package creates is passed to
`shard()`. *Clip*: `optimizer.clip_grad_norm_` replaces torch's function. *Accelerator*:
`ShardcastAccelerator` replaces Accelerate's. Other words name single lines that were replaced or
removed. Data are random and nets are small. DDP exposes only `forward`; if a loop calls other
methods, the reference run averages gradients as DDP would. Low-precision variants run under an
autocast around the loop.
"""


def table_of(rows: Sequence[Row], page: str = "", failed: Collection[Entry] = ()) -> str:
    """Return the page with both tables; recipes that were not run keep the rows of ``page``."""
    lines = {_key(line): line for line in page.splitlines() if line.startswith("| ")}
    lines |= {_key(line): line for line in map(line_of, rows)}
    for entry in failed:
        lines.pop(_key_of(entry), None)
    parts = [PREAMBLE]
    for shipped, columns in (
        (False, ("script", "packages", "fp32", "bf16", "autocast", "remark")),
        (True, ("loop", "package", "changed", "fp32", "bf16", "autocast", "verdict")),
    ):
        entries = [entry for entry in ENTRIES if (entry.shipped is not None) is shipped]
        found = [lines[key] for key in map(_key_of, entries) if key in lines]
        if shipped and found:
            parts.append(_summary(found))
        ruler = ["---:" if column in {"fp32", "bf16", "autocast"} else "---" for column in columns]
        head = ["| " + " | ".join(columns) + " |", "|" + "|".join(ruler) + "|"]
        if found:
            table = "\n".join([*head, *found])
            parts.append(f'<div class="stacked scripts" markdown>\n\n{table}\n\n</div>\n')
    return "\n".join(parts)


def missing(page: str) -> list[str]:
    """Return the titles of entries without a row."""
    known = {_key(line) for line in page.splitlines()}
    return [entry.title for entry in ENTRIES if _key_of(entry) not in known]


def _key_of(entry: Entry) -> tuple[str, ...]:
    return (entry.title, *entry.packages)


def _key(line: str) -> tuple[str, ...]:
    """Return title and packages of a row, without versions."""
    cells = line.split(" | ")
    packages = cells[1].split(", ") if len(cells) > 1 else []
    return (cells[0].removeprefix("| "), *(each.partition(" ")[0] for each in packages))


def line_of(row: Row) -> str:
    entry, figures = row
    packages = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in entry.packages)
    cells = ["refused", "", ""]
    remark = entry.remark
    if figures is not None:
        cells = [_power(figures.fp32), _percent(figures.bf16), _percent(figures.autocast)]
        if entry.shipped is not None:
            remark = f"equals DDP; {remark}" if remark else "equals DDP"
    if entry.warned:
        remark = f"warned: {entry.warned}"
    if entry.error is not None:
        remark = f"{entry.error.__name__} names `{entry.match}`"
    if entry.shipped is not None:
        cells = [entry.shipped or "nothing", *cells]
    return "| " + " | ".join([entry.title, packages, *cells, remark]) + " |"


def _summary(lines: Sequence[str]) -> str:
    packages = {package for line in lines for package in _key(line)[1:]}
    equal = sum("| equals DDP" in line for line in lines)
    refused = sum("| refused |" in line for line in lines)
    others = len(lines) - equal - refused
    rest = f", {others} are warned of" if others else ""
    return SHIPPED.format(
        count=len(lines), packages=len(packages), equal=equal, refused=refused, rest=rest
    )


def _power(value: float) -> str:
    """Round up to a power of ten: smaller differences depend on the machine."""
    return "0" if value == 0 else f"1e{math.ceil(math.log10(value))}"


def _percent(value: float) -> str:
    return f"{100 * value:.1g} %" if value < 0.095 else f"{100 * value:.0f} %"
