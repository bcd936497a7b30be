"""Warnings are said once in a job, with the rank and the number of steps."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from models import CASES, install, sharded

from shardcast.comm import Comm, warn_first, warn_once_for
from shardcast.testing import SpawnedWorld, ThreadedWorld


def ranks_warn(group: Any) -> None:
    comm = Comm(group)
    comm.steps = 12
    warn_first("one rank has it")
    warn_first("one rank has it")
    if group.rank() == 1:
        warn_first("rank 1 alone has this")
    warn_once_for(comm, "all ranks know")
    warn_first(f"rank {group.rank()} says it so", "in its own words")
    comm.watch.end(comm)


SAID = [
    "all ranks know (after 12 steps)",
    "one rank has it (first on rank N, after 12 steps)",
    "rank 1 alone has this (first on rank 1, after 12 steps)",
    "rank N says it so (first on rank N, after 12 steps)",
]


def anonymous(messages: list[str]) -> list[str]:
    """Which of two ranks is the first is not known."""
    return sorted(
        text if "alone" in text else text.replace("rank 0", "rank N").replace("rank 1", "rank N")
        for text in messages
    )


def test_each_warning_is_said_once_by_one_of_the_threads(recwarn: pytest.WarningsRecorder):
    warnings.simplefilter("always")
    ThreadedWorld(2).run(ranks_warn)
    assert anonymous([str(each.message) for each in recwarn.list]) == SAID


def told(group: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks_warn(group)
    return [str(each.message) for each in caught]


def test_each_warning_is_said_once_by_one_of_the_processes(gloo: SpawnedWorld):
    first, second = gloo.run(told)
    assert anonymous(first + second) == SAID
    assert first.count(SAID[0]) == 1 and SAID[2] in second


def test_a_skipped_step_is_told_of_each_time_by_one_rank_with_its_number(
    recwarn: pytest.WarningsRecorder,
):
    def run(group: Any) -> None:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group)
        for step in range(3):
            install(model, step)
            if step != 1:
                model.b.weight.grad.view(-1)[17] = float("inf")
            optimizer.step()
            optimizer.zero_grad()

    warnings.simplefilter("always")
    ThreadedWorld(2).run(run)
    skips = [str(it.message) for it in recwarn.list if "step skipped" in str(it.message)]
    assert [text.rpartition(" (")[2] for text in skips] == ["after 1 steps)", "after 3 steps)"]
