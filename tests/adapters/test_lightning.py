"""shardcast.lightning, with one or several optimizers, compared with Lightning's DDP."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import train_lightning
from commands import python
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm
from models import exact_muon
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from shardcast.lightning import EvaluateAverage, LogMetrics, ShardcastStrategy
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import SpawnedWorld

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice on workers, loggers and devices
]
MANUAL: dict[str, Any] = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
ALONE = SimpleNamespace(size=lambda: 1)
ROWS = "net.0.weight", "net.3.weight"  # Edited.optimizer_step normalizes them
SCRIPT = ("--accelerator", "cpu", "--devices", "2", "--sequences", "64")


class Net(LightningModule):
    """7 -> 12 -> 1 with a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(7, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 1))
        self.losses: list[float] = []
        self.norms: list[float] = []

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        loss = (self.net(batch[0]).float() - batch[1]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: list[Tensor], _index: int) -> None:
        loss = (self.net(batch[0]).float() - batch[1]).square().mean()
        self.log("validation", loss, sync_dist=True)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(getattr(self.trainer.strategy, "model", None), nn.Module):
            self.clip_gradients(optimizer, *args, **kwargs)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(48, 7, generator=generator)
    targets = inputs.sum(dim=1, keepdim=True) / 3
    return DataLoader(TensorDataset(inputs, targets), batch_size=4)


def trainer_of(folder: str, devices: int = 2, **options: Any) -> Trainer:
    return Trainer(
        **{
            "strategy": "shardcast",
            "accelerator": "cpu",
            "devices": devices,
            "max_epochs": 2,
            "precision": "32-true",
            "default_root_dir": folder,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.5,
            "callbacks": [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
            **options,
        }
    )


class Edited(Net):
    """After each step, decays all weights by hand, normalizes rows, and resets some moments."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        optimizer: Any = self.optimizers()
        if not hasattr(optimizer, "whole"):  # plain torch, with DDP
            with torch.no_grad():
                for name, param in self.named_parameters():
                    param.mul_(0.98)
                    if name in ROWS:
                        param.copy_(nn.functional.normalize(param, dim=1))
                        for moment in ("exp_avg", "exp_avg_sq"):
                            optimizer.state[param][moment][::2] = 0
            return
        with optimizer.owned() as parts:
            for part in parts:
                part.master.mul_(0.98)
        with optimizer.whole(*ROWS) as params:
            for one in params.values():
                one.master = nn.functional.normalize(one.master, dim=1)
                for moment in one.state.values():
                    moment[::2] = 0


class Two(Net):
    """Muon for the matrices and AdamW for the rest, stepped by the module."""

    def __init__(self, closes: bool = False, clips: bool = False, automatic: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.closes, self.clips = closes, clips

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


class Gan(LightningModule):
    """Manual optimization with a loss and an optimizer for each network, as Lightning's example."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(2)
        self.judge = nn.Linear(1, 1).requires_grad_(False)  # as for a perceptual loss
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


MODULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "net": (Net, {}),
    "edited": (Edited, {}),
    "two": (Two, MANUAL),
    "gan": (Gan, MANUAL),
}


def fit(
    group: Any,
    folder: str,
    options: dict[str, Any],
    resume: str | None = None,
    kind: str = "net",
    after: str = "",
) -> Any:
    """Fit; return losses, weights, the last validation, rates and steps; then save to ``after``."""
    build, usual = MODULES[kind]
    trainer, module = trainer_of(folder, group.size(), **{**usual, **options}), build()
    trainer.fit(module, loader(), loader(), ckpt_path=resume)
    if after:
        trainer.save_checkpoint(after)
    weights = {name: value.detach().float().clone() for name, value in module.state_dict().items()}
    validation = float(trainer.callback_metrics.get("validation", 0))
    rates = [group["lr"] for one in trainer.optimizers for group in one.param_groups]
    return module.losses, weights, validation, rates, trainer.global_step


