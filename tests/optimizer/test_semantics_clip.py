"""Clipping, scaling and torch's GradScaler, in the orders that training loops use."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from oracle import BATCH, check, equal, mlp, on_ranks, set_grads, sgd, steps, values
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import shardcast

pytestmark = pytest.mark.timeout(60)

# torch sums norms in fp32, tensor by tensor; shardcast makes one sum in fp64. The factors differ by
# an ulp or two, so each of three steps may round a weight below 0.5 the other way: 3 x 2^-25.
NORM = 3 * 2**-25


def clips(model: nn.Module, optimizer: Any, sharded: bool, kind: str, limit: float) -> Any:
    if sharded:
        return getattr(optimizer, f"clip_grad_{kind}_")(limit)
    return {"norm": clip_grad_norm_, "value": clip_grad_value_}[kind](model.parameters(), limit)


@pytest.mark.parametrize("act", ["load_state_dict", "add_param_group"])
def test_a_load_or_another_group_between_a_clip_and_its_step_leaves_gradients_clipped(act: str):
    def script(model: Any, optimizer: Any, _batch: Tensor, sharded: bool) -> None:
        model[4].requires_grad_(False)
        for step in range(3):
            set_grads(model, step)
            clips(model, optimizer, sharded, "norm", 0.05)
            if act == "load_state_dict":
                optimizer.load_state_dict(optimizer.state_dict())
            elif step == 1:
                model[4].requires_grad_(True)
                optimizer.add_param_group({"params": model[4].parameters()})
            optimizer.step()
            optimizer.zero_grad()

    def build(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[:4].parameters(), lr=0.1, momentum=0.9)

    check(build, script, tol=2 * NORM)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("left", ["zeros", "waiting", "means", "clipped means"])
def test_a_loss_scale_is_loaded_whatever_gradients_are_left(size: int, left: str):
    """Zeros stay zeros, gradients not yet reduced have no effect, and means keep their size."""

    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> tuple[list[Tensor], float]:
        def backward() -> None:
            optimizer.scale_loss(model(batch).float().square().mean()).backward()

        saved = optimizer.state_dict()
        optimizer.scale_loss(model(batch).float().sum() * math.inf).backward()
        optimizer.step()  # skipped, which halves the scale
        optimizer.zero_grad(set_to_none=left != "zeros")
        if left == "waiting" and loads:
            backward()
        if "means" in left or (left == "waiting" and loads):
            with optimizer.no_sync():
                backward()
        if "means" in left:
            backward()
        if left == "clipped means":
            optimizer.clip_grad_norm_(0.1)
        if loads:
            optimizer.load_state_dict(saved)
        if left == "waiting":
            optimizer.zero_grad()
        if "means" not in left:
            backward()
        optimizer.step()
        return [*optimizer.full_parameters().values()], float(optimizer.loss_scale)

    fields = {"param_dtype": "fp16", "loss_scale": "dynamic", "loss_scale_init": 1024.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the skipped step
        loads = False
        (expected, half), *_ = on_ranks(script, size, **fields)
        loads = True
        (found, whole), *_ = on_ranks(script, size, **fields)
    assert (half, whole) == (512.0, 1024.0)
    assert equal(found, expected)


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
        lambda model: split(model, max_grad_norm=0.2),
        script,
        worlds=(1, 2, 4),
        tol=NORM,
        norm_type=p,
        partition=partition,
    )


def test_a_group_may_get_its_own_bound_between_steps():
    def script(model: Any, optimizer: Any, _batch: Tensor, sharded: bool) -> None:
        for step in range(3):
            set_grads(model, step)
            if sharded:
                optimizer.param_groups[0]["max_grad_norm"] = 0.2 if step else None
                optimizer.clip_grad_norm_(0.5)
            elif step:
                clip_grad_norm_(model[0].parameters(), 0.2)
                clip_grad_norm_(model[2:].parameters(), 0.5)
            else:
                clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

    check(split, script, tol=NORM)


class Bounded(torch.optim.SGD):
    """A third-party class with its own option ``max_grad_norm``, like LAMBs."""

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
    """All ranks raise the same error, regardless of the rank that overflows, and none hangs."""

    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> str:
        before = values(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        loss = model(batch).float().square().mean()
        is_bad = bad is not None and torch.equal(batch, BATCH.chunk(2)[bad])
        scaler.scale(loss * (math.inf if is_bad else 1.0)).backward()
        with pytest.raises((RuntimeError, ValueError)) as told:
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert equal(before, model.parameters())
        # Without the scaler, the script works.
        optimizer.zero_grad()
        optimizer.scale_loss(model(batch).float().square().mean()).backward()
        optimizer.step()
        assert not equal(before, model.parameters())
        return str(told.value)

    first, second = on_ranks(script, param_dtype=dtype)
    assert first == second
    if dtype == "fp16" and unscale:  # torch itself refuses first
        assert "unscale FP16" in first
    else:
        assert "remove the GradScaler and call optimizer.scale_loss" in first


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
