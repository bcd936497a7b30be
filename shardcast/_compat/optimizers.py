"""A step of torch's optimizers without their hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return ``optimizer.step`` without the hooks and profiler range that torch puts around it."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):  # torch's mark of its wrapper
        step = step.__wrapped__
    bound: Callable[[], Any] = step.__get__(optimizer)
    return bound
