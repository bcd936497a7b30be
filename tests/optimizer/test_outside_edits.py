"""Parameters that no sharded optimizer holds, and layers that change after ``shard()``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import on_each_rank
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import swa_utils

import shardcast
from shardcast.testing import ThreadedWorld

HELD = "no optimizer that was passed to"


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
    assert all("or average the gradients yourself" in message for message in messages)


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


class Nested(nn.Module):
    """Holds an average in a submodule, like ema-pytorch."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside.requires_grad_(False)


def moved(sharded: bool, average: Any, fields: dict[str, Any]) -> tuple[Tensor, set[torch.dtype]]:
    """Return the change of an average inside the model in 30 steps, and its dtypes."""
    model = nn.Module()
    model.net = nn.Sequential(net(), nn.LayerNorm(1))
    model.average = average(model.net)
    optimizer: Any = torch.optim.AdamW(model.net.parameters(), lr=1e-2)
    before = [param.detach().float().clone() for param in model.average.parameters()]
    if sharded:
        optimizer = shardcast.shard(model, optimizer, **{"param_dtype": "bf16", **fields})
    update = getattr(model.average, "update_parameters", None)
    for step in range(30):
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


def listed(trained: nn.Module) -> nn.Module:
    return nn.ModuleList([nested(trained)])


@pytest.mark.parametrize("average", [of_torch, nested, listed])
def test_an_average_anywhere_in_the_model_moves_as_beside_stock_autocast(average: Any):
    stock, _ = moved(False, average, {})
    mine, dtypes = moved(True, average, {})
    assert dtypes == {torch.float32}
    assert (mine - stock).norm() < 0.05 * stock.norm()
    low, dtypes = moved(True, average, {"convert_rest": True})
    assert dtypes >= {torch.bfloat16}
    assert (low - stock).norm() > 0.1 * stock.norm(), "the control"


class Codebook(nn.Module):
    """A quantizer whose forward changes its codes, which are frozen parameters, as in BEiT-2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.codes = nn.Linear(4, 8), nn.Embedding(16, 8)
        self.codes.requires_grad_(False)
        self.total = nn.Parameter(self.codes.weight.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        with torch.no_grad():
            nearest = torch.cdist(hidden.float(), self.codes.weight.float()).argmin(1)
            sums = nn.functional.one_hot(nearest, 16).float().t() @ hidden.float()
            self.total.mul_(0.999).add_(sums.to(self.total.dtype), alpha=0.001)
            self.codes.weight.data.copy_(self.total)
        return hidden - self.codes(nearest)


@pytest.mark.parametrize("held", [False, True])
def test_frozen_parameters_that_a_forward_moves_are_as_beside_stock_autocast(held: bool):
    def codes(sharded: bool, **fields: Any) -> tuple[Tensor, Tensor]:
        model = Codebook()
        start = model.codes.weight.detach().clone()
        params = [param for param in model.parameters() if held or param.requires_grad]
        optimizer: Any = torch.optim.AdamW(params, lr=1e-3)
        if sharded:
            optimizer = shardcast.shard(model, optimizer, param_dtype="bf16", **fields)
        for step in range(50):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.codes.weight.detach().float(), start

    stock, start = codes(False)
    astray = (stock - start).norm()
    assert (codes(True)[0] - stock).norm() < 0.01 * astray
    assert (codes(True, convert_rest=True)[0] - stock).norm() > 0.2 * astray, "the control"


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("came", [torch.float32, torch.bfloat16])
def test_a_base_that_is_merged_and_unmerged_drifts_as_without_shardcast(
    held: bool, came: torch.dtype
):
    """For a rollout, for example. A base in bf16 stays in bf16."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False))
    base, down, up = model
    base.to(came).requires_grad_(False)
    params = [param for param in model.parameters() if held or param.requires_grad]
    shardcast.shard(model, sgd(params), param_dtype="bf16")
    assert base.weight.dtype == came
    plain = base.weight.detach().clone()
    with torch.no_grad():
        for _ in range(20):
            change = (up.weight.float() @ down.weight.float()).to(came)
            for weight in (base.weight, plain):
                weight.add_(change)
            model(torch.ones(1, 8))
            for weight in (base.weight, plain):
                weight.sub_(change)
    model(torch.ones(1, 8))
    assert torch.equal(base.weight, plain)


