"""Averages of buffers, beside the same by hand, and buffers that come back after an evaluation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models import assert_same_bits, run_world
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import shardcast
from shardcast import checkpoint
from shardcast.testing import threaded_world

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:step skipped")]

DECAY, STEPS, SKIPPED = 0.8, 6, 3
AVERAGED = {"ema": {"decay": DECAY, "use_buffers": True}, "short": 0.5}
Values = dict[str, Tensor]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def sharded(model: nn.Module, averages: Any = AVERAGED, **options: Any) -> Any:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return shardcast.shard(model, sgd, param_dtype="fp32", averages=averages, **options)


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step)) + step


def train(model: nn.Module, optimizer: Any, steps: range, rank: int = 0) -> list[Values]:
    """The buffers after each step that was made."""
    seen = []
    for step in steps:
        loss = model(batch(step) + rank).square().mean()
        (loss * (math.inf if step == SKIPPED else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step != SKIPPED:
            seen.append(buffers(model))
    return seen


def buffers(model: nn.Module) -> Values:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def ema(seen: list[Values], decay: Any = DECAY) -> Values:
    """By hand: floating-point ones averaged from the first step on, integers those of the model."""
    average = dict(seen[0])
    for number, values in enumerate(seen[1:], 2):
        kept = min(DECAY, (1 + number) / (10 + number)) if decay == "warmup" else decay
        for name, value in values.items():
            is_float = value.is_floating_point()
            average[name] = average[name].lerp(value, 1 - kept) if is_float else value
    return average


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("how", ["plain", "warmup", "off"])
def test_an_average_with_buffers_is_that_of_one_process(size: int, how: str):
    averages = {"ema": {"decay": DECAY, "use_buffers": True, "warmup": how == "warmup"}}

    def run(group: Any) -> tuple[list[Values], Values]:
        model, rank = build(), 0 if group is None else group.rank()
        optimizer = sharded(model, averages, process_group=group, broadcast_buffers=how != "off")
        seen = train(model, optimizer, range(STEPS), rank)
        training = buffers(model)
        with optimizer.averaged("ema"):
            average = buffers(model)
            model(batch(9))  # in training mode writes them
        assert_same_bits(buffers(model), training)
        assert optimizer.memory_report()["averages"] >= 4 * 12
        return seen, average

    ranks = run_world(size, run)[0] if size > 1 else [run(None)]
    expected = ema(ranks[0][0], how if how == "warmup" else DECAY)
    for _, average in ranks:
        torch.testing.assert_close(average, expected, rtol=1e-6, atol=0)


def test_it_is_that_of_torchs_averaged_model_and_without_the_option_the_models_own():
    model, twin = build(), build()
    optimizer, plain = sharded(model), torch.optim.SGD(twin.parameters(), lr=0.1)
    average = AveragedModel(twin, avg_fn=get_ema_avg_fn(DECAY), use_buffers=True)
    for step in range(SKIPPED):
        train(model, optimizer, range(step, step + 1))
        twin(batch(step)).square().mean().backward()
        plain.step()
        plain.zero_grad()
        average.update_parameters(twin)
    own = buffers(model)
    with optimizer.averaged("ema"):
        for name in ("1.running_mean", "1.running_var"):
            expected = average.module.get_buffer(name)
            torch.testing.assert_close(model.get_buffer(name), expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(model.get_buffer("1.running_mean"), own["1.running_mean"])
    with optimizer.averaged("short"):
        assert_same_bits(buffers(model), own)
        model(batch(9))
    assert_same_bits(buffers(model), own)


@pytest.mark.parametrize("grid", [{"dp": 3}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("through", ["checkpoint", "state_dict"])
def test_averages_of_buffers_resume_on_another_grid(
    grid: dict[str, int], through: str, tmp_path: Path
):
    def run(mesh: Any, resumes: bool) -> tuple[Values, Values]:
        model = build()
        optimizer = sharded(model, **({} if mesh is None else {"mesh": mesh}))
        if not resumes or through == "state_dict":
            train(model, optimizer, range(2))
        if through == "state_dict" and resumes:
            state = optimizer.state_dict()
            train(model, optimizer, range(4, 6))
            for name, buffer in buffers(model).items():
                model.get_buffer(name).copy_(saved[0][name] if buffer.dim() else 2)
            optimizer.load_state_dict(state)
        elif resumes:
            checkpoint.load(tmp_path, model, optimizer)
        else:
            with optimizer.averaged("ema"):  # the checkpoint has the buffers of the training
                checkpoint.save(tmp_path, model, optimizer, step=2)
        seen = buffers(model)
        train(model, optimizer, range(2, STEPS))
        with optimizer.averaged("ema"):
            return seen, buffers(model)

    saved = run(None, False)
    for loaded, average in threaded_world(grid, run, True):
        assert_same_bits(loaded, saved[0])
        torch.testing.assert_close(average, saved[1], rtol=1e-6, atol=1e-7)


def test_an_export_has_the_averaged_buffers_and_load_average_takes_them(tmp_path: Path):
    model = build()
    optimizer = sharded(model)
    seen = train(model, optimizer, range(STEPS))
    checkpoint.save(tmp_path / "saved", model, optimizer, step=1)
    (path,) = [p for p in checkpoint.export(tmp_path / "saved", tmp_path / "out", weights="ema")
               if p.suffix == ".safetensors"]  # fmt: skip
    exported = load_file(path)
    for name, value in ema(seen).items():
        torch.testing.assert_close(exported[name], value, rtol=1e-6, atol=0)
    again = sharded(build())
    again.load_average("ema", exported)
    with again.averaged("ema"):
        average = {name: value.clone() for name, value in again.model.state_dict().items()}
    for name, value in average.items():
        assert name.endswith("tracked") or torch.equal(value, exported[name])


@pytest.mark.parametrize("through", ["load_state_dict", "load_plain", "a list"])
def test_a_full_state_dict_has_the_averages_of_buffers(through: str):
    """Of one optimizer, or with the first of two; plain torch loads it, too."""

    def pair(model: Any) -> Any:
        made = [torch.optim.SGD(model[n].parameters(), lr=0.1, momentum=0.5) for n in (0, 2)]
        made[0].add_param_group({"params": model[1].parameters()})
        return made if through == "a list" else torch.optim.SGD(model.parameters(), 0.1, 0.5)

    def start(group: Any) -> tuple[nn.Module, Any]:
        model = build()
        return model, shardcast.shard(
            model, pair(model), process_group=group, param_dtype="fp32", averages=AVERAGED
        )

    def save(group: Any) -> Any:
        model, optimizer = start(group)
        train(model, optimizer, range(SKIPPED))
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        state = optimizer.full_state_dicts() if through == "a list" else optimizer.full_state_dict()
        return weights, state, finish(model, optimizer)

    def load(group: Any) -> Values:
        model, optimizer = start(group)
        train(model, optimizer, range(4, 6))
        if through == "load_plain":
            checkpoint.load_plain(model, optimizer, weights, state)
        else:
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        return finish(model, optimizer)

    def finish(model: nn.Module, optimizer: Any) -> Values:
        train(model, optimizer, range(SKIPPED, STEPS))
        with optimizer.averaged("ema"):
            return buffers(model)

    (weights, state, expected), (_, elsewhere, _) = run_world(2, save)[0]
    assert not elsewhere, "rank 0 alone has it"
    for average in run_world(3, load)[0]:
        torch.testing.assert_close(average, expected, rtol=1e-6, atol=1e-7)
    if through != "a list":
        pair(build()).load_state_dict(state)


def test_averages_of_buffers_of_another_shape_are_refused():
    """One value for all channels would be taken for each of them."""
    optimizer = sharded(build())
    train(optimizer.model, optimizer, range(2))
    before, state = optimizer.digest(), optimizer.full_state_dict()
    state["shardcast_buffers"]["1.running_mean"]["average.ema"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"1\.running_mean"):
        optimizer.load_state_dict(state)
    weights = {**optimizer.model.state_dict(), "1.running_mean": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"1\.running_mean"):
        optimizer.load_average("ema", weights)
    assert optimizer.digest() == before
