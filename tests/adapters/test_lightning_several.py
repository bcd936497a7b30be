"""shardcast.lightning with several optimizers under manual optimization, against DDP."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from models import exact_muon
from test_lightning import Net, loader, trainer_of
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

from shardcast.lightning import ShardcastStrategy
from shardcast.testing import SpawnedWorld

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice on workers, loggers and devices
]
MANUAL: dict[str, Any] = {"accumulate_grad_batches": 1, "gradient_clip_val": None}


class Two(Net):
    """Muon on the matrices and AdamW on the rest, stepped by the module itself."""

    def __init__(self, closes: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.closes, self.clips = closes, False

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() == 2]
        rest = [p for p in self.parameters() if p.dim() != 2]
        both = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.05)]
        return both, [ExponentialLR(one, rate) for one, rate in zip(both, (0.7, 0.9), strict=True)]

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        optimizers, schedulers = self.optimizers(), self.lr_schedulers()
        loss = super().training_step(batch, index)
        for one in optimizers:
            one.zero_grad()
        self.manual_backward(loss)
        if self.clips:
            self.clip_gradients(optimizers[0], 0.5)
        for one in optimizers:
            one.step(*([lambda: loss] if self.closes else []))
        for scheduler in schedulers if self.trainer.is_last_batch else ():
            scheduler.step()
        return loss


def fit(folder: str, devices: int, resume: str | None = None, **options: Any) -> Any:
    trainer, module = trainer_of(folder, devices, **{**MANUAL, **options}), Two()
    trainer.fit(module, loader(), loader(), ckpt_path=resume)
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    rates = [group["lr"] for one in trainer.optimizers for group in one.param_groups]
    return module.losses, weights, rates, trainer.global_step


def test_training_is_that_of_two_plain_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    exact_muon(monkeypatch)
    plain = fit(str(tmp_path / "plain"), 1, strategy="ddp")
    ours = fit(str(tmp_path / "ours"), 1)
    assert len(ours[0]) == 24
    assert ours[0] == pytest.approx(plain[0], abs=1e-6)
    for name, value in ours[1].items():
        assert (value - plain[1][name]).abs().max() <= 1e-6, name
    assert ours[2:] == plain[2:]


def on_two(group: Any, folder: str, resume: str | None = None) -> Any:
    return fit(folder, group.size(), resume, precision="bf16-true")


def test_resume_is_exact_and_a_checkpoint_goes_on_in_the_two_plain_optimizers(
    tmp_path: Path, gloo: SpawnedWorld
):
    whole = gloo.run(on_two, str(tmp_path / "a"), timeout=100)
    middle = str(tmp_path / "a" / "epoch=0.ckpt")
    again = gloo.run(on_two, str(tmp_path / "b"), middle, timeout=100)
    for mine, theirs in zip(again, whole, strict=True):
        assert mine[0] == theirs[0][6:], "the losses of the second epoch"
        assert mine[2:] == theirs[2:]
        assert all(torch.equal(value, theirs[1][name]) for name, value in mine[1].items())
    first, second = whole
    assert all(torch.equal(value, second[1][name]) for name, value in first[1].items())
    saved = torch.load(middle, weights_only=True)
    muon, adamw = saved["optimizer_states"]
    assert muon["state"][0]["momentum_buffer"].shape == (12, 7)
    assert sorted(adamw["state"][0]) == ["exp_avg", "exp_avg_sq", "step"]
    losses = fit(str(tmp_path / "c"), 1, middle, strategy="ddp")[0]
    assert sum(losses) / 12 < sum(whole[0][0][:6]) / 6


def test_automatic_optimization_of_several_is_refused_and_manual_named(tmp_path: Path):
    module = Two()
    module.automatic_optimization = True
    with pytest.raises(RuntimeError, match=r"Set `self.automatic_optimization = False`"):
        trainer_of(str(tmp_path), 1).fit(module, loader())


def test_clipping_by_one_of_several_says_where_the_bound_goes(tmp_path: Path):
    module = Two()
    module.clips = True
    with pytest.raises(RuntimeError, match=r"clipped together, .* set max_grad_norm"):
        trainer_of(str(tmp_path), 1, **MANUAL).fit(module, loader())
    module.clips = False
    strategy = ShardcastStrategy({"max_grad_norm": 0.01})
    trainer = trainer_of(str(tmp_path), 1, strategy=strategy, max_steps=2, **MANUAL)
    trainer.fit(module, loader())


def test_a_closure_for_one_of_several_is_refused(tmp_path: Path):
    with pytest.raises(TypeError, match="handle of Muon takes no closure"):
        trainer_of(str(tmp_path), 1, **MANUAL).fit(Two(closes=True), loader())


def test_rates_of_both_are_logged_under_the_names_of_their_classes(tmp_path: Path):
    monitor = LearningRateMonitor("step")
    options = {"logger": CSVLogger(tmp_path), "callbacks": [monitor], "log_every_n_steps": 1}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step")
        trainer_of(str(tmp_path), 1, **MANUAL, **options).fit(Two(), loader())
    assert sorted(monitor.lrs) == ["lr-AdamW", "lr-Muon"]
