"""shardcast.lightning with several optimizers under manual optimization, against DDP."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from models import exact_muon
from test_lightning import Net, loader, trainer_of
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
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


# -- a GAN ----------------------------------------------------------------------------------------


class Gan(LightningModule):
    """As Lightning's example: manual optimization, a loss and an optimizer of each network."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(2)
        self.judge = nn.Linear(1, 1).requires_grad_(False)  # such as a perceptual loss
        self.generator = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
        self.critic = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        self.losses: list[float] = []

    def configure_optimizers(self) -> Any:
        options = {"lr": 1e-2, "betas": (0.5, 0.999)}
        return [
            torch.optim.Adam(net.parameters(), **options) for net in (self.generator, self.critic)
        ], []

    def training_step(self, batch: list[Tensor], index: int) -> None:
        of_generator, of_critic = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(of_generator)
        loss = bce(self.judge(self.critic(self.generator(batch[0]))), torch.ones(4, 1))
        self.manual_backward(loss)
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)

        self.toggle_optimizer(of_critic)
        real = bce(self.critic(batch[1].expand(-1, 3)), torch.ones(4, 1))
        fake = bce(self.critic(self.generator(batch[0]).detach()), torch.zeros(4, 1))
        self.manual_backward((real + fake) / 2)
        if self.trainer.strategy.world_size > 1:
            self.clip_gradients(of_critic, 0.02, "norm")
        of_critic.step()
        of_critic.zero_grad()
        self.untoggle_optimizer(of_critic)
        self.losses += [float(it.detach()) for it in (loss, real, fake)]


def fit_gan(group: Any, folder: str, options: dict[str, Any], resume: str | None = None) -> Any:
    module = Gan()
    trainer = trainer_of(folder, group.size(), **MANUAL, **options)
    trainer.fit(module, loader(), ckpt_path=resume)
    return module.losses, {
        name: p.detach().float().clone() for name, p in module.named_parameters()
    }


def test_a_gan_trains_as_under_ddp(tmp_path: Path, gloo: SpawnedWorld):
    stock = {"strategy": "ddp_find_unused_parameters_true"}
    ddp = gloo.run(fit_gan, str(tmp_path / "ddp"), stock, timeout=100)
    for options, tolerance in (({}, 2e-6), ({"precision": "bf16-true"}, 5e-2)):
        runs = gloo.run(fit_gan, str(tmp_path / "ours"), options, timeout=100)
        for ours, plain in zip(runs, ddp, strict=True):
            assert len(ours[0]) == 36
            assert ours[0] == pytest.approx(plain[0], abs=tolerance)
            for name, value in ours[1].items():
                assert (value - plain[1][name]).abs().max() <= tolerance, name


def test_a_gan_resumes_exactly_and_its_checkpoint_goes_on_under_ddp(
    tmp_path: Path, gloo: SpawnedWorld
):
    options = {"precision": "bf16-true"}
    whole = gloo.run(fit_gan, str(tmp_path / "a"), options, timeout=100)
    middle = str(tmp_path / "a" / "epoch=0.ckpt")
    again = gloo.run(fit_gan, str(tmp_path / "b"), options, middle, timeout=100)
    for ours, first in zip(again, whole, strict=True):
        assert ours[0] == first[0][18:]
        assert all(torch.equal(value, first[1][name]) for name, value in ours[1].items())
    saved = torch.load(middle, weights_only=True)
    trained = [value for name, value in saved["state_dict"].items() if "judge" not in name]
    assert {value.dtype for value in trained} == {torch.float32}
    stock = {"strategy": "ddp_find_unused_parameters_true"}
    ddp = gloo.run(fit_gan, str(tmp_path / "c"), stock, middle, timeout=100)
    assert ddp[0][0] == pytest.approx(whole[0][0][18:], abs=5e-2)


def test_a_gan_with_changing_loss_scales_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="loss_scale: expected one fixed number"):
        trainer_of(str(tmp_path), 1, precision="16-true", **MANUAL).fit(Gan(), loader())
    strategy = ShardcastStrategy({"loss_scale": 128.0})
    options = {"precision": "16-true", "strategy": strategy, "max_steps": 4}
    trainer_of(str(tmp_path), 1, **MANUAL, **options).fit(Gan(), loader())
