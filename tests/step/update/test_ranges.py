"""Ranges of an update: their numbers on an accelerator, and several groups in one pack."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_same_bits, run_world
from oracle import BATCH, check, mlp, set_grads, steps
from pairwise import thinned
from torch import Tensor, nn

import shardcast
from shardcast import _compat
from shardcast.step.update import fusion
from shardcast.testing import fake_world

SIZES = (3, 700, 64, 130, 64, 1, 2000, 129, 513, 64, 320, 77, 640)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as an accelerator, and run compiled functions eagerly."""
    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    monkeypatch.setattr(fusion, "_kernel", lambda *_: fusion.in_pieces)


def optimizer_of(group: Any, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **fields: Any):
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(size) for size in SIZES)
    params = [*model.parameters()]
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    groups = [
        {"params": params[:6], "lr": 1e-2},
        {"params": params[6:9], "lr": 1e-3, "max_grad_norm": 0.3},
        {"params": params[9:], "weight_decay": 0.0},
    ]
    usual = {"param_dtype": torch.bfloat16, "max_grad_norm": 1.0, "fuse": "compile"}
    fields = {**usual, "pack_params": 1, **fields}
    optimizer = shardcast.shard(
        model, kind(groups, lr=3e-3, weight_decay=0.1, **options), process_group=group, **fields
    )
    return model, optimizer


def trained(
    kind: type[torch.optim.Optimizer], fields: dict[str, Any], group: Any = None
) -> dict[str, Tensor]:
    model, optimizer = optimizer_of(group, kind, **fields)
    draw = random.Random(1)
    for step in range(8):
        absent = set() if step % 4 < 2 else {*draw.sample(range(len(SIZES)), 5)}
        for number, param in enumerate(model.parameters()):
            grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
            grad[0] = torch.nan if step == 5 and number == 2 else grad[0]
            param.grad = None if number in absent else grad.to(param.dtype)
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.scale_loss(torch.zeros(()))
        optimizer.step()
        optimizer.zero_grad()
    found = {str(number): param.detach().clone() for number, param in enumerate(model)}
    scale = 1.0 if optimizer.loss_scale is None else float(optimizer.loss_scale)
    return {**found, "norm": optimizer.grad_norm, "scale": torch.tensor(scale)}


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"averages": {"ema": 0.9}}),
        (torch.optim.AdamW, {"param_dtype": torch.float32, "max_grad_norm": None}),
        (torch.optim.AdamW, {"param_dtype": torch.float16, "loss_scale": 8.0}),
        (torch.optim.SGD, {}),
        (torch.optim.AdamW, {"pack_params": None}),
        (torch.optim.AdamW, {"pack_params": 5, "averages": {"ema": 0.9}}),
        (torch.optim.AdamW, {"pack_params": None, "master": "split16", "moments": "int8"}),
        (torch.optim.SGD, {"pack_params": None, "max_grad_norm": None}),
        (torch.optim.AdamW, {"norm_type": math.inf, "max_grad_norm": 0.01}),
        (
            torch.optim.AdamW,
            {"param_dtype": torch.float16, "loss_scale": "dynamic", "loss_scale_init": 8.0},
        ),
    ],
    ids=str,
)
def test_a_training_with_numbers_of_the_device_is_that_with_numbers_of_the_host(
    kind: type[torch.optim.Optimizer], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Includes several rates and bounds, absent gradients, a skipped step, incomplete rows."""
    fields = {"fuse": "eager", **fields}
    expected = run_world(2, lambda group: trained(kind, fields, group))[0][0]
    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    ranks = run_world(2, lambda group: trained(kind, fields, group))[0]
    assert_same_bits(*ranks)
    for name, weight in expected.items():
        torch.testing.assert_close(ranks[0][name], weight, rtol=2**-7, atol=1e-5)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_all_that_a_kernel_is_given_begins_at_a_multiple_of_16_bytes(
    kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
):
    """On a GPU, Inductor copies unaligned tensors in each call."""
    given: list[Tensor] = []

    def run(_fusion: Any, operands: Any, numbers: Any, factor: Any, skip: Any) -> None:
        given.extend([*operands, numbers.rule, factor, skip])

    monkeypatch.setattr(fusion, "_kernel", lambda *_: run)
    trained(kind, {})
    assert {tensor.data_ptr() % 16 for tensor in given} == {0} and len(given) > 100


@pytest.mark.timeout(300)
@pytest.mark.needs_compiler
def test_a_rule_has_one_graph_for_all_lengths_rates_and_absent_gradients(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    fusion._kernel.cache_clear()
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    trained(torch.optim.AdamW, {"param_dtype": torch.float32, "max_grad_norm": 1.0})
    assert counts["unique_graphs"] == before + 1
    trained(torch.optim.SGD, {"param_dtype": torch.float32, "max_grad_norm": 1.0})
    assert counts["unique_graphs"] == before + 2
    for pack_params in (None, 8):
        fields = {"param_dtype": torch.float32, "max_grad_norm": 1.0, "pack_params": pack_params}
        trained(torch.optim.AdamW, fields)
        assert counts["unique_graphs"] == before + 3, "one more for several groups"


@pytest.mark.usefixtures("accelerator")
def test_a_kernel_updates_all_groups_of_a_pack_at_once(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []

    def run(fusion: Any, operands: Any, *others: Any) -> None:
        calls.append(operands[0].numel())
        in_pieces(fusion, operands, *others)

    in_pieces = fusion.in_pieces
    monkeypatch.setattr(fusion, "_kernel", lambda *_: run)
    model, optimizer = optimizer_of(None, pack_params=None)
    for param in model:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert len(calls) <= 2, "one for all groups, one for the last, incomplete row"
    assert sum(calls) >= sum(SIZES)


# -- several groups in one pack -------------------------------------------------------------------

ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95)}


def layers(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups as for layer-wise decay: a rate per layer, and no weight decay of biases."""
    params = list(model.parameters())
    return [
        {"params": [param], "lr": 1e-2 * 0.7**number, "weight_decay": 0.3 * (param.dim() > 1)}
        for number, param in enumerate(params)
    ]


def in_two(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": params[1::2], "weight_decay": 0.0, "lr": 3e-2},
        {"params": params[::2], "weight_decay": 0.2},
    ]


GROUPS = {"layers": layers, "two": in_two}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, **ADAM),
    "Adam": lambda groups: torch.optim.Adam(groups, amsgrad=True, **ADAM),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
}


