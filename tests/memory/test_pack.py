"""Packs: each parameter is a view with its own storage."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, GPT, assert_same_bits, install, on_each_rank, sharded, values
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardcast.memory.shard import take_moved
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import ThreadedWorld

pytestmark = pytest.mark.timeout(60)


class Clones(TorchDispatchMode):
    """Counter of clones of tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def test_a_pack_of_one_stays_as_it_is():
    model = CASES["mlp"].build()
    before = [param.data_ptr() for param in model.parameters()]
    sharded(model, pack_params=1)  # in fp32 on one rank
    assert [param.data_ptr() for param in model.parameters()] == before
    model = CASES["mlp"].build()
    first, *rest = before = [param.data_ptr() for param in model.parameters()]
    sharded(model, unpacked_first=1)
    assert model.a.weight.data_ptr() == first
    assert not set(rest) & {param.data_ptr() for param in model.parameters()}


def test_a_pack_of_one_that_is_not_contiguous_is_packed_in_its_own_order():
    model = nn.Linear(3, 5, bias=False)
    model.weight.data = torch.arange(15.0).view(3, 5).t()
    expected = model.weight.detach().clone()
    sharded(model)
    assert torch.equal(model.weight, expected)
    square = nn.Linear(4, 4, bias=False)
    optimizer = sharded(square)
    expected = square.weight.detach().T.clone()
    square.weight.data = square.weight.data.T  # in the same memory
    assert torch.equal(optimizer.full_parameters()["weight"], expected)
    assert square.weight.is_contiguous() and torch.equal(square.weight, expected)


@pytest.mark.parametrize("fields", [{}, {"pack_params": 1}], ids=["one pack", "two packs"])
@pytest.mark.parametrize(
    ("form", "reads"),
    [
        ({"param_dtype": "fp32"}, True),
        ({"param_dtype": "bf16"}, True),
        ({"param_dtype": "bf16"}, False),
        ({"param_dtype": "bf16", "published": {"fp8_block128": ["*weight"]}}, False),
    ],
)
def test_parameters_that_swapped_their_memory_have_each_others_values_also_when_closed(
    form: Any, reads: bool, fields: Any
):
    closed = []
    for swaps in True, False:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(2)))
        optimizer = sharded(model, **form, **fields)
        one, other = model[0].weight, model[1].weight
        expected = [other.detach().clone(), one.detach().clone()]
        if swaps:
            one.data, other.data = other.data, one.data
            found = optimizer.full_parameters() if reads else {}
            for name, param, value in zip(found, (one, other), expected, strict=False):
                assert torch.equal(param, value)
                assert torch.equal(found[name].to(value.dtype), value)
        else:
            one.data, other.data = expected
        optimizer.close()
        closed.append(values(model))
    assert_same_bits(*closed)


@pytest.mark.parametrize("fields", [{}, {"pack_params": 1}], ids=["one pack", "two packs"])
def test_a_swap_before_an_overlapped_sync_has_ended_waits_for_it(fields: Any):
    def train(group: Any, overlap: bool) -> dict[str, torch.Tensor]:
        model = CASES["mlp"].build()
        model.b = nn.Linear(13, 13)
        model.c = nn.Linear(13, 13)
        optimizer = sharded(model, group, overlap_sync=overlap, **fields)
        for _ in range(3):
            model(torch.ones(2, 7)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        is_pending = any(shard.pack.pending for shard in packed_of(optimizer).shards)
        assert is_pending == overlap
        one, other = model.b.weight, model.c.weight
        one.data, other.data = other.data, one.data
        install(model, 1)
        optimizer.step()
        optimizer.wait_sync()
        return values(model)

    for found, expected in zip(
        ThreadedWorld(2).run(train, True), ThreadedWorld(2).run(train, False), strict=True
    ):
        assert_same_bits(found, expected)


def test_assigned_values_in_other_memory_are_copied_once():
    model = CASES["mlp"].build()
    optimizer = sharded(model)
    expected = {name: value * 0.5 for name, value in values(model).items()}
    for name, param in model.named_parameters():
        param.data = expected[name].clone()
    with Clones() as clones:
        take_moved(packed_of(optimizer).shards)
    assert not clones.count
    assert_same_bits(values(model), expected)


@on_each_rank(2)
def test_a_parameter_that_one_rank_resized_after_the_clip_is_refused_on_all(group: Any):
    model = CASES["mlp"].build()
    optimizer = sharded(model, group)
    install(model, 0)
    optimizer.clip_grad_norm_(1.0)
    if group.rank() == 0:
        model.a.weight.data = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"'a.weight' was resized|rank 0 raised"):
        optimizer.step()


