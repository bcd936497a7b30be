"""Losses that are not scaled, and growth of the scale; see also test_semantics_random.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import CASES, run_world, sharded, train
from torch import nn

from shardcast.optimizer.sharded import packed_of

BF16, FP16 = torch.bfloat16, torch.float16


def test_fp16_has_a_dynamic_scale_and_bf16_none():
    dynamic = sharded(nn.Linear(2, 2), param_dtype=FP16, loss_scale=None)
    assert dynamic.loss_scale == 2.0**16
    assert sharded(nn.Linear(2, 2), param_dtype=BF16).loss_scale is None
    loss = torch.ones((), requires_grad=True)
    assert sharded(nn.Linear(2, 2), param_dtype=BF16).scale_loss(loss) is loss


@pytest.mark.parametrize("order", ["zero, scale", "scale, zero"])
def test_the_loss_may_be_scaled_before_or_after_gradients_are_cleared(order: str):
    model = nn.Linear(2, 2)
    optimizer = sharded(model, param_dtype=FP16, loss_scale=8.0)
    for _ in range(2):
        loss = model(torch.ones(1, 2)).float().sum()
        if order == "zero, scale":
            optimizer.zero_grad()
        loss = optimizer.scale_loss(loss)
        if order == "scale, zero":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# -- losses that are not scaled --------------------------------------------------------------------


def unscaled_on(group: Any, bad: int, how: str) -> str:
    model = CASES["mlp"].build()
    model.a.bias.requires_grad_(how != "unfrozen later")
    optimizer = sharded(model, group, param_dtype=FP16, loss_scale=8.0)
    for step in range(2):
        loss = CASES["mlp"].loss(model, CASES["mlp"].batch(step))
        is_bad = step == 1 and (group is None or group.rank() == bad)
        if how == "by hand" and is_bad:
            model.a.weight.grad = torch.ones_like(model.a.weight)
        elif not (how == "no batch" and is_bad):
            (loss if is_bad else optimizer.scale_loss(loss)).backward()
        model.a.bias.requires_grad_(how != "unfrozen later" or step == 1)
        try:
            if step and how == "clip":
                optimizer.clip_grad_norm_(1.0)
            if step and how == "clip value":
                optimizer.clip_grad_value_(1.0)
            optimizer.step()
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match="not scaled"):
                optimizer.step()  # the same gradients again
            return str(error)
        optimizer.zero_grad(set_to_none=how != "no batch")
    return f"ok {float(optimizer.grad_norm):.3g}"


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("how", ["step", "clip", "clip value", "by hand", "unfrozen later"])
def test_all_ranks_refuse_a_loss_that_one_of_them_did_not_scale(how: str, size: int):
    bad = size // 2
    ranks = run_world(size, unscaled_on, bad, how)[0] if size > 1 else [unscaled_on(None, 0, how)]
    assert len(set(ranks)) == 1
    assert f"not scaled on rank {bad};" in ranks[0] and "optimizer.scale_loss(loss)" in ranks[0]


def test_a_rank_without_a_batch_has_nothing_to_scale():
    """It used to raise on this rank only, while the others hung."""
    ranks, _ = run_world(3, unscaled_on, 1, "no batch")
    assert len(set(ranks)) == 1 and ranks[0].startswith("ok")
    assert math.isfinite(float(ranks[0][3:]))


def test_a_step_that_the_guard_skips_says_nothing_of_the_scale():
    """The step neither counts towards growth nor halves the scale."""
    model = CASES["mlp"].build()
    spikes = [False, True, True, False, True, False]
    optimizer = sharded(
        model,
        loss_scale_growth_interval=3,
        loss_scale_init=4.0,
        loss_scale="dynamic",
        guard=lambda _norm, _loss: torch.tensor(spikes[packed_of(optimizer).comm.steps]),
    )
    seen = []
    for step in range(len(spikes)):
        train(model, optimizer, [step])
        seen.append(
            (float(optimizer.loss_scale), packed_of(optimizer).decider.state_dict()["growth"])
        )
    assert seen == [(4, 1), (4, 1), (4, 1), (4, 2), (4, 2), (8, 0)]


def test_the_scale_grows_after_a_resume_with_a_shorter_interval():
    state: dict[str, Any] = {}
    for interval in (100, 3):
        model = CASES["mlp"].build()
        optimizer = sharded(
            model, loss_scale_growth_interval=interval, loss_scale_init=4.0, loss_scale="dynamic"
        )
        if state:
            packed_of(optimizer).decider.load_state_dict(state)
        train(model, optimizer, range(6 if interval == 100 else 1))
        state = packed_of(optimizer).decider.state_dict()
    assert state["loss_scale"] == 8.0
