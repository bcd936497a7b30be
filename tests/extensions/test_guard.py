"""The guard against spikes, compared with the same rule by hand in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import CASES, Tensors, assert_same_bits, everything, of, ranks_of, sharded, values
from torch import Tensor, nn

import shardcast
from shardcast import _compat, checkpoint
from shardcast.extensions.guard import Guard, GuardRule

pytestmark = pytest.mark.filterwarnings("ignore:step skipped")

STEPS, WINDOW, SIGMA = 20, 8, 3.0
SPIKES = {1, 12, 18, 19}  # the window is not half full at the first one, which is trained
NORM = {"norm": SIGMA, "window": WINDOW}
sgd = of("SGD", lr=0.02)


def loss_of(model: nn.Module, step: int, rank: int, spiky: int) -> tuple[Tensor, Tensor]:
    """Return the loss, and its detached value; only the rank ``spiky`` has spikes."""
    loss = CASES["mlp"].loss(model, CASES["mlp"].batch(10 * step + rank))
    if step in SPIKES and rank == spiky:
        loss = loss * 20.0
    return loss, loss.detach()


def by_hand(
    size: int, rule: dict[str, Any], max_norm: float = math.inf
) -> tuple[Tensors, set[int]]:
    """Apply the rule with torch's own optimizer on the batches of all ranks."""
    model = CASES["mlp"].build()
    optimizer = sgd(model)
    accepted: dict[str, list[Tensor]] = {"norm": [], "loss": []}
    guarded = set()
    for step in range(STEPS):
        losses = [loss_of(model, step, rank, size - 1)[0] / size for rank in range(size)]
        optimizer.zero_grad()
        sum(losses).backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        signals = {"norm": norm.double(), "loss": sum(losses).detach().double()}
        is_spike, scale = False, 1.0
        for name, value in signals.items():
            window = torch.tensor([float(v) for v in accepted[name]][-WINDOW:]).double()
            if name in rule and len(window) >= WINDOW // 2:
                bound = window.mean() + rule[name] * window.std()
                if value > bound:
                    is_spike = True
                    if rule.get("action") == "clip":
                        scale, signals[name] = float(bound / value), bound
        guarded |= {step} if is_spike else set()
        if is_spike and rule.get("action") != "clip":
            continue
        for name, value in signals.items():
            accepted[name].append(value)
        for param in model.parameters():
            param.grad *= scale
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return values(model), guarded


