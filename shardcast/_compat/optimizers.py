"""Steps of torch's optimizers: hooks before those of all, and one without hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


def before_any_step(watch: Callable[[torch.optim.Optimizer], None]) -> Callable[[], None]:
    """Call ``watch`` before any optimizer of the process steps; return what ends it.

    By one hook, which stays: another thread may step while one is added, and torch goes through
    its hooks then.
    """
    watches = _watches()
    watches.append(watch)

    def end() -> None:
        if watch in watches:
            watches.remove(watch)

    return end


@functools.cache
def _watches() -> list[Callable[[torch.optim.Optimizer], None]]:
    watches: list[Callable[[torch.optim.Optimizer], None]] = []

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for watch in [*watches]:
            watch(optimizer)

    register_optimizer_step_pre_hook(before_step)
    return watches


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return ``optimizer.step`` without the hooks and profiler range that torch puts around it."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):  # torch's mark of its wrapper
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step.__get__(optimizer)  # type: ignore[no-any-return]
