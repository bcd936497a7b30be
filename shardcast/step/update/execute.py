"""Fuse: how the fused update runs on a device, eager in chunks or compiled into one kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.config import ShardcastConfig
from shardcast.step.compiling import compiles, or_eager
from shardcast.step.update import native, rules
from shardcast.step.update.operands import Flat, by_rows
from shardcast.step.update.rules import Numbers, Rule
from shardcast.step.update.windows import Windows

WINDOW = 1 << 17  # elements per thread and eager call on CPU: all operands stay in its cache
PIECE = 1 << 24  # elements per eager call on an accelerator, where each is a kernel launch


class ChunkedKernel:
    """The eager update on CPU, where the step's numbers and decision are on the host anyway.

    Forms other than fp32 are decoded into windows, updated there, and encoded.
    """

    on_host = True

    def __call__(
        self, rule: Rule, flat: Flat, numbers: Numbers, factor: Tensor | None, skip: Tensor
    ) -> None:
        """See :func:`.rules.update_`; a skipped step is not to come here."""

        def run(flat: Flat) -> None:
            numel = flat.grad.numel()
            size = max(1, min(WINDOW * torch.get_num_threads(), numel))
            whole = numel - numel % size
            for start, stop in ((0, whole), (whole, numel)):
                if start < stop:
                    windows = Windows(min(size, stop - start), len(flat.state))
                    windows.update(rule, flat.cut(start, stop), numbers, factor)

        if flat.forms.exact:
            run(flat)
        else:
            by_rows(flat, 1, run)


class WholeKernel:
    """:func:`.rules.update_`, compiled into one kernel or eager."""

    on_host = False

    def __init__(self, compile: bool) -> None:
        self._compile = compile
        self._run: Callable[..., None] = _compiled() if compile else _by_pieces

    def __call__(
        self, rule: Rule, flat: Flat, numbers: Numbers, factor: Tensor | None, skip: Tensor
    ) -> None:
        """See :func:`.rules.update_`.

        Rows have a fixed length, which lets the compiler see that addresses are multiples of 16
        bytes, which it then moves at a time. There are two at least: of the number of rows one
        graph serves all but 0 and 1.
        """
        in_rows = self._in_rows(flat.forms.row)
        by_rows(flat, 2, lambda part: self._run(rule, part.map(in_rows), numbers, factor, skip))

    def _in_rows(self, row: int) -> Callable[[Tensor, bool], Tensor]:
        """What makes rows of operands, the same memory."""
        if self._compile:
            return lambda operand, per_row: _compat.rows_of(operand, 0 if per_row else row)
        return lambda operand, per_row: operand if per_row else operand.view(-1, row)


class NativeKernel:
    """The update on CPU by a C++ compiler; gradients or parameters in fp16 go a longer way."""

    on_host = True

    def __init__(self) -> None:
        self._native = or_eager(_native, ChunkedKernel())

    def __call__(
        self, rule: Rule, flat: Flat, numbers: Numbers, factor: Tensor | None, skip: Tensor
    ) -> None:
        """See :func:`.rules.update_`; a skipped step is not to come here."""
        if native.supports(flat):
            self._native(rule, flat, numbers, factor, skip)
        else:
            tensors = rules.as_tensors(numbers, skip)
            WholeKernel(compile=True)(rule, flat, tensors, factor, skip)


def _native(rule: Rule, flat: Flat, numbers: Numbers, factor: Tensor | None, _skip: Tensor) -> None:
    native.update(rule, flat, numbers, factor)


Kernel = ChunkedKernel | WholeKernel | NativeKernel


def _by_pieces(rule: Rule, flat: Flat, *rest: Any) -> None:
    """The eager form allocates several times the operands: not of more than so much at a time."""
    rows = max(1, PIECE // flat.forms.row)
    numel = flat.grad.shape[0]
    for start in range(0, numel, rows):
        part = slice(start, start + rows)
        piece = flat.map(lambda operand, _per_row, part=part: operand[part])  # type: ignore[misc]
        if flat.draw is not None:
            piece = piece._replace(draw=flat.draw.at(start * flat.forms.row))
        rules.update_(rule, piece, *rest)


@functools.cache  # one compiled function, so that models of one process share its graphs
def _compiled() -> Callable[..., None]:
    return or_eager(_compat.compiled(rules.update_), _by_pieces)


def choose_kernel(config: ShardcastConfig, device: torch.device) -> Kernel:
    """How to run the update on ``device``; raises as :func:`compiles` does."""
    compile = compiles(config, device)
    if device.type != "cpu":
        return WholeKernel(compile)
    return NativeKernel() if compile else ChunkedKernel()
