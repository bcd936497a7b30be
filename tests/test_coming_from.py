"""The page "Coming from": every "after" trains as its "before" does, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardcast
from shardcast.testing import SpawnedWorld

pytestmark = pytest.mark.timeout(120)

PAGE = (Path(__file__).parents[1] / "docs" / "coming-from.md").read_text()


def snippets(section: str) -> list[str]:
    """The Python of one section, before and after."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch).float() - batch.roll(1, 1).float()).square().mean()


def trained(_group: Any, code: str) -> tuple[float, Tensor]:
    """The last loss of a snippet, and the weights that it leaves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    data = torch.Generator().manual_seed(dist.get_rank())
    scope: dict[str, Any] = {
        "torch": torch, "shardcast": shardcast, "model": model, "device": "cpu",
        "loss_of": loss_of, "fully_shard": fully_shard,
        "DistributedDataParallel": DistributedDataParallel,
        "ZeroRedundancyOptimizer": ZeroRedundancyOptimizer,
        "batches": [torch.randn(8, 16, generator=data) for _ in range(20)],
    }  # fmt: skip
    exec(compile(code, "docs/coming-from.md", "exec"), scope)
    weights = [
        (p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten().float()
        for p in model.parameters()
    ]
    with torch.no_grad():
        final = loss_of(scope["model"], scope["batches"][0])
    return final.item(), torch.cat(weights)


@pytest.mark.parametrize(
    ("section", "tolerance"),
    [("DDP + autocast", 3e-2), ("ZeroRedundancyOptimizer", 1e-5), ("FSDP2", 1e-5)],
)
def test_a_script_trains_as_before(gloo: SpawnedWorld, section: str, tolerance: float):
    """In bf16 to its own rounding, in fp32 to the order of sums."""
    before, after = snippets(section)
    (loss, weights), _ = gloo.run(trained, before)
    (new_loss, new_weights), (_, others) = gloo.run(trained, after)
    assert new_loss == pytest.approx(loss, rel=tolerance)
    assert torch.equal(new_weights, others), "replicas are equal"
    assert (new_weights - weights).abs().max() <= tolerance * weights.abs().max()


def test_the_options_that_the_page_names_exist():
    named = set(re.findall(r"`(\w+): ", PAGE))
    assert named - {"stage"} <= set(shardcast.ShardcastConfig().to_dict())
