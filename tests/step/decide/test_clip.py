"""Norms and clips beyond what the semantics of clips compare with torch: see tests/optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, assert_same_bits, install, run_world, sgd, sharded, values
from torch import Tensor, nn

from shardcast import _compat
from shardcast.step.decide.norm import PNorm

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")


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


def clears(model: nn.ParameterList) -> None:
    model[0].grad = None


def assigns(model: nn.ParameterList) -> None:
    model[0].grad = torch.full_like(model[0], 5.0)


def edits_and_clears(model: nn.ParameterList) -> None:
    model[0].grad.mul_(2)
    model[1].grad = None


ACTS: dict[str, tuple[Callable[[nn.ParameterList], Any], tuple[float, float]]] = {
    "nothing": (lambda _: None, (0.5, 1.0)),
    "an edit": (lambda model: model[0].grad.mul_(8), (4.0, 1.0)),
    "an edit of data": (lambda model: model[0].grad.data.mul_(8), (4.0, 1.0)),
    "of all in one call": (
        lambda model: torch._foreach_mul_([param.grad for param in model], 8.0),
        (4.0, 8.0),
    ),
    "a cleared gradient": (clears, (0.0, 1.0)),
    "an assigned gradient": (assigns, (5.0, 1.0)),
    "an edit beside a cleared one": (edits_and_clears, (1.0, 0.0)),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("how", ACTS)
def test_what_follows_a_clip_is_what_the_step_trains(how: str, ranks: int) -> None:
    """The clip is multiplied in first, as under torch, where gradients are clipped already."""
    act, expected = ACTS[how]

    def run(group: Any) -> list[set[float]]:
        model = nn.ParameterList(nn.Parameter(torch.zeros(numel)) for numel in (200, 100))
        optimizer = sharded(model, group, lambda m: torch.optim.SGD(m.parameters(), lr=1.0))
        (2 * model[0].sum() + 4 * model[1].sum()).backward()
        norm = optimizer.clip_grad_norm_(math.sqrt(200 * 2**2 + 100 * 4**2) / 4)
        torch.testing.assert_close(norm, torch.tensor(math.sqrt(200 * 2**2 + 100 * 4**2)))
        act(model)
        optimizer.step()
        return [set((-param.detach()).tolist()) for param in model]

    def check(found: list[set[float]]) -> None:
        for values_, value in zip(found, expected, strict=True):
            torch.testing.assert_close(Tensor([*values_]), Tensor([value]))

    for found in [run(None)] if ranks == 1 else run_world(ranks, run)[0]:
        check(found)


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


@pytest.mark.parametrize("limit", [1e-30, 1e-3, 1.0, 1e300, math.inf])
@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e-6, 1.0, 1e15])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_clip_is_torchs(limit: float, factor: float, on_device: bool):
    """Also by an infinite bound, with which scripts ask for the norm alone."""
    model, other = CASES["mlp"].build(), CASES["mlp"].build()
    for m in (model, other):
        nn.utils.vector_to_parameters(torch.zeros(500), m.parameters())  # so all bits are seen
    optimizer, plain = sharded(model, optimizer=sgd), sgd(other)
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
    """A norm that the first clip made small is no reason to train a spike."""
    model = CASES["mlp"].build()
    optimizer, before = sharded(model, guard=lambda norm, _loss: norm > 0.2), values(model)
    install(model, 0)
    assert optimizer.clip_grad_norm_(0.1) > 0.2
    optimizer.clip_grad_norm_(0.05)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert_same_bits(values(model), before)
