"""Options that must be alike on all ranks in every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, assert_same_bits, run_world, sharded, values
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import Comm, ProcessGroups
from shardcast.step.decide import options as compared
from shardcast.step.decide import skip_report
from shardcast.step.decide.options import OptionCheck
from shardcast.step.decide.skip_report import HostCopy
from shardcast.testing import fake_world

pytestmark = pytest.mark.timeout(60)

FP16 = torch.float16


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [{"params": model.a.parameters()},
         {"params": [*model.b.parameters(), *model.c.parameters()]}], lr=1e-2,
    )  # fmt: skip


def outcomes(size: int, drift: Callable[[Any, nn.Module, int], Any], **fields: Any) -> list[str]:
    """The errors of all ranks in a step after ``drift(optimizer, model, rank)``."""

    def run(group: Any) -> str:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group, two_groups, **fields)
        rank = group.rank()

        def step() -> None:
            optimizer.zero_grad()
            CASES["mlp"].loss(model, CASES["mlp"].batch(rank)).backward()
            optimizer.step()

        step()
        before = values(model)
        drift(optimizer, model, rank)
        try:
            step()
        except RuntimeError as error:
            assert_same_bits(values(model), before)
            return str(error)
        return "ok"

    ranks, _ = run_world(size, run)
    return ranks


def scheduled(optimizer: Any, _model: nn.Module, rank: int) -> None:
    """ReduceLROnPlateau on a loss that is another one on each rank."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    scheduler.step(1.0)
    scheduler.step(2.0 if rank else 0.5)


def change(**options: Any) -> Callable[[Any, nn.Module, int], None]:
    def drift(optimizer: Any, _model: nn.Module, rank: int) -> None:
        if rank == 1:
            optimizer.param_groups[1].update(options)

    return drift


def at_step(clip: Callable[[Any, int], Any]) -> Callable[[Any, nn.Module, int], None]:
    def drift(optimizer: Any, _model: nn.Module, rank: int) -> None:
        optimizer.step = lambda: (clip(optimizer, rank), type(optimizer).step(optimizer))

    return drift


def freeze(_optimizer: Any, model: nn.Module, rank: int) -> None:
    model.b.bias.requires_grad_(rank != 2)


def change_and_freeze(optimizer: Any, model: nn.Module, rank: int) -> None:
    freeze(optimizer, model, rank)
    change(lr=0.02)(optimizer, model, rank)


