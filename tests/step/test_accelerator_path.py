"""The path of a step on accelerators, run on a CPU whose values the host does not read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import CASES, assert_same_bits, run_world, sharded, values
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardcast import _compat
from shardcast.testing import fake_world

pytestmark = pytest.mark.timeout(60)


def groups_of(model: nn.Module) -> torch.optim.Optimizer:
    """With a rate that is a tensor, as schedulers write it in place."""
    first, *others = model.parameters()
    groups = [{"params": [first], "max_grad_norm": 0.5}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=torch.tensor(1e-2))


def trained(group: Any, fields: dict[str, Any], steps: int) -> tuple[dict[str, Tensor], float, int]:
    model = CASES["mlp"].build()
    optimizer = sharded(model, group, groups_of, fuse="eager", pack_params=1, **fields)
    for step in range(steps):
        optimizer.param_groups[1]["lr"].fill_(1e-2 if step < 3 else 5e-3)
        loss = optimizer.scale_loss(CASES["mlp"].loss(model, CASES["mlp"].batch(step)))
        (loss * (math.nan if step == 2 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.grad_norm is not None
    return values(model), optimizer.grad_norm.item(), optimizer.skipped_steps


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_grad_norm": 0.1},
        {"norm_type": math.inf, "max_grad_norm": 0.01},
        {"param_dtype": torch.float16, "loss_scale": "dynamic", "loss_scale_init": 8.0},
    ],
    ids=str,
)
def test_a_training_on_an_accelerator_is_that_on_a_cpu(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Norms of fp32 instead of fp64, numbers of a step on the device, a step that is skipped."""
    fields = {"param_dtype": torch.float32, **fields}
    on_cpu = run_world(2, trained, fields, 5)[0]
    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    on_device = run_world(2, trained, fields, 5)[0]
    assert_same_bits(on_device[0][0], on_device[1][0])
    for (weights, norm, skipped), (expected, norm_on_cpu, _) in zip(on_device, on_cpu, strict=True):
        assert skipped == 1 and norm == pytest.approx(norm_on_cpu, rel=1e-5)
        for weight, on_host in zip(weights.values(), expected.values(), strict=True):
            torch.testing.assert_close(weight, on_host, rtol=1e-5, atol=1e-6)


class Reads(TorchDispatchMode):
    """Counts the values of tensors that the host asks for, and so waits for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:step skipped by the guard")
@pytest.mark.parametrize(
    ("guard", "waits"),
    [
        ({"norm": 6.0, "window": 8}, False),
        ({"norm": 6.0, "window": 8, "action": "clip"}, False),
        (lambda norm, _loss: norm > 1.0, False),
        (lambda norm, _loss: torch.tensor(bool(norm > 1.0)), True),
    ],
    ids=["a window", "a clip", "a function", "one that waits"],
)
def test_a_guard_asks_for_no_value_of_the_device(
    guard: Any, waits: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    with fake_world(8) as group:
        model = nn.ParameterList(torch.ones(2, 2048) for _ in range(2))
        optimizer = sharded(model, group, fuse="eager", guard=guard)
        for _ in range(3):
            sum(param.sum() for param in model).backward()
            with Reads() as reads:
                optimizer.step()
            optimizer.zero_grad()
    assert (reads.count > 0) == waits
