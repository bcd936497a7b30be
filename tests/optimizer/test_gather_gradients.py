"""After ``gather_gradients()``, ``.grad`` is the mean over ranks on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from oracle import BATCH, check, equal, on_ranks, sgd
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import shardcast
from shardcast import _compat
from shardcast.testing import threaded_world


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, momentum=0.9)


def sam(model: nn.Module, optimizer: Any, batch: Tensor, is_sharded: bool) -> None:
    """The loop of docs/gradients.md."""
    for _ in range(4):
        model(batch).float().square().mean().backward()
        if is_sharded:
            optimizer.gather_gradients()
        params = [p for p in model.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in params])
        with torch.no_grad():
            before = [p.clone() for p in params]
            for p in params:
                p.add_(p.grad * (0.3 / norm))
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        with torch.no_grad():
            for p, value in zip(params, before, strict=True):
                p.copy_(value)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize("partition", ["even", "whole"])
def test_sam_by_hand_trains_as_under_ddp(partition: str):
    check(momentum, sam, tol=1e-6, partition=partition)
    with pytest.raises(RuntimeError, match=r"reads \.grad"):  # the control: without the gather
        check(momentum, lambda *args: sam(*args[:3], False), worlds=(2,), tol=1e-6)


def pcgrad(model: nn.Module, optimizer: Any, batch: Tensor, is_sharded: bool) -> None:
    params = list(model.parameters())
    for _ in range(3):
        tasks = []
        for task in range(2):
            model(batch)[:, task].square().mean().backward()
            if is_sharded:
                optimizer.gather_gradients()
            tasks.append(torch.cat([p.grad.flatten() for p in params]))
            optimizer.zero_grad(set_to_none=False)
        first, second = tasks
        both = first + second - (first @ second).clamp(max=0) / (first @ first) * first
        for p, grad in zip(params, both.split([p.numel() for p in params]), strict=True):
            p.grad = grad.view_as(p)
        optimizer.step()
        optimizer.zero_grad()


def test_replaced_gradients_train_as_under_ddp_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(momentum, pcgrad, tol=1e-6)


@pytest.mark.parametrize("norm", [None, 8.0])
def test_gathered_gradients_show_a_clip_of_values_on_every_rank(norm: float | None):
    def run(group: Any) -> list[Tensor]:
        model = nn.Linear(5, 3)
        optimizer = shardcast.shard(model, sgd(model), process_group=group, param_dtype="fp32")
        for param in model.parameters():
            param.grad = torch.arange(param.numel()).view(param.shape).float()
        if norm is not None:
            optimizer.clip_grad_norm_(norm)
        optimizer.gather_gradients()
        optimizer.clip_grad_value_(1.5)
        return [param.grad.clone() for param in model.parameters()]

    (expected,) = threaded_world(1, run)
    assert max(grad.max() for grad in expected) == 1.5
    for found in threaded_world(2, run):
        assert equal(found, expected)


def swapped(one: Any, other: Any, _optimizer: Any, _backward: Any) -> list[Tensor]:
    one.grad, other.grad = other.grad, one.grad
    return []


def swapped_as_views(one: Any, other: Any, _optimizer: Any, _backward: Any) -> list[Tensor]:
    """Swap new tensor objects of the same memory."""
    one.grad, other.grad = other.grad.data, one.grad.data
    return []


def swapped_before_a_backward(one: Any, other: Any, _: Any, backward: Any) -> list[Tensor]:
    one.grad, other.grad = other.grad.data, one.grad.data
    backward(1)
    return []


def given_on(one: Any, other: Any, _optimizer: Any, _backward: Any) -> list[Tensor]:
    other.grad, one.grad = one.grad.data, torch.full_like(one, 3.0)
    return []


def cleared_before_a_step(one: Any, _other: Any, optimizer: Any, _backward: Any) -> list[Tensor]:
    kept, one.grad = one.grad, None
    optimizer.step()
    one.grad = kept
    return [kept]


def cleared_before_a_backward(one: Any, other: Any, _: Any, backward: Any) -> list[Tensor]:
    kept, one.grad = one.grad, None
    backward(1)
    return [kept, one.grad.clone(), other.grad.clone()]


def cleared_before_zeros(one: Any, _other: Any, optimizer: Any, backward: Any) -> list[Tensor]:
    kept, one.grad = one.grad, None
    optimizer.zero_grad(set_to_none=False)
    backward(1)
    return [kept]


def tasks_with_heads(one: Any, other: Any, optimizer: Any, backward: Any) -> list[Tensor]:
    """Each backward reaches one parameter."""
    optimizer.zero_grad()
    backward(0, (other,))
    kept = other.grad
    optimizer.zero_grad()
    backward(1, (one,))
    last = one.grad
    one.grad, other.grad = last * 2, kept * 3
    return [kept, last]


KEEPS = [
    swapped,
    swapped_as_views,
    swapped_before_a_backward,
    given_on,
    cleared_before_a_step,
    cleared_before_a_backward,
    cleared_before_zeros,
    tasks_with_heads,
]


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize("keep", KEEPS, ids=lambda keep: keep.__name__)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_that_a_script_keeps_do_not_change(keep: Any, dtype: str):
    def run(group: Any, fields: Any) -> list[Tensor]:
        one, other = (nn.Parameter(torch.full((3, 5), 0.5)) for _ in range(2))
        model = nn.ParameterList([one, other])
        optimizer: Any = torch.optim.SGD([one, other], lr=1.0)
        if fields is not None:
            group = None if "shard_ranks" in fields else group
            optimizer = shardcast.shard(model, optimizer, process_group=group, **fields)

        def backward(seed: int, params: Any = (one, other)) -> None:
            numbers = torch.Generator().manual_seed(seed)
            factors = [torch.randint(1, 8, (3, 5), generator=numbers) for _ in params]
            sum((p * f).sum() for p, f in zip(params, factors, strict=True)).backward()
            if fields is not None:
                optimizer.gather_gradients()

        backward(0)
        seen = keep(one, other, optimizer, backward)
        optimizer.step()
        return [value.detach().float().clone() for value in (*seen, one, other)]

    expected = run(None, None)
    for size, fields in (1, {}), (2, {}), (2, {"pack_params": 1}), (2, {"shard_ranks": 1}):
        for found in threaded_world(
            {"dp": size} if "shard_ranks" in fields else size, run, {**fields, "param_dtype": dtype}
        ):
            assert equal(found, expected), (size, fields)


@pytest.mark.parametrize("is_host", [True, False])
def test_a_gradient_of_one_rank_can_be_read_on_all_ranks_after_the_step_too(
    is_host: bool, monkeypatch: pytest.MonkeyPatch
):
    """On an accelerator, a rank does not wait to learn which ranks had gradients."""
    monkeypatch.setattr(_compat, "is_host", lambda _device: is_host)

    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> list[Tensor]:
        params, rank, seen = list(model.parameters()), int(batch.equal(BATCH.chunk(2)[1])), []
        for number in range(2 * len(params)):
            absent = params[number // 2] if rank == number % 2 else None
            sum(p.square().sum() for p in params if p is not absent).backward()
            optimizer.gather_gradients()
            before = [p.grad.clone() for p in params]
            optimizer.step()
            assert equal(before, [p.grad for p in params])
            optimizer.zero_grad()
            seen += before
        return seen

    first, second = on_ranks(script, partition="whole")
    assert equal(first, second)


def nan_or_raises(script: Any, dtype: str) -> None:
    """A script of two ranks reads NaN, or raises an error by name."""
    try:
        weights = on_ranks(script, param_dtype=dtype)
    except RuntimeError as error:
        assert "reads .grad of" in str(error) or "edits an old .grad of" in str(error)
    else:
        assert all(weight.isnan().all() for rank in weights for weight in rank)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("use", ["edit", "read"])
@pytest.mark.parametrize("kept", ["grad", "view"])
@pytest.mark.parametrize("act", ["gather", "clip", "backward", "cleared backward", "zeros"])
def test_gathered_gradients_that_a_script_keeps_are_right_or_raise(
    act: str, kept: str, use: str, dtype: str
):
    """Under DDP they are ``.grad`` until it is cleared."""

    def script(model: nn.Module, optimizer: Any, batch: Tensor, is_sharded: bool = True) -> Any:
        def backward() -> None:
            model(batch.to(next(model.parameters()).dtype)).float().square().mean().backward()

        params = list(model.parameters())
        backward()
        if is_sharded:
            optimizer.gather_gradients()
        grads = [p.grad.view(p.shape) if kept == "view" else p.grad for p in params]
        if act == "cleared backward":
            optimizer.zero_grad()
        if act == "zeros":
            optimizer.zero_grad(set_to_none=False)
        if act == "gather" and is_sharded:
            optimizer.gather_gradients()
        if act == "clip":
            optimizer.clip_grad_norm_(0.1) if is_sharded else clip_grad_norm_(params, 0.1)
        if "backward" in act:
            backward()
        if use == "edit":
            for grad in grads:
                grad.mul_(3.0)
            optimizer.step()
        if use == "read":
            with torch.no_grad():
                for param, grad in zip(params, grads, strict=True):
                    param.sub_(grad)
        return [param.detach().float() for param in params]

    is_dead = act in ("backward", "zeros") or (act, kept, dtype) == ("clip", "view", "bf16")
    if not is_dead:
        check(sgd, script, worlds=(2,), tol=1e-6 if dtype == "fp32" else 1e-2, param_dtype=dtype)
    elif kept == "grad" or (use == "read" and act != "zeros"):
        nan_or_raises(script, dtype)
