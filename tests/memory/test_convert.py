"""convert_: identity, ties, gradients, buffers, kept modules, and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from storages import peak_of
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
    assert shardcast.convert_(model, BF16, keep_fp32="norms") is model
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert model[2].weight is model[0].weight is optimizer.param_groups[0]["params"][0]
    assert torch.equal(model[0].weight, plain[0].weight.to(BF16))
    assert model[1].weight.dtype == FP32
    assert model.scale.dtype == BF16 and model.mask.dtype == torch.bool
    shardcast.convert_(model, FP32)
    assert torch.equal(model[0].weight, plain[0].weight.to(BF16).to(FP32)), "and back"


def test_gradients_follow_and_hooks_survive():
    model, seen = tied(), []
    model[0].weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.dtype))
    model(torch.tensor([1, 2])).sum().backward()
    grad = model[0].weight.grad.clone()
    shardcast.convert_(model, "bf16")
    assert torch.equal(model[0].weight.grad, grad.to(BF16))
    model(torch.tensor([1, 2])).sum().backward()
    assert seen == [FP32, BF16]


def test_an_expanded_buffer_and_a_meta_module_are_converted():
    model = nn.Linear(2, 2)
    model.register_buffer("wide", torch.ones(3, 1).expand(3, 4))
    shardcast.convert_(model, BF16)
    assert model.wide.shape == (3, 4) and model.wide.dtype == BF16
    with torch.device("meta"):
        assert shardcast.convert_(nn.Linear(2, 2), BF16).weight.dtype == BF16


@pytest.mark.parametrize(
    ("free", "through_host"),
    [
        (64 * 64 * 2 * 1.2, []),
        (1000.0, [(64, 64)]),
        (256 * 1.2, [(64, 64)]),
        (256 * 1.2 - 1, [(64, 64), (2, 4)]),
    ],
)
def test_what_does_not_fit_goes_through_the_host(
    free: float, through_host: list[Any], monkeypatch: pytest.MonkeyPatch
):
    """The size is rounded up to a multiple of 256 bytes, plus a reserve of 20 %."""
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


def test_the_peak_is_one_tensors_copy():
    """Each of 24 parameters has 512 KiB in fp32 and 256 KiB in bf16."""

    def build() -> nn.Module:
        return nn.Sequential(*[nn.Linear(256, 512, bias=False) for _ in range(24)])

    def copied() -> Any:
        model = build()
        return model, [param.detach().bfloat16() for param in model.parameters()]

    assert peak_of(lambda: shardcast.convert_(build(), "bf16")) <= (24 << 19) + (1 << 18) + 4096
    assert peak_of(copied) >= 24 * ((1 << 19) + (1 << 18)), "negative control holds both copies"
