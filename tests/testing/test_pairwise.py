"""Sweeps of the tests: what a normal run takes of them, and that it is the same each time."""

from __future__ import annotations

import itertools

import pytest
from pairwise import pairwise, thinned

AXES = "abcde", range(3), (True, False), "wxyz"


def test_any_two_choices_meet_in_few_combinations():
    chosen = pairwise(*AXES)
    for (n, one), (m, other) in itertools.combinations(enumerate(AXES), 2):
        assert {(c[n], c[m]) for c in chosen} == {*itertools.product(one, other)}
    assert 20 <= len(chosen) <= 24, "of 120; 5 x 4 pairs cannot be fewer"
    assert chosen == pairwise(*AXES)
    assert pairwise(*AXES, whole=True) == [*itertools.product(*AXES)]


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_a_sweep_that_is_thinned_has_each_choice_and_the_whole_one_all(parts: int):
    chosen = thinned(parts, AXES[0], AXES[3])
    assert {one for one, _ in chosen} == {*AXES[0]} and {other for _, other in chosen} == {*AXES[3]}
    assert len(chosen) <= 20 // parts + 1
    assert len(thinned(parts, AXES[0], AXES[3], whole=True)) == 20
    assert thinned(parts, range(12)) == [*range(0, 12, parts)]
