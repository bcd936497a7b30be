"""Options that must be equal on all ranks in every step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from models import CASES, adamw, assert_same_bits, on_each_rank, run_world, sharded, train, values
from torch import nn

from shardcast import _compat
from shardcast.comm import Comm, ProcessGroups
from shardcast.step.decide import report
from shardcast.step.decide.options import REMEDY, OptionCheck
from shardcast.step.decide.report import HostCopy
from shardcast.testing import fake_world

FP16 = torch.float16


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, others = model.a.parameters(), [*model.b.parameters(), *model.c.parameters()]
    return torch.optim.AdamW([{"params": first}, {"params": others}], lr=1e-2)


def outcomes(size: int, drift: Callable[[Any, nn.Module, int], Any], **fields: Any) -> list[str]:
    """Return all ranks' errors of a step after ``drift(optimizer, model, rank)``."""

    def run(group: Any) -> str:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group, two_groups, **fields)
        rank = group.rank()

        train(model, optimizer, [rank])
        before = values(model)
        drift(optimizer, model, rank)
        try:
            train(model, optimizer, [rank])
        except RuntimeError as error:
            assert_same_bits(values(model), before)
            return str(error)
        return "ok"

    ranks, _ = run_world(size, run)
    return ranks


def scheduled(optimizer: Any, _model: nn.Module, rank: int) -> None:
    """Step ReduceLROnPlateau with a loss that differs between ranks."""
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


def fill_in_place(optimizer: Any, _model: nn.Module, rank: int) -> None:
    """Change a tensor rate in place after an earlier step, which has no gradients."""
    rate = torch.tensor(1e-2)
    optimizer.param_groups[1]["lr"] = rate
    optimizer.zero_grad()
    optimizer.step()
    rate.fill_(0.5 if rank == 1 else 1e-2)


