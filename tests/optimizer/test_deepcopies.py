"""Copies and pickles of sharded parameters."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, FORMS, assert_same_bits, install, on_each_rank, values
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import shardcast
from shardcast.testing import threaded_world

FIELDS = {**FORMS, "kept": {"keep_fp32": ("b.*",)}, "no autocast": {"autocast": False}}


def mlp(**fields: Any) -> tuple[nn.Module, Any]:
    model = CASES["mlp"].build()
    return model, shardcast.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), **fields)


@pytest.mark.parametrize("fields", FIELDS)
@on_each_rank(2)
def test_a_copy_of_a_model_or_of_a_part_is_an_ordinary_one_in_fp32(group: Any, fields: str):
    model, optimizer = mlp(process_group=group, **FIELDS[fields])
    install(model, 0)
    optimizer.step()
    copied = copy.deepcopy(model)
    part, one = copy.deepcopy(model.a), copy.deepcopy(model.a.weight)
    listed = copy.deepcopy([*model.parameters()])
    optimizer.wait_sync()
    shown = {name: param.detach().float() for name, param in model.named_parameters()}
    assert_same_bits({n: p.detach() for n, p in copied.named_parameters()}, shown)
    assert_same_bits(dict(zip(shown, (p.detach() for p in listed), strict=True)), shown)
    assert torch.equal(part.weight, shown["a.weight"]) and torch.equal(one, shown["a.weight"])
    for param in (*copied.parameters(), *part.parameters(), one, *listed):
        assert type(param) is nn.Parameter and param.is_leaf and not vars(param)
        assert param.grad is None and param.requires_grad
    plain = CASES["mlp"].build()
    plain.load_state_dict(shown)
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(copied(x), plain(x)), "a copy computes in fp32"
    if fields != "kept":  # kept modules compute in fp32 themselves
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(copied(x), plain(x)), "also under the script's autocast"
    if fields != "fp32":
        features = torch.ones(2, 7, dtype=torch.bfloat16)
        assert torch.equal(part(features), plain.a(features.float())), "and takes activations"
    copied(x).sum().backward()
    assert copied.a.weight.grad.dtype == torch.float32
    before = values(model)
    with torch.no_grad():
        copied.a.weight.zero_()
    assert_same_bits(values(model), before)


def test_ties_within_a_copy_stay_tied():
    model = CASES["gpt"].build()
    shardcast.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.wte.weight and copied.wte.weight.dtype == torch.float32


def test_low_precision_and_the_converted_rest_are_copied_as_they_came():
    model = CASES["mlp"].build()
    model.a.requires_grad_(False)
    model.b.bfloat16()
    inner = torch.optim.SGD([*model.b.parameters(), *model.c.parameters()], lr=0.1)
    optimizer = shardcast.shard(model, inner, convert_rest=True)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    dtypes = {name: param.dtype for name, param in copy.deepcopy(model).named_parameters()}
    assert {name for name in dtypes if dtypes[name] == torch.bfloat16} == {"b.weight", "b.bias"}
    assert {*dtypes.values()} == {torch.bfloat16, torch.float32}
    optimizer.close()
    assert not any(vars(param) for param in model.parameters())


@pytest.mark.parametrize("write", [torch.save, pickle.dump])
def test_a_pickled_parameter_says_nothing_of_shardcast(write: Callable[..., Any]):
    model, optimizer = mlp()
    model.a.weight.tag = "mine"
    for what in (model, model.a.weight, model.b.weight):
        file = io.BytesIO()
        write(what, file)
        file.seek(0)
        if write is torch.save and what is model.b.weight:
            loaded = torch.load(file, weights_only=True)
        else:
            loaded = (
                torch.load(file, weights_only=False) if write is torch.save else (pickle.load(file))
            )
        params = [*loaded.parameters()] if what is model else [loaded]
        assert [vars(param) for param in params if vars(param)] in ([], [{"tag": "mine"}])
        copied = copy.deepcopy(params[0])
        assert copied.dtype == torch.bfloat16 and torch.equal(copied, params[0])
    optimizer.close()
    assert vars(model.a.weight) == {"tag": "mine"}


def meshed(mesh: Any) -> None:
    model = nn.Linear(4, 8, bias=False)
    local = torch.ones(4, 4)
    model.weight = nn.Parameter(DTensor.from_local(local, mesh["tp"], [Shard(0)]))
    shardcast.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh)
    assert model.weight.dtype == torch.bfloat16
    for copied in (copy.deepcopy(model).weight, copy.deepcopy(model.weight)):
        assert isinstance(copied, DTensor) and copied.dtype == torch.float32
        assert copied.placements == model.weight.placements
        assert torch.equal(copied.to_local(), model.weight.to_local().float())
        assert "__deepcopy__" not in vars(copied)


def test_a_copy_of_a_tensor_parallel_parameter_is_one_in_fp32():
    threaded_world({"dp": 2, "tp": 2}, meshed)
