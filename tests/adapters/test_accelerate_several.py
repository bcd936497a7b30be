"""Accelerate with several optimizers on one model, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from oracle import difference, mlp, pair
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from shardcast.accelerate import ShardcastAccelerator

pytestmark = pytest.mark.timeout(60)
INPUT = torch.randn(8, 7, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Accelerate keeps its state in class attributes, and other tests may have left some."""

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    yield
    reset()


def accelerator(**options: Any) -> ShardcastAccelerator:
    return ShardcastAccelerator(cpu=True, mixed_precision="no", shardcast_config={}, **options)


def halving(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def plain(steps: int, micros: int = 1) -> nn.Module:
    model = mlp()
    optimizers = pair(model)
    schedulers = [halving(optimizer) for optimizer in optimizers]
    for _ in range(steps):
        for _ in range(micros):
            (model(INPUT).square().mean() / micros).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for one in (*optimizers, *schedulers):
            one.step()
        for one in optimizers:
            one.zero_grad()
    return model


def train(it: ShardcastAccelerator, model: Any, optimizers: Any, schedulers: Any, count: int):
    for _ in range(count):
        with it.accumulate(model):
            it.backward(model(INPUT).square().mean())
            if it.sync_gradients:
                it.clip_grad_norm_(model.parameters(), 0.1)
            for one in (*optimizers, *schedulers):
                one.step()
            for one in optimizers:
                one.zero_grad()


@pytest.mark.parametrize("micros", [1, 2])
def test_two_prepared_optimizers_train_as_two_plain_ones(micros: int):
    it = accelerator(gradient_accumulation_steps=micros)
    model = mlp()
    muon, adamw = pair(model)
    first, model, second, one, other = it.prepare(muon, model, adamw, halving(muon), halving(adamw))
    assert first is not second
    assert it.sharded_optimizer.layout.partition == "mixed"
    train(it, model, [first, second], [one, other], 4 * micros)
    assert difference(model, plain(4, micros)) <= 1e-6
    assert not first.step_was_skipped


def test_a_list_of_optimizers_is_prepared_as_one_that_a_scheduler_drives_whole():
    it = accelerator()
    model = mlp()
    both = pair(model)
    model, optimizer = it.prepare(model, both)
    scheduler = it.prepare(halving(optimizer))
    train(it, model, [optimizer], [scheduler], 4)
    assert difference(model, plain(4)) <= 1e-6
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2 / 2**4] * 2
    with pytest.raises(RuntimeError, match="has a sharded optimizer already"):
        it.prepare(pair(model))


def test_their_state_is_saved_and_loaded_together(tmp_path: Path):
    it = accelerator()
    model = mlp()
    muon, adamw = pair(model)
    prepared = it.prepare(model, muon, adamw, halving(muon), halving(adamw))
    train(it, prepared[0], prepared[1:3], prepared[3:], 2)
    it.save_state(str(tmp_path / "state"))
    train(it, prepared[0], prepared[1:3], prepared[3:], 3)
    it.load_state(str(tmp_path / "state"))
    train(it, prepared[0], prepared[1:3], prepared[3:], 2)
    assert difference(model, plain(4)) <= 1e-6


def test_an_accelerator_may_prepare_them_again_once_its_memory_is_freed():
    it = accelerator()
    model = mlp()
    for _ in range(2):
        model, *optimizers = it.prepare(model, *pair(model))
        train(it, model, optimizers, [], 1)
        it.free_memory(model, *optimizers)


def test_a_second_pair_is_refused():
    it = accelerator()
    model = mlp()
    it.prepare(model, *pair(model))
    with pytest.raises(RuntimeError, match="has a sharded optimizer already"):
        it.prepare(*pair(model))
