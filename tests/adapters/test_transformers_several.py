"""shardcast.transformers with several optimizers, against the two of torch in the stock Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import exact_muon
from test_accelerate_processes import fresh
from test_transformers import STEPS, Text, equal, logged, model_of, weights
from torch.optim.lr_scheduler import LambdaLR

from shardcast.testing import SpawnedWorld
from shardcast.transformers import ShardcastTrainer

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


class Both(torch.optim.Optimizer):
    """Two plain optimizers that look like one to the stock Trainer."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([group for one in optimizers for group in one.param_groups], {})

    def step(self, closure: Any = None) -> None:
        theirs = [group for one in self.optimizers for group in one.param_groups]
        for group, mine in zip(theirs, self.param_groups, strict=True):
            group["lr"] = mine["lr"]
        for one in self.optimizers:
            one.step()


def pair(model: Any) -> list[torch.optim.Optimizer]:
    """Muon on the matrices of the layers, AdamW on the rest, each with its own learning rate."""
    inside = {p for n, p in model.named_parameters() if ".layers." in n and p.dim() == 2}
    rest = [p for p in model.parameters() if p not in inside]
    ordered = [p for p in model.parameters() if p in inside]
    return [torch.optim.Muon(ordered, lr=2e-2), torch.optim.AdamW(rest, lr=5e-3)]


def trainer_of(folder: str, cls: Any, optimizers: Any = None, **options: Any) -> Any:
    fresh()
    model = model_of()
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": folder, "use_cpu": True, "max_steps": STEPS, "logging_steps": 1,
            "save_steps": 3, "per_device_train_batch_size": 2, "max_grad_norm": 0.5, "seed": 3,
            "lr_scheduler_type": "cosine", "report_to": "none", "disable_tqdm": True, **options,
        }
    )  # fmt: skip
    given = {} if optimizers is None else {"optimizers": optimizers(model)}
    return cls(model=model, args=arguments, train_dataset=Text(), **given)


def test_training_is_that_of_two_plain_optimizers_whose_groups_one_schedule_drives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    exact_muon(monkeypatch)
    plain = trainer_of(str(tmp_path / "a"), transformers.Trainer, lambda m: (Both(pair(m)), None))
    plain.train()
    ours = trainer_of(str(tmp_path / "b"), ShardcastTrainer, lambda m: (pair(m), None))
    ours.train()
    assert len(logged(ours)) == STEPS
    for mine, theirs in zip(logged(ours), logged(plain), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6, rel=1e-6)
    for name, value in weights(ours.model).items():
        assert (value - weights(plain.model)[name]).abs().max() <= 1e-6, name
    rates = [group["lr"] for group in ours.optimizer.param_groups]
    assert rates == [group["lr"] for group in plain.optimizer.param_groups]
    assert max(rates) < 1e-6, "both are at the end of the schedule"


class Creating(ShardcastTrainer):
    """Makes its optimizers as Trainer makes its one."""

    def create_optimizer(self, *_: Any, **__: Any) -> Any:
        if self.optimizer is None:
            self.optimizer = pair(self.model)
        return self.optimizer


def run(group: Any, folder: str, resume: str | None = None) -> tuple[Any, Any, Any]:
    trainer = trainer_of(folder, Creating, bf16=True)
    trainer.train(resume_from_checkpoint=resume)
    sharded = trainer.optimizer.optimizer
    assert sharded.layout.partition == "mixed"
    state = sharded.state_dict()["state"]
    return logged(trainer), weights(trainer.model), {n: v["master"] for n, v in state.items()}


def test_optimizers_that_the_trainer_creates_resume_exactly(tmp_path: Path, gloo: SpawnedWorld):
    whole = gloo.run(run, str(tmp_path / "a"), timeout=100)
    assert equal(whole[0][1], whole[1][1])
    again = gloo.run(run, str(tmp_path / "b"), str(tmp_path / "a" / "checkpoint-3"), timeout=100)
    for mine, theirs in zip(again, whole, strict=True):
        assert mine[0] == theirs[0]
        assert equal(mine[1], theirs[1]) and equal(mine[2], theirs[2])


def halving(model: Any) -> Any:
    muon, adamw = pair(model)
    schedulers = [LambdaLR(muon, lambda n: 0.5**n), LambdaLR(adamw, lambda n: 1 / (1 + n))]
    return [muon, adamw], schedulers


def rates_of(trainer: Any) -> list[float]:
    return [group["lr"] for group in trainer.optimizer.param_groups]


def test_a_scheduler_for_each_is_stepped_saved_and_loaded(tmp_path: Path):
    expected = [2e-2 * 0.5**STEPS, 5e-3 / (1 + STEPS)]
    trainer = trainer_of(str(tmp_path / "a"), ShardcastTrainer, halving)
    trainer.train()
    assert rates_of(trainer) == pytest.approx(expected)
    again = trainer_of(str(tmp_path / "b"), ShardcastTrainer, halving)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert rates_of(again) == pytest.approx(expected)
    assert equal(weights(again.model), weights(trainer.model))


def test_one_scheduler_of_one_of_several_optimizers_is_refused(tmp_path: Path):
    def one(model: Any) -> Any:
        optimizers, schedulers = halving(model)
        return optimizers, schedulers[0]

    with pytest.raises(
        ValueError, match="no scheduler, or a list of them, beside several optimizers"
    ):
        trainer_of(str(tmp_path), ShardcastTrainer, one)
