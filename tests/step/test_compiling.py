"""Where nothing can be compiled, on one rank perhaps, updates and means go on eagerly."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import assert_same_bits
from torch import Tensor, nn

from shardcast import shard
from shardcast.step import compiling
from shardcast.step.reduce import mean
from shardcast.step.update import fusion
from shardcast.testing import SpawnedWorld

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]


@contextlib.contextmanager
def broken_compiler() -> Iterator[list[warnings.WarningMessage]]:
    """Nothing was compiled yet in this process, and nothing can be; gives what was warned of."""
    from torch._inductor import config

    def forget() -> None:
        torch._dynamo.reset()
        mean._kernel.cache_clear()
        fusion._compiled.cache_clear()

    forget()
    with (
        tempfile.TemporaryDirectory() as cache,
        pytest.MonkeyPatch.context() as patched,
        config.patch({"cpp.cxx": (None, "/bin/false")}),
        warnings.catch_warnings(record=True) as told,
    ):
        patched.setattr(compiling, "failed", threading.Event())
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
        warnings.simplefilter("always", UserWarning)
        yield told
    forget()


def compiling_failed(told: list[warnings.WarningMessage]) -> int:
    return sum("fuse: compiling failed (" in str(one.message) for one in told)


def trained(fuse: str, dtype: str, group: Any = None) -> dict[str, Tensor]:
    torch.manual_seed(0 if group is None else group.rank())
    model = nn.Linear(16, 16)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = shard(
        model, inner, process_group=group, fuse=fuse, param_dtype=dtype, loss_scale=8.0
    )
    found = {}
    for step in range(3):
        loss = model(torch.randn(2, 16).to(model.weight.dtype)).square().sum()
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        found[f"norm {step}"] = optimizer.grad_norm.clone()
        optimizer.zero_grad()
    return found | {name: param.detach().clone() for name, param in model.named_parameters()}


def test_the_update_is_that_of_eager_with_one_warning():
    """With numbers of the device, so that the last bit of a master may differ."""
    with broken_compiler() as told:
        found = trained("compile", "fp16")
    assert compiling_failed(told) == 1
    for name, tensor in trained("eager", "fp16").items():
        torch.testing.assert_close(found[name], tensor)


def one_rank_without_compiler(group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    eager = trained("eager", "bf16", group)
    with broken_compiler() if group.rank() == 1 else contextlib.nullcontext([]) as told:
        return eager, trained("compile", "bf16", group), compiling_failed(told)


def test_one_rank_that_cannot_compile_trains_with_the_others(gloo: SpawnedWorld):
    (eager, one, warned), (_, other, warned_too) = gloo.run(one_rank_without_compiler)
    assert (warned, warned_too) == (0, 1)
    assert_same_bits(one, other)
    assert torch.equal(one["norm 0"], eager["norm 0"]), "the norm of the same means"
