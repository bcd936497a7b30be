"""One mean over the tokens of all ranks and micro-batches, compared with one plain process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, Tensors, assert_same_bits, everything, of, ranks_of, sharded, values
from oracle import adamw, pair
from torch import Tensor, nn

STEPS = 3
Batches = list[tuple[Tensor, Tensor]]


def batches_of(step: int, rank: int) -> Batches:
    """Micro-batches of unequal sizes; in the second step one of rank 0 has no rows."""
    sizes = [1 + (3 * rank + 5 * step + number) % 7 for number in range(3)]
    if (step, rank) == (1, 0):
        sizes[1] = 0
    rows = [CASES["mlp"].batch(100 * step + 10 * rank + n, size) for n, size in enumerate(sizes)]
    return [(x, y * 3) for x, y in rows]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x).float(), y, reduction="sum") / y.shape[1]


sgd = of("SGD", lr=0.05, momentum=0.9)
adagrad = of("Adagrad", lr=1e-2)


def by_hand(size: int, make: Callable[[nn.Module], Any], clip: str, split: int = 1) -> Tensors:
    """Train one process with the whole batch and torch's own optimizers."""
    model = CASES["mlp"].build()
    made = make(model)
    for step in range(STEPS):
        batches = [batch for rank in range(size) for batch in batches_of(step, rank)]
        total = sum(len(x) for x, _ in batches)
        (sum(loss_of(model, batch) for batch in batches) / total).backward()
        if "norm" in clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if "value" in clip:
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
        for optimizer in made if isinstance(made, list) else [made]:
            optimizer.step()
        model.zero_grad()
    return values(model)


def train(
    group: Any, make: Callable[[nn.Module], Any], how: str, fields: dict[str, Any]
) -> Tensors:
    model = CASES["mlp"].build()
    optimizer = sharded(model, group, make, **fields)
    for step in range(STEPS):
        batches = batches_of(step, 0 if group is None else group.rank())
        for number, batch in enumerate(batches):
            waits = "no_sync" in how and number < len(batches) - 1
            with optimizer.no_sync() if waits else contextlib.nullcontext():
                tokens = len(batch[0])
                optimizer.count(torch.tensor(tokens) if number else tokens)
                if "late" in how and not number:  # gradients of the last step are cleared now
                    optimizer.zero_grad()
                optimizer.scale_loss(loss_of(model, batch)).backward()
        if "gather" in how:
            optimizer.gather_gradients()
        if "norm" in how:
            optimizer.clip_grad_norm_(0.5)
        if "value" in how:
            optimizer.clip_grad_value_(0.05)
        optimizer.step()
        if "late" not in how:
            optimizer.zero_grad()
    return values(model)


WAYS: dict[str, tuple[int, Any, str, dict[str, Any]]] = {
    "alone": (1, sgd, "", {}),
    "two ranks": (2, sgd, "", {}),
    "cleared late": (1, sgd, "late", {}),
    "three ranks": (3, sgd, "no_sync", {}),
    "four ranks": (4, sgd, "no_sync", {}),
    "sharded gradients": (3, sgd, "no_sync", {"accumulate": "sharded"}),
    "a divisor": (2, sgd, "", {"divisor": 7}),
    "a loss scale": (3, sgd, "no_sync", {"loss_scale": 1000.0}),
    "a norm": (3, sgd, "norm", {"loss_scale": 8.0}),
    "a norm by option": (2, sgd, "by option norm", {"max_grad_norm": 0.5}),
    "a value": (3, sgd, "value", {"loss_scale": 8.0}),
    "a value of one process": (1, sgd, "value", {}),
    "a norm, then a value": (2, sgd, "norm value", {}),
    "the gathered mean": (2, sgd, "gather norm", {}),
    "whole parameters": (3, adagrad, "no_sync", {"partition": "whole"}),
    "two optimizers": (2, pair, "no_sync norm", {}),
}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler")
@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_counted_tokens_is_that_of_one_process_on_all_of_them(way: str):
    size, make, how, fields = WAYS[way]
    expected = by_hand(size, make, how)
    inside = how.replace("by option norm", "")
    for trained in ranks_of(size, train, make, inside, fields):
        torch.testing.assert_close(trained, expected, rtol=1e-6, atol=1e-6)


