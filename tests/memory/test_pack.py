"""Packs: parameters as views, on their own and under plain optimizers."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from models import CASES, GPT, assert_same_bits, sharded, values
from torch import Tensor, nn

import shardcast

pytestmark = pytest.mark.timeout(60)

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}


def train(
    model: nn.Module, packs: shardcast.PackedParameters | nn.Module, zero: str, kind: str
) -> dict[str, Tensor]:
    """Five steps of an optimizer over ``packs.parameters()``."""
    optimizer = OPTIMIZERS[kind](packs.parameters())
    for step in range(5):
        CASES["mlp"].loss(model, CASES["mlp"].batch(step)).backward()
        optimizer.step()
        if zero == "to zero":
            optimizer.zero_grad(set_to_none=False)
        elif zero == "optimizer":
            optimizer.zero_grad()
        elif zero == "packs":
            packs.zero_grad()
    return values(model)


@pytest.mark.parametrize(
    ("options", "kind", "zero"),
    [
        ({}, "adamw", "optimizer"),
        ({}, "sgd", "never"),
        ({"pack_params": 1}, "sgd", "packs"),
        ({"unpacked_first": 2, "alignment": 8}, "adamw", "to zero"),
        ({"pack_params": 4}, "adamw", "never"),
        ({"group_fn": lambda name, param: param.dim()}, "sgd", "to zero"),
        ({"pack_params": 4}, "sgd", "optimizer"),
        ({}, "adamw", "packs"),
    ],
)
def test_plain_optimizers_over_packs_equal_training_without_packs(
    options: dict[str, Any], kind: str, zero: str
):
    model = CASES["mlp"].build()
    twin = copy.deepcopy(model)
    packs = shardcast.pack_parameters(model, **options)
    assert_same_bits(train(model, packs, zero, kind), train(twin, twin, zero, kind))


def test_packs_make_the_optimizer_run_once_per_pack():
    model = CASES["mlp"].build()
    packs = shardcast.pack_parameters(model, alignment=8)
    assert [name for name, _ in packs.named_parameters()] == ["pack.0"]
    (flat,) = packs.parameters()
    assert flat.dim() == 1
    CASES["mlp"].loss(model, CASES["mlp"].batch(0)).backward()
    gradients = [p.grad for p in model.parameters()]
    assert flat.grad is not None
    for slot, grad in zip(packs.layout.packs[0].slots, gradients, strict=True):
        assert torch.equal(flat.grad[slot.offset : slot.end].view(slot.shape), grad)
    grown = sum(float(grad.square().sum()) for grad in gradients)
    assert float(flat.grad.square().sum()) == pytest.approx(grown, rel=1e-6), "padding is zero"


def test_a_pack_of_one_stays_as_it_is():
    model = CASES["mlp"].build()
    before = [param.data_ptr() for param in model.parameters()]
    packs = shardcast.pack_parameters(model, pack_params=1)
    assert [param.data_ptr() for param in model.parameters()] == before
    assert [flat.data_ptr() for flat in packs.parameters()] == before
    sharded(model, pack_params=1)  # in fp32 on one rank
    assert [param.data_ptr() for param in model.parameters()] == before
    model = CASES["mlp"].build()
    first, *rest = before = [param.data_ptr() for param in model.parameters()]
    shardcast.pack_parameters(model, unpacked_first=1)
    assert model.a.weight.data_ptr() == first
    assert not set(rest) & {param.data_ptr() for param in model.parameters()}


def test_a_pack_of_one_that_is_not_contiguous_is_packed_in_its_own_order():
    model = nn.Linear(3, 5, bias=False)
    model.weight.data = torch.arange(15.0).view(3, 5).t()
    expected = model.weight.detach().clone()
    shardcast.pack_parameters(model)
    assert torch.equal(model.weight, expected)


def test_frozen_parameters_have_packs_that_get_no_gradient():
    model = CASES["mlp"].build()
    model.b.weight.requires_grad_(False)
    twin = copy.deepcopy(model)
    packs = shardcast.pack_parameters(model)
    trained, frozen = packs.parameters()
    assert trained.requires_grad and not frozen.requires_grad
    expected = train(twin, twin, "optimizer", "adamw")
    assert_same_bits(train(model, packs, "optimizer", "adamw"), expected)
    assert frozen.grad is None


def test_ties_survive_packing():
    model = GPT()
    packs = shardcast.pack_parameters(model)
    assert model.head.weight is model.wte.weight
    assert sum("wte.weight" in line for line in repr(packs).splitlines()) == 1
    assert "head.weight" not in repr(packs)


def test_parameters_keep_their_identity_and_values():
    model = GPT()
    params, before = list(model.parameters()), values(model)
    packs = shardcast.pack_parameters(model)
    assert all(new is old for new, old in zip(model.parameters(), params, strict=True))
    assert_same_bits(values(model), before)
    (flat,) = packs.parameters()
    with torch.no_grad():
        flat.fill_(3.0)
    assert all(bool((param == 3).all()) for param in model.parameters()), "views of the pack"


def packed_models() -> dict[str, nn.Module]:
    packed, one, low = GPT(), GPT(), GPT()
    shardcast.pack_parameters(packed)
    sharded(one)
    sharded(low, param_dtype=torch.bfloat16, keep_fp32="norms")
    return {"packed": packed, "fp32": one, "bf16": low}


@pytest.mark.parametrize("which", ["packed", "fp32", "bf16"])
def test_every_parameter_has_a_storage_of_its_own(which: str):
    model = packed_models()[which]
    storages = [param.untyped_storage() for param in model.parameters()]
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    for storage, param in zip(storages, model.parameters(), strict=True):
        assert param.storage_offset() == 0
        assert storage.nbytes() == param.nbytes, "nothing of the neighbours would be saved"


@pytest.mark.parametrize("which", ["packed", "fp32", "bf16"])
def test_all_ways_of_saving_keep_every_parameter(which: str):
    safetensors = pytest.importorskip("safetensors.torch")
    model = packed_models()[which]
    expected = values(model)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    size = sum(param.nbytes for param in model.parameters())
    assert buffer.tell() < size * 1.5 + 20_000, "each storage once, and no pack with it"
    buffer.seek(0)
    assert_same_bits(torch.load(buffer, weights_only=True), expected)
    untied = {k: v for k, v in model.state_dict().items() if k != "head.weight"}
    loaded = safetensors.load(safetensors.save(untied))  # refuses tensors that share memory
    assert_same_bits(loaded, {k: v for k, v in expected.items() if k != "head.weight"})
    exact = {name: value.float() for name, value in expected.items()}
    assert_same_bits(values(copy.deepcopy(model)), exact)


def test_packed_memory_outlives_the_pack_object():
    model = CASES["mlp"].build()
    expected = values(model)
    shardcast.pack_parameters(model)  # the result is dropped
    torch.zeros(1000), torch.ones(1000)
    assert_same_bits(values(model), expected)


def test_a_packed_model_that_nobody_holds_is_freed():
    def abandoned() -> list[weakref.ref[object]]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        packed = shardcast.pack_parameters(model)
        return [weakref.ref(item) for item in (model, model[0].weight, packed.packs[0])]

    left = abandoned()
    gc.collect()
    assert [item() is not None for item in left] == [False] * 3, "model, parameter, pack"


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.rare = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.used(x)
        return self.rare(x) if both else x


@pytest.mark.parametrize("by_closure", [False, True])
def test_a_parameter_without_a_gradient_among_others_of_its_pack_is_an_error_of_the_step(
    by_closure: bool,
):
    """It would be decayed; in a pack of its own it is left alone."""
    model, x = Switched(), torch.ones(2, 3)
    packs = shardcast.pack_parameters(model)
    optimizer = torch.optim.AdamW(packs.parameters(), weight_decay=0.5)

    def closure() -> torch.Tensor:
        loss = model(x, both=False).sum()
        loss.backward()
        return loss

    model(x, both=True).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if not by_closure:
        closure()
    with pytest.raises(RuntimeError, match=r"'rare.*group_fn"):
        optimizer.step(closure if by_closure else None)
    model = Switched()
    packs = shardcast.pack_parameters(model, group_fn=lambda name, _param: name.split(".")[0])
    optimizer = torch.optim.AdamW(packs.parameters(), weight_decay=0.5)
    before = model.rare.weight.clone()
    for _ in range(2):
        optimizer.step(closure)
        optimizer.zero_grad()
    assert torch.equal(model.rare.weight, before)
