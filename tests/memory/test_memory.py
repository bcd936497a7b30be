"""Bytes in memory and at the allocator, compared with the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import adamw, install, sharded
from pairwise import thinned
from quantizers import batch, gpt, loss_of
from storages import live, peak_of, settle
from torch import nn

import shardcast
from shardcast.estimate import estimate
from shardcast.optimizer.sharded import packed_of
from shardcast.step.sync.sync import EncodedWork
from shardcast.testing import fake_world

pytestmark = pytest.mark.timeout(60)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """Exclude earlier objects from garbage collections, which take most of the time."""
    settle(None)


@pytest.fixture
def late_copies() -> None:
    """Override the fixture of this name: late copies keep their sources alive."""


def wide(numel: int = 64) -> nn.Module:
    """Return a model of 620,000 elements in twelve parameters."""
    return nn.Sequential(
        *(
            nn.Linear(numel * 5, numel * 5 + 3)
            if i % 2 == 0
            else nn.Linear(numel * 5 + 3, numel * 5)
            for i in range(6)
        )
    )


def held(size: int, rank: int, **fields: Any) -> tuple[int, Any]:
    """Return the bytes of memory that training holds on this rank between steps."""
    before = sum(live().values())
    with fake_world(size, rank) as group:
        model = wide()
        optimizer = sharded(model, group, **fields)
        for step in range(2):
            install(model, step)
            optimizer.step()
        return sum(live().values()) - before, optimizer


HELD: dict[str, tuple[dict[str, Any], float, float]] = {  # bytes per element, per owned element
    "bf16": ({}, 2, 2 + 12),
    "fp32, which is its own master": ({"param_dtype": FP32}, 4, 4 + 8),
    "fp32 gradients": ({"grad_dtype": FP32}, 2, 4 + 12),
    "several packs": ({"pack_params": 4}, 2, 2 + 12),
    "whole parameters": ({"partition": "whole", "pack_params": 4}, 2, 2 + 12),
    "split16": ({"master": "split16"}, 2, 2 + 10.125),
    "bf16 moments": ({"moments": "bf16"}, 2, 2 + 8.0625),
    "split16, bf16 moments": ({"master": "split16", "moments": "bf16"}, 2, 2 + 6.1875),
    "split16, bytes": ({"master": "split16", "moments": "int8"}, 2, 2 + 4.25),
    "sharded accumulation": ({"accumulate": "sharded"}, 2, 2 + 12),
    "all": ({"master": "split16", "moments": "bf16", "accumulate": "sharded"}, 2, 2 + 6.1875),
}


@pytest.mark.parametrize(("name", "size"), thinned(2, HELD, (1, 3)))
def test_persistent_bytes_are_those_of_the_formula(name: str, size: int):
    fields, every, owned = HELD[name]
    for rank in {0, size - 1}:
        found, optimizer = held(size, rank, **{"param_dtype": BF16, **fields})
        layout = optimizer.layout
        gaps = [shard.grads._gaps for shard in packed_of(optimizer).shards]
        found -= sum(gap.nbytes for gap in gaps if gap is not None and gap.nbytes > 2048)
        found -= packed_of(optimizer).reduce.buffers.nbytes  # kept on a CPU, not in the report
        assert found == sum(optimizer.memory_report().values())
        elements = sum(pack.spans[rank].numel for pack in layout.packs)
        assert found == pytest.approx(every * layout.numel + owned * elements, rel=1e-3)


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        ("mxfp8", {}),
        ("mxfp4", {"overlap_sync": True}),
        ("mxfp4_rceil", {"sync": "all_gather"}),
        ("fp8_block128", {}),
        ("fp8_block128", {"overlap_sync": True}),
    ],
)
def test_bytes_of_codes_in_a_sync_are_those_of_the_estimate(
    form: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """All codes are in memory before the first unpacking, and none after the last."""
    fields = {"published": {form: "blocks.*[!12].weight"}, "param_dtype": BF16, **fields}
    seen: list[int] = []
    unpack = EncodedWork.wait

    def wait(self: EncodedWork) -> None:
        seen.append(sum(live().values()))
        unpack(self)

    monkeypatch.setattr(EncodedWork, "wait", wait)
    for rank in (0, 2):
        seen.clear()
        with fake_world(3, rank) as group:
            model = gpt()
            promised = estimate(model, adamw(model), 3, fields, "gloo").encoded
            optimizer = sharded(model, group, **fields)
            inputs, targets = batch(0, rank, 0)
            loss_of(model(inputs), targets).backward()
            del inputs, targets
            optimizer.step()
            assert optimizer.memory_report().get("encoded", 0) == (
                promised if "overlap_sync" in fields else 0
            )
            optimizer.wait_sync()
            assert "encoded" not in optimizer.memory_report()
            assert seen[0] - sum(live().values()) == promised > 0


# -- peak at set-up -------------------------------------------------------------------------------


def shard_wide(group: Any, dtype: torch.dtype) -> None:
    model = wide()
    shardcast.shard(model, adamw(model), process_group=group, param_dtype=dtype, pack_mb=0.5)


def allowed(size: int, dtype: torch.dtype) -> int:
    """Return the bytes of the larger of the models before and after, and of one pack in flight."""
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
