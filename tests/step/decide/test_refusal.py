"""A mistake of one rank in a call that all ranks make raises on all ranks, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, assert_same_bits, on_each_rank, run_world, sharded, values
from pairwise import thinned
from torch import nn

from shardcast import _compat, checkpoint
from shardcast.testing import SpawnedWorld, ThreadedWorld

pytestmark = pytest.mark.timeout(90)
BF16 = torch.bfloat16


def backward(model: nn.Module, step: int = 0) -> None:
    CASES["mlp"].loss(model, CASES["mlp"].batch(step)).backward()


# -- mistakes -------------------------------------------------------------------------------------


def clips(*arguments: Any, **named: Any) -> Callable[..., Any]:
    def act(optimizer: Any, _model: nn.Module, is_wrong: bool) -> None:
        optimizer.clip_grad_norm_(*(arguments if is_wrong else [1.0]), **named if is_wrong else {})

    return act


def clips_some(optimizer: Any, model: nn.Module, is_wrong: bool) -> None:
    params = [*model.parameters()]
    optimizer.clip_grad_norm_(params[: 1 if is_wrong else None], 1.0)


def edits_after_clip(optimizer: Any, model: nn.Module, is_wrong: bool) -> None:
    optimizer.clip_grad_norm_(1.0)
    if is_wrong:
        model.a.weight.grad = torch.zeros_like(model.a.weight)


def counts(optimizer: Any, model: nn.Module, is_wrong: bool) -> None:
    optimizer.zero_grad()
    optimizer.count(-1 if is_wrong else 1)
    backward(model)


def steps_with(*, clipped: bool = False, **named: Any) -> Callable[..., Any]:
    def act(optimizer: Any, _model: nn.Module, is_wrong: bool) -> None:
        if clipped:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step(**named if is_wrong else {})

    return act


def is_stepped_by_a_scaler(optimizer: Any, _model: nn.Module, is_wrong: bool) -> None:
    if is_wrong:
        optimizer.found_inf = torch.zeros(())  # as torch.amp.GradScaler does


def inside_no_sync(call: str, *arguments: Any, again: bool) -> Callable[..., Any]:
    """Return a call inside ``no_sync``, with the last backward or without it."""

    def act(optimizer: Any, model: nn.Module, is_wrong: bool) -> None:
        if again:
            optimizer.zero_grad()
        with optimizer.no_sync() if is_wrong else contextlib.nullcontext():
            if again:
                backward(model)
            getattr(optimizer, call)(*arguments)

    return act


# The error's class, its text, and what a rank does before the step.
MISTAKES: dict[str, tuple[type[Exception], str, Callable[..., Any]]] = {
    "a bound": (ValueError, "max_norm: expected a number above 0, got -1.0", clips(-1.0)),
    "a bound of another kind": (TypeError, "max_norm: expected a number above 0", clips("1")),
    "another norm": (ValueError, "expected norm_type 2.0, got 1.0", clips(1.0, norm_type=1.0)),
    "an error for infinity": (
        ValueError,
        "error_if_nonfinite=False, got True",
        clips(1.0, error_if_nonfinite=True),
    ),
    "some parameters": (ValueError, "clip_grad_norm_: expected all trained", clips_some),
    "a bound of values": (
        ValueError,
        "clip_value: expected a number above 0",
        lambda it, _, is_wrong: it.clip_grad_value_(-1.0 if is_wrong else 1.0),
    ),
    "an edit after a clip": (RuntimeError, "edited, replaced or cleared after", edits_after_clip),
    "tokens": (ValueError, "count: expected a number >= 0", counts),
    "a divisor": (
        ValueError,
        "divisor: expected a number above 0",
        lambda it, _, is_wrong: setattr(it, "divisor", -2.0 if is_wrong else None),
    ),
    "an argument": (TypeError, "step: expected only a closure", steps_with(grad_scale=1.0)),
    "an argument after a clip": (TypeError, "got grad_", steps_with(clipped=True, grad_scale=1.0)),
    "a loss after a clip": (TypeError, "expected no loss=", steps_with(clipped=True, loss=1.0)),
    **{
        f"{call} inside no_sync{' with its backward' * again}": (
            RuntimeError,
            f"{call}: called inside no_sync()",
            inside_no_sync(call, *arguments, again=again),
        )
        for call, *arguments in (["step"], ["clip_grad_norm_", 1.0], ["gather_gradients"])
        for again in (False, True)
    },
    "a scaler": (RuntimeError, "called by torch.amp.GradScaler", is_stepped_by_a_scaler),
}


@pytest.mark.parametrize(("name", "ranks"), thinned(2, MISTAKES, (2, 3)))
def test_a_mistake_of_one_rank_is_an_error_on_all_of_them(name: str, ranks: int):
    kind, told, act = MISTAKES[name]

    def run(group: Any) -> None:
        model, is_wrong = CASES["mlp"].build(), group.rank() == 1
        optimizer = sharded(model, group)
        before = values(model)
        backward(model)
        with pytest.raises(kind) as raised:
            act(optimizer, model, is_wrong)
            optimizer.step()
        assert told in str(raised.value)
        starts = "rank 1: ", "the ranks are in different calls: "
        assert is_wrong or str(raised.value).startswith(starts)
        assert_same_bits(values(model), before)
        optimizer.divisor = None
        optimizer.zero_grad()
        backward(model)
        optimizer.step()  # the mistake leaves no trace

    ThreadedWorld(ranks).run(run)


def test_on_an_accelerator_the_report_follows(monkeypatch: pytest.MonkeyPatch):
    def run(group: Any) -> str:
        model, is_wrong = CASES["mlp"].build(), group.rank() == 1
        optimizer = sharded(model, group)
        before = values(model)
        backward(model)
        with pytest.raises((ValueError, RuntimeError)) as raised:
            clips(-1.0)(optimizer, model, is_wrong)
            optimizer.step()
        assert_same_bits(values(model), before)
        return str(raised.value)

    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    (of_others, own), _ = run_world(2, run)
    assert "another rank raised an error" in of_others
    assert own.startswith("max_norm: expected a number above 0, got -1.0")


# -- calls ----------------------------------------------------------------------------------------

Call = Callable[[Any, nn.Module, str], Any]


def enter(block: contextlib.AbstractContextManager[Any]) -> None:
    with block:
        pass


CALLS: dict[str, Call] = {
    "owned": lambda it, *_: enter(it.owned()),
    "whole": lambda it, *_: enter(it.whole("*")),
    "gather_gradients": lambda it, *_: it.gather_gradients(),
    "clip_grad_norm_": lambda it, *_: it.clip_grad_norm_(1.0),
    "full_parameters": lambda it, *_: it.full_parameters(),
    "full_state_dict": lambda it, *_: it.full_state_dict(),
    "load_state_dict": lambda it, *_: it.load_state_dict(it.state_dict()),
    "check_copies": lambda it, *_: it.check_copies(),
    "digest": lambda it, *_: it.digest(),
    "averaged": lambda it, *_: enter(it.averaged("ema")),
    "as_plain": lambda it, *_: enter(it.as_plain()),
    "sleep": lambda it, *_: it.sleep(),
    "close": lambda it, *_: it.close(),
    "add_param_group": lambda it, model, _: it.add_param_group({"params": [model.late]}),
    "save": lambda it, model, folder: checkpoint.save(folder, model, it, step=1),
    "load": lambda it, model, folder: checkpoint.load(folder, model, it),
}


def one_calls(group: Any, name: str, folder: str, frozen: bool) -> str:
    """Return a rank's error if the first rank makes another call while the others step."""
    model = CASES["mlp"].build()
    model.a.requires_grad_(not frozen)
    optimizer = sharded(model, group, param_dtype=BF16, averages={"ema": 0.9})
    model.late = nn.Parameter(torch.ones(4))
    backward(model)
    with pytest.raises(RuntimeError) as raised:
        if group.rank() == 0:
            CALLS[name](optimizer, model, folder)
        optimizer.step()
    with contextlib.suppress(RuntimeError):
        optimizer.close(restore=False)
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        *((name, False) for name in CALLS),
        *((name, True) for name in ("gather_gradients", "full_parameters", "clip_grad_norm_")),
    ],
)
def test_a_call_of_one_rank_beside_a_step_is_named_on_all(
    gloo: SpawnedWorld, name: str, frozen: bool, tmp_path: Path
):
    """Also if the step looks whether frozen parameters have gradients."""
    told = f"the ranks are in different calls: rank 0: {name}; rank 1: step; make the same calls"
    for error in gloo.run(one_calls, name, str(tmp_path), frozen):
        assert error.startswith(told)