adafactor = of("Adafactor", lr=1e-2)
LOW = {"param_dtype": "bf16"}
FORMS: list[tuple[Any, dict[str, Any]]] = [
    (sgd, LOW),
    (adamw, {**LOW, "master": "split16", "accumulate": "sharded"}),
    (adamw, {**LOW, "moments": "int8"}),
    (adamw, {"offload": True, "averages": {"ema": 0.9}}),
    (pair, {**LOW, "overlap_sync": True}),
    (adafactor, {"partition": "whole"}),
    (adagrad, {"param_dtype": "fp16", "loss_scale": "dynamic", "loss_scale_init": 64}),
]


@pytest.mark.filterwarnings("ignore:step skipped", "ignore:.*lr_scheduler")
@pytest.mark.parametrize(("make", "fields"), FORMS, ids=lambda v: getattr(v, "__name__", None))
def test_counts_and_guards_move_no_bit_of_any_class_and_form(make: Any, fields: dict[str, Any]):
    """Dividing by 8 tokens, a power of two, is exact. Both runs skip a spike."""

    def run(group: Any, counts: bool) -> tuple[list[bool], Tensors]:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group, make, guard={"norm": 4.0, "window": 8}, **fields)
        skipped = []
        for step in range(8):
            rows = CASES["mlp"].batch(step, 4)
            size = (1.0 if counts else 0.25) * (256.0 if step == 6 and group.rank() else 1.0)
            if counts:
                optimizer.count(4)
            optimizer.scale_loss(loss_of(model, rows) * size).backward()
            if step == 3:  # no rank has this gradient
                model.b.bias.grad = None
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(bool(optimizer.last_step_skipped))
        optimizer.wait_sync()
        return skipped, everything(model, optimizer)

    counted, plain = (ranks_of(2, run, counts) for counts in (True, False))
    for (skipped, state), (skipped_too, expected) in zip(counted, plain, strict=True):
        assert skipped == skipped_too == [step == 6 for step in range(8)]
        assert_same_bits(state, expected)


# -- which tokens belong to a step -----------------------------------------------------------------


def step_of(
    model: nn.Module,
    optimizer: Any,
    rows: int,
    seed: int = 0,
    batches: int = 1,
    counts: bool = True,
) -> None:
    for number in range(batches):
        optimizer.count(rows) if counts else None
        batch = CASES["mlp"].batch(seed + number, rows)
        optimizer.scale_loss(loss_of(model, batch)).backward()


DROPS: dict[str, Callable[[nn.Module, Any], None]] = {
    "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "a clip": lambda model, optimizer: (optimizer.clip_grad_norm_(1.0), model.zero_grad()),
    "a skip": lambda model, optimizer: (
        optimizer.gather_gradients(),
        model.a.bias.grad.fill_(math.nan),
        optimizer.step(),
        model.zero_grad(),
    ),
    "every handle": lambda model, optimizer: [it.zero_grad() for it in optimizer.optimizers],
}


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize("accumulate", ["local", "sharded"])
@pytest.mark.parametrize("how", DROPS)
def test_tokens_of_dropped_gradients_do_not_count(how: str, accumulate: str):
    def run(group: Any) -> None:
        trained = []
        for drops in (True, False):
            model = CASES["mlp"].build()
            optimizer = sharded(model, group, sgd, accumulate=accumulate)
            if drops:
                step_of(model, optimizer, 5, seed=7)
                DROPS[how](model, optimizer)
            step_of(model, optimizer, 3, batches=2)
            optimizer.step()
            trained.append(everything(model, optimizer))
        assert_same_bits(*trained)

    ranks_of(2, run)


