"""Claims of DCP's ``test_state_dict.py``."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import TestCase

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from torch.testing._internal.common_dist_composable import CompositeParamModel, UnitModule
from torch.testing._internal.common_utils import TestCase as TorchTestCase
from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin

from claims.sides import claim, claims_in

CPU = torch.device("cpu")


class Verify(TorchTestCase, VerifyStateDictMixin):
    """torch's own comparison of states."""

    def runTest(self) -> None:  # noqa: N802
        pass


Pair = tuple[nn.Module, Any]


def plainly(optimizer: Any) -> AbstractContextManager[None]:
    return optimizer.as_plain() if hasattr(optimizer, "as_plain") else nullcontext()


def round_trip(
    side: Any,
    build: Callable[[], nn.Module],
    kind: Any,
    flatten: bool = False,
    compiles: bool = False,
    **options: Any,
) -> None:
    """``_test_save_load``: train ten steps, compare the states, and load them into another one."""
    verify, asked = (
        Verify(),
        StateDictOptions(flatten_optimizer_state_dict=flatten),
    )
    torch.manual_seed(42)
    plain = build()

    def sharded() -> Pair:
        model = copy.deepcopy(begun)
        optimizer = side.shard(model, kind, lr=1e-4)
        return (torch.compile(model, backend="eager") if compiles else model), optimizer

    begun = copy.deepcopy(plain)
    steps, copied = (kind(plain.parameters(), lr=1e-4, **options) for _ in range(2))
    model, optimizer = sharded()
    for _ in range(10):
        batch = torch.rand(8, 100)
        for one, by in ((plain, steps), (model, optimizer)):
            by.zero_grad()
            one(batch).sum().backward()
            by.step()
    steps.zero_grad()
    optimizer.zero_grad()
    weights, state = plain.state_dict(), steps.state_dict()

    def compare(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        with plainly(optimizer):
            ours, our_state = get_state_dict(model, optimizer, options=asked)
        verify._verify_msd(weights, ours, asked)
        verify._verify_osd_by_load(plain, steps, copied, our_state)
        if not flatten:
            verify._verify_osd(plain, steps, state, our_state)
        return ours, our_state

    ours, our_state = compare(model, optimizer)
    model, optimizer = sharded()
    set_model_state_dict(model, ours, options=asked)
    with plainly(optimizer):
        set_optimizer_state_dict(model, optimizer, our_state, options=asked)
    compare(model, optimizer)


def composite() -> nn.Module:
    return CompositeParamModel(CPU)


ADAMS = (torch.optim.Adam, torch.optim.AdamW)
ONE_WAY = "wrapper classes, because shardcast has none; these tests all train alike"


@claim(4, without=ONE_WAY, control="it tests DDP, whose state is already plain")
def test_ddp(side: Any) -> None:
    for kind in (*ADAMS, torch.optim.SGD):
        round_trip(side, composite, kind)


@claim(4, without=ONE_WAY)
def test_fsdp2(side: Any) -> None:
    for kind, compiles in itertools.product(ADAMS, (False, True)):
        round_trip(side, composite, kind, compiles=compiles)


@claim(4, without=ONE_WAY, control="tests FSDP1")
def test_fsdp(side: Any) -> None:
    for kind in (*ADAMS, torch.optim.SGD):
        round_trip(side, composite, kind)


@claim(4, without=ONE_WAY, control="tests FSDP1")
def test_compiled_fsdp(side: Any) -> None:
    for kind in ADAMS:
        round_trip(side, composite, kind, compiles=True)


@claim(4, without=ONE_WAY, control="tests FSDP1")
def test_fsdp_ddp(side: Any) -> None:
    for kind in ADAMS:
        round_trip(side, composite, kind)


@claim(4, without="shards of the tied weight; embeddings have 1,000 rows instead of 10,000")
def test_shared_weight(side: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.decoder = nn.Embedding(1000, 30), nn.Linear(30, 1000)
            self.decoder.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(self.embedding((x * 10).to(torch.int)))

    for flatten in (False, True):
        round_trip(side, Tied, torch.optim.AdamW, flatten=flatten)


@claim(4)
def test_strict(side: Any) -> None:
    model = composite()
    side.shard(model)
    check, state = TestCase(), get_model_state_dict(model)
    state["abc"] = torch.zeros(10)
    with check.assertRaisesRegex(RuntimeError, "Unexpected key"):
        set_model_state_dict(model, state)
    key = next(name for name in state if name != "abc")
    state.pop(key)
    told = set_model_state_dict(model, state, options=StateDictOptions(strict=False))
    assert (told.missing_keys, told.unexpected_keys) == ([key], ["abc"])
    state.pop("abc")
    with check.assertRaisesRegex(RuntimeError, "Missing key"):
        set_model_state_dict(model, state)


@claim(4)
def test_cpu_offload_full_state_dict(side: Any) -> None:
    for kind in ADAMS:
        model = composite()
        optimizer = side.shard(model, kind, lr=1e-4)

        def states(optimizer: Any = optimizer, model: Any = model, **asked: Any) -> list[Any]:
            with plainly(optimizer):
                return list(get_state_dict(model, optimizer, options=StateDictOptions(**asked)))

        def tensors(tree: Any) -> list[Any]:
            return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor)]

        assert all(x.device == CPU for x in tensors(states(cpu_offload=True)))
        assert not any(isinstance(x, DTensor) for x in tensors(states(full_state_dict=True)))
        both = states(full_state_dict=True, cpu_offload=True)
        if dist.get_rank() == 0:
            assert all(x.device == CPU for x in tensors(both))
        else:
            assert both == [{}, {}]