READS: dict[str, Callable[[Any], object]] = {
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "full_parameters": lambda optimizer: optimizer.full_parameters(),
    "step": lambda optimizer: optimizer.step(),
}


@pytest.mark.parametrize(
    ("read", "ranks"), [(None, [0, 1]), *((read, [0, 1]) for read in READS), ("state_dict", [0])]
)
@on_each_rank(2)
def test_memory_that_was_kept_may_come_back_unless_its_values_were_overwritten(
    group: Any, read: str | None, ranks: list[int]
):
    """Scripts that evaluate an EMA do this: back up ``param.data``, swap it and restore it."""
    model = CASES["mlp"].build()
    optimizer = sharded(model, group)
    install(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    before = values(model)
    shadow = {name: value * 0.5 for name, value in before.items()}
    backup = {}
    if group.rank() in ranks:
        for name, param in model.named_parameters():
            backup[name], param.data = param.data, shadow[name]
    if read is not None:
        READS[read](optimizer)
    for name, param in model.named_parameters():
        param.data = backup.get(name, param.data)
    if read is None:
        assert_same_bits(values(model), before)
        optimizer.step()
        return
    install(model, 1)
    with pytest.raises(RuntimeError, match=r"'a.weight' was given back its old memory"):
        optimizer.step()


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_backup_that_shows_the_new_values_is_warned_of(dtype: str, keeps: bool):
    """``param.data.copy_(backup)`` would bring nothing back, where torch has the old values."""
    model = CASES["mlp"].build()
    optimizer = sharded(model, param_dtype=dtype)
    backup = [param.data for param in model.parameters()][: 2 * keeps]
    for param in model.parameters():
        param.data = param.data * 2
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.step()
    assert len(backup) == 2 * keeps
    assert ["'a.weight' got other values" in str(it.message) for it in told] == [True] * keeps


@pytest.mark.parametrize("keeps", [True, False])
def test_a_backup_of_several_packs_is_warned_of_once_and_a_variable_of_a_loop_never(keeps: bool):
    model = CASES["mlp"].build()
    optimizer = sharded(model, param_dtype="fp32", pack_params=1)
    assert len(optimizer.layout.packs) > 1
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            backup = [param.data for param in model.parameters() if keeps]
            for param in model.parameters():
                old = param.data
                param.data = old * 2
            optimizer.step()
    assert old.numel() and len(told) == keeps == bool(backup)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_parameter_has_a_storage_of_its_own_and_is_saved_in_all_ways(dtype: str):
    safetensors = pytest.importorskip("safetensors.torch")
    model = GPT()
    sharded(model, param_dtype=dtype, **({"keep_fp32": "norms"} if dtype == "bf16" else {}))
    storages = [param.untyped_storage() for param in model.parameters()]
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    for storage, param in zip(storages, model.parameters(), strict=True):
        assert param.storage_offset() == 0
        assert storage.nbytes() == param.nbytes, "no neighbor is saved with it"
    expected = values(model)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    size = sum(param.nbytes for param in model.parameters())
    assert buffer.tell() < size * 1.5 + 20_000, "each storage once, and no pack"
    buffer.seek(0)
    assert_same_bits(torch.load(buffer, weights_only=True), expected)
    untied = {k: v for k, v in model.state_dict().items() if k != "head.weight"}
    loaded = safetensors.load(safetensors.save(untied))  # refuses tensors that share memory
    assert_same_bits(loaded, {k: v for k, v in expected.items() if k != "head.weight"})
    exact = {name: value.float() for name, value in expected.items()}
    assert_same_bits(values(copy.deepcopy(model)), exact)
