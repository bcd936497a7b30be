"""torchao's ``Float8Linear`` and an NF4 base on two ranks, compared with plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import run_world
from torch import Tensor, nn

import shardcast

float8 = pytest.importorskip("torchao.float8")
nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
pytestmark = pytest.mark.timeout(300)


def scaled() -> nn.Module:
    """Return linears that multiply in fp8, which torchao emulates on a CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    config = float8.Float8LinearConfig(emulate=True)
    return float8.convert_to_float8_training(model, config=config)  # type: ignore[no-any-return]


class QLoRA(nn.Module):
    """Model with a frozen NF4 weight and a trained adapter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Parameter(nf4.to_nf4(torch.randn(256, 64) / 8), requires_grad=False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 256, bias=False)
        self.head = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nf4.linear_nf4(x, self.base) + self.up(self.down(x)))  # type: ignore[no-any-return]


def trained(group: Any, build: Any) -> tuple[list[float], nn.Module, Any]:
    """Return losses, model and optimizer; without a group, one process runs under autocast."""
    model = build()
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer: Any = torch.optim.AdamW(params, lr=1e-2)
    if group is not None:
        optimizer = shardcast.shard(model, optimizer, process_group=group)
    ranks = range(2) if group is None else [group.rank()]
    losses = []
    for step in range(10):
        total = 0.0
        for rank in ranks:
            seed = torch.Generator().manual_seed(2 * step + rank)
            batch = torch.randn(16, 64, generator=seed)
            with torch.autocast("cpu", torch.bfloat16, enabled=group is None):
                output = model(batch)
            loss = nn.functional.mse_loss(output.float(), batch.roll(1, 1)) / len(ranks)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model, optimizer


@pytest.mark.parametrize("build", [scaled, QLoRA])
def test_torchaos_tensors_train_as_under_autocast(build: Any) -> None:
    expected, _, _ = trained(None, build)
    ranks, _ = run_world(2, trained, build)
    found = [sum(losses) / 2 for losses in zip(*(rank[0] for rank in ranks), strict=True)]
    assert found == pytest.approx(expected, rel=3e-3) and found[-1] < 0.95 * found[0]


def test_weights_of_float8_linear_have_sharded_masters() -> None:
    ((_, model, optimizer), _), _ = run_world(2, trained, scaled)
    assert type(model[0]).__name__ == "Float8Linear" and model[0].weight.dtype == torch.bfloat16
    assert optimizer.memory_report()["masters"] < 4 * sum(p.numel() for p in model.parameters())


def test_an_nf4_base_keeps_its_bits_and_its_class() -> None:
    ((_, model, _), _), _ = run_world(2, trained, QLoRA)
    assert type(model.base) is nf4.NF4Tensor or isinstance(model.base.data, nf4.NF4Tensor)
    given = QLoRA().base
    assert torch.equal(model.base.get_original_weight(), given.get_original_weight())