class Watching(Net):
    """Records which average is in the module, and its weights, in validation and training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.training_saw: set[Any] = set()

    def in_model(self) -> str | None:
        (sharded,) = self.trainer.strategy.precision_plugin.sharded
        return packed_of(sharded).hook_of("averages").in_model

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.training_saw.add(self.in_model())
        return super().training_step(batch, index)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        (sharded,) = self.trainer.strategy.precision_plugin.sharded
        expected = sharded.full_parameters("ema")["net.0.weight"]
        self.seen.append((self.in_model(), torch.equal(expected, self.net[0].weight)))
        super().validation_step(batch, index)


def test_a_callback_validates_with_an_average_and_weight_averaging_is_warned_of(tmp_path: Path):
    strategy = ShardcastStrategy({"averages": {"ema": 0.5}, "metrics": True})
    options = {"strategy": strategy, "max_epochs": 1, "num_sanity_val_steps": 0}
    module = Watching()
    callbacks = [EvaluateAverage("ema"), LogMetrics("net.0.*"), ModelCheckpoint(str(tmp_path))]
    trainer = trainer_of(str(tmp_path), 1, **options, callbacks=callbacks, log_every_n_steps=1)
    trainer.fit(module, loader(), loader())
    assert module.seen == [("ema", True)] * len(module.seen) and module.seen
    assert module.training_saw == {None}
    assert float(trainer.callback_metrics["weight_norm/net.0.weight"]) > 0
    ours = importlib.import_module("lightning.pytorch.callbacks")
    if hasattr(ours, "WeightAveraging"):
        trainer = trainer_of(
            str(tmp_path), 1, strategy="shardcast", max_epochs=1, callbacks=[ours.WeightAveraging()]
        )
        with pytest.warns(UserWarning, match="WeightAveraging.*averages="):
            trainer.fit(Net(), loader(), loader())


class Failing(Net):
    """Its first validation fails."""

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        raise ValueError("of the validation")


def test_an_error_while_an_average_is_validated_is_raised_and_the_weights_are_back(tmp_path: Path):
    options = {"strategy": ShardcastStrategy({"averages": {"ema": 0.5}}), "num_sanity_val_steps": 0}
    trainer, module = trainer_of(str(tmp_path), 1, **options, max_epochs=1), Failing()
    trainer.callbacks.append(EvaluateAverage("ema"))
    trained: dict[str, Tensor] = {}
    module.on_validation_start = lambda: trained.update(  # type: ignore[method-assign]
        trainer.strategy.precision_plugin.sharded[0].full_parameters()
    )
    with pytest.raises(ValueError, match="of the validation"):
        trainer.fit(module, loader(), loader())
    assert all(torch.equal(p, trained[name]) for name, p in module.named_parameters())


UNUSED = "ddp_find_unused_parameters_true"  # for a GAN, whose losses each train one network
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
SAME: dict[str, tuple[str, dict[str, Any], float]] = {
    "clipped by norm": ("net", {}, 1e-6),
    "clipped by value": ("net", BY_VALUE, 1e-6),
    "no accumulation": ("net", MANUAL, 1e-6),
    "weights edited after each step": ("edited", {}, 1e-6),
    "edited in bf16": ("edited", {"precision": "bf16-true"}, 5e-2),
    "gan": ("gan", {}, 2e-6),
    "gan in bf16": ("gan", {"precision": "bf16-true"}, 5e-2),
}


@pytest.mark.parametrize("case", SAME)
def test_training_is_that_of_ddp(tmp_path: Path, gloo: SpawnedWorld, case: str):
    kind, options, tolerance = SAME[case]
    stock = {**options, "strategy": UNUSED if kind == "gan" else "ddp", "precision": "32-true"}
    ddp = gloo.run(fit, str(tmp_path / "ddp"), stock, None, kind)
    ours = gloo.run(fit, str(tmp_path / "ours"), options, None, kind)
    for mine, theirs in zip(ours, ddp, strict=True):
        assert len(mine[0]) == (36 if kind == "gan" else 12)
        assert mine[0] == pytest.approx(theirs[0], abs=tolerance)
        assert mine[2] == pytest.approx(theirs[2], abs=tolerance)
        for name, value in mine[1].items():
            assert (value - theirs[1][name]).abs().max() <= tolerance, name
        for name in ROWS if kind == "edited" else ():
            norms = mine[1][name].norm(dim=1)
            torch.testing.assert_close(norms, torch.ones_like(norms), rtol=tolerance, atol=0)


def test_training_is_that_of_two_plain_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    exact_muon(monkeypatch)
    plain = fit(ALONE, str(tmp_path / "plain"), {"strategy": "ddp"}, None, "two")
    ours = fit(ALONE, str(tmp_path / "ours"), {}, None, "two")
    assert len(ours[0]) == 24 and ours[3:] == plain[3:]
    assert ours[0] == pytest.approx(plain[0], abs=1e-6)
    for name, value in ours[1].items():
        assert (value - plain[1][name]).abs().max() <= 1e-6, name


@pytest.mark.parametrize(
    ("kind", "precision", "after"),
    [
        ("net", "bf16-true", True),
        ("net", "16-true", False),
        ("two", "bf16-true", False),
        ("gan", "bf16-true", False),
    ],
)
def test_resume_is_exact_and_goes_on_at_another_world_size_and_under_ddp(
    tmp_path: Path, gloo: SpawnedWorld, kind: str, precision: str, after: bool
):
    """Resume from a checkpoint saved within fit, or after it."""
    options, middle = {"precision": precision}, str(tmp_path / "a" / "epoch=0.ckpt")
    whole = gloo.run(fit, str(tmp_path / "a"), options, None, kind)
    if after:
        middle, short = str(tmp_path / "after.ckpt"), {**options, "max_epochs": 1}
        gloo.run(fit, str(tmp_path / "c"), short, None, kind, middle)
    again = gloo.run(fit, str(tmp_path / "b"), options, middle, kind)
    half = len(whole[0][0]) // 2
    for mine, theirs in zip(again, whole, strict=True):
        assert mine[0] == theirs[0][half:] and mine[2:] == theirs[2:]
        assert all(torch.equal(value, theirs[1][name]) for name, value in mine[1].items())
        assert all(torch.equal(value, whole[0][1][name]) for name, value in mine[1].items())
    saved = torch.load(middle, weights_only=True)
    trained = [value for name, value in saved["state_dict"].items() if "judge" not in name]
    assert {value.dtype for value in trained} == {torch.float32}
    first, *others = saved["optimizer_states"]
    state = "momentum_buffer" if kind == "two" else "exp_avg"
    assert first["state"][0][state].shape == ((9, 7) if kind == "gan" else (12, 7))
    if kind == "two":
        assert sorted(others[0]["state"][0]) == ["exp_avg", "exp_avg_sq", "step"]
    if precision == "bf16-true" and kind != "two":  # Muon rounds differently
        stock = {"strategy": UNUSED, "max_epochs": 2}
        ddp = gloo.run(fit, str(tmp_path / "d"), stock, middle, kind)
        assert ddp[0][0] == pytest.approx(whole[0][0][half:], abs=0.1)
    if after:
        one = fit(ALONE, str(tmp_path / "e"), options, middle, kind)
        assert len(one[0]) == 2 * half and one[2] < 1.0


def test_a_module_may_be_fitted_twice_and_validated(tmp_path: Path):
    module = Net()
    for _ in range(2):
        trainer_of(str(tmp_path), 1, precision="bf16-true").fit(module, loader())
    found = trainer_of(str(tmp_path), 1).validate(module.float(), loader())
    assert found[0]["validation"] < module.losses[0]


def test_weights_that_were_loaded_after_fit_are_what_is_saved(tmp_path: Path):
    trainer, module = trainer_of(str(tmp_path), 1, precision="bf16-true"), Net()
    trainer.fit(module, loader())
    with torch.no_grad():
        module.net[0].weight.mul_(0.5)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(saved["net.0.weight"].bfloat16(), module.net[0].weight)
    assert saved["net.3.weight"].dtype == torch.float32


@pytest.mark.parametrize("keep", [(), "norms"])
def test_a_trained_module_is_validated_in_its_precision(tmp_path: Path, keep: Any):
    def made() -> Trainer:
        strategy = ShardcastStrategy({"keep_fp32": keep})
        return trainer_of(str(tmp_path), 1, strategy=strategy, precision="bf16-true")

    module, trainer = Net(), made()
    trainer.fit(module, loader(), loader())
    within = trainer.callback_metrics["validation"].item()
    dtypes = [param.dtype for param in module.parameters()]
    assert trainer.validate(module, loader())[0]["validation"] == within
    fresh = Net()
    found = made().validate(fresh, loader(), ckpt_path=str(tmp_path / "epoch=1.ckpt"))
    assert found[0]["validation"] == within
    assert [param.dtype for param in module.parameters()] == dtypes
    low = torch.bfloat16
    assert [dtypes[0], dtypes[2]] == [low, torch.float32 if keep else low], "norms may stay in fp32"
    assert {param.dtype for param in fresh.parameters()} == {torch.float32}, "unchanged"
    for net in (module, fresh):
        assert not any(child._forward_pre_hooks for child in net.modules())


def test_a_fit_after_a_validation_begins_from_exact_weights(tmp_path: Path):
    masters = []
    for validated in (False, True):
        trainer, module = trainer_of(str(tmp_path), 1, precision="bf16-true", max_epochs=1), Net()
        if validated:
            trainer.validate(module, loader())
        trainer.fit(module, loader())
        masters.append(trainer.optimizers[0].full_parameters())
    assert all(torch.equal(value, masters[1][name]) for name, value in masters[0].items())


class Wide(Net):
    """Has a matrix of whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 32), nn.Tanh(), nn.Linear(32, 1))


