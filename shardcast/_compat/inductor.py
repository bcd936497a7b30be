"""Compiled functions."""

from __future__ import annotations

import functools
import subprocess
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` as one compiled graph for all lengths of its tensors.

    Under a dispatch mode, such as ``FlopCounterMode``, where Dynamo compiles nothing, the function
    itself runs.
    """
    # Triton would else try two block sizes in the first step, on copies of all that the kernel
    # overwrites: memory that no estimate has. The one that is left suits what memory bounds.
    settings: dict[str, Any] = {"triton.autotune_pointwise": False}
    if divides_exactly():
        settings[EXACT_DIVISION] = True
    # Dynamo limits the graphs of a code object; this one has none of other functions.
    code = function.__code__.replace()
    own = types.FunctionType(
        code, function.__globals__, None, function.__defaults__, function.__closure__
    )
    graph = torch.compile(own, dynamic=True, fullgraph=True, options=settings)

    def run(*args: Any) -> None:
        (graph if _get_current_dispatch_mode() is None else function)(*args)

    return run


EXACT_DIVISION = "eager_numerics.division_rounding"


@functools.cache
def divides_exactly() -> bool:
    """Return whether :func:`compiled` code divides as eager operations do, rounded to nearest.

    Triton's own division may be one bit off; Inductor has a setting for it (torch >= 2.13).
    """
    from torch._inductor import config  # slow to import

    return EXACT_DIVISION in config.get_config_copy()


def compile_errors() -> tuple[type[Exception], ...]:
    """Return what :func:`compiled` code raises if it cannot be compiled."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    # The limit, of all graphs of a function in this process, is no TorchDynamoException.
    dynamo = (TorchDynamoException, FailOnRecompileLimitHit)
    compiler = (*dynamo, CppCompileError, InvalidCxxCompiler)
    return *compiler, OSError, subprocess.SubprocessError  # such as a cache that is read-only
