"""Steps that are skipped for non-finite gradients, and what is said of them."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from models import (
    CASES,
    assert_same_bits,
    everything,
    install,
    run_world,
    sharded,
    values,
)
from torch import nn

pytestmark = pytest.mark.timeout(60)

BF16, FP32 = torch.bfloat16, torch.float32
NAN, INF = math.nan, math.inf


def spoil(model: nn.Module, name: str, element: int, value: float) -> None:
    model.get_parameter(name).grad.view(-1)[element] = value


def skips(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "skipped" in str(w.message)]


def skipping(group: Any, value: float, bad_rank: int, fields: dict[str, Any], kind: str) -> None:
    """Good step, bad step on one rank, good step; and the same without the bad one."""
    rank = 0 if group is None else group.rank()

    def make(model: nn.Module) -> torch.optim.Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        if kind == "rmsprop":
            return torch.optim.RMSprop(model.parameters(), lr=0.01)
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    model, other = CASES["mlp"].build(), CASES["mlp"].build()
    optimizer = sharded(model, group, make, **fields)
    spared = sharded(other, group, make, **fields)
    for step in range(4):
        install(model, step)
        if step in (1, 2):
            before = everything(model, optimizer)
            if rank == bad_rank:
                spoil(model, "b.weight", 17, value)
            optimizer.step()
            assert_same_bits(everything(model, optimizer), before)
        else:
            install(other, step)
            optimizer.step()
            spared.step()
            spared.zero_grad()
        optimizer.zero_grad()
    assert_same_bits(everything(model, optimizer), everything(other, spared))
    assert optimizer.skipped_steps == 2 and spared.skipped_steps == 0


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_ranks_bad_gradient_skips_the_step_everywhere_and_changes_nothing(
    size: int, value: float, dtype: torch.dtype
):
    fields = {"param_dtype": dtype, "pack_params": 2}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if size == 1:
            skipping(None, value, 0, fields, "adamw")
        else:
            run_world(size, skipping, value, size - 1, fields, "adamw")
    assert len(skips(caught)) == 2 * size
    assert all("parameter 'b.weight', element 17" in message for message in skips(caught))


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize("kind", ["sgd", "rmsprop"])
@pytest.mark.parametrize("fields", [{}, {"partition": "whole"}, {"max_grad_norm": 1.0},
                                    {"norm_type": INF}, {"norm_type": 1.0}], ids=str)  # fmt: skip
def test_a_skip_changes_nothing_whatever_the_options(fields: dict[str, Any], kind: str):
    run_world(2, skipping, NAN, 1, {"param_dtype": BF16, **fields}, kind)


def test_a_skipped_first_step_leaves_no_trace():
    model = CASES["mlp"].build()
    optimizer = sharded(model, param_dtype=BF16)
    before = values(model)
    install(model, 0)
    spoil(model, "a.bias", 0, INF)
    with pytest.warns(UserWarning, match="step skipped"):
        optimizer.step()
    assert_same_bits(values(model), before)
    for state in optimizer.state.values():
        assert state["step"] == 0
        assert not any(bool(tensor.any()) for tensor in state.values())


@pytest.mark.filterwarnings("ignore:step skipped")
def test_without_the_skip_a_nan_would_spread(monkeypatch: pytest.MonkeyPatch):
    """Negative control: the comparison fails when the decision never skips."""
    from shardcast.step.decide.decider import Decider

    decide = Decider.decide

    def never(self: Decider, *args: Any) -> Any:
        decision = decide(self, *args)
        decision.skip.fill_(False)
        return decision

    monkeypatch.setattr(Decider, "decide", never)
    with pytest.raises(AssertionError):
        run_world(2, skipping, NAN, 1, {"param_dtype": BF16}, "adamw")


def bad_on(group: Any, bad_rank: int, name: str, element: int, partition: str) -> None:
    model = CASES["gpt"].build()
    optimizer = sharded(model, group, param_dtype=BF16, pack_params=3, partition=partition)
    install(model, 0)
    if group.rank() == bad_rank:
        spoil(model, name, element, NAN)
    optimizer.step()


def messages_of(*args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_world(2, bad_on, *args)
    assert {warning.filename for warning in caught} == {__file__}, "the line that called step()"
    return skips(caught)


@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize(
    ("name", "element"), [("wte.weight", 0), ("blocks.1.fc.weight", 647), ("ln.bias", 17)]
)
def test_the_warning_names_parameter_and_element(name: str, element: int, partition: str):
    for bad_rank in (0, 1):
        messages = messages_of(bad_rank, name, element, partition)
        assert len(messages) == 2 and messages[0] == messages[1]
        assert f"parameter {name!r}, element {element}" in messages[0]


def test_the_warning_names_the_rank_whose_gradient_was_bad():
    for bad_rank in (0, 1):
        # Element 0 of the first parameter belongs to rank 0 under the even partition.
        messages = messages_of(bad_rank, "wte.weight", 0, "even")
        assert re.search(rf"rank {bad_rank}\b", messages[0]), messages[0]
        assert not re.search(rf"rank {1 - bad_rank}\b", messages[0]), messages[0]


def test_on_an_accelerator_the_report_claims_no_more_than_the_span():
    optimizer = sharded(CASES["mlp"].build(), None)
    skips = optimizer.decider.skips
    skips._device = torch.device("cuda")  # of which only the kind is asked here
    first = optimizer.layout.packs[0].slots[0].name
    assert skips._locate([0]) == f"in the span of rank 0 that begins in parameter {first!r}"


def always_bad(group: Any) -> list[str]:
    model = CASES["mlp"].build()
    optimizer = sharded(model, group, param_dtype=BF16, max_skipped_steps=3)
    outcomes = []
    for step in range(7):
        install(model, step)
        if step != 2 and group.rank() == 1:
            spoil(model, "c.bias", 1, INF)
        try:
            optimizer.step()
            outcomes.append("ok")
        except RuntimeError as error:
            outcomes.append(str(error))
        optimizer.zero_grad()
    return outcomes


@pytest.mark.filterwarnings("ignore:step skipped")
def test_too_many_skips_in_a_row_raise_on_every_rank_and_say_where():
    ranks, _ = run_world(2, always_bad)
    for outcomes in ranks:
        assert outcomes[:5] == ["ok"] * 5, "two in a row, one good, two in a row"
        for message in outcomes[5:]:
            assert "in a row were skipped" in message
            assert "parameter 'c.bias', element 1" in message
