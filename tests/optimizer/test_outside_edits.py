"""Parameters of the model that no sharded optimizer holds, and that move all the same."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardcast
from shardcast.testing import ThreadedWorld

pytestmark = pytest.mark.timeout(60)

BF16, FP32 = torch.bfloat16, torch.float32
Edit = Callable[["Net"], Any]


class Average(nn.Module):
    """Stands between the average and the net that it follows, as in ema-pytorch."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.inside = copy.deepcopy(net).requires_grad_(False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.average = Average(self.net)
        self.centres = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).float() - self.centres.float()


def average(model: Net) -> None:
    pairs = zip(model.average.inside.parameters(), model.net.parameters(), strict=True)
    for slow, fast in pairs:
        slow.data.lerp_(fast.data.to(slow.dtype), 0.25)


def train_centres(model: Net) -> None:
    assert model.centres.grad is not None
    model.centres.sub_(0.1 * model.centres.grad)


def load(model: Net) -> None:
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("edit", "size", "fields", "told"),
    [
        (average, 1, {}, "'average.inside.0.weight'.*keep_fp32"),
        (average, 2, {}, "'average.inside.0.weight'.*keep_fp32"),
        (average, 2, {"keep_fp32": "average.*"}, None),
        (average, 2, {"param_dtype": FP32}, None),
        (train_centres, 2, {"param_dtype": FP32}, "'centres'.*averages its gradients"),
        (train_centres, 1, {"param_dtype": FP32}, None),
        (lambda _: None, 2, {}, None),
        (load, 2, {}, None),
    ],
)
def test_parameters_that_the_script_moves_by_itself_are_warned_of(
    edit: Edit, size: int, fields: dict[str, Any], told: str | None, recwarn: Any
):
    def run(group: Any) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1)
        optimizer = shardcast.shard(
            model, optimizer, process_group=group, **{"param_dtype": BF16, **fields}
        )
        for step in range(9):
            model.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            if edit is not load or step in (2, 5):
                with torch.no_grad():
                    edit(model)

    ThreadedWorld(size).run(run)
    messages = [str(each.message) for each in recwarn.list if "no sharded" in str(each.message)]
    assert bool(messages) == bool(told)
    for message in messages:
        assert told is not None and re.search(told, message)


def test_a_layer_that_another_sharded_model_trains_is_not_warned_of(recwarn: Any):
    def run(group: Any) -> None:
        torch.manual_seed(0)
        one = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        other = nn.Sequential(one[0], nn.Linear(8, 1))
        optimizers = [
            shardcast.shard(model, torch.optim.SGD(params, lr=0.1), process_group=group)
            for model, params in ((one, one.parameters()), (other, other[1].parameters()))
        ]
        for _ in range(9):
            (one(torch.randn(3, 4)) + other(torch.randn(3, 4))).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    ThreadedWorld(2).run(run)
    assert not [each for each in recwarn.list if "no sharded" in str(each.message)]
