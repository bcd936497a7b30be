"""Parameters of real models: freezing, groups, ties, buffers, meta and compiled models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import BATCH, adamw, backwards, equal, mlp, on_ranks, values
from torch import Tensor, nn

import shardcast
from shardcast.testing import ThreadedWorld

# Sums over 12 rows in halves or thirds round differently than at once; five steps.
ROUNDING = 1e-5


def but_the_first(model: Any) -> torch.optim.Optimizer:
    model[0].requires_grad_(False)
    return adamw(model, weight_decay=0.1)


def test_unfreezing_on_one_rank_only_is_no_hang_and_counts_the_others_as_zero():
    def script(model: Any, optimizer: Any, batch: Tensor) -> list[Tensor]:
        if torch.equal(batch, BATCH.chunk(2)[1]):
            model[0].requires_grad_(True)
        backwards(3)(model, optimizer, BATCH, True)
        return values(model)

    first, second = on_ranks(script, build=but_the_first)
    assert equal(first, second)
    assert not torch.equal(first[0], mlp()[0].weight)


def test_frozen_parameters_have_no_state_no_decay_and_no_pack_with_trained_ones():
    def script(model: Any, optimizer: Any, batch: Tensor) -> None:
        before = model[0].weight.clone()
        backwards(2)(model, optimizer, batch, True)
        assert model[0].weight not in optimizer.state
        assert torch.equal(model[0].weight, before)
        packs = [{slot.name for slot in pack.slots} for pack in optimizer.layout.packs]
        assert {"0.weight", "0.bias"} in packs

    on_ranks(script, build=but_the_first, pack_params=None)


def first_layer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model[0].parameters(), lr=1e-2)


def test_ranks_that_add_different_groups_are_told_so():
    def script(model: Any, optimizer: Any, batch: Tensor) -> None:
        first, before = torch.equal(batch, BATCH.chunk(2)[0]), optimizer.layout
        layer = model[2] if first else model[4]
        with pytest.raises(RuntimeError, match=r"rank 0: .*2\.weight.*rank 1: .*4\.weight"):
            optimizer.add_param_group({"params": list(layer.parameters())})
        with pytest.raises(RuntimeError, match=r"rank 0: group 1: lr = 0\.5; rank 1: .* = 0\.25"):
            optimizer.add_param_group({"params": [], "lr": 0.5 if first else 0.25})
        assert len(optimizer.param_groups) == 1 and optimizer.layout == before
        # The same group may be added afterwards, and trains.
        optimizer.add_param_group({"params": list(model[2].parameters())})
        weight = model[2].weight.detach().clone()
        backwards(2)(model, optimizer, BATCH, True)
        assert not torch.equal(model[2].weight, weight)

    on_ranks(script, build=first_layer)


@pytest.mark.parametrize(
    ("dtype", "partition"), [("fp32", "even"), ("bf16", "even"), ("bf16", "whole")]
)
def test_groups_added_after_steps_train_with_gradients_of_any_dtype(dtype: str, partition: str):
    """Gradients of bf16 parameters accumulate in fp32 in the new group, as in the old one."""

    def extend(step: int, model: Any, optimizer: Any) -> None:
        if step == 2:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 1e-3})
            assert optimizer.param_groups[1]["weight_decay"] == 1e-2  # torch's default

    def script(model: Any, optimizer: Any, batch: Tensor) -> list[Tensor]:
        backwards(4, extend)(model, optimizer, batch, True)
        model(batch).float().sum().backward()
        assert model[0].weight.grad.dtype == model[2].weight.grad.dtype == torch.float32
        return values(model)

    fields = {"grad_dtype": "fp32", "param_dtype": dtype, "partition": partition, "pack_params": 1}
    first, *others = on_ranks(script, 3, first_layer, **fields)
    assert all(equal(first, other) for other in others)
    moved = [not torch.equal(a, b.to(a.dtype)) for a, b in zip(first, values(mlp()), strict=True)]
    assert moved == [True] * 4 + [False] * 2


def test_a_layer_added_with_its_group_follows_the_rules_of_the_others():
    """With ``keep_fp32="norms"``, a new normalization layer is kept in fp32, like the first."""
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5))
    optimizer = shardcast.shard(model, adamw(model), keep_fp32="norms")
    model.append(nn.LayerNorm(5))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert model[1].weight.dtype == model[2].weight.dtype == torch.float32
    backwards(1)(model, optimizer, BATCH)


class Odd(nn.Module):
    """Scalars, empty, integer, boolean and transposed parameters, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 7, bias=False)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.first.weight
        self.turned = nn.Parameter(torch.randn(5, 7).t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.count = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
        self.flag = nn.Parameter(torch.tensor(True), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(torch.tanh(self.first(x))) @ self.turned * self.scale + self.empty.sum()

    def trained(self) -> list[nn.Parameter]:
        return [param for param in self.parameters() if param.is_floating_point()]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_odd_parameters_train_as_in_plain_torch(size: int):
    plain = Odd()
    backwards(5)(plain, torch.optim.AdamW(plain.trained(), lr=1e-2), BATCH)

    def run(group: Any) -> tuple[Any, list[Tensor]]:
        model = Odd()
        inner = torch.optim.AdamW(model.trained(), lr=1e-2)
        optimizer = shardcast.shard(
            model, inner, process_group=group, param_dtype="fp32", pack_params=2
        )
        backwards(5)(model, optimizer, BATCH.chunk(size)[group.rank()])
        return model.state_dict(), values(model)

    for state, params in ThreadedWorld(size).run(run):
        for mine, theirs in zip(params, plain.parameters(), strict=True):
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=ROUNDING)
        assert torch.equal(state["first.weight"], state["tied.weight"])


# -- buffers and normalization --------------------------------------------------------------------


@pytest.mark.parametrize("param_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("came", [torch.float32, torch.bfloat16])
def test_batch_norm_is_kept_in_fp32_and_channels_last_weights_keep_their_values(
    came: torch.dtype, param_dtype: str
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(came)
    model = model.to(memory_format=torch.channels_last)
    model[1].running_mean.fill_(0.5)
    weight = model[0].weight.detach().clone()
    optimizer = shardcast.shard(model, adamw(model), param_dtype=param_dtype)
    low = torch.bfloat16 if param_dtype == "bf16" else torch.float32
    assert torch.equal(model[0].weight, weight.to(low))
    assert model[1].weight.dtype == model[1].running_mean.dtype == torch.float32
    assert torch.equal(model[1].running_mean, torch.full((4,), 0.5))
    out = model(torch.randn(2, 3, 8, 8))
    assert out.dtype == low
    out.float().sum().backward()
    optimizer.step()
    model.eval()
    assert model(torch.randn(2, 3, 8, 8)).dtype == low


# -- kinds of models ------------------------------------------------------------------------------


def test_a_model_built_on_meta_is_materialised_by_the_users_function():
    def fill(model: nn.Module) -> None:
        model.to_empty(device="cpu")
        for module in model.children():
            module.reset_parameters()

    def run(group: Any) -> list[Tensor]:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 3))
        optimizer = shardcast.shard(model, adamw(model), process_group=group, materialize=fill)
        backwards(2)(model, optimizer, BATCH)
        return values(model)

    first, second = ThreadedWorld(2).run(run)
    assert equal(first, second) and all(param.isfinite().all() for param in first)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_model_trains_as_the_plain_one_and_keeps_its_names(when: str):
    model, plain = mlp(), mlp()
    front = torch.compile(model, backend="aot_eager") if when == "before" else model
    optimizer = shardcast.shard(front, adamw(model), param_dtype="fp32", pack_params=2)
    if when == "after":
        front = torch.compile(model, backend="aot_eager", fullgraph=True)
    backwards(4)(front, optimizer, BATCH)
    backwards(4)(plain, adamw(plain), BATCH)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=ROUNDING)
    assert optimizer.layout.packs[0].slots[0].name == "0.weight"