def test_a_step_that_is_not_counted_unlike_the_last_one_is_warned_of():
    model = CASES["mlp"].build()
    optimizer = sharded(model, None, sgd)
    step_of(model, optimizer, 3)
    optimizer.step()
    loss_of(model, CASES["mlp"].batch(0)).backward()
    with pytest.warns(UserWarning, match="no tokens were counted"):
        optimizer.step()


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [-1, -0.5, math.nan, math.inf, True, "8", None, torch.ones(2), torch.tensor(-3), 1j],
    ids=str,
)
def test_what_is_no_number_of_tokens_is_refused(tokens: Any):
    with pytest.raises(ValueError, match="count: expected a number"):
        sharded(CASES["tiny"].build()).count(tokens)


@pytest.mark.parametrize("how", ["after a backward", "after a clip", "no tokens"])
def test_counts_that_belong_to_no_step_are_refused_on_all_ranks(how: str):
    def run(group: Any) -> None:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group, sgd)
        before = values(model)
        with pytest.raises(RuntimeError, match="count"):
            step_of(model, optimizer, 0) if how != "after a backward" else None
            if how == "after a clip":
                optimizer.count(3)
                optimizer.clip_grad_norm_(1.0)
            if how != "no tokens":
                loss_of(model, CASES["mlp"].batch(0)).backward()
                optimizer.count(3)
            optimizer.step()
        assert_same_bits(values(model), before)

    ranks_of(2, run)


@pytest.mark.parametrize("zeroes", ["in place", "gathered", "gathered, by data", "by a factor", ""])
@pytest.mark.parametrize(("size", "counts_first"), [(1, True), (1, False), (2, True)])
def test_counted_gradients_are_not_added_to_those_of_the_last_step(
    size: int, counts_first: bool, zeroes: str
):
    """Each would need the tokens of its own step; zeros by hand need none."""

    def run(group: Any) -> None:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group, sgd)
        refused = pytest.raises(RuntimeError, match="added to those of the last step")
        for step in range(2):
            step_of(model, optimizer, 3, counts=counts_first or step > 0)
            with refused if step and not zeroes else contextlib.nullcontext():
                if zeroes.startswith("gathered"):
                    optimizer.gather_gradients()
                optimizer.step()
            for param in model.parameters() if zeroes else ():
                grad: Any = param.grad
                if zeroes == "by a factor":
                    grad.mul_(0)
                else:
                    (grad.data if "data" in zeroes else grad).zero_()

    ranks_of(size, run)


def test_a_lone_rank_clears_the_last_gradients_by_the_model_after_its_first_count():
    model = CASES["mlp"].build()
    optimizer = sharded(model, None, sgd)
    for counts in (False, True):
        optimizer.count(3) if counts else None
        model.zero_grad()
        step_of(model, optimizer, 3, counts=False)
        optimizer.step()


@pytest.mark.parametrize("counts", [False, True])
def test_only_a_script_that_counts_pays_for_a_look_at_the_last_steps_gradients(
    counts: bool, monkeypatch: pytest.MonkeyPatch
):
    looks, plain = [], Tensor.any
    model = CASES["mlp"].build()
    optimizer = sharded(model, None, sgd)
    optimizer.divisor = 1.0  # so that one rank reduces its gradients, as after count()
    for _ in range(3):
        optimizer.count(3) if counts else None
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "any", lambda it: looks.append(it) or plain(it))
            loss_of(model, CASES["mlp"].batch(0)).backward()
        optimizer.gather_gradients()
        optimizer.step()
        for param in model.parameters():
            param.grad.data.zero_()  # type: ignore[union-attr]
    assert len(looks) == 2 * counts * len(list(model.parameters()))


def test_a_count_on_some_ranks_is_refused_on_all_of_them_also_by_a_clip_of_values():
    def run(group: Any) -> None:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group, sgd)
        if group.rank():
            optimizer.count(4)
        loss_of(model, CASES["mlp"].batch(0)).backward()
        told = "rank 0: step; rank 1: clip_grad_value_ of counted tokens"
        with pytest.raises(RuntimeError, match=told):
            optimizer.clip_grad_value_(0.5)
            optimizer.step()

    ranks_of(2, run)
