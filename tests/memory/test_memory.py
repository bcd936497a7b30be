"""Bytes, found in memory and by the allocator, against the formula: to the byte."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import adamw, install, sharded
from storages import live
from torch import Tensor, nn

import shardcast
from shardcast.estimate import estimate
from shardcast.testing import fake_world

pytestmark = pytest.mark.timeout(60)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """What was there before needs no look at every collection; that takes most of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def wide(numel: int = 64) -> nn.Module:
    """Two thirds of a million elements in twelve parameters."""
    return nn.Sequential(*(nn.Linear(numel * 5, numel * 5 + 3) if i % 2 == 0 else
                           nn.Linear(numel * 5 + 3, numel * 5) for i in range(6)))  # fmt: skip


def held(size: int, rank: int, dtype: torch.dtype, **fields: Any) -> tuple[int, Any]:
    """Bytes that training holds on this rank between steps, as found in memory."""
    before = sum(live().values())
    with fake_world(size, rank) as group:
        model = wide()
        optimizer = sharded(model, group, param_dtype=dtype, **fields)
        for step in range(2):
            install(model, step)
            optimizer.step()
        return sum(live().values()) - before, optimizer


def padded(sizes: list[int], itemsize: int, alignment: int, size: int) -> tuple[int, int]:
    """Elements of one pack, cut evenly, and of one span of it; counted by hand."""
    align, end = alignment // itemsize, 0
    for numel in sizes:
        end = -(-end // align) * align + numel
    if size == 1:
        return end, end
    span = -(-end // (size * align)) * align
    return span * size, span


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("size", [1, 4])
def test_persistent_bytes_are_parameters_gradients_and_twelve_per_owned_element(
    size: int, dtype: torch.dtype
):
    sizes = [param.numel() for param in wide().parameters()]
    total, owned = padded(sizes, dtype.itemsize, 128, size)
    masters = 4 * owned if dtype != FP32 else 0  # fp32 parameters are their own masters
    expected = 2 * dtype.itemsize * total + masters + 8 * owned
    for rank in {0, size - 1}:
        found, optimizer = held(size, rank, dtype)
        assert found == expected
        assert optimizer.memory_report() == {
            "parameters": dtype.itemsize * total,
            "gradients": dtype.itemsize * total,
            "masters": masters,
            "state": 8 * owned,
        }


@pytest.mark.parametrize(
    ("size", "fields"),
    [
        (3, {"partition": "even", "pack_params": 4}),
        (3, {"partition": "whole", "pack_params": 4}),
        (2, {"grad_dtype": FP32}),
    ],
    ids=str,
)
def test_several_packs_and_fp32_gradients_hold_what_the_layout_says(
    size: int, fields: dict[str, Any]
):
    for rank in range(size):
        found, optimizer = held(size, rank, BF16, **fields)
        layout, grad = optimizer.layout, 4 if "grad_dtype" in fields else 2
        assert found == (2 + grad) * layout.numel + 12 * layout.owned(rank)
        assert found == sum(optimizer.memory_report().values())


def test_a_forgotten_copy_is_noticed():
    """Negative control: one more copy of the masters is found in memory."""
    _, optimizer = held(2, 0, BF16)
    before = sum(live().values())
    copy = optimizer.shards[0].data.clone()
    assert sum(live().values()) - before == copy.nbytes > 0


def test_ranks_that_own_whole_parameters_hold_one_fp32_state_together():
    whole = 12 * sum(p.numel() for p in wide().parameters())
    parts = 0
    for rank in range(4):
        _, optimizer = held(4, rank, BF16, partition="whole")
        report = optimizer.memory_report()
        parts += report["masters"] + report["state"]
    assert whole <= parts < whole * 1.01


# -- peak at set-up -------------------------------------------------------------------------------


def peak_of(run: Any) -> int:
    """Largest sum of bytes allocated on CPU during ``run()``, above what was there before."""
    gc.collect()  # what an earlier run left behind must not be freed, and counted, in this one
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        run()
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def shard_wide(group: Any, dtype: torch.dtype) -> None:
    model = wide()
    shardcast.shard(model, adamw(model), process_group=group, param_dtype=dtype, pack_mb=0.5)


def allowed(size: int, dtype: torch.dtype) -> int:
    """The fp32 model, or what replaces it if that is more, and one pack, staged and cast."""
    numel = sum(param.numel() for param in wide().parameters())
    masters = 0 if dtype == FP32 else 4 / size
    in_flight = 0.5 * 2**20 / dtype.itemsize * (4 + (0 if dtype == FP32 else dtype.itemsize))
    small = 32 * 1024
    return int(max(4, dtype.itemsize + masters) * numel + in_flight) + small


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_set_up_needs_one_pack_and_the_shard_beside_the_fp32_model(size: int, dtype: torch.dtype):
    with fake_world(size, 0) as group:
        assert peak_of(lambda: shard_wide(group, dtype)) <= allowed(size, dtype)


def test_originals_that_are_not_freed_are_noticed(monkeypatch: pytest.MonkeyPatch):
    """Negative control: the same set-up with the fp32 originals kept alive needs too much."""
    from shardcast.optimizer import setup

    kept: list[Tensor] = []
    original = setup.build_shard

    def hoard(layout: Any, params: list[nn.Parameter], *rest: Any) -> Any:
        kept.extend(param.data for param in params)
        return original(layout, params, *rest)

    monkeypatch.setattr(setup, "build_shard", hoard)
    with fake_world(4, 0) as group:
        assert peak_of(lambda: shard_wide(group, BF16)) > allowed(4, BF16)


class Mixed(nn.Module):
    """Parameters that the optimizer does not hold, frozen ones that it does, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = wide(), nn.LayerNorm(300_000)
        self.frozen, self.outside = nn.Linear(500, 600), nn.Linear(700, 900)
        self.frozen.requires_grad_(False)
        self.register_buffer("table", torch.empty(400, 500))


def wide_bf16() -> nn.Module:
    """In low precision from the start: to stage it takes more than it held."""
    return nn.Sequential(*[nn.Linear(320, 323, dtype=BF16) for _ in range(6)])


def but_outside(model: nn.Module) -> torch.optim.Optimizer:
    named = model.named_parameters()
    return torch.optim.AdamW([param for name, param in named if "outside" not in name])


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("make", [wide, wide_bf16, Mixed])
@pytest.mark.parametrize(
    "fields",
    [
        {"pack_mb": 0.5},
        {"param_dtype": FP32, "pack_mb": 0.5},
        {"param_dtype": FP32, "pack_params": 1},
        {"partition": "whole", "pack_params": 3},
        {"keep_fp32": "norms", "cast_buffers": True},
        {"master": "split16", "pack_mb": 0.5},
        {"offload": True, "pack_mb": 0.5},
    ],
    ids=["bf16", "fp32", "alone", "whole", "kept", "split", "offload"],
)
def test_the_estimated_peak_of_setting_up_is_the_measured_one(
    fields: dict[str, Any], make: Any, size: int
):
    with torch.device("meta"):
        model = make()
    found = estimate(model, but_outside(model), size, fields).setup_peak
    peaks = []
    for rank in range(size):
        with fake_world(size, rank) as group:

            def run(group: Any = group) -> None:
                model = make()
                shardcast.shard(model, but_outside(model), process_group=group, **fields)

            peaks.append(peak_of(run))
    assert found <= max(peaks) <= found + 1024, "but for a few scalars"
