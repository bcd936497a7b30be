"""Parts of long sweeps: each week another one, by STORIES_SEED, so that all are run in turn."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")
WEEK = int(os.environ.get("STORIES_SEED", "0"))


def this_week(cases: Iterable[T], parts: int = 2) -> list[T]:
    """Every ``parts``-th case."""
    return [*cases][WEEK % parts :: parts]
