"""Select the cases of sweeps and the seeds of random tests, by default the same in every run.

``launch/test.sh --nightly`` sets SWEEPS=whole, which runs all cases of each sweep, and a new
STORIES_SEED. Set both by hand to repeat a failure of a nightly run.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

WHOLE = os.environ.get("SWEEPS") == "whole"
SEED = int(os.environ.get("STORIES_SEED", "0"))


def pairwise(
    *axes: Iterable[Any], whole: bool = WHOLE, fits: Callable[..., bool] | None = None
) -> list[tuple[Any, ...]]:
    """Return combinations that contain every pair of choices of two axes.

    Args:
        fits: whether a combination is allowed; by default all are.
    """
    values = [[*axis] for axis in axes]
    combinations = [
        one
        for one in itertools.product(*(range(len(axis)) for axis in values))
        if fits is None or fits(*(axis[n] for axis, n in zip(values, one, strict=True)))
    ]
    if not whole:
        left = {pair for combination in combinations for pair in pairs(combination)}
        chosen = []
        while left:  # take the first combination with the most missing pairs
            chosen.append(max(combinations, key=lambda one: len(left & pairs(one))))
            left -= pairs(chosen[-1])
        combinations = sorted(chosen)
    return [tuple(axis[n] for axis, n in zip(values, one, strict=True)) for one in combinations]


def pairs(combination: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return {*itertools.combinations(enumerate(combination), 2)}


def thinned(parts: int, *axes: Iterable[Any], whole: bool = WHOLE) -> list[Any]:
    """Return one of ``parts`` parts of a slow sweep, with each choice in some of its cases."""
    numbered = itertools.product(*(enumerate(axis) for axis in axes))
    cases = [one for one in numbered if whole or sum(n for n, _ in one) % parts == 0]
    chosen = [tuple(value for _, value in one) for one in cases]
    return chosen if len(axes) > 1 else [value for (value,) in chosen]


def seeds(count: int) -> range:
    """Return ``count`` seeds for random tests, twice as many for a whole sweep."""
    first = 1_000_003 * SEED
    return range(first, first + count * (1 + WHOLE))
