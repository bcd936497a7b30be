"""Clipping against that of torch on the whole gradient."""

from __future__ import annotations

import math
from typing import Any

import oracle
import pytest
import torch
from models import CASES, assert_same_bits, install, sharded, values
from oracle import set_grads
from torch import Tensor, nn

pytestmark = pytest.mark.timeout(60)

BF16, INF = torch.bfloat16, math.inf


@pytest.mark.parametrize("how", ["call", "option"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, INF])
def test_the_clipped_step_equals_torchs_clip_of_the_whole_gradient(norm_type: float, how: str):
    norms: list[Tensor] = []  # torch's first

    def script(model: nn.Module, optimizer: Any, _batch: Tensor, sharded: bool) -> None:
        set_grads(model, 3)
        if not sharded:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type))
        elif how == "call":
            norms.append(optimizer.clip_grad_norm_(0.05))
        optimizer.step()
        if sharded:
            norms.append(optimizer.grad_norm)

    limit = {"max_grad_norm": 0.05} if how == "option" else {}
    oracle.check(
        lambda model: torch.optim.SGD(model.parameters(), lr=1.0), script, worlds=(3,),
        tol=2**-23, norm_type=norm_type, **limit,
    )  # fmt: skip
    assert norms[0] > 0.05
    for norm in norms[1:]:
        assert torch.equal(norm, norms[1])
        # torch takes the norm of norms in fp32: a few roundings.
        torch.testing.assert_close(norm, norms[0], rtol=2**-21, atol=0)


def test_padding_and_owners_do_not_enter_the_norm():
    model = CASES["scalars"].build()
    optimizer = sharded(model, param_dtype=BF16, alignment=1024)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    count = sum(param.numel() for param in model.parameters())
    assert optimizer.grad_norm == torch.tensor(float(count)).sqrt()


def test_a_clip_whose_gradients_were_dropped_is_forgotten():
    """After clip, look at the norm, drop the batch: the next step has a decision of its own."""
    model, other = CASES["mlp"].build(), CASES["mlp"].build()
    optimizer, expected = sharded(model), sharded(other)
    install(model, 0)
    optimizer.clip_grad_norm_(1e-3)
    model.zero_grad()
    for m, opt in ((model, optimizer), (other, expected)):
        CASES["mlp"].loss(m, CASES["mlp"].batch(0)).backward()
        opt.step()
    assert_same_bits(values(model), values(other))


@pytest.mark.filterwarnings("ignore:step skipped")
def test_values_clipped_by_a_norm_that_is_not_finite_do_not_spoil_later_steps():
    """The factor is NaN then, and a clamp to NaN would reach the padding, which nobody clears."""
    model, other = CASES["mlp"].build(), CASES["mlp"].build()
    optimizer, expected = sharded(model), sharded(other)
    assert optimizer.layout.padding > 0
    for step, m, opt in ((0, model, optimizer), (1, model, optimizer), (1, other, expected)):
        install(m, step)
        if step == 0:
            m.a.weight.grad[1, 2] = math.nan
        opt.clip_grad_norm_(0.05)
        opt.clip_grad_value_(0.01)
        opt.step()
        opt.zero_grad()
    assert optimizer.skipped_steps == 1
    assert_same_bits(values(model), values(other))
