"""``optimizer.attempt()``: a failing rank costs at most one step, and is named."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import CASES, MLP, adamw, assert_same_bits, on_each_rank, run_world, sharded, values
from sequences import Fail
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardcast
from shardcast import _compat
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import RankLeftError, threaded_world

pytestmark = pytest.mark.filterwarnings("ignore:step made without", "ignore:step skipped")
CASE = CASES["mlp"]


class BadSample(Exception):  # noqa: N818
    """Raised by a failing rank."""


def micro_batches(model: nn.Module, optimizer: Any, step: int, rank: int, fails: str) -> None:
    """Run two micro-batches; ``fails`` names the place of an error in the first one, if any."""
    for number in range(2):
        x, y = CASE.batch(100 * step + 10 * rank + number)
        with optimizer.no_sync() if number == 0 else contextlib.nullcontext():
            if fails == "data":
                raise BadSample("data")
            if fails == "forward":
                model(x[:, :3])  # a wrong shape
            hidden = torch.tanh(model.a(x))
            if fails == "half way":
                hidden = Fail.apply(hidden)
            out = model.c(torch.tanh(model.b(hidden))).float()
            optimizer.scale_loss(nn.functional.mse_loss(out, y)).backward()


def train(
    group: Any, plan: dict[int, dict[int, str]], steps: int = 4, **fields: Any
) -> tuple[Any, Any]:
    """Train; ``plan`` gives for each step which ranks fail, and where."""
    model = CASE.build()
    optimizer = sharded(model, group, **{"on_error": "drop", **fields})
    rank = 0 if group is None else group.rank()
    for step in range(steps):
        with optimizer.attempt():
            micro_batches(model, optimizer, step, rank, plan.get(step, {}).get(rank, ""))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_the_step_warns_of_rank_and_error_and_keeps_them():
    plan = {1: {1: "data"}, 2: {0: "forward"}}

    def run(group: Any) -> Any:
        return train(group, plan)[1].failures()

    with pytest.warns(UserWarning, match="ranks that failed: rank 1: BadSample: data"):
        failures, others = run_world(2, run)[0]
    assert failures == others
    assert failures[0] == (2, 1, "BadSample: data") and failures[1].error.startswith("Runtime")


def test_too_many_failed_steps_in_a_row_raise_on_all_ranks():
    plan = {step: {1: "data"} for step in (0, 1, 3, 4, 5)}
    fields: Any = {"on_error": {"action": "drop", "max_failed_steps": 3}}

    def run(group: Any) -> str:
        with pytest.raises(RuntimeError, match="3 steps in a row") as caught:
            train(group, plan, 9, **fields)
        return str(caught.value)

    for text in run_world(2, run)[0]:
        assert "rank 1: BadSample: data" in text and "max_failed_steps" in text


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("action", ["drop", "skip"])
def test_a_rank_that_fails_before_it_counts_divides_as_the_others_do(action: str, clip: bool):
    """In the first step, and if a script counts only in some steps."""
    counted, failing = (True, False, True, True, False), {0: "before", 1: "", 2: "after", 4: ""}

    def run(group: Any, attempts: bool) -> dict[str, Tensor]:
        model, fields = CASE.build(), {"on_error": action} if attempts else {}
        optimizer = sharded(model, group, lambda m: torch.optim.SGD(m.parameters(), 0.1), **fields)
        for step, counts in enumerate(counted):
            left_out = step in failing and group.rank() == 1
            if not attempts and action == "skip" and step in failing:
                continue
            with optimizer.attempt() if attempts else optimizer.no_sync():
                if left_out and attempts and failing[step] != "after":
                    raise BadSample(step)
                if counts:
                    optimizer.count(0 if left_out else 3 + step)
                x, y = CASE.batch(10 * step + group.rank())
                if not left_out:
                    nn.functional.mse_loss(model(x), y, reduction="sum").backward()
                elif attempts:
                    raise BadSample(step)
            if not attempts and not counts:
                optimizer.divisor = 1 if step in failing else None
            if clip:
                optimizer.clip_grad_value_(0.05)
            optimizer.step()
            optimizer.divisor = None
            optimizer.zero_grad()
        return values(model)

    found, expected = run_world(2, run, True)[0], run_world(2, run, False)[0]
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("action", ["drop", "skip"])
@pytest.mark.parametrize("way", ["zero_grad", "sleep", "zero_grad outside"])
def test_a_failure_goes_with_the_gradients_that_a_script_drops(way: str, action: str):
    def run(group: Any, fails: bool) -> dict[str, Tensor]:
        model = CASE.build()
        optimizer: Any = sharded(model, group, on_error=action)
        for step in range(3):
            if fails and way == "zero_grad outside":
                CASE.loss(model, CASE.batch(step)).backward()
                optimizer.zero_grad()
            for again in range(2):
                with optimizer.attempt():
                    CASE.loss(model, CASE.batch(10 * step + again)).backward()
                    if fails and not again and group.rank() == 1:
                        raise BadSample("of what is given up")
                if not again and way == "sleep":
                    optimizer.sleep()
                    optimizer.wake()
                elif not again:
                    optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        assert not optimizer.failures() and not optimizer.skipped_steps
        return values(model)

    found, expected = run_world(2, run, True)[0], run_world(2, run, False)[0]
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)


def test_a_loss_scale_and_moments_of_fp16_go_on():
    plan = {1: {1: "half way"}, 3: {0: "data", 1: "data"}}

    def run(group: Any) -> float:
        fields = {"param_dtype": torch.float16, "loss_scale": "dynamic", "loss_scale_init": 8.0}
        _, optimizer = train(group, plan, 6, **fields, loss_scale_growth_interval=2)
        assert optimizer.skipped_steps == 1
        return float(optimizer.loss_scale)

    assert run_world(2, run)[0] == [32.0, 32.0]  # five steps; the skip is no overflow


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit])
def test_what_is_no_failure_is_raised(error: type[BaseException]):
    _, optimizer = train(None, {}, 1)
    with pytest.raises(error), optimizer.attempt():
        raise error
    with optimizer.attempt():  # the previous one is closed
        pass
    optimizer.step()
    assert optimizer.failures() == []


def test_errors_of_collectives_are_raised():
    def run(group: Any) -> None:
        _, optimizer = train(group, {}, 1)
        if group.rank() == 0:
            with optimizer.attempt():
                dist.all_reduce(torch.ones(1), group=group)

    with pytest.raises(RankLeftError):
        threaded_world(2, run)


MISUSES: dict[str, tuple[str, Callable[[nn.Module, Any], Any]]] = {
    "still open; leave it": ("inside", lambda _, optimizer: optimizer.attempt().__enter__()),
    "leave the block": ("inside", lambda _, optimizer: optimizer.step()),
    "divisor": ("before", lambda _, optimizer: setattr(optimizer, "divisor", 3.0)),
    r"call optimizer\.zero_grad": (
        "before",
        lambda model, _: CASE.loss(model, CASE.batch(0)).backward(),
    ),
}


@pytest.mark.parametrize("text", MISUSES)
def test_a_wrong_use_is_an_error_of_its_own(text: str):
    when, misuse = MISUSES[text]

    def run(group: Any) -> None:
        model, optimizer = train(group, {}, 1)
        if when == "before":
            misuse(model, optimizer)
        with pytest.raises(RuntimeError, match=text), optimizer.attempt():
            if when == "inside":
                misuse(model, optimizer)

    run_world(2, run)


def test_without_the_option_attempt_names_it():
    optimizer = sharded(CASE.build())
    with pytest.raises(AttributeError, match="on_error='skip'"):
        optimizer.attempt()
    assert not hasattr(optimizer, "attempt")


REFUSED = [{"accumulate": "sharded"}, {"on_error": "drop", "guard": {"loss": 3.0, "window": 4}}]


@pytest.mark.parametrize("fields", REFUSED, ids=str)
@on_each_rank(2)
def test_what_cannot_leave_a_rank_out_is_refused_by_name(group: Any, fields: dict[str, Any]):
    model = CASE.build()
    before = values(model)
    with pytest.raises(ValueError, match="on_error: expected"):
        sharded(model, group, **{"on_error": "skip", **fields})
    assert_same_bits(values(model), before)


def test_model_parallel_meshes_pipelines_and_synchronized_norms_are_refused():
    def in_mesh(mesh: DeviceMesh) -> None:
        model = MLP()
        with pytest.raises(ValueError, match="model-parallel mesh"):
            shardcast.shard(model, adamw(model), mesh=mesh, on_error="skip")

    threaded_world({"tp": 2, "dp": 2}, in_mesh)

    def pipeline(mesh: DeviceMesh) -> None:
        model = MLP()
        with pytest.raises(ValueError, match="on_error: expected"):
            shardcast.shard([model], adamw(model), mesh=mesh, on_error="skip")

    threaded_world({"pp": 2, "dp": 2}, pipeline)

    def synchronized(group: Any) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
        optimizer = sharded(model, group, on_error="drop")
        with pytest.raises(RuntimeError, match="SyncBatchNorm"), optimizer.attempt():
            pass

    run_world(2, synchronized)


@pytest.mark.parametrize("action", ["skip", "drop"])
def test_a_guard_that_is_given_a_loss_or_none_judges_alike(action: str):
    loss = {"guard": {"loss": 50.0, "window": 4}} if action == "skip" else {}

    def run(group: Any) -> int:
        model = CASE.build()
        optimizer = sharded(model, group, on_error=action, **loss)
        for step in range(5):
            loss_of_step = None
            with optimizer.attempt():
                if step == 2 and group.rank() == 1:
                    raise BadSample("data")
                loss_of_step = CASE.loss(model, CASE.batch(step))
                loss_of_step.backward()
            optimizer.step(loss=loss_of_step) if loss else optimizer.step()
            optimizer.zero_grad()
        return optimizer.skipped_steps

    assert run_world(2, run)[0] == [action == "skip"] * 2


def test_on_an_accelerator_names_come_by_the_all_reduce(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    plan = {1: {1: "half way"}, 3: {0: "forward", 1: "data"}}

    def run(group: Any) -> Any:
        model, optimizer = train(group, plan, 6)
        return values(model), optimizer.failures(), optimizer.skipped_steps

    expected = [(2, 1, "BoomError"), (4, 0, "RuntimeError"), (4, 1, "BadSample")]
    results, _ = run_world(2, run)
    for found, failures, skipped in results:
        assert failures == expected and skipped == 1
        assert_same_bits(found, results[0][0])


def test_an_attempt_keeps_no_tensor_of_a_rank_that_failed():
    _, optimizer = train(None, {}, 1)
    alive: list[Any] = []

    class Big:
        def __del__(self) -> None:
            alive.clear()

    def fails() -> None:
        big = Big()
        alive.append(1)
        raise BadSample(str(id(big)))

    with optimizer.attempt():
        fails()
    assert not alive
    optimizer.step()


@on_each_rank(2)
def test_packs_that_wake_while_a_rank_fails_are_woken_on_all(group: Any):
    model = CASE.build()
    model.a.requires_grad_(False)
    optimizer = sharded(model, group, on_error="drop")
    for step in range(3):
        model.a.requires_grad_(step == 2)
        with optimizer.attempt():
            if step and group.rank() == 1:
                raise BadSample("data")
            CASE.loss(model, CASE.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert packed_of(optimizer).comm.steps == 3


def test_an_attempt_after_a_backward_raises_on_all_ranks_whatever_one_has_cleared():
    def run(group: Any) -> str:
        model = CASE.build()
        optimizer: Any = sharded(model, group, on_error="drop")
        CASE.loss(model, CASE.batch(0)).backward()
        if group.rank() == 0:
            model.zero_grad()
        with pytest.raises(RuntimeError, match="already reduced outside an attempt") as told:
            optimizer.attempt().__enter__()
        optimizer.zero_grad(set_to_none=False)
        with optimizer.attempt():
            CASE.loss(model, CASE.batch(1)).backward()
        optimizer.step()
        assert optimizer.failures() == []
        return str(told.value)

    first, second = run_world(2, run)[0]
    assert first == second
