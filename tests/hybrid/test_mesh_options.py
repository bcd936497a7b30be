"""Options of the configuration mean the same beside tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from language import PARTS, Language, batches, loss_of, parallel
from torch.distributed.device_mesh import DeviceMesh

import shardcast
from shardcast.testing import threaded_world

STEPS = 3
FP32 = {"param_dtype": "fp32", "fuse": "eager"}
BF16 = {"param_dtype": "bf16", "fuse": "eager"}
CASES = (
    FP32,
    {**FP32, "grads": "sharded"},
    {**FP32, "overlap_sync": True},
    {**FP32, "pack_params": 1},
    BF16,
    {**BF16, "master": "split16"},
)


def trained(mesh: DeviceMesh, options: dict[str, Any]) -> list[torch.Tensor]:
    """Parameters of this rank after steps of two backwards each, some with zeroed gradients."""
    torch.manual_seed(0)
    model = Language()
    parallel(model, mesh["tp"])
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = shardcast.shard(model, adamw, options, mesh=mesh, grad_sum_over=PARTS)
    for step, batch in enumerate(batches(STEPS)):
        first = 2 * mesh.get_local_rank("dp")
        for number in (first, first + 1):
            loss_of(model, batch.chunk(4)[number]).backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    optimizer.check_copies()
    return [shard.pack.data.clone() for shard in optimizer.shards]


def all_cases(mesh: DeviceMesh) -> list[list[float]]:
    by_case = [trained(mesh, options) for options in CASES]
    return [torch.cat(packs).double().sort().values.tolist() for packs in by_case]


def test_options_that_move_no_bit_move_none_on_a_mesh():
    for exact, sharded, overlapped, single, low, split in threaded_world(
        {"dp": 2, "tp": 2}, all_cases
    ):
        assert sharded == exact
        assert overlapped == exact
        assert [x for x in single if x] == [x for x in exact if x]  # other padding
        assert split == low
        assert low != exact, "the comparison can fail"
