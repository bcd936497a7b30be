"""Write metrics of a run, one JSON object per line, and compare two runs."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]
FILE = "metrics.jsonl"


class Metrics:
    """Writes records to `metrics.jsonl` in a run's directory; does nothing unless `enabled`.

    A resumed run appends to the earlier records. For a repeated step, the last record counts.

    Kinds: "run" (arguments, configuration, world size, digest of the corpus, tokens of a step),
    "train" (loss: mean since the last record; lr, grad_norm, skipped_steps, tokens_per_second),
    "update_to_weight" (by layer, with the option `metrics`), "validation" (loss), "memory" (bytes
    of rank 0 by kind), "sample" (text).
    Losses are in nats per byte.
    """

    def __init__(self, directory: Path, enabled: bool, append: bool = False) -> None:
        self._file = None
        if enabled:
            directory.mkdir(parents=True, exist_ok=True)
            if append and (directory / FILE).is_file():  # a killed run may have left half a line
                (directory / FILE).write_text("".join(_lines(directory / FILE)), encoding="utf-8")
            self._file = (directory / FILE).open("a" if append else "w", encoding="utf-8")

    def write(self, kind: str, **values: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **values}, default=str) + "\n")
            self._file.flush()


def read(directory: Path) -> list[Record]:
    path = directory / FILE
    if not path.is_file():
        raise FileNotFoundError(f"{directory} holds no run: {path} does not exist")
    return [json.loads(line) for line in _lines(path)]


def _lines(path: Path) -> list[str]:
    """Return complete lines; the last one may be half written."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]


def curve(records: list[Record], kind: str) -> dict[int, float]:
    """Return the loss by step of all records of one kind ("train" or "validation")."""
    return {record["step"]: record["loss"] for record in records if record["kind"] == kind}


def values_of(records: list[Record], kind: str) -> Record:
    """Return the values of the last record of one kind; empty if there is none."""
    return next((record for record in reversed(records) if record["kind"] == kind), {})


def processor_seconds(records: list[Record]) -> float:
    """Return the processor time of a step on the first rank, the median over training records.

    On a busy machine, the wall times of two consecutive runs also depend on other programs.
    """
    return statistics.median(
        record["processor_seconds"] for record in records if record["kind"] == "train"
    )


@dataclass(frozen=True)
class Comparison:
    """Validation losses of two runs at common steps; differences in percent."""

    steps: list[int]
    losses: list[tuple[float, float]]

    @property
    def differences(self) -> list[float]:
        return [100 * abs(b - a) / a for a, b in self.losses]

    def __str__(self) -> str:
        largest = max(range(len(self.steps)), key=self.differences.__getitem__)
        lines = [
            f"{name} difference of the validation losses: {self.differences[i]:.3f} % "
            f"(step {self.steps[i]}: {self.losses[i][0]:.4f} and {self.losses[i][1]:.4f} nats)"
            for name, i in (("largest", largest), ("final", -1))
        ]
        return "\n".join(lines)


def compare(a: list[Record], b: list[Record]) -> Comparison:
    """Return the differences of run `b` relative to run `a`."""
    _same_text(a, b)
    left, right = curve(a, "validation"), curve(b, "validation")
    steps = sorted(left.keys() & right.keys())
    if not steps:
        raise ValueError("the two runs have no step at which both wrote a validation loss")
    return Comparison(steps, [(left[step], right[step]) for step in steps])


def largest_difference(a: list[Record], b: list[Record]) -> tuple[int, float]:
    """Return the step with the largest relative difference of training losses, and the difference.

    It compares the steps that both runs recorded.
    """
    _same_text(a, b)
    left, right = curve(a, "train"), curve(b, "train")
    steps = left.keys() & right.keys()
    if not steps:
        raise ValueError("the two runs have no step at which both wrote a training loss")
    differences = {step: abs(right[step] - left[step]) / left[step] for step in sorted(steps)}
    step = max(differences, key=differences.__getitem__)
    return step, differences[step]


def _same_text(a: list[Record], b: list[Record]) -> None:
    if values_of(a, "run").get("corpus") != values_of(b, "run").get("corpus"):
        raise ValueError("the two runs were trained on different text: they cannot be compared")
