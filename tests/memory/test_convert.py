"""convert_: identity, ties, gradients, buffers, kept modules, and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import shardcast
from shardcast.memory import convert

pytestmark = pytest.mark.timeout(60)
BF16, FP32 = torch.bfloat16, torch.float32


def tied() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 11, bias=False))
    model[2].weight = model[0].weight
    model.register_buffer("scale", torch.full((3,), 1.1))
    model.register_buffer("mask", torch.tensor([True, False]))
    return model


def test_values_are_cast_and_identities_and_ties_stay():
    model, plain = tied(), tied()
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert shardcast.convert_(model, BF16) is model
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert model[2].weight is model[0].weight is optimizer.param_groups[0]["params"][0]
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(BF16))
    assert model.scale.dtype == BF16 and model.mask.dtype == torch.bool


def test_gradients_follow_and_hooks_survive():
    model, seen = tied(), []
    model[0].weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.dtype))
    model(torch.tensor([1, 2])).sum().backward()
    grad = model[0].weight.grad.clone()
    shardcast.convert_(model, "bf16")
    assert torch.equal(model[0].weight.grad, grad.to(BF16))
    model(torch.tensor([1, 2])).sum().backward()
    assert seen == [FP32, BF16]


def test_kept_modules_stay_fp32():
    model = shardcast.convert_(tied(), BF16, keep_fp32="norms")
    assert model[1].weight.dtype == FP32 and model[0].weight.dtype == BF16


def test_back_and_forth_is_exact_for_what_the_dtype_holds():
    model = shardcast.convert_(shardcast.convert_(tied(), BF16), FP32)
    for mine, theirs in zip(model.parameters(), tied().parameters(), strict=True):
        assert torch.equal(mine, theirs.to(BF16).to(FP32))


def test_an_expanded_buffer_and_a_meta_module_are_converted():
    model = nn.Linear(2, 2)
    model.register_buffer("wide", torch.ones(3, 1).expand(3, 4))
    shardcast.convert_(model, BF16)
    assert model.wide.shape == (3, 4) and model.wide.dtype == BF16
    with torch.device("meta"):
        assert shardcast.convert_(nn.Linear(2, 2), BF16).weight.dtype == BF16


@pytest.mark.parametrize(
    ("free", "through_host"),
    [(64 * 64 * 2 * 1.2, []), (1000.0, [(64, 64)]), (256 * 1.2, [(64, 64)]),
     (256 * 1.2 - 1, [(64, 64), (2, 4)])],
)  # fmt: skip
def test_what_does_not_fit_goes_through_the_host(
    free: float, through_host: list[Any], monkeypatch: pytest.MonkeyPatch
):
    """The need is rounded up to granules of 256 bytes, and has a reserve of a fifth."""
    moved: list[tuple[int, ...]] = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(
        torch.Tensor, "cpu", lambda self: (moved.append(tuple(self.shape)), cpu(self))[1]
    )
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(4, 2, bias=False))
    plain = [param.detach().clone() for param in model.parameters()]
    monkeypatch.setattr(convert, "free_bytes", lambda _device: free)
    shardcast.convert_(model, BF16)
    assert moved == through_host
    for mine, theirs in zip(model.parameters(), plain, strict=True):
        assert torch.equal(mine, theirs.to(BF16))


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="param_dtype: expected bf16, fp16 or fp32, got 'int8'"):
        shardcast.convert_(tied(), "int8")


PEAKS = """
import gc, json, resource, torch, shardcast
from torch import nn

def build():
    return nn.Sequential(*[nn.Linear(1024, 2048, bias=False) for _ in range(24)])

def peak_of(call):
    model = build()
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
    before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
    held = call(model)
    status = open("/proc/self/status").read()
    return (int(status.split("VmHWM:")[1].split()[0]) << 10) - before

print(json.dumps([peak_of(lambda model: shardcast.convert_(model, "bf16")),
                  peak_of(lambda model: [p.detach().bfloat16() for p in model.parameters()])]))
"""


def test_the_peak_is_one_tensors_copy():
    """24 parameters of 8 MB; converted, one is 4 MB, all are 96 MB."""
    # glibc keeps freed blocks up to 32 MB for itself, which would be counted; these it gives back.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", PEAKS], capture_output=True, text=True, timeout=50, env=env
    )
    assert done.returncode == 0, done.stderr
    converted, copied = (peak / 2**20 for peak in json.loads(done.stdout))
    assert converted < 8
    assert copied > 90, "the control holds both copies"