def train(
    group: Any, guard: Any, how: str, fields: dict[str, Any]
) -> tuple[Tensors, set[int], set[int]]:
    """Return the parameters, the skipped steps, and those counted by the guard."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    model = CASES["mlp"].build()
    optimizer = sharded(model, group, sgd, guard=guard, **fields)
    skipped, guarded, count = set(), set(), 0
    for step in range(STEPS):
        loss, given = loss_of(model, step, rank, size - 1)
        if how == "tokens":
            optimizer.count(4)
            loss = loss * 4
        optimizer.scale_loss(loss).backward()
        if how == "clip":
            assert float(optimizer.clip_grad_norm_(0.5)) > 0
        if how == "closure":
            optimizer.step(lambda given=given: given)
        else:
            optimizer.step(**({"loss": given} if how == "loss" else {}))
        optimizer.zero_grad()
        skipped |= {step} if optimizer.last_step_skipped else set()
        guarded |= {step} if optimizer.guarded_steps > count else set()
        count = optimizer.guarded_steps
    return values(model), skipped, guarded


CASES_OF_GUARDS: dict[str, tuple[int, dict[str, Any], str, dict[str, Any]]] = {
    "norm, alone": (1, NORM, "", {}),
    "norm, two ranks": (2, NORM, "", {}),
    "norm, three ranks": (3, NORM, "", {"partition": "whole"}),
    "sharded gradients": (2, NORM, "", {"accumulate": "sharded"}),
    "a loss scale": (2, NORM, "", {"loss_scale": 1000.0}),
    "counted tokens": (2, NORM, "tokens", {}),
    "beside a clip": (2, NORM, "clip", {}),
    "beside max_grad_norm": (2, NORM, "", {"max_grad_norm": 0.5}),
    "loss": (2, {"loss": SIGMA, "window": WINDOW}, "loss", {}),
    "loss of a closure": (2, {"loss": SIGMA, "window": WINDOW}, "closure", {}),
    "both": (3, {"loss": 2.0, "norm": 4.0, "window": WINDOW}, "loss", {}),
    "clipped": (2, {**NORM, "action": "clip"}, "", {}),
    "clipped, then by max_grad_norm": (2, {**NORM, "action": "clip"}, "", {"max_grad_norm": 0.5}),
    "clipped twice": (2, {**NORM, "action": "clip"}, "clip", {"loss_scale": 8.0}),
}


@pytest.mark.parametrize("case", CASES_OF_GUARDS)
def test_a_spike_of_one_rank_is_judged_by_all_ranks_as_by_hand(case: str):
    size, rule, how, fields = CASES_OF_GUARDS[case]
    clips = how == "clip" or "max_grad_norm" in fields
    expected, expected_guarded = by_hand(size, rule, 0.5 if clips else math.inf)
    assert expected_guarded >= SPIKES - {1}, "the control: these steps are spikes"
    for trained, skipped, guarded in ranks_of(size, train, rule, how, fields):
        assert guarded == expected_guarded
        assert skipped == (set() if rule.get("action") == "clip" else guarded)
        torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-6)


def test_an_accelerators_path_judges_alike_without_waiting(monkeypatch: pytest.MonkeyPatch):
    expected = ranks_of(2, train, NORM, "", {})
    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    for (trained, *steps), (values_on_host, *steps_on_host) in zip(
        ranks_of(2, train, NORM, "", {}), expected, strict=True
    ):
        assert steps == steps_on_host
        torch.testing.assert_close(trained, values_on_host)


@pytest.mark.parametrize("how", ["", "loss"])
def test_a_function_may_judge(how: str):
    seen: list[tuple[Tensor, Tensor | None]] = []

    def guard(norm: Tensor, loss: Tensor | None) -> Tensor:
        seen.append((norm, loss))
        return (norm if loss is None else loss) > 3.0

    for _, skipped, guarded in ranks_of(2, train, guard, how, {}):
        assert skipped == guarded == SPIKES
    assert all(norm.dim() == 0 for norm, _ in seen)
    assert all((loss is not None) == (how == "loss") for _, loss in seen)


# -- saved state and warnings ----------------------------------------------------------------------


@pytest.mark.parametrize("through", ["state_dict", "a checkpoint"])
@pytest.mark.parametrize("window", [WINDOW, 5, 20])
def test_a_resumed_guard_goes_on_with_its_window(through: str, window: int, tmp_path: Path):
    def pair(guard: dict[str, Any]) -> tuple[nn.Module, Any]:
        model = CASES["mlp"].build()
        return model, sharded(model, None, sgd, guard=guard)

    def steps(model: nn.Module, optimizer: Any, numbers: range) -> list[bool]:
        skipped = []
        for step in numbers:
            loss_of(model, step, 0, 0)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(bool(optimizer.last_step_skipped))
        return skipped

    model, optimizer = pair(NORM)
    steps(model, optimizer, range(14))
    resumed, again = pair({**NORM, "window": window})
    if through == "state_dict":
        again.load_state_dict(optimizer.state_dict())
    else:
        checkpoint.save(tmp_path, model, optimizer, step=14)
        checkpoint.load(tmp_path, resumed, again)
    assert again.guarded_steps == optimizer.guarded_steps > 0
    assert steps(resumed, again, range(14, 20)) == steps(model, optimizer, range(14, 20))
    assert again.skipped_steps == optimizer.skipped_steps
    if window == WINDOW:
        assert_same_bits(everything(resumed, again), everything(model, optimizer))


def test_a_spike_is_named_and_changes_neither_moments_nor_loss_scale():
    model = CASES["mlp"].build()
    optimizer = sharded(model, guard=NORM, loss_scale="dynamic", loss_scale_init=4.0)
    for step in range(12):
        optimizer.scale_loss(loss_of(model, step, 0, -1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = everything(model, optimizer)
    optimizer.scale_loss(loss_of(model, 12, 0, 0)[0]).backward()
    with pytest.warns(UserWarning, match=r"skipped by the guard: norm [\d.]+ \(bound [\d.]+\)"):
        optimizer.step()
    assert_same_bits(everything(model, optimizer), before)
    assert float(optimizer.loss_scale) == 4.0
    assert optimizer.memory_report()["guard"] == 8 * WINDOW


def test_too_many_spikes_in_a_row_raise_and_name_the_guard():
    model = CASES["mlp"].build()
    optimizer = sharded(model, guard=lambda norm, loss: norm > -1.0, max_skipped_steps=3)
    for step in range(3):
        loss_of(model, step, 0, 0)[0].backward()
        if step < 2:
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match=r"max_skipped_steps.*guard"):
                optimizer.step()


# -- refusals --------------------------------------------------------------------------------------

BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "no window": ({"norm": 6.0}, TypeError, "window of at least 2 steps, got none"),
    "an unknown key": ({"norm": 6.0, "windows": 128}, ValueError, "windows"),
    "no signal": ({"window": 128}, ValueError, "'norm' or 'loss'"),
    "no deviation": ({"norm": 0.0, "window": 128}, ValueError, "above 0"),
    "an infinite one": ({"norm": math.inf, "window": 128}, ValueError, "above 0"),
    "text": ({"norm": "six", "window": 128}, TypeError, "norm"),
    "a window of text": ({"norm": 6.0, "window": "128"}, TypeError, "window"),
    "a window of one": ({"norm": 6.0, "window": 1}, ValueError, "at least 2"),
    "another action": ({"norm": 6.0, "window": 8, "action": "stop"}, ValueError, "action"),
    "a clip by loss": ({"loss": 6.0, "window": 8, "action": "clip"}, ValueError, "action"),
    "a number": (6.0, TypeError, "guard"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_guard_that_is_none_is_refused_by_name(bad: str):
    guard, kind, name = BAD[bad]
    with pytest.raises(kind, match="guard") as error:
        shardcast.ShardcastConfig(guard=guard)
    assert name in str(error.value)


LOSS, PAIR = {"loss": 6.0, "window": 8}, torch.ones(2)
# The guard, what a rank does, the error and its text.
REFUSED: dict[str, tuple[Any, Callable[[Any, int], Any], type[Exception], str]] = {
    "no guard": (None, lambda o, _: o.step(loss=1.0), TypeError, "guard"),
    "a guard of norms": (NORM, lambda o, _: o.step(loss=1.0), TypeError, "guard"),
    "none": (LOSS, lambda o, _: o.step(), RuntimeError, "loss=loss"),
    "of one rank": (
        LOSS,
        lambda o, r: o.step(**{"loss": 1.0} if r else {}),
        RuntimeError,
        "loss differs",
    ),
    "a clip": (LOSS, lambda o, _: o.clip_grad_norm_(1.0), RuntimeError, "max_grad_norm"),
    "a clip beside a function": (
        lambda norm, loss: norm > 9,
        lambda o, _: (o.clip_grad_norm_(1.0), o.step(loss=1.0)),
        TypeError,
        "max_grad_norm",
    ),
    "no tensor": (lambda norm, loss: True, lambda o, _: o.step(), TypeError, "0-dim tensor"),
    "one that differs": (None, lambda o, r: o.step(loss=[None, 1.0][r]), TypeError, "no loss="),
    "two": (LOSS, lambda o, r: o.step(loss=[1.0, PAIR][r]), ValueError, r"got shape \(2,\)"),
    "text": (LOSS, lambda o, _: o.step(loss="1"), ValueError, "got str"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_is_missing_or_of_no_use_is_refused_on_all_ranks(case: str):
    guard, call, kind, names = REFUSED[case]

    def run(group: Any) -> None:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group, sgd, guard=guard)
        before = values(model)
        loss_of(model, 0, 0, 0)[0].backward()
        with pytest.raises(kind, match=names):
            call(optimizer, group.rank())
        assert_same_bits(values(model), before)

    ranks_of(2, run)


def test_a_loss_that_is_not_finite_is_a_spike_and_never_a_part_of_the_window():
    guard = Guard(GuardRule(window=8, loss=3.0), 1, torch.device("cpu"))
    norm = torch.ones((), dtype=torch.float64)
    spikes = []
    for loss in (1.0, math.nan, 1.1, 0.9, 1.0, 1.1, math.inf, 50.0, math.nan, 1.0, 50.0):
        guard.loss = loss
        verdict = guard.judge(guard.read(guard.local()), norm)
        decision: Any = SimpleNamespace(verdicts={guard: verdict}, skip=verdict.is_spike)
        guard.conclude(decision)
        spikes.append(bool(verdict.is_spike))
    assert spikes == [False] * 6 + [True] * 3 + [False, True]