DRIFTS: dict[str, tuple[Callable[[Any, nn.Module, int], None], list[str]]] = {
    "plateau": (scheduled, ["lr of group 0", "lr of group 1", "rank 0: 0.01", "ranks 1, 2: 0.005"]),
    "lr": (change(lr=0.02), ["lr of group 1", "ranks 0, 2: 0.01", "rank 1: 0.02"]),
    "lr beside a frozen parameter": (change_and_freeze, ["lr of group 1"]),
    "weight decay": (change(weight_decay=0.5), ["weight_decay of group 1", "rank 1: 0.5"]),
    "betas": (change(betas=(0.9, 0.95)), ["betas of group 1", "(0.9, 0.999)", "(0.9, 0.95)"]),
    "a flag": (change(amsgrad=True), ["amsgrad of group 1", "rank 1: True"]),
    "a bound": (change(max_grad_norm=0.5), ["max_grad_norm of group 1", "rank 1: 0.5"]),
    "a tensor": (change(lr=torch.tensor(0.5)), ["lr of group 1", "rank 1: 0.5"]),
    "a clip": (at_step(lambda o, rank: o.clip_grad_norm_(2.0 if rank == 1 else 1.0)),
               ["max_norm", "ranks 0, 2: 1.0", "rank 1: 2.0"]),
    "a value": (at_step(lambda o, rank: o.clip_grad_value_(1.0) if rank != 1 else None),
                ["clip_value", "ranks 0, 2: 1.0", "rank 1: None"]),
    "a divisor": (lambda o, _m, rank: setattr(o, "divisor", 96.0 if rank == 1 else None),
                  ["divisor", "ranks 0, 2: None", "rank 1: 96.0"]),
    "a count": (lambda o, _m, rank: o.count(8) if rank else None,
                ["optimizer.count", "rank 0: False", "ranks 1, 2: True"]),
    "its tensor": (lambda o, _m, rank: setattr(o, "divisor", torch.tensor(96.0 + rank // 2)),
                   ["divisor", "ranks 0, 1: 96.0", "rank 2: 97.0"]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:step. requires_grad")
@pytest.mark.parametrize("name", DRIFTS)
def test_every_rank_names_option_group_and_values(name: str):
    drift, facts = DRIFTS[name]
    errors = outcomes(3, drift)
    assert len(set(errors)) == 1, "the same on all ranks"
    for fact in facts:
        assert fact in errors[0]
    assert errors[0].count(" of group ") == sum(" of group " in fact for fact in facts)


def test_equal_values_and_notes_of_a_script_are_no_difference():
    def drift(optimizer: Any, _model: nn.Module, rank: int) -> None:
        for group in optimizer.param_groups:
            group["note of a script"] = rank
            group["lr"] = 0.02 if rank else 2 * 0.01  # another object, the same value

    assert outcomes(3, drift) == ["ok"] * 3


def test_a_parameter_that_some_ranks_do_not_train_is_warned_of_once():
    """It counts as one without a gradient there, so the step is made."""
    with pytest.warns(UserWarning) as caught:
        assert outcomes(3, freeze) == ["ok"] * 3
    fact = "requires_grad of parameter 'b.bias' differs (ranks 0, 1: True; rank 2: False)"
    assert [fact in str(warning.message) for warning in caught] == [True] * 3


def test_a_step_with_equal_options_again_goes_on():
    """The refused step changed nothing, and what was corrected is compared anew."""

    def run(group: Any) -> None:
        trained = []
        for mistaken in (True, False):
            model = CASES["mlp"].build()
            optimizer = sharded(model, group)
            CASES["mlp"].loss(model, CASES["mlp"].batch(group.rank())).backward()
            if mistaken:
                optimizer.param_groups[0]["lr"] = 0.5 + group.rank()
                for _ in range(2):
                    with pytest.raises(RuntimeError, match="lr of group 0"):
                        optimizer.step()
                optimizer.param_groups[0]["lr"] = 1e-2
            optimizer.step()
            trained.append(values(model))
        assert_same_bits(*trained)

    run_world(2, run)


@pytest.mark.parametrize("size", [2, 64, 1024])
def test_nothing_is_exchanged_in_a_step_but_the_control_all_reduce(size: int):
    """One all-reduce of doubles per step; the follow-up that names values is for errors only."""
    with fake_world(size) as group:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group, two_groups)
        for step in range(2):
            for options in optimizer.param_groups:
                options["lr"] = 0.1 / (1 + step)
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
        doubles = [call for call in group.log if call.dtype == torch.float64]
    assert [call.op for call in doubles] == ["all_reduce"] * 2
    groups, slots, digests, unseen_writes, tokens = 2, 6, 3, 1, 1
    assert doubles[0].nbytes == 8 * (
        groups + 2 * size + slots + 2 * digests + unseen_writes + tokens
    )


# -- the digests ----------------------------------------------------------------------------------


def differing(groups_of_ranks: list[list[dict[str, Any]]], divisors: Any = None) -> list[float]:
    """What the ranks conclude from the sum of their digests: not 0 where options differ."""
    size = len(groups_of_ranks)
    names = [name for name in groups_of_ranks[0][0] if name != "params"]
    with fake_world(size) as group:
        grid = ProcessGroups.flat(Comm(group))
        checks = [OptionCheck(names, grid, torch.device("cpu")) for _ in range(size)]
        sums = sum(
            check.pairs(groups, {"divisor": divisor})
            for check, groups, divisor in zip(
                checks, groups_of_ranks, divisors or [None] * size, strict=True
            )
        )
        training, *options = checks[0].differing(sums).tolist()
        assert not training
        return options


def differ(groups_of_ranks: list[list[dict[str, Any]]], divisors: Any = None) -> bool:
    return any(differing(groups_of_ranks, divisors))


def groups_with(number: int, lr: Any, groups: int = 3) -> list[dict[str, Any]]:
    made = [{"params": [], "lr": 1e-3, "betas": (0.9, 0.99)} for _ in range(groups)]
    made[number]["lr"] = lr
    return made


SAME = groups_with(1, 1e-3)


@pytest.mark.parametrize(
    "ranks",
    [*([SAME] * rank + [groups_with(1, 5e-4)] + [SAME] * (1023 - rank) for rank in (0, 511, 1023)),
     [groups_with(2, 1e-3 * 2.0 ** -(rank % 2)) for rank in range(64)]],
    ids=["the first of 1024", "one amid them", "the last one", "half of 64"],
)  # fmt: skip
def test_a_difference_is_noticed_whatever_ranks_have_it(
    ranks: list[Any], monkeypatch: pytest.MonkeyPatch
):
    assert not differ([SAME] * len(ranks))
    assert differ(ranks)
    monkeypatch.setattr(  # negative control
        OptionCheck, "differing", lambda self, sums: torch.zeros(3)
    )
    assert not differ(ranks)


def test_differences_have_one_sign_so_that_none_cancels_another():
    """What ranks, model-parallel groups and steps add up is below 0 wherever some ranks differ."""
    choose = random.Random(0)
    for _ in range(50):
        rates = [choose.choice([1e-3, 2e-3, -1e-3]) for _ in range(choose.choice([2, 4, 5]))]
        by_rank = [groups_with(1, rate) for rate in rates]
        sums = differing([by_rank[0]] * len(rates)), differing(by_rank), differing(by_rank[::-1])
        assert all(value <= 0 for values in sums for value in values)
        for numbers in sums[1:]:
            assert any(numbers) == (len(set(rates)) > 1)


@pytest.mark.parametrize("factor", [0.5, 1 + 2**-20, -1.0, 0.0])
def test_values_on_an_accelerator_are_compared_there(
    factor: float, monkeypatch: pytest.MonkeyPatch
):
    """Here tensors of one element pass for such: nothing may ask the host for their value."""
    plain = compared.plain
    monkeypatch.setattr(
        compared,
        "plain",
        lambda value: compared.ON_DEVICE if isinstance(value, Tensor) else plain(value),
    )
    same = [groups_with(0, torch.tensor(1e-3)) for _ in range(4)]
    assert not differ(same)
    assert differ([*same[:3], groups_with(0, torch.tensor([1e-3 * factor]))])
    assert differ([*same[:3], groups_with(0, 1e-3)])
    divisors = [torch.tensor(7.0) for _ in range(4)]
    assert not differ(same, divisors)
    assert differ(same, [*divisors[:3], 7.0 * torch.tensor(factor)])
    rates = torch.tensor(1e-3), torch.tensor(2e-3 * (1 + factor))
    ordered, swapped = (
        [{"params": [], "lr": rate} for rate in row] for row in (rates, rates[::-1])
    )
    assert not differ([ordered, ordered])
    assert differ([ordered, swapped]), "rates that changed places"


# -- on an accelerator the host has the numbers later ---------------------------------------------


class Event:
    """Not yet come to pass when it is asked for the first time."""

    asked = False

    def record(self, stream: Any) -> None:
        assert stream == "of the model's device" and not self.asked

    def query(self) -> bool:
        self.asked, before = True, self.asked
        return before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {torch.device("cuda"): "of the model's device"}
    monkeypatch.setattr(skip_report.torch.cuda, "Event", Event)
    monkeypatch.setattr(skip_report.torch.cuda, "current_stream", streams.get)
    monkeypatch.setattr(skip_report.torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        skip_report.torch,
        "zeros_like",
        lambda numbers, **_: torch.zeros(numbers.shape, dtype=numbers.dtype),
    )


@pytest.mark.usefixtures("cuda")
def test_numbers_are_read_when_they_have_arrived_and_not_overwritten_before():
    """A step posts before it reads: to post anew each time would put the arrival off for ever."""
    copy = HostCopy(torch.device("cuda"))
    read = []
    for step in range(6):
        copy.send(torch.tensor([float(step)]))
        read.append(copy.read())  # the copy that was just started is not done
    assert read == [None, [0.0], None, [2.0], None, [4.0]]


@pytest.mark.parametrize("wrong", ["lr", "scale", "count"])
def test_on_an_accelerator_such_steps_are_skipped_and_the_report_follows(
    wrong: str, monkeypatch: pytest.MonkeyPatch
):
    def run(group: Any) -> None:
        model = CASES["mlp"].build()
        scale = {"param_dtype": FP16, "loss_scale": 8.0} if wrong == "scale" else {}
        optimizer = sharded(model, group, **scale)
        before = values(model)
        loss = CASES["mlp"].loss(model, CASES["mlp"].batch(0))
        if wrong == "lr":
            optimizer.param_groups[0]["lr"] = 0.5 + group.rank()
        if wrong == "count":
            optimizer.count(0)
        if wrong != "scale" or group.rank() != 1:
            loss = optimizer.scale_loss(loss)
        loss.backward()
        own_rate = f"rank {group.rank()} has lr of group 0 {0.5 + group.rank()}"
        expected = {
            "lr": own_rate,
            "count": "optimizer.count: expected more than 0 tokens",
            "scale": "the loss was not scaled on rank 1",
        }
        with pytest.raises(RuntimeError, match=expected[wrong]):
            optimizer.step()
        assert_same_bits(values(model), before)

    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    run_world(2, run)


@pytest.mark.parametrize("option", ["lr", "betas"])
def test_tensors_on_an_accelerator_that_differ_are_refused_on_all_ranks_in_the_first_step(
    option: str, monkeypatch: pytest.MonkeyPatch
):
    """``shard()`` does not read them, for that would wait for the device."""

    def run(group: Any) -> None:
        rate, beta = torch.tensor(0.1), torch.tensor(0.9)
        (rate if option == "lr" else beta).div_(1 + group.rank())
        model = CASES["mlp"].build()
        optimizer = sharded(
            model,
            group,
            lambda model: torch.optim.AdamW(
                model.parameters(), lr=rate, betas=(beta, torch.tensor(0.99)), foreach=False
            ),
        )
        before = values(model)
        CASES["mlp"].loss(model, CASES["mlp"].batch(0)).backward()
        with pytest.raises(RuntimeError, match=f"ranks differ in options.* {option} of group 0"):
            optimizer.step()
        assert_same_bits(values(model), before)

    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    run_world(2, run)
