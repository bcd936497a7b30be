"""Norms and clips that tests/optimizer/test_semantics_clip.py does not compare with torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import CASES, assert_same_bits, install, on_each_rank, sgd, sharded, values
from pairwise import pairwise
from torch import nn

from shardcast import _compat
from shardcast.step.decide.norm import PNorm
from shardcast.testing import ThreadedWorld

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore:step skipped")
def test_values_clipped_by_a_norm_that_is_not_finite_do_not_spoil_later_steps():
    """The factor is then NaN; clamping to NaN would spoil the padding, which is never cleared."""
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


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_sums_in_fp32_give_the_norm_of_doubles(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    spans = [
        torch.randn(numel, generator=generator).to(dtype)
        for numel in (0, 5, 4096, 3 * 4096 + 17)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
    norm = PNorm(p, CPU)
    expected = norm.powers(spans)
    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    torch.testing.assert_close(norm.powers(spans).double(), expected, rtol=1e-5, atol=0)
    for bad in (math.inf, -math.inf, math.nan):
        spans[7][4095 if bad > 0 else 0] = bad
        is_finite = norm.powers(spans).isfinite().tolist()
        assert is_finite == [number != 7 for number in range(len(spans))]


@pytest.mark.parametrize(
    ("limit", "factor", "how"),
    pairwise(
        (1e-30, 1e-3, 1.0, 1e300, math.inf),
        (0.0, 1e-30, 1e-6, 1.0, 1e15),
        ((False, 1), (True, 1), (False, 2)),
    ),
    ids=str,
)
def test_a_clip_is_torchs(limit: float, factor: float, how: tuple[bool, int]):
    """This includes an infinite bound, with which scripts only compute the norm."""
    ThreadedWorld(how[1]).run(clipped, limit, factor, how[0])


def clipped(group: Any, limit: float, factor: float, on_device: bool) -> None:
    model, other = CASES["mlp"].build(), CASES["mlp"].build()
    for m in (model, other):
        nn.utils.vector_to_parameters(torch.zeros(500), m.parameters())  # so all bits are visible
    optimizer, plain = sharded(model, group, optimizer=sgd), sgd(other)
    for m in (model, other):
        install(m, 0)
        for param in m.parameters():
            param.grad.mul_(factor)
    norm = optimizer.clip_grad_norm_(torch.tensor(limit) if on_device else limit)
    expected = nn.utils.clip_grad_norm_(other.parameters(), limit)
    optimizer.step()
    plain.step()
    torch.testing.assert_close(float(norm), float(expected))
    torch.testing.assert_close(values(model), values(other), rtol=1e-5, atol=1e-37)


@pytest.mark.filterwarnings("ignore:step skipped")
def test_an_infinity_is_not_clamped_and_skips_the_step():
    model = CASES["mlp"].build()
    optimizer, before = sharded(model), values(model)
    install(model, 0)
    model.a.weight.grad[1, 2] = math.inf
    optimizer.clip_grad_value_(0.01)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert_same_bits(values(model), before)


@pytest.mark.filterwarnings("ignore:step skipped")
def test_what_a_guard_has_judged_holds_after_another_clip():
    """A spike stays skipped although the first clip made its norm small."""
    model = CASES["mlp"].build()
    optimizer, before = sharded(model, guard=lambda norm, _loss: norm > 0.2), values(model)
    install(model, 0)
    assert optimizer.clip_grad_norm_(0.1) > 0.2
    optimizer.clip_grad_norm_(0.05)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert_same_bits(values(model), before)


@pytest.mark.parametrize("size", [1, 2])
@on_each_rank("size")
def test_the_norm_of_clipped_gradients_is_without_their_loss_scale(group: Any, size: int):
    model = CASES["mlp"].build()
    optimizer = sharded(model, group, param_dtype=torch.float16, loss_scale=8.0)
    loss = CASES["mlp"].loss(model, CASES["mlp"].batch(0))
    optimizer.scale_loss(loss).backward()
    norm = float(optimizer.clip_grad_norm_(1e30))
    for bound in (norm / 2, norm):
        optimizer.clip_grad_norm_(bound)
    assert float(optimizer.clip_grad_norm_(norm)) == pytest.approx(norm / 2, rel=1e-3)
