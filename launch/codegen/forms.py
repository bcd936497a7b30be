"""The kernels of published forms: what the library gives to ``torch.compile`` for each of them.

Values are those of blocks that are usual, tiny, huge, all zeros, random bits, NaN and infinite. All
bits have to be those of the eager functions, but for codes of blocks that are NaN, which say
nothing.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest import mock

import torch
from codegen import blocks
from codegen.lower import Call, Graph, lower
from codegen.trace import forget_graphs
from codegen.values import Difference, Recorded, interpret, slip
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.extensions.published_forms.forms import FORMS, NAN_SCALE, Form
from shardcast.extensions.published_forms.kernels import Kernels

ROWS, COLUMNS = 256, 384
STAGES = ("round", "codes of masters", "collapse", "expand")


def matrix() -> Tensor:
    """Blocks of all kinds: ``(1, ROWS, COLUMNS)``."""
    generator = torch.Generator().manual_seed(0)
    usual = torch.randn(ROWS, COLUMNS, generator=generator) * 0.02
    bits = torch.randint(-(2**31), 2**31, usual.shape, generator=generator, dtype=torch.int64)
    wild = bits.to(torch.int32).view(torch.float32)
    power = torch.randint(-140, 127, (ROWS // 128, 1, COLUMNS // 32, 1), generator=generator)
    powers = power.double().exp2().float().expand(-1, 128, -1, 32).reshape(usual.shape)
    values = torch.where(torch.arange(COLUMNS) < 128, usual, usual * powers)
    values[:128, 256:] = wild[:128, 256:]
    values[128:, 32:64] = -0.0
    values[5, 70], values[9, 100], values[200, 200] = torch.nan, -torch.inf, 3e38
    return values[None]


def record(form: Form, stage: str) -> list[Recorded]:
    """The call of a stage, and what it does eagerly. The host is taken for an accelerator."""
    calls: list[Recorded] = []

    def compiler(function: Any, **options: Any) -> Any:
        def call(*args: Tensor) -> None:
            eager = copy.deepcopy(args)
            function(*eager)
            calls.append(Recorded(Call(function, options, args), eager))

        return call

    masters = matrix()
    values = form.round(masters)
    codes, scales = form.quantize(values)
    codes = codes.view(torch.uint8)
    forget_graphs()
    accelerator = mock.patch("shardcast._compat.is_host", lambda _device: False)
    with accelerator, mock.patch("torch.compile", compiler):
        kernels = Kernels(form, ShardcastConfig(fuse="compile"))
        if stage == "round":
            kernels.round(masters, [torch.zeros_like(values) for _ in range(2)])
        elif stage == "expand":
            kernels.expand(torch.zeros_like(values), codes, scales)
        else:
            given = masters if stage == "codes of masters" else values
            kernels.collapse(given, torch.zeros_like(codes), torch.zeros_like(scales))
    forget_graphs()
    return calls


def graphs(form: Form, stage: str) -> list[Graph]:
    """What a GPU would run."""
    return lower([recorded.call for recorded in record(form, stage)])


def values(form: Form, stage: str, slips: bool = False) -> Difference:
    """Whether interpreted kernels leave the bits of the eager functions.

    Args:
        slips: one operand is off, by so much that a code is another one.
    """
    if form.block_rows > 1 and stage != "expand":
        return _of_blocks(form, stage, slips)
    calls = record(form, stage)
    interpret(calls, partial(slip, factor=1.5) if slips else str)
    total = Difference()
    for recorded in calls:
        for found, eager in zip(recorded.call.args, recorded.eager, strict=True):
            total |= _difference(form, found, eager, recorded.eager[-1])
    return total


def _of_blocks(form: Form, stage: str, slips: bool) -> Difference:
    """The same of the kernel that is written by hand."""
    given = matrix() if stage != "collapse" else form.round(matrix())
    if stage == "round":
        eager = [form.round_bits(given)] * 2
        scales = form.quantize(given)[1]
    else:
        codes, scales = form.quantize(given)
        eager = [codes.view(torch.uint8), scales]
    outputs = [torch.zeros_like(tensor) for tensor in eager]
    found = blocks.interpreted(stage, given * 1.5 if slips else given, outputs)
    total = Difference()
    for tensor, expected in zip(found, eager, strict=True):
        total |= _difference(form, tensor, expected, scales)
    return total


def _difference(form: Form, found: Tensor, eager: Tensor, scales: Tensor) -> Difference:
    same = _bits(found) == _bits(eager)
    is_codes = eager.dtype == scales.dtype == torch.uint8 and eager.numel() > scales.numel()
    if is_codes and form.block_rows == 1:
        same |= scales == NAN_SCALE
    elif is_codes:
        same |= (scales == NAN_SCALE).repeat_interleave(128, -2).repeat_interleave(128, -1)
    share = float((~same).double().mean())
    return Difference(rounded=share, far=share > 0)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])


__all__ = ["FORMS", "STAGES", "graphs", "values"]
