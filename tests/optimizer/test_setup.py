"""After ``shard``: parameters are equal, and masters have full precision."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from commands import python
from models import (
    CASES,
    GPT,
    MLP,
    assert_same_bits,
    install,
    on_each_rank,
    parts,
    run_world,
    sharded,
    values,
    whole,
)
from torch import Tensor, nn

import shardcast
from shardcast import _compat
from shardcast.memory import packed_param
from shardcast.optimizer import setup
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import fake_world

BF16, FP32 = torch.bfloat16, torch.float32


class WithBuffers(nn.Module):
    """Parameters in and out of the optimizer, buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.outside = nn.Linear(5, 3), nn.Linear(3, 3)
        self.outside.weight.data = torch.randn(3, 3).t()  # not contiguous
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("count", torch.randint(100, (2,)))
        self.register_buffer("nothing", None)
        self.register_buffer("wide", torch.randn(1, 4).expand(3, 4))
        self.register_buffer("turned", torch.randn(2, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(self.trained(x))


def start(group: Any, make: Any, fields: dict[str, Any]) -> tuple[dict, dict, dict]:
    """Return values before and after ``shard``, and masters; each rank starts with other values."""
    torch.manual_seed(group.rank())
    model = make()
    before = values(model)
    optimizer = sharded(model, group, **fields)
    return before, values(model), parts(optimizer)


@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_start_from_the_first_ranks_values_and_masters_are_exact(
    size: int, dtype: torch.dtype, partition: str
):
    fields = {"param_dtype": dtype, "partition": partition, "pack_params": 3, "autocast": False}
    ranks, _ = run_world(size, start, GPT, fields)
    first = ranks[0][0]
    assert not torch.equal(ranks[1][0]["wte.weight"], first["wte.weight"]), "they differed before"
    for _, after, _ in ranks:
        assert_same_bits(after, {name: tensor.to(dtype) for name, tensor in first.items()})
    masters = whole(found for _, _, found in ranks)
    names = {name for name in first if name != "head.weight"}
    assert masters.keys() == {f"{name}/master" for name in names}
    for name in names:
        assert torch.equal(masters[f"{name}/master"], first[name].flatten()), "masters are not cast"


def test_buffers_and_parameters_outside_of_the_optimizer_are_made_equal_too():
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.trained.parameters(), lr=0.1)

    ranks, _ = run_world(2, start, WithBuffers, {"optimizer": make, "param_dtype": BF16})
    first = ranks[0][0]
    for _, after, _ in ranks:
        for name, tensor in after.items():
            assert torch.equal(tensor, first[name].to(tensor.dtype)), name
            assert tensor.dtype == (BF16 if name.startswith("trained.") else first[name].dtype)


def test_what_the_model_had_as_gradients_is_forgotten():
    model = MLP()
    install(model, 0)
    optimizer = sharded(model, param_dtype=BF16)
    assert all(param.grad is None for param in model.parameters())
    before = values(model)
    optimizer.step()
    assert_same_bits(values(model), before)


def test_a_model_that_is_bf16_already_has_masters_of_what_it_holds():
    model = MLP().bfloat16()
    before = values(model)
    optimizer = sharded(model, param_dtype=BF16)
    assert_same_bits(values(model), before)
    for name, master in whole([parts(optimizer)]).items():
        assert master.dtype == FP32
        assert torch.equal(master, before[name.removesuffix("/master")].float().flatten())


def test_a_group_of_one_rank_issues_no_collective():
    with fake_world(1, 0) as group:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group, param_dtype=BF16)
        install(model, 0)
        optimizer.step()
        assert group.log == []


def empty_model(group: Any) -> dict[str, Tensor]:
    model = nn.Module()
    model.nothing = nn.Parameter(torch.empty(0, 4))
    optimizer = sharded(model, group)
    model.nothing.grad = torch.empty(0, 4)
    optimizer.step()
    return values(model)


def test_a_model_of_empty_parameters_alone_can_be_sharded():
    ranks, _ = run_world(2, empty_model)
    assert all(found["nothing"].shape == (0, 4) for found in ranks)