def test_a_checkpoint_is_validated_in_the_published_form_it_was_trained_in(tmp_path: Path):
    def trainer() -> Any:
        strategy = ShardcastStrategy({"published": {"mxfp4": ["net.2.weight"]}})
        return trainer_of(str(tmp_path), 1, strategy=strategy, precision="bf16-true", max_epochs=1)

    fit, saved = trainer(), tmp_path / "after.ckpt"
    fit.fit(Wide(), loader(), loader())
    fit.save_checkpoint(saved)
    found = trainer().validate(Wide(), loader(), ckpt_path=saved)[0]["validation"]
    assert found == float(fit.callback_metrics["validation"])


class Monitored(Net):
    """Logs norms like many modules."""

    def __init__(self, sharded: bool = True, trained: bool = True) -> None:
        super().__init__()
        self.sharded, self.trained = sharded, trained
        self.global_norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))

    def on_train_batch_end(self, *_: Any) -> None:
        norm: Any = self.optimizers().grad_norm if self.sharded else None  # type: ignore
        if norm is not None and self.trainer.global_step > len(self.global_norms):
            self.global_norms.append(float(norm))

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers() if self.trained else None


def norms(group: Any, folder: str, strategy: str) -> tuple[list[float], list[float]]:
    """Return norms computed by a hook of the module, and those of the sharded optimizer."""
    module = Monitored(strategy == "shardcast")
    options = {"accumulate_grad_batches": 2, "max_epochs": 1, "enable_checkpointing": False}
    trainer_of(folder, group.size(), callbacks=[], strategy=strategy, **options).fit(
        module, loader()
    )
    return module.norms, module.global_norms