@claim(4)
def test_activation_ckpt_fqns_ddp(side: Any) -> None:
    model = composite()
    keys = get_model_state_dict(model).keys()
    apply_activation_checkpointing(model)
    side.shard(model)
    assert get_model_state_dict(model).keys() == keys


@claim(1)
def test_extra_state(side: Any) -> None:
    model = composite()
    side.shard(model)
    UnitModule.get_extra_state = lambda self: "MyState"
    UnitModule.set_extra_state = lambda self, state: None
    try:
        set_model_state_dict(model, get_model_state_dict(model))
        assert model.state_dict()["u1._extra_state"] == "MyState"
        assert model.state_dict().keys() == get_model_state_dict(model).keys()
    finally:
        del UnitModule.get_extra_state, UnitModule.set_extra_state


@claim(1)
def test_non_persistent_buffers(side: Any) -> None:
    model = composite()
    model.register_buffer("dont_save_me", torch.rand(100), persistent=False)
    side.shard(model)
    set_model_state_dict(model, get_model_state_dict(model))
    state = get_model_state_dict(model)
    assert model.state_dict().keys() == state.keys()
    assert "dont_save_me" not in state


@claim(4)
def test_broadcast_from_rank0(side: Any) -> None:
    torch.manual_seed(42)
    plain = composite()
    model = copy.deepcopy(plain)
    steps = torch.optim.Adam(plain.parameters(), lr=1e-3)
    optimizer = side.shard(model, lr=1e-3)
    batch = torch.rand(8, 100)
    for one, by in ((plain, steps), (model, optimizer)):
        one(batch).sum().backward()
        by.step()
    weights, state = get_state_dict(plain, steps)
    full = StateDictOptions(full_state_dict=True)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def is_equal() -> bool:
        with plainly(optimizer):
            ours = get_model_state_dict(model, options=full)
            our_state = get_optimizer_state_dict(model, optimizer, options=full)
        try:
            assert_close(dict(ours), dict(weights))
            assert_close(our_state["state"], state["state"])
        except AssertionError:
            return False
        return True

    assert is_equal()
    model(batch).sum().backward()
    optimizer.step()
    assert not is_equal()
    held: tuple[Any, ...] = ({}, {}, {}) if dist.get_rank() else (weights, weights, state)
    given, again, given_state = (copy.deepcopy(one) for one in held)
    set_model_state_dict(model, given, options=spread)
    with plainly(optimizer):
        set_optimizer_state_dict(model, optimizer, given_state, options=spread)
    assert is_equal()
    if again:
        again.pop(next(iter(again)))
    with TestCase().assertRaisesRegex(RuntimeError, "Missing key"):
        set_model_state_dict(model, again, options=spread)


