"""Steps that are skipped for non-finite gradients, and their warnings."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from models import CASES, assert_same_bits, everything, install, ranks_of, run_world, sharded
from pairwise import thinned
from torch import nn

import shardcast
from shardcast import _compat
from shardcast.testing import threaded_world

BF16, FP32 = torch.bfloat16, torch.float32
NAN, INF = math.nan, math.inf


def spoil(model: nn.Module, name: str, element: int, value: float) -> None:
    model.get_parameter(name).grad.view(-1)[element] = value


def skips(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "skipped" in str(w.message)]


def skipping(group: Any, value: float, bad_rank: int, fields: dict[str, Any], kind: str) -> None:
    """Compare good steps around steps that are bad on one rank with only the good steps."""
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


@pytest.mark.parametrize(
    ("size", "value", "fields", "kind"),
    [
        *(
            (size, value, {"param_dtype": dtype, "pack_params": 2}, "adamw")
            for size, value, dtype in [(1, NAN, BF16), (2, INF, FP32), (3, -INF, BF16)]
        ),
        *(
            (2, NAN, {"param_dtype": BF16, **fields}, kind)
            for kind in ("sgd", "rmsprop")
            for fields in (
                {},
                {"partition": "whole"},
                {"max_grad_norm": 1.0},
                {"norm_type": INF},
                {"norm_type": 1.0},
            )
        ),
    ],
    ids=str,
)
def test_one_ranks_bad_gradient_skips_the_step_everywhere_and_changes_nothing(
    size: int, value: float, fields: dict[str, Any], kind: str
):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks_of(size, skipping, value, size - 1, fields, kind)
    assert len(skips(caught)) == 2, "only one rank warns"
    if size > 1:
        assert [text.rpartition(" (")[2] for text in skips(caught)] == [
            "after 2 steps)",
            "after 3 steps)",
        ]
    assert all("parameter 'b.weight', element 17" in message for message in skips(caught))


@pytest.mark.parametrize(
    ("place", "bad_rank", "partition"),
    thinned(
        2,
        [("wte.weight", 0), ("blocks.1.fc.weight", 647), ("ln.bias", 17)],
        (0, 1),
        ("even", "whole"),
    ),
    ids=str,
)
def test_the_warning_names_the_rank_that_had_the_gradient_parameter_and_element(
    place: tuple[str, int], bad_rank: int, partition: str
):
    name, element = place

    def run(group: Any) -> None:
        model = CASES["gpt"].build()
        optimizer = sharded(model, group, param_dtype=BF16, pack_params=3, partition=partition)
        install(model, 0)
        if group.rank() == bad_rank:
            spoil(model, name, element, NAN)
        optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_world(2, run)
    assert {warning.filename for warning in caught} == {__file__}, "the line that called step()"
    expected = f"rank {bad_rank}, parameter {name!r}, element {element}"
    assert [expected in message for message in skips(caught)] == [True]


def test_replicas_whose_backend_sums_name_the_parameter_and_no_rank():
    def run(mesh: Any) -> None:
        model = CASES["mlp"].build()
        make = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = shardcast.shard(model, make, shard_ranks=1)
        install(model, 0)
        if mesh.get_rank() == 1:
            spoil(model, "b.weight", 17, NAN)
        optimizer.step()

    told = "gradient: the sum over ranks, at its owner 0, parameter 'b.weight', element 17"
    with pytest.warns(UserWarning, match=told):
        threaded_world({"dp": 2}, run)


def test_on_an_accelerator_the_report_claims_no_more_than_the_span(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    model = CASES["mlp"].build()
    optimizer = sharded(model, pack_params=2)
    install(model, 0)
    spoil(model, "b.weight", 17, NAN)
    pack = next(p for p in optimizer.layout.packs if any(s.name == "b.weight" for s in p.slots))
    place = f"in the span of rank 0 of the pack that begins with parameter {pack.slots[0].name!r}"
    with pytest.warns(UserWarning, match=place):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:step skipped")
def test_too_many_skips_in_a_row_raise_on_every_rank_and_say_where():
    def run(group: Any) -> None:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group, param_dtype=BF16, max_skipped_steps=3)
        for step in range(7):  # two in a row, one good, two in a row
            install(model, step)
            if step != 2 and group.rank() == 1:
                spoil(model, "c.bias", 1, INF)
            if step < 5:
                optimizer.step()
            else:
                with pytest.raises(RuntimeError, match=r"parameter 'c\.bias', element 1"):
                    optimizer.step()
            optimizer.zero_grad()

    run_world(2, run)
