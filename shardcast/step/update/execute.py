"""Fuse: how the fused update runs on a device, eager in chunks or compiled into one kernel."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.config import ShardcastConfig
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.update import rules
from shardcast.step.update.rules import Flat, Rule

CHUNK = 1 << 16  # elements per thread and eager call on CPU: all operands stay in its cache
PIECE = 1 << 24  # elements per eager call on an accelerator, where each is a kernel launch
COMPILERS = {"cpu": ("c++", "g++", "clang++"), "cuda": ("cc", "gcc", "clang")}


class ChunkedKernel:
    """The eager update on CPU, where the step's numbers and decision are on the host anyway."""

    on_host = True

    @property
    def window(self) -> int:
        """Elements of which fp32 copies are held at a time, where stores make copies."""
        return 2 * CHUNK * torch.get_num_threads()

    def __call__(
        self,
        rule: Rule,
        flat: Flat,
        numbers: tuple[Any, ...],
        factor: Tensor | None,
        skip: Tensor,
    ) -> None:
        """See :func:`.rules.update_`; a skipped step is not to come here."""
        size = max(1, min(CHUNK * torch.get_num_threads(), flat.master.numel()))
        scratch = [torch.empty(size, dtype=MASTER_DTYPE) for _ in range(2)]
        rules.update_in_chunks_(rule, flat, numbers, factor, scratch)


class WholeKernel:
    """:func:`.rules.update_`, compiled into one kernel or, as a fallback, eager."""

    on_host = False
    window = 1 << 22

    def __init__(self, compile: bool) -> None:
        self._run: Callable[..., None] = _compiled() if compile else _by_pieces

    def __call__(
        self,
        rule: Rule,
        flat: Flat,
        numbers: tuple[Any, ...],
        factor: Tensor | None,
        skip: Tensor,
    ) -> None:
        self._run(rule, flat.alone(), numbers, factor, skip)


Kernel = ChunkedKernel | WholeKernel


def _by_pieces(rule: Rule, flat: Flat, *rest: Any) -> None:
    """The eager form allocates several times the operands: not of more than so much at a time."""
    for piece in flat.chunks(PIECE):
        rules.update_(rule, piece, *rest)


@functools.cache  # one compiled function, so that models of one process share its graphs
def _compiled() -> Callable[..., None]:
    return _compat.compiled(rules.update_)


def choose_kernel(config: ShardcastConfig, device: torch.device) -> Kernel:
    """How to run the update on ``device``.

    ``auto`` compiles where Triton can. On CPU a compiler may be missing, and a short job would not
    earn its compile time back: there torch's own fused kernel runs over the chunks, and with
    ``eager`` the operations of ``torch.optim``, to the bit.

    Raises:
        ValueError: ``compile`` on CPU without a C++ compiler.
    """
    compile = compiles(config, device)
    return ChunkedKernel() if device.type == "cpu" and not compile else WholeKernel(compile)


def compiles(config: ShardcastConfig, device: torch.device) -> bool:
    """Whether what is fused is compiled on ``device``; see :func:`choose_kernel`."""
    if device.type != "cpu":
        return config.fuse == "compile" or (config.fuse == "auto" and _triton())
    if config.fuse == "compile" and not _has_compiler("cpu", "CXX"):
        raise ValueError(
            "fuse: expected a C++ compiler on the PATH for 'compile' on CPU, found none; "
            "install g++ or use fuse 'eager'"
        )
    return config.fuse == "compile"


def _triton() -> bool:
    """Whether Triton is installed, with the C compiler that it builds its launchers with."""
    return importlib.util.find_spec("triton") is not None and _has_compiler("cuda", "CC")


def _has_compiler(kind: str, variable: str) -> bool:
    chosen = os.environ.get(variable, "").split()[:1]  # it may have arguments
    return any(shutil.which(name) for name in chosen or COMPILERS[kind])
