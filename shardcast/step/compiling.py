"""The choice whether what is fused is compiled on a device."""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch

from shardcast.config import ShardcastConfig

COMPILERS = {"cpu": ("c++", "g++", "clang++"), "cuda": ("cc", "gcc", "clang")}


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
