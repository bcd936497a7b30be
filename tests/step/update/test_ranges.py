"""Ranges of an update on an accelerator: their numbers, and what is kept from step to step."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from models import assert_same_bits, run_world
from torch import Tensor, nn

import shardcast
from shardcast import _compat
from shardcast.step.update import fusion

SIZES = (3, 700, 64, 130, 64, 1, 2000, 129, 513, 64, 320, 77, 640)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU passes for an accelerator, and compiled functions run as they are."""
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
    """Several rates and bounds, absent gradients, a skipped step, ends of no whole row."""
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
    """Inductor copies on a GPU what does not, in each call."""
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
        assert counts["unique_graphs"] == before + 3, "and one for several groups"


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
    assert len(calls) <= 2, "one call, and one for the end of no whole row"
