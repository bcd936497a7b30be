"""Time of each phase of a step, next to the same compute alone and the crude floor.

Functions of the library are timed while they run, without the functions that they call, so phases
add up to the step. Timing costs about a microsecond per call: this is a profile, not a comparison
with other systems. The last row counts page faults of a step. They occur if the allocator has
returned the memory of the previous step to the system.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.models import WORKLOADS
from benchmarks.step import WARM_UP
from benchmarks.systems import SYSTEMS, System
from shardcast.comm import REDUCTIONS
from shardcast.step.decide.decider import Decider
from shardcast.step.decide.norm import PNorm
from shardcast.step.reduce.bucket import Bucket
from shardcast.step.sync.sync import Sync
from shardcast.step.update import fusion

OURS, FLOOR = "shardcast", "crude floor"
NAMES = (OURS, FLOOR, "local, bf16", "local, autocast")
PHASES = (
    "forward",
    "backward",
    "copy and send",
    "exchange",
    "mean",
    "norm",
    "decide",
    "written weights",
    "update and cast",
    "sync",
    "rest of step()",
)
PLACES: tuple[tuple[Any, str, str], ...] = (
    (Bucket, "send", "copy and send"),
    (Bucket, "land", "mean"),
    *((kind, "wait", "exchange") for kind in {*REDUCTIONS.values()}),
    (PNorm, "powers", "norm"),
    (Decider, "decide", "decide"),
    (fusion, "take_shown_", "written weights"),
    (fusion.Executor, "__call__", "update and cast"),
    (Sync, "__call__", "sync"),
)
FAULTS = "page faults"
COLUMNS = ("phase", OURS, "share", FLOOR, "bf16 alone", "autocast alone")


class Clock:
    """Wall-clock seconds of each phase, without the phases inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []  # seconds of finished phases inside each running one

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block."""
        self._inside.append(0.0)
        begin = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - begin
            self.seconds[name] += took - self._inside.pop()
            if self._inside:
                self._inside[-1] += took

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def call(*args: Any, **named: Any) -> Any:
            with self.phase(name):
                return function(*args, **named)

        return call


def measure(group: dist.ProcessGroup, model: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each phase and the faults of each round, by system. Collective."""
    workload = WORKLOADS[model]
    systems: dict[str, System] = {}
    for name in NAMES:
        torch.manual_seed(0)
        systems[name] = SYSTEMS[name](workload.build(), workload)
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in NAMES}
    for number in range(WARM_UP + rounds):
        first = number % len(NAMES)
        for name in NAMES[first:] + NAMES[:first]:
            batch = workload.batch(number * group.size() + group.rank())
            dist.barrier()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            taken = _step(systems[name], batch)
            taken[FAULTS] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            for row, value in taken.items():
                if number >= WARM_UP:
                    found[name][row].append(value)
    return found


def _step(system: System, batch: Any) -> dict[str, float]:
    """Make one step; return seconds by phase."""
    clock = Clock()
    places = [
        mock.patch.object(owner, name, clock.timed(phase, getattr(owner, name)))
        for owner, name, phase in PLACES
    ]
    backward = mock.patch.object(torch.Tensor, "backward", _method(clock, torch.Tensor.backward))
    for place in (*places, backward):
        place.start()
    try:
        with clock.phase("forward"):
            system.micro(batch, True, 1)
        with clock.phase("rest of step()"):
            system.step()
    finally:
        mock.patch.stopall()
    return {phase: clock.seconds.get(phase, 0.0) for phase in PHASES}


def _method(clock: Clock, backward: Any) -> Any:
    def call(self: torch.Tensor, *args: Any, **named: Any) -> None:
        with clock.phase("backward"):
            backward(self, *args, **named)

    return call


def rows(found: dict[str, dict[str, list[float]]]) -> Sequence[tuple[str, ...]]:
    """Return rows of phases, in ms, and of faults; medians do not exactly add up to `all`."""
    totals = {
        name: [sum(each) for each in zip(*(phases[phase] for phase in PHASES), strict=True)]
        for name, phases in found.items()
    }
    whole = statistics.median(totals[OURS])
    lines = []
    for phase in PHASES:
        own = statistics.median(found[OURS][phase])
        others = (statistics.median(found[name][phase]) for name in NAMES[1:])
        shown = [f"{1e3 * other:.1f}" if other else "" for other in others]
        lines.append((phase, f"{1e3 * own:.1f}", f"{own / whole:.1%}", *shown))
    every = [f"{1e3 * statistics.median(totals[name]):.1f}" for name in NAMES]
    faults = [f"{statistics.median(found[name][FAULTS]):.0f}" for name in NAMES]
    return [
        *lines,
        ("all", every[0], "100.0%", *every[1:]),
        (FAULTS, faults[0], "", *faults[1:]),
    ]
