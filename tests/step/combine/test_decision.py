"""Counts of present gradients, several to a double."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch

from shardcast.comm import Comm, Grid
from shardcast.step.combine.decision import Control
from shardcast.step.combine.norm import PNorm
from shardcast.testing import fake_world

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")


def told(size: int, patterns: Iterable[tuple[bool, ...]], slots: int) -> tuple[bool, ...]:
    """What the sum of all ranks' counts says."""
    with fake_world(size) as group:
        control = Control([], Grid.flat(Comm(group)), PNorm(2.0, CPU), CPU)
    counts = sum(torch.tensor(control._packed(p), dtype=torch.float64) for p in patterns)
    return control._unpacked(counts, slots)


@pytest.mark.parametrize("slots", [1, 52, 53, 300])
@pytest.mark.parametrize("size", [2, 3, 64, 1024])
def test_a_slot_is_present_where_any_rank_has_a_gradient(size: int, slots: int):
    choose = random.Random(size * slots)
    for density in (0.0, 0.5 / size, 0.5, 1.0):
        patterns = [tuple(choose.random() < density for _ in range(slots)) for _ in range(size)]
        assert told(size, patterns, slots) == tuple(map(any, zip(*patterns, strict=True)))


def test_all_ranks_with_all_gradients_do_not_run_over_into_the_next_slot():
    """Fields of the bits of ``size - 1`` would: the count itself must fit."""
    for size in (2, 4, 1024):
        patterns = [(True, False) * 20] * size
        assert told(size, patterns, 40) == (True, False) * 20
