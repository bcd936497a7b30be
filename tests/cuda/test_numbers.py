"""Numerical results of steps on a GPU, or on a CPU in the dry run of `launch/gpu.sh`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest
import torch
from gpu.initial import LENGTH, NEAR, CudaRandom
from torch import Tensor, nn

import shardcast

DEVICE = os.environ.get("GPU_KIT_DEVICE", "cuda")
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
]

ADAMW = torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}
ADAM = torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}
SGD = torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}
WINDOWS = 9 << 20  # elements: two windows and a part of one, for options that make copies


def model_of(*sizes: int) -> nn.ParameterList:
    """Return parameters with these numbers of elements, equal in every call.

    The first is a matrix: in a model without one, vectors would stay fp32.
    """
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(numel, generator=generator).to(DEVICE) for numel in sizes]
    return nn.ParameterList([params[0].view(2, -1), *params[1:]])


def give(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    """Set random gradients that depend only on ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator).to(DEVICE) * scale
        param.grad = grad.to(param.grad_dtype or param.dtype)


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def masters(optimizer: shardcast.ShardedOptimizer) -> list[Tensor]:
    return [entry["master"].clone() for entry in optimizer.state_dict()["state"].values()]


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.fixture(params=["auto", "eager"])
def fuse(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


@pytest.mark.parametrize(("kind", "options"), [ADAMW, ADAM, SGD])
def test_fp32_steps_are_those_of_torch(
    kind: type[torch.optim.Optimizer], options: dict[str, float], fuse: str
) -> None:
    """The bound is an ulp per step: a compiler may use fused multiply-adds and other divisions."""
    ours, theirs = model_of(1000, 33), model_of(1000, 33)
    optimizer = shardcast.shard(
        ours, kind(ours.parameters(), **options), param_dtype="fp32", fuse=fuse
    )
    reference = kind(theirs.parameters(), **options)
    for step in range(5):
        give(ours, step)
        give(theirs, step)
        optimizer.step()
        reference.step()
    for mine, other in zip(values(ours), values(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=6e-7, atol=6e-7)


@pytest.mark.parametrize(("kind", "options"), [ADAMW, ADAM, SGD])
def test_several_groups_of_a_pack_are_updated_as_by_torch(
    kind: type[torch.optim.Optimizer], options: dict[str, float], fuse: str
) -> None:
    """Learning rates change, and one group has no weight decay."""

    def grouped(model: nn.ParameterList) -> torch.optim.Optimizer:
        groups = [{"params": [param], "lr": 1e-2 / (n + 1)} for n, param in enumerate(model)]
        groups[1]["weight_decay"] = 0.0
        return kind(groups, **options)

    ours, theirs = model_of(1000, 33, 700, 256), model_of(1000, 33, 700, 256)
    optimizer = shardcast.shard(
        ours, grouped(ours), param_dtype="fp32", fuse=fuse, unpacked_first=0
    )
    reference = grouped(theirs)
    for step in range(5):
        for each in (optimizer, reference):
            each.param_groups[step % 4]["lr"] *= 0.5
        give(ours, step)
        give(theirs, step)
        optimizer.step()
        reference.step()
    assert len(optimizer.layout.packs) == 1
    for mine, other in zip(values(ours), values(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=6e-7, atol=6e-7)


def test_packs_of_unequal_lengths_are_updated_as_by_torch(fuse: str) -> None:
    """One kernel updates eight packs at a time; one pack has over 2**26 elements."""
    shrink = 0 if DEVICE == "cuda" else 10
    sizes = [n >> shrink for n in (*range(9 << 20, 12 << 20, 130_016), 80_000_000)]
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(numel: int) -> Tensor:
        return torch.randn(2, numel // 2, generator=generator, device=DEVICE)

    model = nn.ParameterList(random(numel) for numel in sizes)
    expected = [param.detach().clone() for param in model.parameters()]
    optimizer = shardcast.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), fuse=fuse, pack_params=1
    )
    reference = torch.optim.AdamW(expected, lr=1e-2, fused=True)
    for _ in range(4):
        for param, master in zip(model.parameters(), expected, strict=True):
            param.grad = random(param.numel()).bfloat16()
            master.grad = param.grad.float()
        optimizer.step()
        reference.step()
    for mine, master in zip(masters(optimizer), expected, strict=True):
        torch.testing.assert_close(mine, master.flatten(), rtol=1e-6, atol=1e-6)


def test_published_parameters_are_the_casts_of_their_masters(fuse: str) -> None:
    model = model_of(1000, 33)
    optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), fuse=fuse)
    for step in range(3):
        give(model, step)
        optimizer.step()
    cast = [master.bfloat16() for master in masters(optimizer)]
    assert same_bits([v.flatten() for v in values(model)], cast)