@pytest.mark.parametrize("size", [1, 2])
@on_each_rank("size")
def test_what_no_optimizer_holds_keeps_its_memory_dtype_and_strides(group: Any, size: int):
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[:3].requires_grad_(False)
    model[0].to(memory_format=torch.channels_last)
    model[1].to(torch.bfloat16)
    model[2].half()
    view = model[0].weight.data[:1]  # an alias that a module might keep
    rest = [*model[:3].parameters(), *model[1].buffers()]
    dtypes, strides = [t.dtype for t in rest], [t.stride() for t in rest]
    addresses = [t.data_ptr() for t in model[:3].parameters()]
    shardcast.shard(model, sgd(model[3].parameters()), process_group=group, param_dtype="bf16")
    rest = [*model[:3].parameters(), *model[1].buffers()]
    assert [t.dtype for t in rest] == dtypes and [t.stride() for t in rest] == strides
    assert [t.data_ptr() for t in model[:3].parameters()] == addresses
    assert torch.equal(view, model[0].weight[:1])


# -- layers that are replaced after shard() -------------------------------------------------------


def trained(group: Any, change: Any, ranks: tuple[int, ...], steps: int = 3) -> str:
    """Return a rank's error if ``ranks`` change the model after a step, else "ok"."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = shardcast.shard(model, optimizer, process_group=group, param_dtype="fp32")
    try:
        for step in range(steps):
            if step == 1 and group.rank() in ranks:
                change(model)
            model(torch.ones(3, 4) + group.rank()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return f"step {step}: {error}"
    return "ok"


def replaced(model: Any) -> None:
    model[1][1] = nn.Linear(8, 8)


def replaced_parameter(model: Any) -> None:
    model[2].weight = nn.Parameter(torch.ones(1, 8))


def wrapped(model: Any) -> None:
    model[1] = nn.Sequential(nn.Identity(), model[1])


def deleted(model: Any) -> None:
    del model[1][1]


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model[2], "weight", nn.Tanh())


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (replaced, "'1.1.weight', '1.1.bias'"),
        (replaced_parameter, "'2.weight'"),
        (deleted, "'1.1.weight', '1.1.bias'"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_layer_that_one_rank_replaces_is_an_error_of_all_in_the_same_step(
    change: Any, names: str, rank: int
):
    errors = ThreadedWorld(2).run(trained, change, (rank,))
    assert errors[0] == errors[1]
    assert errors[0].startswith("step 1: ")
    assert "no longer in the model differs (rank 0: " in errors[0]
    assert names in errors[0].split(f"rank {rank}: ")[1]
    assert names not in errors[0].split(f"rank {1 - rank}: ")[1].split("rank")[0]
    assert "before shardcast.shard" in errors[0] and "close()" in errors[0]


@pytest.mark.parametrize(
    ("change", "ranks"),
    [(replaced, (0, 1)), (wrapped, (1,)), (copy.deepcopy, (0,)), (parametrized, (0, 1))],
)
def test_what_all_ranks_do_alike_or_keeps_the_parameters_is_no_error(
    change: Any, ranks: tuple[int, ...]
):
    assert ThreadedWorld(2).run(trained, change, ranks) == ["ok", "ok"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resize_is_refused_by_name_and_works_after_close(world_size: int):
    """``resize_token_embeddings`` of transformers resizes like this."""

    def resize(model: Any) -> None:
        model[2].weight.data = torch.ones(3, 8)
        model[2].bias.data = torch.ones(3)

    def then_closed(group: Any) -> tuple[int, ...]:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        for change in (None, resize):
            if change:
                change(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            sharded = shardcast.shard(model, optimizer, process_group=group)
            model(torch.ones(3, 4)).float().square().mean().backward()
            sharded.step()
            sharded.close()
        return tuple(model[2].weight.shape)

    for error in ThreadedWorld(world_size).run(trained, resize, (0, 1)):
        assert "parameter '2.weight' was resized after shardcast.shard: expected (1, 8)" in error
        assert "optimizer.close()" in error
    assert ThreadedWorld(world_size).run(then_closed) == [(3, 8)] * world_size
