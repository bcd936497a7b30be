"""GPU kernels that Inductor generates, on a machine without a GPU.

These tests need Triton (``pip install triton``); ``bash launch/test.sh --versions`` installs it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardcast
from shardcast import _compat
from shardcast.step.update.fusion import Fusion

pytest.importorskip("triton")
from generated import kernels

pytestmark = pytest.mark.timeout(120)

SHAPE = (1003, 101)  # not a multiple of any block size


def forget() -> None:
    """Clear the library's caches of compiled functions."""
    for name, module in list(sys.modules.items()):
        for value in list(vars(module).values()) if name.startswith("shardcast") else ():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@contextmanager
def compiled() -> Iterator[list[tuple[Any, Any]]]:
    """Record calls of compiled functions, run eagerly, with the host in place of an accelerator."""
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
    """Bytes: gradient 2, master and moments 24, parameter 4 (read to see a script's writes)."""
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
    """Except 4 bytes per row of 64 elements, the place of its numbers."""
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
    assert len(updates) == 2, "one for all groups, one for the last, incomplete row"