@pytest.mark.parametrize(
    ("kind", "names"), [("net", ["lr-AdamW"]), ("two", ["lr-AdamW", "lr-Muon"])]
)
def test_rates_are_logged_once_under_the_names_of_their_classes(
    tmp_path: Path, kind: str, names: list[str]
):
    monitor, (build, usual) = LearningRateMonitor("step"), MODULES[kind]
    options = {"logger": CSVLogger(tmp_path), "callbacks": [monitor], "log_every_n_steps": 1}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step")
        trainer_of(str(tmp_path), 1, **usual, **options).fit(build(), loader())
    assert sorted(monitor.lrs) == names


def test_a_hook_before_the_step_sees_the_gradients_of_ddp(tmp_path: Path, gloo: SpawnedWorld):
    ddp = gloo.run(norms, str(tmp_path), "ddp")
    for hooked, of_steps in gloo.run(norms, str(tmp_path), "shardcast"):
        assert hooked == pytest.approx(ddp[0][0], abs=1e-4)  # grad_norm rounds to four digits
        assert hooked == pytest.approx(of_steps, abs=1e-4)


class Divided(Net):
    """On a single rank, sets a divisor and reads the gradients in a hook."""

    def on_train_start(self) -> None:
        self.optimizers().optimizer.divisor = 2  # type: ignore[union-attr]

    def on_before_optimizer_step(self, _optimizer: Any) -> None:
        self.norms += [float(param.grad.abs().sum()) for param in self.parameters()]


