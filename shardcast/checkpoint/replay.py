"""``replay``: make the steps between checkpoints again, and find the element that parts first."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardcast.checkpoint import directory as folders
from shardcast.checkpoint.access import Model, Snapshot
from shardcast.checkpoint.loading import Directory, load
from shardcast.extensions.digest import bits_of, values_of
from shardcast.optimizer.stateful import packed_of

Part = tuple[str, int, str]  # parameter, first element, master or name of the state


@dataclass(frozen=True)
class Difference:
    """The place where the steps that were made again first part from the recorded ones.

    Attributes:
        first, last: the checkpoints between which it happened, by their steps.
        parameter: its name.
        kind: ``master``, or the name of the state tensor.
        element: index in the flat parameter.
        recorded, replayed: the values.
        start: number that the run gave its first step.
    """

    first: int
    last: int
    parameter: str
    kind: str
    element: int
    recorded: float
    replayed: float
    start: int = 0

    def __str__(self) -> str:
        return (
            f"between steps {self.first} and {self.last} {self.kind} of {self.parameter!r} parts "
            f"at element {self.element}: recorded {self.recorded!r}, now {self.replayed!r} (after "
            f"train({self.first + self.start}) to train({self.last + self.start - 1}); give start= "
            f"if the run's first step was not number {self.start})"
        )


def replay(
    directory: Directory,
    model: Model,
    optimizer: torch.optim.Optimizer,
    train: Callable[[int], Any],
    *,
    first: int | None = None,
    last: int | None = None,
    start: int = 0,
) -> Difference | None:
    """Load a checkpoint, make the steps up to the next one again, and compare; and so on.

    Every rank of the optimizer's group must call it. With ``reproducible`` the number of ranks may
    be another one than that of the run: masters and state must then be equal to the bit, unless
    memory, a kernel or the data was at fault. Holds this rank's masters and state twice.

    Args:
        directory: the checkpoints of a run, of which it needs two; it is not changed.
        train: makes the step of the number that it is given, as the run did: backwards of its data
            and random numbers, rates, ``optimizer.step()`` and ``zero_grad()``.
        first, last: steps of the checkpoints to begin and to end with; without them all.
        start: the number of the run's first step: 0 where its loop is that of docs/checkpoints.md,
            ``for step in range(first, steps)``, which saves ``step + 1``; 1 where the step of
            number ``step`` is saved as that.

    Returns:
        The first difference, the same on all ranks; ``None`` if there is none.

    Raises:
        ValueError: there are no two checkpoints.
    """
    snapshot = Snapshot(model, optimizer)
    path = Path(os.path.abspath(directory))
    low, high = first or 0, float("inf") if last is None else last
    steps = [step for step in sorted(folders.steps(path)) if low <= step <= high]
    if len(steps) < 2:
        raise ValueError(
            f"directory: expected two checkpoints in {str(path)!r} between the first and the last "
            f"step, got those of {steps}; save more often, with keep=None"
        )
    load(folders.folder_of(path, steps[0]), model, optimizer)
    for begin, end in pairwise(steps):
        for step in range(begin, end):
            train(step + start)
        replayed = _values(optimizer)
        load(folders.folder_of(path, end), model, optimizer)
        recorded = _values(optimizer)
        compare = partial(_first_difference, recorded, replayed)
        differences = [d for d in snapshot.collect(compare, "replay") if d is not None]
        if differences:
            parted = min(differences, key=lambda values: values[:3])
            return Difference(begin, end, *parted, start=start)
    return None


def _values(optimizer: Any) -> dict[Part, Tensor]:
    """Copy what this rank owns."""
    packed = packed_of(optimizer)
    return {
        (fragment.slot.name, fragment.param_range[0], kind): (
            torch.as_tensor(value).detach().clone().reshape(-1)
        )
        for shard in packed.shards
        for fragment, _, kind, value in values_of(packed, shard)
    }


def _first_difference(
    recorded: dict[Part, Tensor], replayed: dict[Part, Tensor]
) -> tuple[str, str, int, float, float] | None:
    for (name, start, kind), values in sorted(recorded.items(), key=lambda item: item[0]):
        again = replayed.get((name, start, kind), torch.full_like(values, torch.nan))
        differs = bits_of(values) != bits_of(again)  # -0 is not 0, and a NaN is itself
        if bool(differs.any()):
            index = int(differs.int().argmax())
            return name, kind, start + index, values[index].item(), again[index].item()
    return None