@pytest.mark.parametrize("call", ["step", "gather_gradients"])
@on_each_rank(2)
def test_two_models_of_one_shape_that_meet_are_named_on_all_ranks(group: Any, call: str):
    """Their messages have equal lengths, so gloo would mix up their gradients and weights."""
    models = [CASES["mlp"].build() for _ in range(2)]
    optimizers = [sharded(model, group) for model in models]
    before = [values(model) for model in models]
    for model in models:
        backward(model)
    order = optimizers if group.rank() == 0 else optimizers[::-1]
    told = rf"{call}: .* different .* models, .* \(rank 0: number 1; rank 1: number 2\)"
    with pytest.raises(RuntimeError, match=told):
        getattr(order[0], call)()
    for model, weights in zip(models, before, strict=True):
        assert_same_bits(values(model), weights)
    for optimizer in optimizers:  # the mistake leaves no trace
        optimizer.step()


@pytest.mark.parametrize("orders", ["ab ba", "aba baa", "abba baab"])
@on_each_rank(2)
def test_backwards_of_two_such_models_in_different_orders_are_named_on_all_ranks(
    group: Any, orders: str
):
    """Each model receives gradients of the other; the step uses none of them."""
    models = {name: CASES["mlp"].build() for name in "ab"}
    optimizers = {name: sharded(model, group) for name, model in models.items()}
    before = {name: values(model) for name, model in models.items()}
    for own in (orders.split()[group.rank()], "aab"):  # the second order is the same on all ranks
        for name in own:
            backward(models[name])
        for name, optimizer in optimizers.items():
            if own != "aab":
                with pytest.raises(RuntimeError, match=r"other sharded models .* zero_grad"):
                    optimizer.step()
                assert_same_bits(values(models[name]), before[name])
            else:
                optimizer.step()
            optimizer.zero_grad()


