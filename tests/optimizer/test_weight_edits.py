"""Weights that a script writes between steps, beside the same script on a plain fp32 model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, assert_same_bits, install, run_world, values
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import shardcast
from shardcast.memory import weight_edits
from shardcast.testing import ThreadedWorld, threaded_world

pytestmark = pytest.mark.timeout(120)

BF16 = torch.bfloat16
STEPS = 6
Edit = Callable[[nn.Module, int], None]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-2)


def reinit(model: nn.Module, step: int) -> None:
    if step == 2:
        generator = torch.Generator().manual_seed(3)
        for param in model.parameters():
            param.copy_(0.25 * torch.randn(param.shape, generator=generator))


def vector(model: nn.Module, step: int) -> None:
    if step % 2:
        flat = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(flat * 0.5, model.parameters())


def load(model: nn.Module, step: int) -> None:
    if step == 3:
        model.load_state_dict(CASES["mlp"].build(seed=4).state_dict())


class Lookahead:
    """Slow weights, written back every second step."""

    def __init__(self) -> None:
        self.slow: list[Tensor] = []

    def __call__(self, model: nn.Module, step: int) -> None:
        self.slow = self.slow or [param.float().clone() for param in model.parameters()]
        if step % 2:
            for slow, fast in zip(self.slow, model.parameters(), strict=True):
                slow.lerp_(fast.float(), 0.5)
                fast.copy_(slow)


class SwitchedAverage:
    """An average that is evaluated in the model's place, and stays in it at the end."""

    def __init__(self, last: int = STEPS - 2) -> None:
        self.last = last
        self.average: list[Tensor] = []

    def __call__(self, model: nn.Module, step: int) -> None:
        params = list(model.parameters())
        self.average = self.average or [torch.zeros(param.shape) for param in params]
        for average, param in zip(self.average, params, strict=True):
            average.lerp_(param.float(), 0.5)
        backup = [param.clone() for param in params]
        for param, average in zip(params, self.average, strict=True):
            param.copy_(average)
        if step != self.last:
            for param, kept in zip(params, backup, strict=True):
                param.copy_(kept)


EDITS: dict[str, Callable[[], Edit]] = {
    "reinit": lambda: reinit,
    "vector": lambda: vector,
    "load": lambda: load,
    "lookahead": Lookahead,
    "average": SwitchedAverage,
}


def train(model: nn.Module, optimizer: Any, edit: Edit) -> None:
    wait = getattr(optimizer, "wait_sync", lambda: None)
    for step in range(STEPS):
        install(model, step)
        if step % 2 and hasattr(optimizer, "clip_grad_norm_"):
            optimizer.clip_grad_norm_(1e9)
        optimizer.step()
        wait()
        with torch.no_grad():
            edit(model, step)


def plain(edit: Edit) -> dict[str, Tensor]:
    model = CASES["mlp"].build()
    train(model, adamw(model), edit)
    return values(model)


def on_rank(group: Any, kind: str, fields: dict[str, Any]) -> Any:
    model = CASES["mlp"].build()
    optimizer = shardcast.shard(model, adamw(model), process_group=group, **fields)
    train(model, optimizer, EDITS[kind]())
    exact = optimizer.full_parameters()
    install(model, STEPS)
    optimizer.step()  # every rank has the owners' values
    optimizer.wait_sync()
    return exact, values(model)


KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"param_dtype": torch.float32},
    "bf16": {},
    "fp16": {"param_dtype": torch.float16, "loss_scale": 1.0},
    "split": {"master": "split16"},
    "offload": {"offload": True},
    "overlap": {"overlap_sync": True, "pack_params": 2},
    "whole": {"partition": "whole"},
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_a_script_writes_are_those_of_the_plain_script(edit: str, kind: str):
    expected = plain(EDITS[edit]())
    unedited = plain(lambda _model, _step: None)
    results, _ = run_world(2, on_rank, edit, KINDS[kind])
    assert_same_bits(results[0][1], results[1][1])
    exact = results[0][0]

    def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
        return max((one[name] - other[name]).abs().max().item() for name in one)

    bound = 1e-6 if kind == "fp32" else 1e-2
    assert distance(exact, expected) < bound
    assert distance(unedited, expected) > 2e-2, "the edit changes much"


@pytest.mark.parametrize("kind", KINDS)
def test_an_average_that_is_switched_in_and_out_moves_no_bit(kind: str):
    def run(group: Any, edit: Edit) -> Any:
        model = CASES["mlp"].build()
        optimizer = shardcast.shard(model, adamw(model), process_group=group, **KINDS[kind])
        train(model, optimizer, edit)
        return optimizer.full_parameters()

    unedited, switched = (
        ThreadedWorld(2).run(run, edit)[0]
        for edit in (lambda _model, _step: None, SwitchedAverage(last=STEPS))
    )
    assert_same_bits(switched, unedited)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("fields", KINDS)
def test_an_embedding_that_rescales_its_rows_keeps_their_norm(kind: Any, fields: str):
    torch.manual_seed(0)
    model = nn.Sequential(kind(9, 4, max_norm=0.5), nn.Linear(4, 3))
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = shardcast.shard(model, inner, **KINDS[fields])
    for _ in range(3):
        optimizer.scale_loss(model(torch.arange(9).view(9, 1)).float().square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.full_parameters()["0.weight"].norm(dim=1).max() < 0.51


def write_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.0625, 0.0625)