def abandoned(size: int, how: str) -> dict[str, weakref.ref[Any]]:
    """Return weak references to parts of a sharded model that nothing refers to any more."""
    with fake_world(size, 0) as group:
        model = MLP()
        optimizer = sharded(model, group if size > 1 else None, param_dtype=BF16)
        if how != "never stepped":
            CASES["mlp"].loss(model, CASES["mlp"].batch(0)).backward()
            optimizer.step()
        pack = packed_of(optimizer).shards[0].pack
        if how.startswith("closed"):
            optimizer.close(restore=how == "closed")
        found = {"optimizer": optimizer, "model": model, "parameter": model.a.weight, "pack": pack}
        return {name: weakref.ref(item) for name, item in found.items()}


@pytest.mark.parametrize("how", ["never stepped", "stepped", "closed", "closed in low precision"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_sharded_model_that_nobody_holds_is_freed(size: int, how: str):
    """No cycle may pass through post-accumulate hooks, which torch hides from the collector."""
    left = abandoned(size, how)
    gc.collect()
    assert [name for name, item in left.items() if item() is not None] == []


def test_the_other_public_modules_are_imported_when_they_are_used():
    code = (
        "import sys, shardcast\n"
        "lazy = [f'shardcast.{n}' for n in ('checkpoint', 'testing', 'accelerate')]\n"
        "assert not set(lazy) & set(sys.modules)\n"
        "shardcast.checkpoint.save, shardcast.testing.spawn\n"
        "shardcast.accelerate.ShardcastAccelerator\n"
        "try: shardcast.chekpoint\n"
        "except AttributeError as error: print(error)\n"
    )
    done = python("-c", code)
    assert done.stdout == "module 'shardcast' has no attribute 'chekpoint'\n", done.stderr


def test_a_cpu_that_multiplies_slowly_is_named_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "has_products", lambda dtype: dtype == FP32)
    monkeypatch.setattr(setup, "told", set())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for dtype in (FP32, BF16, BF16, torch.float16):
            sharded(MLP(), param_dtype=dtype)
    texts = [str(one.message) for one in told]
    assert len(texts) == 2 and all("slow on this CPU" in text for text in texts)
    assert "bfloat16" in texts[0] and "float16" in texts[1] and "bfloat16" not in texts[1]


# -- a parameter belongs to one sharded optimizer -------------------------------------------------


def two(trunk: nn.Module) -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(trunk, nn.Linear(3, 2)), nn.Sequential(trunk, nn.Linear(3, 1))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("frozen", [False, True])
@on_each_rank(2)
def test_a_parameter_of_another_sharded_optimizer_is_refused_by_name_on_all_ranks(
    group: Any, dtype: str, frozen: bool
):
    one, other = two(CASES["mlp"].build().requires_grad_(not frozen))
    fields = {"process_group": group, "param_dtype": dtype}
    first = shardcast.shard(one, torch.optim.SGD(one.parameters(), lr=0.1), **fields)
    before = values(other)
    given = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'0.a.weight' and 5 more .* another sharded optim"):
        shardcast.shard(other, given, **fields)
    assert_same_bits(values(other), before)
    head = shardcast.shard(other, torch.optim.SGD(other[1].parameters(), lr=0.1), **fields)
    with pytest.raises(ValueError, match=r"'0.b.bias' .* another sharded optimizer"):
        head.add_param_group({"params": [other[0].b.bias]})
    head.close()
    first.close()
    shardcast.shard(other, given, **fields).close()


@on_each_rank(2)
def test_a_parameter_that_one_rank_alone_has_in_another_sharded_optimizer_is_refused_on_all(
    group: Any,
):
    model = CASES["mlp"].build()
    if group.rank() == 1:
        packed_param.note(model.a.weight, torch.float32, lambda: None)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'a.weight' belongs to another sharded optimizer"):
        shardcast.shard(model, inner, process_group=group)


@on_each_rank(2)
def test_a_part_of_a_model_that_was_closed_without_restore_goes_on_from_its_masters(group: Any):
    one, other = two(CASES["mlp"].build())
    first = shardcast.shard(one, torch.optim.SGD(one.parameters(), lr=0.1), process_group=group)
    install(one, 0)
    first.step()
    masters = first.full_parameters()
    first.close(restore=False)
    second = shardcast.shard(
        other, torch.optim.SGD(other.parameters(), lr=0.1), process_group=group
    )
    for name, value in second.full_parameters().items():
        assert name.startswith("1.") or torch.equal(value, masters[name]), name
