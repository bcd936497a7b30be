"""The list of recipes: a title, the packages it needs, the function, and what it must reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
    """Bound of the largest difference of a weight from DDP's in fp32."""
    ratio: float
    """Bound of the bf16 run's distance, in distances of DDP under autocast."""
    remark: str
    error: type[Exception] | None
    """Refused instead, with this class of error."""
    match: str
    warned: str
    """Warned of instead, with these words: its figures are not those of DDP."""
    silent: str
    """What goes wrong without a word, and is to be repaired."""


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
    silent: str = "",
) -> Callable[[Recipe], Recipe]:
    """Enter the function that follows."""

    def entered(train: Recipe) -> Recipe:
        entry = Entry(title, train, packages, fp32, ratio, remark, error, match, warned, silent)
        ENTRIES.append(entry)
        return train

    return entered


class Row(NamedTuple):
    entry: Entry
    figures: Figures | None
    """``None`` if it was refused."""


PREAMBLE = """# Tested scripts

Scripts as their authors write them, run on two gloo processes under DDP, under DDP with bf16
autocast, and with the change that the README asks for, in fp32 and in bf16. Written by
`bash launch/test.sh --ecosystem`, which takes ten minutes on two cores.

*fp32* is the largest difference of a weight or buffer from DDP's after some steps. *bf16* is how
far the weights went astray from DDP's in fp32, as a share of the distance that training moved them;
*autocast* is the same for DDP under autocast: the noise of bf16 itself. *Refused* is an error on
every rank that names cause and remedy; *warned* trains, and a warning says what differs. What goes
wrong without a word is marked **not noticed**.

<div class="stacked scripts" markdown>
"""


def table_of(rows: Sequence[Row]) -> str:
    lines = [PREAMBLE, "| script | packages | fp32 | bf16 | autocast | remark |"]
    lines.append("|---|---|---:|---:|---:|---|")
    for entry, figures in rows:
        packages = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in entry.packages)
        cells = ["" if entry.silent else "refused", "", ""]
        remark = entry.remark
        if figures is not None:
            cells = [_power(figures.fp32), _percent(figures.bf16), _percent(figures.autocast)]
        if entry.warned:
            remark = f"warned: {entry.warned}"
        if entry.silent:
            remark = f"**not noticed**: {entry.silent}"
        elif entry.error is not None:
            remark = f"{entry.error.__name__} names `{entry.match}`"
        lines.append("| " + " | ".join([entry.title, packages, *cells, remark]) + " |")
    return "\n".join([*lines, "", "</div>"]) + "\n"


def _power(value: float) -> str:
    """The power of ten above it: the figures of two machines differ in less."""
    return "0" if value == 0 else f"1e{math.ceil(math.log10(value))}"


def _percent(value: float) -> str:
    return f"{100 * value:.1g} %" if value < 0.095 else f"{100 * value:.0f} %"
