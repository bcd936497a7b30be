"""Parameters of the model that no sharded optimizer holds; copies of a sharded model."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils

import shardcast
from shardcast.testing import ThreadedWorld

pytestmark = pytest.mark.timeout(60)

HELD, COPIED = "no optimizer that was given to", "a sharded model was copied"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize(
    ("size", "frozen", "told"), [(2, False, True), (1, False, False), (2, True, False)]
)
def test_layers_with_gradients_that_no_sharded_optimizer_holds_are_named_once(
    size: int, frozen: bool, told: bool, recwarn: pytest.WarningsRecorder
):
    def run(group: Any) -> None:
        model = net()
        model[0].requires_grad_(not frozen)
        optimizer = shardcast.shard(model, sgd(model[2].parameters()), process_group=group)
        for _ in range(3):
            model(torch.randn(3, 4)).float().square().mean().backward()
            optimizer.step()
            model.zero_grad()
        optimizer.close()

    ThreadedWorld(size).run(run)
    messages = [str(each.message) for each in recwarn.list if HELD in str(each.message)]
    assert len(messages) == told
    assert all("'0.weight', '0.bias' of a sharded model" in message for message in messages)
    assert all("after 1 steps" in message for message in messages)


def test_a_layer_that_another_sharded_model_trains_is_not_warned_of(recwarn: Any):
    def run(group: Any) -> None:
        one = net()
        other = nn.Sequential(one[0], nn.Linear(8, 1))
        for model, params in ((one, one.parameters()), (other, other[1].parameters())):
            optimizer = shardcast.shard(model, sgd(params), process_group=group)
            model(torch.randn(3, 4)).float().square().mean().backward()
            optimizer.step()

    ThreadedWorld(2).run(run)
    assert not [each for each in recwarn.list if HELD in str(each.message)]


@pytest.mark.parametrize(("dtype", "told"), [("bf16", 1), ("fp32", 0)])
def test_a_copy_of_a_sharded_model_is_warned_of_once_where_it_has_no_masters(dtype: str, told: int):
    model = net()
    optimizer = shardcast.shard(model, sgd(model.parameters()), param_dtype=dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        copy.deepcopy(model[0])
        copy.deepcopy(model.state_dict())
        pickle.dumps(model)
        assert not [each for each in caught if COPIED in str(each.message)]
        for _ in range(2):
            copy.deepcopy(copy.deepcopy(model))
        optimizer.close()
        copy.deepcopy(model)
    assert len([each for each in caught if COPIED in str(each.message)]) == told


class Nested(nn.Module):
    """Stands between the average and the net that it follows, as in ema-pytorch."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside.requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        ("list", {}, True),
        ("list", {"keep_fp32": "average.*"}, False),
        ("list", {"param_dtype": "fp32"}, False),
        ("other", {}, False),
    ],
)
def test_an_average_that_becomes_low_is_warned_of_by_name(
    kind: str, fields: dict[str, Any], told: bool, recwarn: pytest.WarningsRecorder
):
    model = nn.Module()
    model.net = nn.Sequential(net(), nn.LayerNorm(1))
    inside = copy.deepcopy(model.net)
    if kind == "other":  # its norm has ones and zeros as any has
        nn.init.normal_(inside[0][0].weight)
        nn.init.normal_(inside[0][2].weight)
        nn.init.normal_(inside[0][0].bias)
        nn.init.normal_(inside[0][2].bias)
    model.average = nn.ModuleList([Nested(inside)])
    shardcast.shard(model, sgd(model.net.parameters()), **{"param_dtype": "bf16", **fields})
    messages = [str(w.message) for w in recwarn.list if "begins as a copy" in str(w.message)]
    assert len(messages) == told
    assert all("'average.0.inside.0.0.weight'" in text and "average.*" in text for text in messages)


def moved(sharded: bool, average: Any, fields: dict[str, Any]) -> tuple[Tensor, set[torch.dtype]]:
    """How an average inside the model moves in 60 steps, beside stock autocast, and its dtypes."""
    model = nn.Module()
    model.net = nn.Sequential(net(), nn.LayerNorm(1))
    model.average = average(model.net)
    optimizer: Any = torch.optim.AdamW(model.net.parameters(), lr=1e-2)
    before = [param.detach().float().clone() for param in model.average.parameters()]
    if sharded:
        optimizer = shardcast.shard(model, optimizer, **{"param_dtype": "bf16", **fields})
    update = getattr(model.average, "update_parameters", None)
    for step in range(60):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", torch.bfloat16):
            out = model.net(x)
        (out.float() - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if update is not None:
            update(model.net)
            continue
        with torch.no_grad():
            pairs = zip(model.average.parameters(), model.net.parameters(), strict=True)
            for slow, fast in pairs:
                slow.mul_(0.99).add_(fast, alpha=0.01)
    after = [param.detach().float() for param in model.average.parameters()]
    moves = [(new - old).flatten() for new, old in zip(after, before, strict=True)]
    return torch.cat(moves), {param.dtype for param in model.average.parameters()}


def of_torch(trained: nn.Module) -> nn.Module:
    return swa_utils.AveragedModel(trained, avg_fn=swa_utils.get_ema_avg_fn(0.99))


def nested(trained: nn.Module) -> nn.Module:
    return Nested(copy.deepcopy(trained))


@pytest.mark.parametrize("average", [of_torch, nested])
def test_an_average_anywhere_in_the_model_moves_as_beside_stock_autocast(average: Any):
    stock, _ = moved(False, average, {})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*begins as a copy")
        mine, dtypes = moved(True, average, {})
    assert dtypes == {torch.float32}
    assert (mine - stock).norm() < 0.05 * stock.norm()
    low, _ = moved(True, average, {"convert_rest": True})
    assert (low - stock).norm() > 0.1 * stock.norm(), "the control"


@pytest.mark.filterwarnings("ignore:parameter .* begins as a copy")
def test_frozen_layers_of_a_network_are_not_taken_for_averages():
    """Of lists, of one layer, and those of which no trained module is the like."""
    model = nn.Module()
    model.blocks = nn.ModuleList([net() for _ in range(3)])
    model.stem = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8))
    model.one, model.other = nn.Linear(8, 8), nn.Linear(8, 8)
    for frozen in (*model.blocks[:2], model.stem, model.one):
        frozen.requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad]
    shardcast.shard(model, sgd(params), param_dtype="bf16")
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
