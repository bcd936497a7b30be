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
    """Compile ``function`` as one graph for all lengths of its tensors.

    Under a dispatch mode such as ``FlopCounterMode``, where Dynamo compiles nothing, the function
    itself runs.
    """
    graph = torch.compile(
        _with_own_code(function), dynamic=True, fullgraph=True, options=_settings()
    )

    def run(*args: object) -> None:
        (graph if _get_current_dispatch_mode() is None else function)(*args)

    return run


def _with_own_code(function: Callable[..., None]) -> Callable[..., None]:
    """Return a copy with its own code object, because Dynamo limits graphs per code object."""
    code = function.__code__.replace()
    return types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def _settings() -> dict[str, Any]:
    # Otherwise Triton would try two block sizes in the first step, on copies of everything that the
    # kernel overwrites, which no estimate of memory includes. The remaining one suits memory-bound
    # kernels.
    settings: dict[str, Any] = {"triton.autotune_pointwise": False}
    if "size_asserts" in known_settings():  # guards have checked already
        settings["size_asserts"] = False
    if divides_exactly():
        settings[EXACT_DIVISION] = True
    return settings


EXACT_DIVISION = "eager_numerics.division_rounding"


@functools.cache
def divides_exactly() -> bool:
    """Return whether :func:`compiled` code divides like eager code, rounded to nearest.

    Triton's own division may be off by one bit; Inductor has a setting for it (torch >= 2.13).
    """
    return EXACT_DIVISION in known_settings()


@functools.cache
def known_settings() -> frozenset[str]:
    """Return the names of Inductor's settings."""
    from torch._inductor import config  # slow to import

    return frozenset(config.get_config_copy())


def compile_errors() -> tuple[type[Exception], ...]:
    """Return the errors that :func:`compiled` code raises if it cannot be compiled."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    # The limit on graphs of a function per process is not a TorchDynamoException.
    dynamo = (TorchDynamoException, FailOnRecompileLimitHit)
    system = (OSError, subprocess.SubprocessError)  # for example a read-only cache
    return *dynamo, CppCompileError, InvalidCxxCompiler, *system