def test_a_nan_skips_the_step_and_changes_nothing(fuse: str) -> None:
    model = model_of(1000, 33)
    optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), fuse=fuse)
    give(model, 0)
    optimizer.step()
    before = values(model), masters(optimizer)
    give(model, 1)
    next(model.parameters()).grad.view(-1)[7] = math.nan
    with pytest.warns(UserWarning, match="non-finite gradient"):  # later on a GPU
        optimizer.step()
        assert optimizer.skipped_steps == 1
        assert same_bits(values(model), before[0]) and same_bits(masters(optimizer), before[1])
        for step in range(2, 5):
            give(model, step)
            optimizer.step()
            synchronize()
    assert not same_bits(values(model), before[0])


def test_clipping_bounds_the_update_by_the_global_norm(fuse: str) -> None:
    model, free = model_of(70_000, 33), model_of(70_000, 33)
    options = {"lr": 1.0}
    optimizer = shardcast.shard(
        model,
        torch.optim.SGD(model.parameters(), **options),
        param_dtype="fp32",
        max_grad_norm=0.5,
        fuse=fuse,
    )
    before = values(model)
    give(model, 0)
    give(free, 0)
    optimizer.step()
    norm = torch.cat([param.grad.double().flatten() for param in free.parameters()]).norm()
    torch.testing.assert_close(optimizer.grad_norm.double(), norm, rtol=1e-6, atol=0.0)
    moved = [(a - b).double().flatten() for a, b in zip(before, values(model), strict=True)]
    assert torch.cat(moved).norm().item() == pytest.approx(0.5, rel=1e-4)


def test_an_overflow_of_fp16_halves_the_scale_and_training_goes_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1)).to(DEVICE)
    x = torch.randn(64, 16, device=DEVICE)
    y = x[:, :1].half()
    optimizer = shardcast.shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        param_dtype="fp16",
        loss_scale_init=2.0**24,
    )
    losses = []
    for _ in range(40):
        loss = (model(x) - y).float().square().mean()
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert optimizer.skipped_steps > 0
    assert optimizer.loss_scale.item() == 2.0 ** (24 - optimizer.skipped_steps)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("fields", [{"master": "split16"}, {"offload": True}])
def test_forms_that_hold_less_give_the_same_bits(fields: dict[str, object]) -> None:
    """On a GPU, there are several windows, so copies of one overlap the update of another."""
    numel = WINDOWS if DEVICE == "cuda" else 300_000
    exact, lean = model_of(numel, 33), model_of(numel, 33)
    plain = shardcast.shard(exact, torch.optim.AdamW(exact.parameters(), lr=1e-2))
    optimizer = shardcast.shard(lean, torch.optim.AdamW(lean.parameters(), lr=1e-2), **fields)
    for step in range(4):
        give(exact, step)
        give(lean, step)
        plain.step()
        optimizer.step()
        torch.full((numel,), math.nan, device=DEVICE)  # reuses memory that was freed too early
    assert same_bits(values(exact), values(lean))
    assert same_bits([m.cpu() for m in masters(plain)], [m.cpu() for m in masters(optimizer)])


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_rounded_moments_stay_close_to_exact_ones(moments: str) -> None:
    exact, lean = model_of(100_000), model_of(100_000)
    plain = shardcast.shard(exact, torch.optim.AdamW(exact.parameters(), lr=1e-3))
    optimizer = shardcast.shard(
        lean, torch.optim.AdamW(lean.parameters(), lr=1e-3), moments=moments
    )
    start = masters(plain)[0].double()
    for step in range(10):
        give(exact, step)
        give(lean, step)
        plain.step()
        optimizer.step()
    moved = masters(plain)[0].double() - start
    other = masters(optimizer)[0].double() - start
    assert torch.nn.functional.cosine_similarity(moved, other, dim=0) > 0.98


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@pytest.mark.skipif(DEVICE != "cuda", reason="compares a GPU's random numbers with a host's")
def test_random_numbers_of_the_device_are_those_made_on_a_host():
    torch.manual_seed(0)
    one, other = torch.randn(LENGTH, device=DEVICE), torch.rand(LENGTH, device=DEVICE)
    again = torch.randn(1000, device=DEVICE)
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    with CudaRandom(0, processors):
        torch.testing.assert_close(one.cpu(), torch.empty(LENGTH).normal_(), rtol=0, atol=NEAR)
        torch.testing.assert_close(other.cpu(), torch.empty(LENGTH).uniform_(), rtol=0, atol=1e-7)
        torch.testing.assert_close(again.cpu(), torch.empty(1000).normal_(), rtol=0, atol=NEAR)