@on_each_rank(2)
def test_two_rare_calls_are_named_too(group: Any):
    model = CASES["mlp"].build()
    optimizer = sharded(model, group)
    told = "rank 0: digest; rank 1: full_parameters; make"
    with pytest.raises(RuntimeError, match=told):
        optimizer.full_parameters() if group.rank() else optimizer.digest()


@pytest.mark.parametrize(
    ("apart", "told"),
    [
        ({3}, "ranks 0, 1, 2: step; rank 3: gather_gradients"),
        ({1, 3}, "ranks 0, 2: step; ranks 1, 3: gather_gradients"),  # data-parallel ranks agree
    ],
    ids=str,
)
@on_each_rank({"dp": 2, "tp": 2})
def test_calls_are_compared_over_ranks_of_a_mesh_too(mesh: Any, apart: set[int], told: str):
    model = CASES["mlp"].build()
    optimizer = sharded(model, None, mesh=mesh)
    backward(model)
    with pytest.raises(RuntimeError, match=told):
        optimizer.gather_gradients() if mesh.get_rank() in apart else optimizer.step()


# -- loads ----------------------------------------------------------------------------------------


def loads(model: nn.Module, factor: float) -> None:
    model.load_state_dict({name: value * factor for name, value in model.state_dict().items()})


def there_and_back(model: nn.Module, rank: int) -> None:
    if rank == 0:
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        loads(model, 3.0)
        model.load_state_dict(kept)


DIFFERENT: dict[str, Callable[[nn.Module, int], Any]] = {
    "one rank": lambda model, rank: rank or loads(model, 2.0),
    "other values": lambda model, rank: loads(model, 2.0 + rank),
    "other layers": lambda model, rank: loads(model.a if rank else model.b, 2.0),
}
ALIKE: dict[str, Callable[[nn.Module, int], Any]] = {
    "all": lambda model, _: loads(model, 2.0),
    "there and back": there_and_back,
    "the same": lambda model, rank: rank or loads(model, 1.0),
}


def after_loading(
    group: Any, load: Callable[[nn.Module, int], Any], use: str, dtype: torch.dtype
) -> str:
    model = CASES["mlp"].build()
    optimizer = sharded(model, group, param_dtype=dtype)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    if use != "clip, load":
        load(model, group.rank())
    backward(model)
    try:
        if "clip" in use:
            optimizer.clip_grad_norm_(1.0)
        if use == "clip, load":
            load(model, group.rank())
        if use == "gather":
            optimizer.gather_gradients()
        optimizer.step()
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "use", "dtype"),
    thinned(2, DIFFERENT, ("step", "clip", "gather", "clip, load"), (torch.float32, BF16)),
    ids=str,
)
def test_loads_that_differ_are_an_error_on_all_ranks(name: str, use: str, dtype: torch.dtype):
    for error in run_world(2, after_loading, DIFFERENT[name], use, dtype)[0]:
        assert "the ranks loaded different weights by model.load_state_dict" in error
        assert "rank 0: " in error and "(values " in error
        assert name != "one rank" or "rank 1: nothing" in error


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("name", ALIKE)
def test_loads_that_are_alike_or_undone_are_none(name: str, dtype: torch.dtype):
    assert run_world(2, after_loading, ALIKE[name], "clip", dtype)[0] == ["", ""]
