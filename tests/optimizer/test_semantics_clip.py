"""Clipping, scaling and torch's GradScaler, in the orders and groups that training loops use."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracle import BATCH, check, mlp, set_grads, steps
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import shardcast
from shardcast.testing import ThreadedWorld, assert_same_sequence

pytestmark = pytest.mark.timeout(60)

# torch sums norms in fp32 tensor by tensor, here it is one sum in fp64: the factor differs by an
# ulp or two, so each of three steps may round a weight below 0.5 the other way: 3 x 2^-25.
NORM = 3 * 2**-25


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def clipped(*calls: tuple[str, float]) -> Any:
    """A script of three steps that clips by ``norm`` and by ``value`` in the order given."""

    def script(model: nn.Module, optimizer: Any, _batch: Tensor, sharded: bool) -> None:
        for step in range(3):
            set_grads(model, step)
            for kind, limit in calls:
                if kind == "norm" and sharded:
                    optimizer.clip_grad_norm_(limit)
                elif kind == "norm":
                    clip_grad_norm_(model.parameters(), limit)
                elif sharded:
                    optimizer.clip_grad_value_(limit)
                else:
                    clip_grad_value_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()

    return script


def test_values_are_clipped_to_torchs_bits():
    check(sgd, clipped(("value", 0.3)))


def test_values_clipped_before_the_norm_enter_the_norm():
    check(sgd, clipped(("value", 0.1), ("norm", 0.5)), tol=NORM)


def test_values_clipped_after_the_norm_are_those_of_the_clipped_gradient():
    """torch: clamp(g x f); the bound must not be applied to g, with f to follow."""
    check(sgd, clipped(("norm", 2.0), ("value", 0.1)), tol=NORM)


@pytest.mark.parametrize("limits", [(0.5, 3.0), (3.0, 0.5)])
def test_a_second_norm_bounds_what_the_first_left(limits: tuple[float, float]):
    check(sgd, clipped(*(("norm", limit) for limit in limits)), tol=NORM)


def split(model: Any, **own: Any) -> torch.optim.Optimizer:
    first = {"params": list(model[0].parameters()), **own}
    return torch.optim.SGD([first, {"params": list(model[2:].parameters())}], lr=0.1)


@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_a_group_with_its_own_bound_keeps_it_when_the_rest_is_clipped_by_hand(
    p: float, partition: str
):
    def script(model: Any, optimizer: Any, _batch: Tensor, sharded: bool) -> None:
        for step in range(3):
            set_grads(model, step)
            if sharded:
                optimizer.clip_grad_norm_(0.5)
            else:
                clip_grad_norm_(model[0].parameters(), 0.2, norm_type=p)
                clip_grad_norm_(model[2:].parameters(), 0.5, norm_type=p)
            optimizer.step()
            optimizer.zero_grad()

    check(
        lambda model: split(model, max_grad_norm=0.2), script, worlds=(1, 2, 4), tol=NORM,
        norm_type=p, partition=partition,
    )  # fmt: skip


class Bounded(torch.optim.SGD):
    """A third-party class that has an option ``max_grad_norm`` of its own, as LAMBs have."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.defaults["max_grad_norm"] = 0.01
        for group in self.param_groups:
            group["max_grad_norm"] = 0.01  # this class does not use it


def test_an_option_of_the_optimizers_own_is_not_taken_for_a_bound_of_the_group():
    check(lambda model: Bounded(model.parameters(), lr=0.1), steps(3))


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("bad", [0, None])
def test_the_stock_recipe_of_grad_scaler_stops_on_all_ranks_alike(
    dtype: str, unscale: bool, bad: int | None
):
    """Whatever overflows, and where: the same error everywhere, and nobody waits."""

    def run(group: Any) -> str:
        model = mlp()
        optimizer = shardcast.shard(model, sgd(model), process_group=group, param_dtype=dtype)
        before = [param.detach().clone() for param in model.parameters()]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        loss = model(BATCH).float().square().mean()
        scaler.scale(loss * (math.inf if group.rank() == bad else 1.0)).backward()
        with pytest.raises((RuntimeError, ValueError)) as told:
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return str(told.value)

    world = ThreadedWorld(2)
    first, second = world.run(run)
    assert_same_sequence(world.logs)
    assert first == second
    if dtype == "fp16" and unscale:  # torch itself refuses before it comes to us
        assert "unscale FP16" in first
    else:
        assert "remove the GradScaler and call optimizer.scale_loss" in first


def test_after_the_refusal_the_script_without_grad_scaler_works():
    model = mlp()
    optimizer = shardcast.shard(model, sgd(model))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(BATCH).float().square().mean()).backward()
    with pytest.raises(RuntimeError, match="remove the GradScaler"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    before = model[0].weight.detach().clone()
    model(BATCH).float().square().mean().backward()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


def test_clips_may_be_called_as_those_of_torch():
    bounds = []
    for arguments, options in (
        ((0.5,), {}),
        (("params", 0.5), {}),
        (("params",), {"max_norm": 0.5, "norm_type": 2.0}),
        (("params", 0.5, 2), {"error_if_nonfinite": False, "foreach": True}),
        ((), {"parameters": "params", "max_norm": torch.tensor(0.5)}),
        ((), {"max_norm": 0.5, "norm_type": 2.0}),
    ):
        model = mlp()
        optimizer = shardcast.shard(model, sgd(model), param_dtype=torch.float32)
        set_grads(model, 0)
        told = {k: model.parameters() if v == "params" else v for k, v in options.items()}
        norm = optimizer.clip_grad_norm_(
            *(model.parameters() if a == "params" else a for a in arguments), **told
        )
        optimizer.step()
        bounds.append((float(norm), [p.detach().clone() for p in model.parameters()]))
    for norm, weights in bounds:
        assert norm == bounds[0][0] > 0.5
        assert all(torch.equal(a, b) for a, b in zip(weights, bounds[0][1], strict=True))
    set_grads(model, 1)
    optimizer.clip_grad_value_(model.parameters(), clip_value=0.1)


def test_a_clip_that_would_not_be_the_one_asked_for_is_explained():
    model, other = mlp(), nn.Linear(2, 2)
    optimizer = shardcast.shard(model, sgd(model), param_dtype=torch.float32)
    parameters = list(model.parameters())
    for arguments, options, error, message in (
        ((parameters[:-1], 1.0), {}, ValueError, "expected all trained parameters, got all but 1"),
        (([*parameters, *other.parameters()], 1.0), {}, ValueError, "got 2 others that require"),
        ((parameters, 1.0, math.inf), {}, ValueError, "expected norm_type 2.0, got inf; set norm"),
        ((1.0,), {"norm_type": 1.0}, ValueError, "expected norm_type 2.0, got 1.0"),
        ((1.0,), {"error_if_nonfinite": True}, ValueError, "skipped on all ranks"),
        ((parameters,), {}, TypeError, "max_norm: expected a number"),
        ((1.0,), {"max_nrom": 1.0}, TypeError, "unexpected keyword argument 'max_nrom'"),
    ):
        with pytest.raises(error, match=message):
            optimizer.clip_grad_norm_(*arguments, **options)
    with pytest.raises(ValueError, match="clip_grad_value_: expected all trained parameters"):
        optimizer.clip_grad_value_(parameters[:-1], 1.0)
    with pytest.raises(TypeError, match=r"step: expected nothing but a closure, got grad_scale="):
        optimizer.step(grad_scale=2.0)
