"""Compiled or eager: the choice for a device, and the fallback where compiling fails."""

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
ATTEMPTS = 2  # at compiling a kernel: what other processes do to the cache passes


def compiles(config: ShardcastConfig, device: torch.device) -> bool:
    """Return whether what is fused is compiled on ``device``.

    ``auto`` compiles where Triton can. On CPU a compiler may be missing, and a short job would not
    earn its compile time back: there torch's own fused kernel runs over the chunks, and with
    ``eager`` the operations of ``torch.optim``, to the bit.

    Raises:
        ValueError: ``compile`` on CPU without a C++ compiler.
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
    """Return whether Triton is installed, with the C compiler that builds its launchers."""
    return importlib.util.find_spec("triton") is not None and _has_compiler("cuda", "CC")


def _has_compiler(kind: str, variable: str) -> bool:
    chosen = os.environ.get(variable, "").split()[:1]  # it may have arguments
    return any(shutil.which(name) for name in chosen or COMPILERS[kind])


def or_eager(compiled: Callable[..., T], eager: Callable[..., T], kernel: str) -> Callable[..., T]:
    """Return ``compiled``, which becomes ``eager`` once compiling it has failed twice in a row.

    An error on one rank alone would leave the others waiting in their next collective, so there
    is a warning, on this rank. The mean has the same bits either way. An update may differ in the
    last one, which only ranks notice that own the same elements: replicas and tied stages.

    Args:
        compiled: one kernel, of one graph, that is compiled when it is called.
        kernel: what the warning calls it.
    """
    attempts = ATTEMPTS

    def run(*args: Any) -> T:
        nonlocal attempts
        while attempts:
            try:
                results = compiled(*args)
                attempts = ATTEMPTS
                return results
            except inductor.compile_errors() as error:  # nothing has run yet
                attempts -= 1
                if not attempts:
                    warn_first(
                        f"fuse: compiling failed for {kernel} ({type(error).__name__}: {error}); "
                        "it runs eagerly on this rank from now on. Replicas or tied pipeline "
                        "stages of which one does may come to differ in last bits. See that the "
                        "compiler works and that the cache directory of torch.compile "
                        "(TORCHINDUCTOR_CACHE_DIR) can be written, or use fuse 'eager'"
                    )
        return eager(*args)

    return run