def write_one(model: nn.Module) -> None:
    model.c.bias.data[0] = 3.0  # of one rank's span


@pytest.mark.parametrize("write", [write_data, write_one])
@pytest.mark.parametrize("kind", ["bf16", "offload", "overlap", "whole"])
def test_a_write_through_data_is_refused_by_name_on_all_ranks(
    kind: str, write: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(weight_edits, "PIECE", 8)  # several in a span

    def run(group: Any) -> str:
        model = CASES["mlp"].build()
        optimizer = shardcast.shard(model, adamw(model), process_group=group, **KINDS[kind])
        install(model, 0)
        optimizer.step()
        optimizer.wait_sync()
        write(model)
        before = optimizer.resync_masters  # reading state would take it
        install(model, 1)
        with pytest.raises(RuntimeError, match=r"resync_masters") as error:
            optimizer.step()
        before()
        optimizer.step()  # the script took the advice
        return str(error.value)

    for message in ThreadedWorld(2).run(run):
        assert ("'c.bias'" if write is write_one else ".") in message


def write_late(model: nn.Module) -> None:
    model.a.weight.data[-1, -1] = 3.0  # none of the elements that are compared in every step


@pytest.mark.parametrize(
    ("write", "evaluated", "seen"),
    [(write_data, False, True), (write_late, False, False), (write_late, True, True)],
)
def test_one_write_through_data_late_in_a_run_is_found(write: Any, evaluated: bool, seen: bool):
    """The first elements are compared in all steps; after an evaluation all others are, too."""

    def run(group: Any) -> None:
        model = CASES["mlp"].build()
        optimizer = shardcast.shard(model, adamw(model), process_group=group)
        for step in range(20):
            install(model, step)
            optimizer.step()
        write(model)
        if evaluated:
            with torch.no_grad():
                model(torch.ones(1, 7, dtype=BF16))
        install(model, 20)
        if seen:
            with pytest.raises(RuntimeError, match="resync_masters") as error:
                optimizer.step()
            assert "parameter 'a.weight'" in str(error.value) or write is write_data
        else:
            optimizer.step()

    ThreadedWorld(2).run(run)


@pytest.mark.parametrize("period", [5, 6, 8])
def test_writes_through_data_in_every_few_steps_are_found(period: int):
    model = CASES["mlp"].build()
    optimizer = shardcast.shard(model, adamw(model))
    for step in range(16):  # the first steps have none
        install(model, step)
        optimizer.step()

    def run() -> None:
        for step in range(1, 127 * period + 1):
            if step % period == 0:
                write_data(model)
            optimizer.step()

    with pytest.raises(RuntimeError, match="resync_masters"):
        run()


def test_full_precision_is_kept_where_an_edit_changes_nothing():
    model = CASES["mlp"].build()
    optimizer = shardcast.shard(model, adamw(model))
    install(model, 0)
    optimizer.step()
    before = optimizer.full_parameters()
    with torch.no_grad():
        model.a.weight[0] = 2.0
        model.b.weight.mul_(1.0)
    after = optimizer.full_parameters()
    before["a.weight"][0] = 2.0
    assert_same_bits(after, before)
    assert not torch.equal(after["b.weight"], after["b.weight"].to(BF16).float())


def test_weights_that_become_nan_are_no_edits():
    model = CASES["mlp"].build()
    optimizer = shardcast.shard(model, adamw(model))
    optimizer.param_groups[0]["lr"] = float("nan")
    for step in range(weight_edits.FIRST + 2):
        install(model, step)
        optimizer.step()
    assert model.a.weight.isnan().all()


def meshed(mesh: Any, way: str) -> Tensor:
    torch.manual_seed(0)
    whole = torch.randn(8, 4)
    local = whole.chunk(2)[mesh.get_local_rank("tp")].clone()
    model = nn.Linear(4, 8, bias=False)
    model.weight = nn.Parameter(DTensor.from_local(local, mesh["tp"], [Shard(0)]))
    optimizer = shardcast.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.0), mesh=mesh, param_dtype=BF16
    )
    with torch.no_grad():
        if way == "dtensor":
            model.weight.clamp_(-0.25, 0.25)
        elif way == "local":
            model.weight.to_local().clamp_(-0.25, 0.25)
        else:
            model.weight.to_local().data.clamp_(-0.25, 0.25)
    model.weight.grad = DTensor.from_local(torch.zeros(4, 4, dtype=BF16), mesh["tp"], [Shard(0)])
    if way == "data":
        with pytest.raises(RuntimeError, match=r"'weight'|another rank"):
            optimizer.step()
    else:
        optimizer.step()
    return copy.copy(optimizer.shards[0].data)


@pytest.mark.parametrize("way", ["dtensor", "local", "data"])
def test_tensor_parallel_weights_may_be_written_too(way: str):
    largest = max(m.abs().max() for m in threaded_world({"dp": 2, "tp": 2}, meshed, way))
    assert (largest < 0.251) == (way != "data")  # below it masters are cast to 0.25
