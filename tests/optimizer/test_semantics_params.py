"""Groups, freezing, ties, buffers, meta and compiled models: what parameters do in real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import BATCH, check, mlp, steps
from torch import Tensor, nn

import shardcast
from shardcast.testing import ThreadedWorld


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def backward(count: int, before: Any = None) -> Any:
    """A script of ``count`` steps on the rank's part of the batch."""

    def script(model: nn.Module, optimizer: Any, batch: Tensor, _sharded: bool) -> None:
        for step in range(count):
            if before is not None:
                before(step, model, optimizer)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return script


# Different sums over the batch: 12 rows in halves or thirds instead of at once, five steps.
ROUNDING = 1e-5


def frozen_at_first(model: nn.Module) -> torch.optim.Optimizer:
    model[0].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def freeze_and_unfreeze(step: int, model: nn.Module, optimizer: Any) -> None:
    if step == 3:  # one parameter of a pack that was frozen from the start
        model[0].weight.requires_grad_(True)
    if step == 5:
        model[2].requires_grad_(False)
    if step == 7:
        model[2].requires_grad_(True)
        model[4].bias.requires_grad_(True)


@pytest.mark.parametrize("partition", ["even", "whole"])
def test_freezing_and_unfreezing_equals_plain_torch_bit_for_bit(partition: str):
    check(frozen_at_first, steps(9, freeze_and_unfreeze), partition=partition)


def test_freezing_and_unfreezing_works_with_real_backwards():
    check(frozen_at_first, backward(9, freeze_and_unfreeze), tol=ROUNDING)


def test_unfreezing_on_one_rank_only_is_no_hang_and_counts_the_others_as_zero():
    def run(group: Any) -> list[Tensor]:
        model = mlp()
        model[0].requires_grad_(False)
        optimizer = shardcast.shard(
            model, adamw(model), process_group=group, param_dtype="fp32", pack_params=2
        )
        if group.rank() == 1:
            model[0].requires_grad_(True)
        backward(3)(model, optimizer, BATCH, True)
        return [param.detach().clone() for param in model.parameters()]

    first, second = ThreadedWorld(2).run(run)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], mlp()[0].weight)


def test_frozen_parameters_have_no_state_no_decay_and_no_pack_with_trained_ones():
    model = mlp()
    optimizer = shardcast.shard(model, frozen_at_first(model))
    before = model[0].weight.clone()
    backward(2)(model, optimizer, BATCH, True)
    assert model[0].weight not in optimizer.state
    assert torch.equal(model[0].weight, before)
    for pack in optimizer.layout.packs:
        assert {slot.name for slot in pack.slots} in (
            {"0.weight", "0.bias", "4.bias"},
            {"2.weight", "2.bias", "4.weight"},
        )


def two_groups(kind: Any, **options: Any) -> Any:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        first = {"params": model[0].parameters(), "lr": 1e-3, "mine": "kept"}
        groups = [first, {"params": []}, {"params": model[2].parameters()}]
        return kind(groups, lr=1e-2, **options)

    return build


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.3}),
    ],
)
def test_groups_can_be_added_and_changed_between_steps(kind: Any, options: dict[str, Any]):
    if kind is torch.optim.Adagrad and torch.__version__ < (2, 13):
        pytest.skip("the oracle, torch's own Adagrad, makes no state for groups that are added")

    def before(step: int, model: nn.Module, optimizer: Any) -> None:
        if step == 2:
            optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 5e-3})
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        assert optimizer.param_groups[0]["mine"] == "kept"

    check(two_groups(kind, **options), steps(6, before))


def test_a_group_of_strangers_is_refused_and_not_added():
    model = mlp()
    optimizer = shardcast.shard(model, adamw(model))
    with pytest.raises(ValueError, match="and add a new module to the model before its group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model[0].weight]})
    assert len(optimizer.param_groups) == 1


def test_ranks_that_add_different_groups_are_told_so():
    def run(group: Any) -> None:
        model = mlp()
        inner = torch.optim.AdamW(model[0].parameters())
        optimizer = shardcast.shard(model, inner, process_group=group)
        first, before = group.rank() == 0, optimizer.layout
        layer = model[2] if first else model[4]
        with pytest.raises(RuntimeError, match=r"rank 0: .*2\.weight.*rank 1: .*4\.weight"):
            optimizer.add_param_group({"params": list(layer.parameters())})
        with pytest.raises(RuntimeError, match=r"rank 0: group 1: lr = 0\.5; rank 1: .* = 0\.25"):
            optimizer.add_param_group({"params": [], "lr": 0.5 if first else 0.25})
        assert len(optimizer.param_groups) == len(inner.param_groups) == 1
        assert optimizer.layout == before
        # The same may be added afterwards, and trains.
        optimizer.add_param_group({"params": list(model[2].parameters())})
        weight = model[2].weight.detach().clone()
        backward(2)(model, optimizer, BATCH, True)
        assert not torch.equal(model[2].weight, weight)

    ThreadedWorld(2).run(run)


def test_a_group_that_cannot_be_packed_leaves_everything_as_it_was():
    model = mlp()
    inner = torch.optim.AdamW(model[0].parameters())
    optimizer = shardcast.shard(model, inner)
    before = optimizer.layout
    model.append(nn.Linear(3, 3, device="meta"))
    with pytest.raises(ValueError, match="on the meta device"):
        optimizer.add_param_group({"params": list(model[-1].parameters())})
    assert len(optimizer.param_groups) == len(inner.param_groups) == 1
    assert optimizer.layout == before


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
    reference = torch.optim.AdamW(plain.trained(), lr=1e-2)
    backward(5)(plain, reference, BATCH, False)

    def run(group: Any) -> tuple[Any, list[Tensor]]:
        model = Odd()
        inner = torch.optim.AdamW(model.trained(), lr=1e-2)
        optimizer = shardcast.shard(
            model, inner, process_group=group, param_dtype="fp32", pack_params=2
        )
        backward(5)(model, optimizer, BATCH.chunk(size)[group.rank()], True)
        return model.state_dict(), [param.detach() for param in model.parameters()]

    for state, params in ThreadedWorld(size).run(run):
        for mine, theirs in zip(params, plain.parameters(), strict=True):
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=ROUNDING)
        assert torch.equal(state["first.weight"], state["tied.weight"])


