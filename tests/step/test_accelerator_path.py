"""The path of a step on accelerators, run on a CPU whose values the host does not read."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from models import CASES, adamw, assert_same_bits, run_world, sharded, values
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardcast import _compat
from shardcast.memory import weight_edits
from shardcast.step.update import fusion
from shardcast.testing import fake_world

pytestmark = pytest.mark.timeout(60)

BF16 = torch.bfloat16
LAUNCHES = 25  # of a step without options, beside one for each pack


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "is_host", lambda _device: False)


def groups_of(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups = [{"params": [first], "max_grad_norm": 0.5}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def trained(group: Any, fields: dict[str, Any], steps: int) -> tuple[dict[str, Tensor], float, int]:
    model = CASES["mlp"].build()
    optimizer = sharded(model, group, groups_of, fuse="eager", pack_params=1, **fields)
    for step in range(steps):
        loss = optimizer.scale_loss(CASES["mlp"].loss(model, CASES["mlp"].batch(step)))
        (loss * (math.nan if step == 2 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.grad_norm is not None
    return values(model), optimizer.grad_norm.item(), optimizer.skipped_steps


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize(
    "fields",
    [{}, {"max_grad_norm": 0.1}, {"norm_type": math.inf, "max_grad_norm": 0.01},
     {"param_dtype": torch.float16, "loss_scale": "dynamic", "loss_scale_init": 8.0}],
    ids=str,
)  # fmt: skip
def test_a_training_on_an_accelerator_is_that_on_a_cpu(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Norms of fp32 instead of fp64, numbers of a step on the device, a step that is skipped."""
    fields = {"param_dtype": torch.float32, **fields}
    on_cpu = run_world(2, trained, fields, 5)[0]
    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    on_device = run_world(2, trained, fields, 5)[0]
    assert_same_bits(on_device[0][0], on_device[1][0])
    for (weights, norm, skipped), (expected, norm_on_cpu, _) in zip(on_device, on_cpu, strict=True):
        assert skipped == 1 and norm == pytest.approx(norm_on_cpu, rel=1e-5)
        for weight, on_host in zip(weights.values(), expected.values(), strict=True):
            torch.testing.assert_close(weight, on_host, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("accelerator")
def test_the_report_of_an_accelerator_names_the_owner_and_its_span():
    def run(group: Any) -> None:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group, fuse="eager", pack_params=1, partition="whole")
        for _ in range(3):
            for name, param in model.named_parameters():
                bad = name == "b.weight" and group.rank() == 1
                param.grad = torch.full_like(param, math.nan if bad else 1.0)
            optimizer.step()

    with pytest.warns(UserWarning, match=r"span of rank \d .* parameter 'b.weight'"):
        run_world(2, run)


def in_a_collective() -> bool:
    """Whether what runs is what a mock group computes for a collective."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_issue":
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


class Launches(TorchDispatchMode):
    """Notes operations on tensors but views: on an accelerator, kernel launches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        launches = not func.is_view and "empty" not in str(func) and func.namespace == "aten"
        if launches and not in_a_collective():
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def launches_of_a_step(packs: int, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> list[str]:
    """Those of the third step, in which the update of a range is one, as where it is compiled."""
    monkeypatch.setattr(fusion, "_in_pieces", lambda _fusion, operands, *_: operands[-1].add_(0))
    with fake_world(8) as group:
        model = nn.ParameterList(torch.ones(4096) for _ in range(packs))
        optimizer = sharded(model, group, adamw, fuse="eager", pack_params=1, **fields)
        optimizer.edits.steps = weight_edits.FIRST  # weights are compared with masters until then
        optimizer.reduce.edits.looks = 0  # and means with what they were
        for _ in range(3):
            sum(param.float().sum() for param in model).backward()
            begun = len(group.log)
            with Launches() as counter:
                optimizer.step()
            optimizer.zero_grad()
        assert len(optimizer.layout.packs) == packs
        collectives = {call.launch: call.op for call in group.log[begun:]}
    return [*counter.names, *collectives.values()]


@pytest.mark.usefixtures("accelerator")
def test_a_step_makes_one_launch_for_each_pack_and_few_others(monkeypatch: pytest.MonkeyPatch):
    few, many = (launches_of_a_step(packs, monkeypatch, param_dtype=BF16) for packs in (3, 15))
    assert len(many) - len(few) == 12 * 1
    assert len(many) - 15 <= LAUNCHES, sorted(many)


@pytest.mark.filterwarnings("ignore:step skipped by the guard")
@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize(
    ("guard", "waits"),
    [
        ({"norm": 6.0, "window": 8}, False),
        ({"norm": 6.0, "window": 8, "action": "clip"}, False),
        (lambda norm, _loss: norm > 1.0, False),
        (lambda norm, _loss: torch.tensor(bool(norm > 1.0)), True),
    ],
    ids=["a window", "a clip", "a function", "one that waits"],
)
def test_a_guard_asks_for_no_value_of_the_device(
    guard: Any, waits: bool, monkeypatch: pytest.MonkeyPatch
):
    names = launches_of_a_step(2, monkeypatch, param_dtype=BF16, guard=guard)
    assert ("aten._local_scalar_dense.default" in names) == waits