def packs_of(model: nn.Module, optimizer: torch.optim.Optimizer, **fields: Any) -> int:
    with fake_world(4, rank=1) as group:
        sharded = shardcast.shard(model, optimizer, process_group=group, **fields)
        return len(sharded.layout.packs)


@pytest.mark.parametrize(("name", "groups", "pack_params"), thinned(2, OPTIMIZERS, GROUPS, (3, 4)))
def test_each_group_has_its_own_numbers(name: str, groups: str, pack_params: int):
    """Also if they change and gradients are absent."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[name](GROUPS[groups](model))

    def change(step: int, _model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[step % 2]["lr"] *= 0.5
        optimizer.param_groups[1]["weight_decay"] = 0.1 * (step % 3)

    def script(model: nn.Module, optimizer: Any, _batch: Tensor, _sharded: bool) -> None:
        for step in range(6):
            change(step, model, optimizer)
            set_grads(model, step)
            if step in (0, 3):  # one parameter's first step comes later than the others'
                list(model.parameters())[step % 4 + 1].grad = None
            optimizer.step()
            optimizer.zero_grad()

    tol = 1e-6 if name == "Adafactor" else 0.0
    fields: dict[str, Any] = {"unpacked_first": 0, "pack_params": pack_params}
    check(build, script, worlds=(1, 2, 4), tol=tol, **fields)
    model = mlp()
    packs = packs_of(model, build(model), param_dtype="fp32", **fields)
    assert packs == 2, "as many packs as with one group"


def test_a_flag_that_one_group_gets_later_gives_its_state_to_that_group_alone():
    """With amsgrad, the pack stays, and parameters of the other group get no such state."""

    def flag(step: int, _model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["amsgrad"] = step >= 2

    def build(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(in_two(model), **ADAM)

    def script(model: nn.Module, optimizer: Any, _batch: Tensor, sharded: bool) -> None:
        for step in range(5):
            flag(step, model, optimizer)
            for param in optimizer.param_groups[0]["params"] if step == 2 and not sharded else ():
                optimizer.state[param]["max_exp_avg_sq"] = torch.zeros_like(param)
            set_grads(model, step)
            optimizer.step()

    check(build, script, worlds=(1, 2), unpacked_first=0, pack_params=4)
    model = mlp()
    optimizer = shardcast.shard(model, build(model), param_dtype="fp32", unpacked_first=0)
    steps(4, flag)(model, optimizer, BATCH, True)
    names = [
        {*optimizer.state_dict()["state"][number]} for number in range(len([*model.parameters()]))
    ]
    assert ["max_exp_avg_sq" in own for own in names] == [True] * 3 + [False] * 3


def test_what_chooses_code_or_state_parts_packs():
    model = mlp()
    groups = in_two(model)
    groups[0]["amsgrad"] = True
    assert packs_of(model, torch.optim.AdamW(groups), unpacked_first=0) == 2
    model = mlp()
    groups = in_two(model)
    groups[0]["momentum"] = 0.9
    assert packs_of(model, torch.optim.SGD(groups), unpacked_first=0) == 2


def test_groups_add_no_collective():
    counts = {}
    for name, build in {"one": lambda m: [{"params": list(m.parameters())}], **GROUPS}.items():
        with fake_world(8, rank=0) as group:
            model = mlp()
            inner = torch.optim.AdamW(build(model), lr=1e-3)
            optimizer = shardcast.shard(model, inner, process_group=group, max_grad_norm=1.0)
            for _ in range(2):
                before = len(group.rank_log)
                model(BATCH).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            counts[name] = len(group.rank_log) - before
    assert len({*counts.values()}) == 1, counts