class Learner(nn.Module):
    """Its ``parameters()`` takes no arguments and returns a list, as in MAML code."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        sizes = ((16, 7), (16,), (3, 16), (3,))
        self.vars = nn.ParameterList(torch.randn(size, generator=draw) / 4 for size in sizes)
        self.running_mean = nn.Parameter(torch.zeros(7), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        first, second, third, fourth = self.vars
        hidden = nn.functional.linear(inputs - self.running_mean, first, second).tanh()
        return nn.functional.linear(hidden, third, fourth)

    def parameters(self) -> nn.ParameterList:  # type: ignore[override]
        return self.vars


@pytest.mark.parametrize("options", [{}, {"param_dtype": "bf16"}, {"overlap_sync": True}])
def test_a_module_with_its_own_parameters_method_trains_as_beside_ddp(options: dict[str, Any]):
    def train(group: Any = None) -> list[Tensor]:
        model, batch = Learner(), BATCH
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if group is not None:
            batch = BATCH.chunk(group.size())[group.rank()]
            given = {"param_dtype": "fp32", "fuse": "eager", **options}
            optimizer = shardcast.shard(model, optimizer, process_group=group, **given)
        for _ in range(5):
            model(batch).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if options.get("overlap_sync") and group is not None:
            optimizer.wait_sync()
        return [param.detach().float() for param in model.vars]

    first, second = ThreadedWorld(2, timeout=20).run(train)
    assert equal(first, second)
    tolerance = 1e-2 if options.get("param_dtype") == "bf16" else ROUNDING
    torch.testing.assert_close(first, train(), rtol=0, atol=tolerance)