def test_batch_norm_is_kept_in_fp32_and_channels_last_weights_keep_their_values():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(
        memory_format=torch.channels_last
    )
    weight = model[0].weight.detach().clone()
    optimizer = shardcast.shard(model, adamw(model))
    assert torch.equal(model[0].weight, weight.bfloat16())
    assert model[1].weight.dtype == model[1].running_mean.dtype == torch.float32
    out = model(torch.randn(2, 3, 8, 8))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("param_dtype", ["bf16", "fp32"])
def test_batch_norm_of_a_model_that_comes_in_bf16_is_kept_in_fp32_whole(param_dtype: str):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).bfloat16()
    model[1].running_mean.fill_(0.5)
    optimizer = shardcast.shard(model, adamw(model), param_dtype=param_dtype)
    mean = model[1].running_mean
    assert model[1].weight.dtype == mean.dtype == torch.float32
    assert torch.equal(mean, torch.full((4,), 0.5))
    model(torch.randn(5, 3)).float().sum().backward()
    optimizer.step()


def test_buffers_are_cast_by_policy_and_made_equal_in_every_step_on_request():
    def run(group: Any) -> Tensor:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        optimizer = shardcast.shard(
            model, adamw(model), process_group=group, cast_buffers=True, broadcast_buffers=True
        )
        torch.manual_seed(group.rank())
        model(torch.randn(2, 3, 8, 8)).float().sum().backward()
        optimizer.step()
        assert model[1].running_mean.dtype == torch.bfloat16
        return model[1].running_mean

    first, second = ThreadedWorld(2).run(run)
    assert torch.equal(first, second)


def test_a_model_built_on_meta_is_materialised_by_the_users_function():
    def fill(model: nn.Module) -> None:
        model.to_empty(device="cpu")
        for module in model:
            if isinstance(module, nn.Linear):
                module.reset_parameters()

    def run(group: Any) -> list[Tensor]:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 3))
        optimizer = shardcast.shard(model, adamw(model), process_group=group, materialize=fill)
        backward(2)(model, optimizer, BATCH, True)
        return [param.detach().clone() for param in model.parameters()]

    first, second = ThreadedWorld(2).run(run)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_model_trains_as_the_plain_one_and_keeps_its_names(when: str):
    model, plain = mlp(), mlp()
    front = torch.compile(model, backend="aot_eager") if when == "before" else model
    optimizer = shardcast.shard(front, adamw(model), param_dtype="fp32", pack_params=2)
    if when == "after":
        front = torch.compile(model, backend="aot_eager", fullgraph=True)
    backward(4)(front, optimizer, BATCH, True)
    backward(4)(plain, adamw(plain), BATCH, False)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=ROUNDING)
    assert optimizer.layout.packs[0].slots[0].name == "0.weight"


def test_several_forwards_and_retained_graphs_give_the_sum_of_their_gradients():
    def script(model: nn.Module, optimizer: Any, batch: Tensor, _sharded: bool) -> None:
        for _ in range(3):
            first, second = model(batch).square().mean(), model(batch + 1).square().mean()
            first.backward(retain_graph=True)
            second.backward()
            first.backward()
            optimizer.step()
            optimizer.zero_grad()

    check(adamw, script, tol=ROUNDING)


def test_expanded_and_transposed_buffers_become_rank_zeros():
    def run(group: Any) -> tuple[Tensor, Tensor]:
        model = nn.Linear(7, 3)
        rank = float(group.rank())
        model.register_buffer("wide", torch.full((1, 4), rank).expand(3, 4))
        model.register_buffer("turned", (torch.arange(6.0).view(2, 3) + rank).t())
        shardcast.shard(model, adamw(model), process_group=group)
        return model.wide, model.turned

    for wide, turned in ThreadedWorld(2).run(run):
        assert torch.equal(wide, torch.zeros(3, 4))
        assert torch.equal(turned, torch.arange(6.0).view(2, 3).t())


@pytest.mark.parametrize("master", ["fp32", "split16"])
def test_masters_stay_exact_where_low_precision_values_are_loaded_that_they_have(master: str):
    """As with ``model.load_state_dict(model.state_dict())``; values that differ are taken."""

    def run(group: Any) -> list[Any]:
        model = mlp()
        optimizer = shardcast.shard(model, adamw(model), process_group=group, master=master)
        backward(2)(model, optimizer, BATCH, True)
        found = [optimizer.full_parameters()]  # on rank 0
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        changed = {**saved, "0.weight": saved["0.weight"].clone()}
        changed["0.weight"][2] = 3.0
        exact = {name: value.float() for name, value in saved.items()}
        for values in (saved, changed, exact):
            model.load_state_dict(values)
            found.append(optimizer.full_parameters())
        return [*found, exact]

    before, same, changed, loaded, exact = ThreadedWorld(2).run(run)[0]
    for name, value in before.items():
        assert torch.equal(same[name], value)
        assert torch.equal(loaded[name], exact[name]), "in fp32 zeros are meant"
    assert not torch.equal(before["0.weight"], exact["0.weight"]), "there was more than bf16"
    before["0.weight"][2] = 3.0
    assert torch.equal(changed["0.weight"], before["0.weight"])
