"""Kernels of a GPU, on a machine without one: what Inductor generates, and what is written by hand.

Both need Triton: ``pip install triton``. ``bash launch/test.sh --versions`` has it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardcast
from shardcast import _compat
from shardcast.serving.forms import FORMS, NAN_SCALE
from shardcast.step.update.fusion import Fusion

pytest.importorskip("triton")
from generated import kernels

pytestmark = pytest.mark.timeout(120)

SHAPE = (1003, 101)  # a multiple of nothing


def forget() -> None:
    """Forget what the library keeps of ``torch.compile`` for all models of a process."""
    for name, module in list(sys.modules.items()):
        for value in list(vars(module).values()) if name.startswith("shardcast") else ():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@contextmanager
def compiled() -> Iterator[list[tuple[Any, Any]]]:
    """What goes to ``torch.compile`` while the host is taken for an accelerator; run eagerly."""
    calls: list[tuple[Any, Any]] = []

    def compiler(function: Any, **_options: Any) -> Any:
        def call(*args: Any) -> Any:
            calls.append((function, args))
            return function(*args)

        return call

    forget()
    accelerator = mock.patch.object(_compat, "is_host", lambda _device: False)
    with accelerator, mock.patch("torch.compile", compiler):
        yield calls
    forget()


@pytest.mark.parametrize(("amsgrad", "moved"), [(False, 30), (True, 38)])
def test_the_update_of_adamw_reads_and_writes_each_operand_once_and_spills_no_register(
    amsgrad: bool, moved: int, tmp_path: Path
):
    """Gradient 2; master and moments 24; the parameter 4, as what a script writes there counts."""
    with compiled() as calls:
        model = nn.ParameterList([torch.randn(SHAPE)])
        optimizer: Any = torch.optim.AdamW(model.parameters(), amsgrad=amsgrad)
        optimizer = shardcast.shard(model, optimizer, param_dtype="bf16", fuse="compile")
        model[0].grad = torch.randn_like(model[0])
        optimizer.step()
    call = next(call for call in calls if isinstance(call[1][0], Fusion))
    (kernel,) = kernels(*call, tmp_path)
    assert (kernel.bytes, kernel.spills) == (moved, 0)


def test_the_update_of_several_groups_is_one_kernel_that_moves_as_much(tmp_path: Path):
    """But for the place of its numbers, 4 bytes, which 64 elements of a row share."""
    with compiled() as calls:
        model = nn.ParameterList(torch.randn(SHAPE) for _ in range(3))
        groups = [{"params": [param], "lr": 1e-3 * (n + 1)} for n, param in enumerate(model)]
        groups[1]["weight_decay"] = 0.0
        optimizer: Any = torch.optim.AdamW(groups)
        optimizer = shardcast.shard(
            model, optimizer, param_dtype="bf16", fuse="compile", unpacked_first=0
        )
        for param in model:
            param.grad = torch.randn_like(param)
        optimizer.step()
    updates = [call for call in calls if isinstance(call[1][0], Fusion)]
    (kernel,) = kernels(*updates[0], tmp_path)
    assert (kernel.bytes, kernel.spills) == (30 + 4, 0)
    assert len(updates) == 2, "all groups, and the end that is no whole row"


INTERPRETED = """
import sys
import torch
from shardcast.serving import blocks
values, rounded, codes, scales = torch.load(sys.argv[1])
blocks.round_(values, rounded)
blocks.collapse_(values, codes, scales)
torch.save((rounded, codes, scales), sys.argv[1])
"""


def blocks_of_all_kinds() -> Tensor:
    """Usual ones, tiny and huge ones, zeros, random bits, NaN and infinite ones."""
    generator = torch.Generator().manual_seed(0)
    usual = torch.randn(256, 384, generator=generator) * 0.02
    powers = torch.tensor([[1.0, 2.0**-130, 2.0**100], [1.0, 0.0, 1.0]])
    values = usual * powers.repeat_interleave(128, 0).repeat_interleave(128, 1)
    bits = torch.randint(-(2**31), 2**31, (128, 128), generator=generator)
    values[128:, 256:] = bits.int().view(torch.float32)
    values[5, 7], values[140, 3] = -torch.inf, 3e38
    return values


def test_the_kernel_of_fp8_blocks_has_the_bits_of_the_eager_form(tmp_path: Path):
    """It is written by hand; Triton's interpreter runs it on the host."""
    form, values = FORMS["fp8_block128"], blocks_of_all_kinds()
    codes, scales = form.quantize(values)
    expected = form.round_bits(values), codes.view(torch.uint8), scales
    file = tmp_path / "values.pt"
    torch.save((values, *(torch.zeros_like(each) for each in expected)), file)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED, file], env=environment, check=True)
    rounded, found, found_scales = torch.load(file)
    assert torch.equal(rounded, expected[0]) and torch.equal(found_scales, scales)
    is_nan = (scales == NAN_SCALE).repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(found[~is_nan], expected[1][~is_nan]) and 0 < is_nan.sum() < is_nan.numel()
