"""Fuse: how the fused update runs on a device, eager in chunks or compiled into one kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.config import ShardcastConfig
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.compiling import compiles, or_eager
from shardcast.step.update import native, rules
from shardcast.step.update.rules import Flat, Numbers, Rule
from shardcast.step.update.windows import Windows

CHUNK = 1 << 16  # elements per thread and eager call on CPU: all operands stay in its cache
WINDOW = 1 << 16  # the same where there are buffers of decoded values too
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
        numel, row, threads = flat.grad.numel(), flat.forms.row, torch.get_num_threads()
        if flat.forms.exact:
            size = max(1, min(CHUNK * threads, numel))
            rules.update_in_chunks_(rule, flat, numbers, factor, _scratch(size))
            return
        windows = Windows(-(-min(WINDOW * threads, numel) // row) * row, len(flat.state))
        scratch = _scratch(windows.size)
        for start in range(0, numel, windows.size):
            part = flat.cut(start, min(start + windows.size, numel))
            exact, encode = windows.decoded(part)
            rules.update_in_chunks_(rule, exact, numbers, factor, scratch)
            encode()


def _scratch(size: int) -> list[Tensor]:
    return [torch.empty(size, dtype=MASTER_DTYPE) for _ in range(2)]


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

        It runs on whole rows, by two at least: their fixed length lets the compiler see that
        addresses are multiples of 16 bytes, which it then moves at a time, and of the number of
        rows one graph serves all but 0 and 1. Spans and runs of parameters begin with a row. Only
        the last one of a world of one may end within it, and goes through a padded copy.
        """
        numel, row = flat.grad.numel(), flat.forms.row
        whole = numel // row * row if numel >= 2 * row else 0
        if whole:
            self._run(rule, flat.cut(0, whole).map(self._in_rows(row)), numbers, factor, skip)
        if whole < numel:
            rest = flat.cut(whole, numel)

            def padded(operand: Tensor, per_row: bool) -> Tensor:
                copy = operand.new_zeros(2 if per_row else 2 * row)
                copy[: operand.numel()] = operand
                return copy

            copies = rest.map(padded)
            self._run(rule, copies.map(self._in_rows(row)), numbers, factor, skip)
            rest.take(copies)

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