@claim(4)
def test_optim_state_dict_param_matching(side: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(2)])
    again = copy.deepcopy(model)
    optimizer = side.shard(model, modules=list(model))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=[lambda epoch: 0.95**epoch])
    gather = StateDictOptions(full_state_dict=True, cpu_offload=True)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with plainly(optimizer):
        state = get_optimizer_state_dict(model, optimizer, options=gather)
    if dist.get_rank() == 0:
        assert "initial_lr" in state["param_groups"][0]
    optimizer = side.shard(again, modules=list(again))
    assert "initial_lr" not in optimizer.param_groups[0]
    with plainly(optimizer):
        set_optimizer_state_dict(again, optimizer, state, options=spread)
    if dist.get_rank() == 0:
        assert "initial_lr" in optimizer.param_groups[0]


@claim(4, without="two optimizers on one model; the second one shards a copy instead")
def test_flattened_osd(side: Any) -> None:
    model = composite()
    again = copy.deepcopy(model)
    optimizer = side.shard(model, torch.optim.AdamW, lr=1e-3)
    model(torch.rand(8, 100)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    with plainly(optimizer):
        nested = get_optimizer_state_dict(model, optimizer)
        flattened = get_optimizer_state_dict(model, optimizer, options=flat)
        expected = copy.deepcopy(optimizer.state_dict())
    second = side.shard(again, torch.optim.AdamW, lr=1e-3)
    for state in (flattened, nested):
        with plainly(second):
            set_optimizer_state_dict(again, second, state)
            TorchTestCase().assertEqual(second.state_dict(), expected)


@claim(4, without="tensor-parallel parameters, because no rank has their whole state")
def test_multi_param_groups(side: Any) -> None:
    for empty, full, spread in itertools.product((False, True), repeat=3):
        if spread and not full:
            continue

        def kind(params: Any, lr: float, empty: bool = empty) -> Any:
            first, second = params
            groups = [[first, second], []] if empty else [[first], [second]]
            groups = [{"params": groups[0]}, {"params": groups[1], "lr": 0.2}]
            return torch.optim.AdamW(groups, lr=lr)

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        again = copy.deepcopy(model)
        optimizer = side.shard(model, kind, lr=0.1)
        model(torch.randn(64, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        asked = StateDictOptions(full_state_dict=full, broadcast_from_rank0=spread)
        second = side.shard(again, kind, lr=0.1)
        with plainly(optimizer):
            state = get_optimizer_state_dict(model, optimizer, options=asked)
            expected = copy.deepcopy(optimizer.state_dict())
        with plainly(second):
            set_optimizer_state_dict(again, second, state, options=asked)
            TorchTestCase().assertEqual(second.state_dict(), expected)


NO_OPTIMIZER = "loads weights into a meta-device model that FSDP2 sharded; there is no optimizer"
FSDP1 = "tests FSDP1"
ALONE = "tests torch's functions alone; nothing is sharded"
TESTS = claims_in(globals()) | {
    "test_single_gpu": ALONE,
    "test_activation_ckpt_fqns_fsdp1": FSDP1,
    "test_fsdp_root_not_initialized": FSDP1,
    "test_deprecate_api": ALONE,
    "test_setting_meta_device_model": NO_OPTIMIZER,
    "test_setting_meta_device_model_broadcasting_and_memory": NO_OPTIMIZER,
    "test_set_cpu_model_state_dict_broadcast_from_rank0": ALONE,
    "test_multi_device_load_model_state_dict": ALONE,
    "test_state_dict_with_hook_on_keys": ALONE,
    "test_no_dist": ALONE,
}
