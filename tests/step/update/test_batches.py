"""Several ranges in one call, as on an accelerator, and what an update keeps from step to step."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from models import assert_same_bits, run_world
from torch import Tensor, nn

import shardcast
from shardcast import _compat
from shardcast.step.reduce import compiled_mean
from shardcast.step.update import batches, compiled_update, fusion
from shardcast.step.update.batches import Batch
from shardcast.step.update.state import ShardState

pytestmark = pytest.mark.timeout(60)
SIZES = (3, 700, 64, 130, 64, 1, 2000, 129, 513, 64, 320, 77, 640)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU passes for an accelerator, and compiled functions run as they are."""
    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    monkeypatch.setattr(batches, "_kernel", lambda *_: batches._one_by_one)
    monkeypatch.setattr(compiled_update, "_kernel", lambda *_: fusion.in_pieces)
    monkeypatch.setattr(compiled_mean, "_kernel", lambda *_: compiled_mean.mean_)


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
    fields = {"param_dtype": torch.bfloat16, "max_grad_norm": 1.0, **fields}
    optimizer = shardcast.shard(
        model, kind(groups, lr=3e-3, weight_decay=0.1, **options),
        process_group=group, fuse="compile", pack_params=1, **fields,
    )  # fmt: skip
    return model, optimizer


def trained(group: Any, kind: type[torch.optim.Optimizer], fields: dict[str, Any]) -> Any:
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
    weights = {str(number): param.detach().clone() for number, param in enumerate(model)}
    return weights, optimizer.digest()


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"averages": {"ema": 0.9}}),
        (torch.optim.AdamW, {"param_dtype": torch.float32, "max_grad_norm": None}),
        (torch.optim.AdamW, {"param_dtype": torch.float16, "loss_scale": 8.0}),
        (torch.optim.AdamW, {"grads": "sharded"}),
        (torch.optim.SGD, {}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("accelerator")
def test_batches_have_the_bits_of_ranges_that_are_updated_one_by_one(
    kind: type[torch.optim.Optimizer], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Several rates and bounds, absent gradients, a skipped step, ends of no whole row."""
    called: list[int] = []
    one_by_one = batches._one_by_one

    def counted(fusion: Any, ranges: Any, *others: Any) -> None:
        called.append(len(ranges))
        one_by_one(fusion, ranges, *others)

    monkeypatch.setattr(batches, "_one_by_one", counted)
    found, _ = run_world(2, trained, kind, fields)
    assert {*called} == {batches.BATCH}
    monkeypatch.setattr(batches, "FEWEST", 1000)
    called.clear()
    expected, _ = run_world(2, trained, kind, fields)
    assert not called
    for (weights, digest), (others, other) in zip(found, expected, strict=True):
        assert_same_bits(weights, others)
        assert digest == other


@pytest.mark.usefixtures("accelerator")
def test_a_step_like_the_last_one_prepares_nothing(monkeypatch: pytest.MonkeyPatch):
    fetched: list[slice] = []
    fetch = ShardState.fetch

    def counted(self: ShardState, part: slice, *others: Any) -> Any:
        fetched.append(part)
        return fetch(self, part, *others)

    monkeypatch.setattr(ShardState, "fetch", counted)

    def run(group: Any) -> list[int]:
        model, optimizer = optimizer_of(group)
        counts, grads = [], [torch.randn_like(param) for param in model]
        for step in range(7):
            for param, grad in zip(model, grads, strict=True):
                param.grad = grad.clone()
            if step in (3, 4):
                model[1].grad = None
            optimizer.param_groups[0]["lr"] *= 0.5
            before = len(fetched)
            optimizer.step()
            counts.append(len(fetched) - before)
            optimizer.zero_grad()
        return counts

    first, *later = shardcast.testing.threaded_world(1, run)[0]
    assert first > 0 and later[:2] == [0, 0], "the rate alone has changed"
    assert later[2] > 0 and later[4] > 0, "a gradient is absent, and is there again"


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_all_that_a_batch_has_begins_at_a_multiple_of_16_bytes(
    kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
):
    """Inductor copies on a GPU what does not, in each call."""
    made: list[batches.Batch] = []
    monkeypatch.setattr(batches, "Batch", lambda *args: made.append(Batch(*args)) or made[-1])
    trained(None, kind, {})
    assert len(made) > 1
    for batch in made:
        tensors = [batch.numbers, batch.factors, *itertools.chain(*batch.operands)]
        assert {tensor.data_ptr() % 16 for tensor in tensors} == {0}


@pytest.mark.parametrize("count", [4, 7, 8, 9, 40])
@pytest.mark.usefixtures("accelerator")
def test_the_longest_ranges_are_cut_until_batches_are_full(count: int):
    model = nn.ParameterList(torch.ones(64 * (4 + n)) for n in range(count))
    optimizer = shardcast.shard(
        model, torch.optim.AdamW(model.parameters()), fuse="compile", pack_params=1,
        param_dtype=torch.bfloat16,
    )  # fmt: skip
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        in_batches = batches.in_batches

        def noted(ranges: Any) -> Any:
            seen.append((list(ranges), in_batches(ranges)))
            return seen[-1][1]

        patch.setattr(batches, "in_batches", noted)
        optimizer.step()
    ranges, (made, alone) = seen[0]
    assert not alone and all(len(batch) == batches.BATCH for batch in made)
    assert len(made) == -(-count // batches.BATCH)
    for one in ranges:
        parts = [it.part for batch in made for it in batch if it.state is one.state]
        parts.sort(key=lambda part: part.start)
        assert parts[0].start == 0 and parts[-1].stop == one.part.stop
        assert all(left.stop == right.start for left, right in itertools.pairwise(parts))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.needs_compiler
def test_a_batch_has_one_graph_whatever_is_absent(monkeypatch: pytest.MonkeyPatch):
    """And whichever ranges have equal lengths; compiled it has the bits of ranges one by one."""
    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    monkeypatch.setattr(batches, "BATCH", 4)

    def run(_group: Any = None) -> dict[str, Tensor]:
        model, optimizer = optimizer_of(None)
        for step in range(5):
            for number, param in enumerate(model.parameters()):
                seed = torch.Generator().manual_seed(step)
                grad = torch.randn(param.shape, generator=seed).to(param.dtype)
                param.grad = None if step and number % 5 == step else grad
            if step == 1:
                torch._dynamo.config.error_on_recompile = True
            optimizer.step()
        return {str(number): param.detach().clone() for number, param in enumerate(model)}

    with torch._dynamo.config.patch(error_on_recompile=False):
        found = run()
    monkeypatch.setattr(batches, "FEWEST", 1000)
    with torch._dynamo.config.patch(error_on_recompile=False):
        assert_same_bits(found, run())