DRIFTS: dict[str, tuple[Callable[[Any, nn.Module, int], None], list[str]]] = {
    "plateau": (scheduled, ["lr of group 0", "lr of group 1", "rank 0: 0.01", "ranks 1, 2: 0.005"]),
    "lr": (change(lr=0.02), ["lr of group 1", "ranks 0, 2: 0.01", "rank 1: 0.02"]),
    "lr beside a frozen parameter": (change_and_freeze, ["lr of group 1"]),
    "weight decay": (change(weight_decay=0.5), ["weight_decay of group 1", "rank 1: 0.5"]),
    "betas": (change(betas=(0.9, 0.95)), ["betas of group 1", "(0.9, 0.999)", "(0.9, 0.95)"]),
    "a flag": (change(amsgrad=True), ["amsgrad of group 1", "rank 1: True"]),
    "a bound": (change(max_grad_norm=0.5), ["max_grad_norm of group 1", "rank 1: 0.5"]),
    "a tensor": (change(lr=torch.tensor(0.5)), ["lr of group 1", "rank 1: 0.5"]),
    "a tensor in place": (fill_in_place, ["lr of group 1", "rank 1: 0.5"]),
    "a clip": (
        at_step(lambda o, rank: o.clip_grad_norm_(2.0 if rank == 1 else 1.0)),
        ["max_norm", "ranks 0, 2: 1.0", "rank 1: 2.0"],
    ),
    "a value": (
        at_step(lambda o, rank: o.clip_grad_value_(1.0) if rank != 1 else None),
        ["clip_value", "ranks 0, 2: 1.0", "rank 1: None"],
    ),
    "a divisor": (
        lambda o, _m, rank: setattr(o, "divisor", 96.0 if rank == 1 else None),
        ["divisor", "ranks 0, 2: None", "rank 1: 96.0"],
    ),
    "a count": (
        lambda o, _m, rank: o.count(8) if rank else None,
        ["optimizer.count", "rank 0: False", "ranks 1, 2: True"],
    ),
    "its tensor": (
        lambda o, _m, rank: setattr(o, "divisor", torch.tensor(96.0 + rank // 2)),
        ["divisor", "ranks 0, 1: 96.0", "rank 2: 97.0"],
    ),
}


@pytest.mark.filterwarnings("ignore:step. requires_grad")
@pytest.mark.parametrize("name", DRIFTS)
def test_every_rank_names_option_group_and_values(name: str):
    drift, facts = DRIFTS[name]
    errors = outcomes(3, drift)
    assert len(set(errors)) == 1, "equal on all ranks"
    for fact in facts:
        assert fact in errors[0]
    assert errors[0].count(" of group ") == sum(" of group " in fact for fact in facts)


def test_equal_values_and_notes_of_a_script_are_no_difference():
    def drift(optimizer: Any, _model: nn.Module, rank: int) -> None:
        for group in optimizer.param_groups:
            group["note of a script"] = rank
            group["lr"] = 0.02 if rank else 2 * 0.01  # another object of the same value

    assert outcomes(3, drift) == ["ok"] * 3


def test_a_parameter_that_some_ranks_do_not_train_is_warned_of_once():
    """There it counts as a parameter without a gradient, so the step runs."""
    with pytest.warns(UserWarning) as caught:
        assert outcomes(3, freeze) == ["ok"] * 3
    fact = "requires_grad of parameter 'b.bias' differs (ranks 0, 1: True; rank 2: False)"
    assert [fact in str(warning.message) for warning in caught] == [True]


@on_each_rank(2)
def test_a_step_with_equal_options_again_goes_on(group: Any):
    """The refused step changed nothing, and the corrected options are compared again."""
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


# -- the digests ----------------------------------------------------------------------------------


def differ(groups_of_ranks: list[list[dict[str, Any]]]) -> bool:
    """Return whether the sum of the ranks' digests shows a difference."""
    size = len(groups_of_ranks)
    names = [name for name in groups_of_ranks[0][0] if name != "params"]
    with fake_world(size) as group:
        grid = ProcessGroups.flat(Comm(group))
        originals = [
            SimpleNamespace(groups=groups, option_names=lambda: names) for groups in groups_of_ranks
        ]
        checks = [OptionCheck(of, [], grid, torch.device("cpu")) for of in originals]
        training, *options = checks[0].read(sum(check.local() for check in checks)).tolist()
        assert not training
        return any(options)


def groups_with(number: int, lr: Any, groups: int = 3) -> list[dict[str, Any]]:
    made = [{"params": [], "lr": 1e-3, "betas": (0.9, 0.99)} for _ in range(groups)]
    made[number]["lr"] = lr
    return made


SAME = groups_with(1, 1e-3)


@pytest.mark.parametrize(
    "ranks",
    [
        *(
            [SAME] * rank + [groups_with(1, 5e-4)] + [SAME] * (1023 - rank)
            for rank in (0, 511, 1023)
        ),
        [groups_with(2, 1e-3 * 2.0 ** -(rank % 2)) for rank in range(64)],
    ],
    ids=["the first of 1024", "one amid them", "the last one", "half of 64"],
)
def test_a_difference_is_noticed_whatever_ranks_have_it(ranks: list[Any]):
    assert not differ([SAME] * len(ranks))
    assert differ(ranks)


# -- on an accelerator the host gets the numbers later --------------------------------------------


class Event:
    """Event that has not happened yet at the first query."""

    asked = False

    def record(self, stream: Any) -> None:
        assert stream == "of the model's device" and not self.asked

    def query(self) -> bool:
        self.asked, before = True, self.asked
        return before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {torch.device("cuda"): "of the model's device"}
    monkeypatch.setattr(report.torch.cuda, "Event", Event)
    monkeypatch.setattr(report.torch.cuda, "current_stream", streams.get)
    monkeypatch.setattr(report.torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        report.torch,
        "zeros_like",
        lambda numbers, **_: torch.zeros(numbers.shape, dtype=numbers.dtype),
    )


@pytest.mark.usefixtures("cuda")
def test_numbers_are_read_when_they_have_arrived_and_not_overwritten_before():
    """A step sends before it reads; if each send replaced the last, no copy would ever arrive."""
    copy = HostCopy(torch.device("cuda"))
    read = []
    for step in range(6):
        copy.send(torch.tensor([float(step)]))
        read.append(copy.read())  # the copy just started has not arrived
    assert read == [None, [0.0], None, [2.0], None, [4.0]]


def tensors(rates: tuple[float, float], beta: float) -> Callable[..., torch.optim.Optimizer]:
    """Return tensor options, which ``shard()`` does not read since it would wait for the device."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        first, *others = model.parameters()
        groups = [
            {"params": [first], "lr": torch.tensor(rates[0])},
            {"params": others, "lr": torch.tensor(rates[1])},
        ]
        betas = torch.tensor(beta), torch.tensor(0.99)
        return torch.optim.AdamW(groups, betas=betas, foreach=False)

    return build


class OnDevice(NamedTuple):
    """The error, a rank's optimizer, what it does before the step, and options of ``shard()``."""

    told: str
    optimizer_of: Callable[[int], Any] = lambda _: adamw
    act: Callable[[Any, int], Any] = lambda *_: None
    fields: dict[str, Any] = {}  # noqa: RUF012 - never modified


ON_DEVICE = {
    "lr": OnDevice(
        "has lr of group 0", act=lambda o, rank: o.param_groups[0].update(lr=0.5 + rank)
    ),
    "a scale": OnDevice(
        "the loss was not scaled on rank 1", fields={"param_dtype": FP16, "loss_scale": 8.0}
    ),
    "no tokens": OnDevice("optimizer.count: .*more than 0 tokens", act=lambda o, _: o.count(0)),
    **{
        f"a tensor rate times {factor}": OnDevice(
            "ranks differ in options.* lr of group 1",
            lambda rank, factor=factor: tensors((0.1, 0.1 * (factor if rank else 1)), 0.9),
        )
        for factor in (0.5, 1 + 2**-20, -1.0, 0.0)
    },
    "tensor rates that changed places": OnDevice(
        "ranks differ in options.* lr of group 0",
        lambda rank: tensors((0.1, 0.2)[:: 1 - 2 * rank], 0.9),
    ),
    "tensor betas": OnDevice(
        "ranks differ in options.* betas of group 0",
        lambda rank: tensors((0.1, 0.1), 0.9 / (1 + rank)),
    ),
    "a tensor divisor": OnDevice(
        "ranks differ in options.* divisor",
        act=lambda o, rank: setattr(o, "divisor", torch.tensor(7.0 + rank)),
    ),
}


@pytest.mark.parametrize("name", ON_DEVICE)
def test_on_an_accelerator_such_steps_are_skipped_and_the_report_follows(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    message, optimizer_of, act, fields = ON_DEVICE[name]

    def run(group: Any) -> str:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group, optimizer_of(group.rank()), **fields)
        before = values(model)
        loss = CASES["mlp"].loss(model, CASES["mlp"].batch(0))
        act(optimizer, group.rank())
        (loss if name == "a scale" and group.rank() else optimizer.scale_loss(loss)).backward()
        with pytest.raises(RuntimeError, match=message) as raised:
            optimizer.step()
        assert_same_bits(values(model), before)
        return str(raised.value)

    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    told, _ = run_world(2, run)
    if name == "lr":
        for rank, text in enumerate(told):
            assert f"rank {rank} has lr of group 0 {0.5 + rank}" in text
            assert REMEDY in text