def test_a_hook_reads_the_gradients_of_one_rank_that_divides_them(tmp_path: Path):
    trainer_of(str(tmp_path), 1, max_epochs=1).fit(module := Divided(), loader())
    assert len(module.norms) >= 6
    assert all(0 < norm < math.inf for norm in module.norms)


def test_a_module_without_an_optimizer_runs(tmp_path: Path):
    module = Monitored(sharded=False, trained=False)
    before = [p.detach().clone() for p in module.parameters()]
    trainer_of(str(tmp_path), 1, precision="bf16-true", max_epochs=1).fit(module, loader())
    assert len(module.losses) == 12
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize(
    ("build", "options", "error", "message"),
    [
        (Net, {"precision": "64-true"}, ValueError, "expects 32-true, bf16-true, bf16-mixed, 16"),
        (partial(Two, automatic=True), {}, RuntimeError, "`self.automatic_optimization = False`"),
        (partial(Two, clips=True), MANUAL, RuntimeError, "clipped together, .* set max_grad_norm"),
        (partial(Two, closes=True), MANUAL, TypeError, "handle of Muon takes no closure"),
        (Gan, {**MANUAL, "precision": "16-true"}, ValueError, "loss_scale: expected one fixed num"),
    ],
    ids=["precision", "automatic", "clip of one", "closure of one", "loss scales"],
)
def test_what_cannot_work_is_refused_by_name(
    tmp_path: Path, build: Any, options: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        trainer_of(str(tmp_path), 1, **options).fit(build(), loader())


@pytest.mark.parametrize(
    ("build", "precision", "config"),
    [(Two, "32-true", {"max_grad_norm": 0.01}), (Gan, "16-true", {"loss_scale": 128.0})],
)
def test_the_remedies_that_are_named_train(
    tmp_path: Path, build: Any, precision: str, config: dict[str, Any]
):
    options = {**MANUAL, "strategy": ShardcastStrategy(config), "precision": precision}
    trainer = trainer_of(str(tmp_path), 1, max_steps=4, **options)
    trainer.fit(build(), loader())
    assert trainer.global_step == 4


@pytest.mark.parametrize("name", ["ddp_comm_hook", "model_averaging_period"])
def test_hooks_of_ddp_are_refused(name: str):
    with pytest.raises(ValueError, match=f"{name}: expected None, got 3"):
        ShardcastStrategy(**{name: 3})


def test_the_tensor_parallelism_of_lightning_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ValueError, match=r"ModelParallelStrategy, got tensor_parallel_size=2; use"):
        ShardcastStrategy(tensor_parallel_size=2)
    monkeypatch.setattr("shardcast._compat.is_dtensor", lambda param: param.dim() == 2)
    with pytest.raises(ValueError, match=r"got parameter 'net\.0\.weight' is a DTensor; use"):
        trainer_of(str(tmp_path), 1, max_epochs=1).fit(Net(), loader())


def test_the_example_script_trains_on_two_processes_that_lightning_starts(tmp_path: Path):
    done = python("launch/train_lightning.py", *SCRIPT, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "validation_loss" in done.stdout
    assert list(tmp_path.rglob("*.ckpt"))


def under_torchrun(_group: Any, flags: list[str]) -> str:
    os.environ.update(TORCHELASTIC_RUN_ID="1", MASTER_ADDR="localhost", MASTER_PORT="1")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train_lightning.main(flags)
    return printed.getvalue()


def test_the_example_script_trains_in_processes_that_torchrun_started(
    tmp_path: Path, gloo: SpawnedWorld
):
    told = gloo.run(under_torchrun, [*SCRIPT, "--output", str(tmp_path)])
    assert ["validation_loss" in text for text in told] == [True, False]
    assert list(tmp_path.rglob("*.ckpt"))
