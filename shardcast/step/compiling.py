"""Compiled or eager: the choice for a device, and the fallback if compiling fails."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from shardcast._compat import inductor
from shardcast.comm import warn_first
from shardcast.config import ShardcastConfig

T = TypeVar("T")

COMPILERS = {"cpu": ("c++", "g++", "clang++"), "cuda": ("cc", "gcc", "clang")}
ATTEMPTS = 2  # to compile a kernel; a second one, because other processes may disturb the cache


def compiles(config: ShardcastConfig, device: torch.device) -> bool:
    """Return whether fused code is compiled on ``device``.

    ``auto`` compiles if Triton can. On a CPU a compiler may be missing, and a short job would not
    gain back the compile time. There torch's own fused kernel runs over chunks; with ``eager``, the
    operations of ``torch.optim`` run, with the same bits.

    Raises:
        ValueError: ``compile`` on a CPU without a C++ compiler.
    """
    if device.type != "cpu":
        return config.fuse == "compile" or (config.fuse == "auto" and _triton())
    if config.fuse == "compile" and not _has_compiler("cpu", "CXX"):
        raise ValueError(
            "fuse: expected a C++ compiler on the PATH for 'compile' on CPU, found none; "
            "install g++ or use fuse 'eager'"
        )
    return config.fuse == "compile"


def _triton() -> bool:
    """Return whether Triton is installed, and the C compiler that builds its launchers."""
    return importlib.util.find_spec("triton") is not None and _has_compiler("cuda", "CC")


def _has_compiler(kind: str, variable: str) -> bool:
    chosen = os.environ.get(variable, "").split()[:1]  # the variable may include arguments
    return any(shutil.which(name) for name in chosen or COMPILERS[kind])


def or_eager(compiled: Callable[..., T], eager: Callable[..., T], kernel: str) -> Callable[..., T]:
    """Return ``compiled``, which falls back to ``eager`` after it failed to compile twice.

    An error on one rank would leave the others waiting in their next collective. So this rank only
    warns. The mean has the same bits either way. An update may differ in the last bit, which
    matters only to ranks that own the same elements: replicas and tied stages.

    Args:
        compiled: one kernel, of one graph, that is compiled when it is called.
        kernel: name of the kernel in the warning.
    """
    attempts = ATTEMPTS

    def run(*args: Any) -> T:
        nonlocal attempts
        while attempts:
            try:
                results = compiled(*args)
                attempts = ATTEMPTS
                return results
            except inductor.compile_errors() as error:  # the kernel has not run yet
                attempts -= 1
                if not attempts:
                    warn_first(
                        f"fuse: compiling failed for {kernel} ({type(error).__name__}: {error}); "
                        "it runs eagerly on this rank from now on. If only some replicas or "
                        "tied pipeline stages run eagerly, their last bits may differ. Check "
                        "that the compiler works and that the cache directory of torch.compile "
                        "(TORCHINDUCTOR_CACHE_DIR) is writable, or use fuse 'eager'"
                    )
        return eager(*args)

    return run
