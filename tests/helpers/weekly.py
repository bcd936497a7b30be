"""Parts of long sweeps: each week another one, by STORIES_SEED, so that all are run in turn."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")
WEEK = int(os.environ.get("STORIES_SEED", "0"))


def this_week(cases: Iterable[T], parts: int = 2) -> list[T]:
    """Every ``parts``-th case."""
    return [*cases][WEEK % parts :: parts]


def combined(parts: int, *axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every ``parts``-th combination, so chosen that each choice is in some of them."""
    numbered = itertools.product(*(enumerate(axis) for axis in axes))
    chosen = (pairs for pairs in numbered if sum(n for n, _ in pairs) % parts == WEEK % parts)
    return [tuple(value for _, value in pairs) for pairs in chosen]
