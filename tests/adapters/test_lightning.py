"""shardcast.lightning in two real processes, against Lightning's own DDP strategy."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import train_lightning
from commands import python
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm
from test_accelerate import Casts
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardcast.lightning import EvaluateAverage, LogMetrics, ShardcastStrategy
from shardcast.testing import SpawnedWorld, spawn_world

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice on workers, loggers and devices
]
ROOT = Path(__file__).parents[2]
SCRIPT = ("--accelerator", "cpu", "--devices", "2", "--sequences", "64")


class Net(LightningModule):
    """7 -> 12 -> 1 with a norm; gradients of other sizes on each rank."""

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


def loader(float64: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(48, 7, generator=generator)
    targets = inputs.sum(dim=1, keepdim=True) / 3
    return DataLoader(TensorDataset(inputs, targets), batch_size=4)


def trainer_of(folder: str, devices: int = 2, **options: Any) -> Trainer:
    return Trainer(
        **{
            "strategy": "shardcast", "accelerator": "cpu", "devices": devices, "max_epochs": 2,
            "precision": "32-true", "default_root_dir": folder, "logger": False,
            "enable_progress_bar": False, "enable_model_summary": False,
            "accumulate_grad_batches": 2, "gradient_clip_val": 0.5,
            "callbacks": [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)], **options,
        }
    )  # fmt: skip


def fit(group: Any, folder: str, options: dict[str, Any], resume: str | None = None) -> Any:
    trainer, module = trainer_of(folder, group.size(), **options), Net()
    trainer.fit(module, loader(), loader(), ckpt_path=resume)
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return module.losses, weights, float(trainer.callback_metrics["validation"])


class Watching(Net):
    """Notes which average is in the module, and its weights, as it validates and as it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.training_saw: set[Any] = set()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.training_saw.add(self.trainer.strategy.precision_plugin.sharded[0].average_in_model)
        return super().training_step(batch, index)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        (sharded,) = self.trainer.strategy.precision_plugin.sharded
        expected = sharded.full_parameters("ema")["net.0.weight"]
        self.seen.append((sharded.average_in_model, torch.equal(expected, self.net[0].weight)))
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


CLIPS = {
    "norm": {},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "none": {"gradient_clip_val": None, "accumulate_grad_batches": 1},
}


@pytest.mark.parametrize("clip", CLIPS)
def test_fp32_training_is_that_of_ddp(tmp_path: Path, gloo: SpawnedWorld, clip: str):
    ddp = gloo.run(fit, str(tmp_path / "ddp"), {"strategy": "ddp", **CLIPS[clip]}, timeout=100)
    ours = gloo.run(fit, str(tmp_path / "ours"), CLIPS[clip], timeout=100)
    for mine, theirs in zip(ours, ddp, strict=True):
        assert len(mine[0]) == 12
        assert mine[0] == pytest.approx(theirs[0], abs=1e-6)
        assert mine[2] == pytest.approx(theirs[2], abs=1e-6)
        for name, value in mine[1].items():
            assert (value - theirs[1][name]).abs().max() <= 1e-6, name


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-true"])
def test_resume_is_exact(tmp_path: Path, gloo: SpawnedWorld, precision: str):
    options = {"precision": precision}
    whole = gloo.run(fit, str(tmp_path / "a"), options, timeout=100)
    middle = str(tmp_path / "a" / "epoch=0.ckpt")
    again = gloo.run(fit, str(tmp_path / "b"), options, middle, timeout=100)
    for mine, theirs in zip(again, whole, strict=True):
        assert mine[0] == theirs[0][6:], "the losses of the second epoch"
        assert all(torch.equal(value, theirs[1][name]) for name, value in mine[1].items())
    first, second = whole
    assert all(torch.equal(value, second[1][name]) for name, value in first[1].items())
    if precision != "32-true":
        assert next(iter(first[1].values())).dtype in (torch.bfloat16, torch.float16)


def test_a_checkpoint_goes_on_at_another_world_size_and_under_ddp(
    tmp_path: Path, gloo: SpawnedWorld
):
    options = {"precision": "bf16-true"}
    gloo.run(fit, str(tmp_path / "a"), options, timeout=100)
    middle = str(tmp_path / "a" / "epoch=0.ckpt")
    saved = torch.load(middle, weights_only=True)
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.float32}
    assert saved["optimizer_states"][0]["state"][0]["exp_avg"].shape == (12, 7)
    plain = Net()
    plain.load_state_dict(saved["state_dict"])
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    optimizer.load_state_dict(saved["optimizer_states"][0])
    ddp = gloo.run(fit, str(tmp_path / "b"), {"strategy": "ddp"}, middle, timeout=100)
    with spawn_world(1, timeout=100, start_method="forkserver") as alone:
        one = alone.run(fit, str(tmp_path / "c"), {**options, "max_epochs": 2}, middle)
    for losses, _, validation in (*ddp, *one):
        assert len(losses) in (6, 12) and validation < 1.0


class Counting(Callback):
    """Counts the casts of the first forward and backward."""

    casts: Casts | None = None

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if self.casts is None:
            self.casts = Casts(module)
            self.casts.__enter__()

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 0:
            self.casts.__exit__(None, None, None)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_no_parameter_is_cast_in_forward_and_backward(tmp_path: Path, precision: str):
    def casts_and_loss(**options: Any) -> tuple[int, float]:
        counting, module = Counting(), Net()
        trainer = trainer_of(
            str(tmp_path), 1, accumulate_grad_batches=1, enable_checkpointing=False,
            limit_val_batches=0, callbacks=[counting], max_steps=1, precision=precision, **options,
        )  # fmt: skip
        trainer.fit(module, loader())
        return counting.casts.parameters, module.losses[0]

    found, loss = casts_and_loss()
    assert found == 0
    if precision == "bf16-mixed":
        found, stock = casts_and_loss(strategy="ddp")
        assert found >= 2, "the control: autocast casts the weights"
        assert loss == pytest.approx(stock, rel=2e-3)


def test_a_module_may_be_fitted_twice_and_validated(tmp_path: Path):
    module = Net()
    for _ in range(2):
        trainer_of(str(tmp_path), 1, precision="bf16-true").fit(module, loader())
    found = trainer_of(str(tmp_path), 1).validate(module.float(), loader())
    assert found[0]["validation"] < module.losses[0]


def saved_after_fit(group: Any, folder: str, options: dict[str, Any]) -> None:
    trainer = trainer_of(folder, group.size(), max_epochs=1, **options)
    trainer.fit(Net(), loader(), loader())
    trainer.save_checkpoint(f"{folder}/after.ckpt")


def test_what_is_saved_after_fit_resumes_as_exactly(tmp_path: Path, gloo: SpawnedWorld):
    options = {"precision": "bf16-true"}
    whole = gloo.run(fit, str(tmp_path / "a"), options, timeout=100)
    gloo.run(saved_after_fit, str(tmp_path), options, timeout=100)
    after = str(tmp_path / "after.ckpt")
    again = gloo.run(fit, str(tmp_path / "b"), options, after, timeout=100)
    for mine, theirs in zip(again, whole, strict=True):
        assert mine[0] == theirs[0][6:], "the losses of the second epoch"
        assert all(torch.equal(value, theirs[1][name]) for name, value in mine[1].items())


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
    assert {param.dtype for param in fresh.parameters()} == {torch.float32}, "as it was before"
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


def test_other_precisions_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="expects 32-true, bf16-true, bf16-mixed, 16-true"):
        trainer_of(str(tmp_path), 1, precision="64-true")


class Monitored(Net):
    """Logs as many modules do."""

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


def rates(group: Any, folder: str) -> list[list[str]]:
    """The names under which rates are logged, here and under DDP."""
    found = []
    for strategy in ("shardcast", "ddp"):
        monitor = LearningRateMonitor("step")
        trainer = trainer_of(
            folder, group.size(), strategy=strategy, callbacks=[monitor], max_epochs=1,
            logger=CSVLogger(folder), log_every_n_steps=1, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(Net(), loader())
        found.append(sorted(monitor.lrs))
    return found


def norms(group: Any, folder: str, strategy: str) -> tuple[list[float], list[float]]:
    """Norms as a hook of the module computes them, and those of the sharded optimizer."""
    module = Monitored(strategy == "shardcast")
    options = {"accumulate_grad_batches": 2, "max_epochs": 1, "enable_checkpointing": False}
    trainer_of(folder, group.size(), callbacks=[], strategy=strategy, **options).fit(
        module, loader()
    )
    return module.norms, module.global_norms


def test_rates_are_logged_once(tmp_path: Path, gloo: SpawnedWorld):
    for ours, ddp in gloo.run(rates, str(tmp_path), timeout=100):
        assert ours == ddp == ["lr-AdamW"]


def test_a_hook_before_the_step_sees_the_gradients_of_ddp(tmp_path: Path, gloo: SpawnedWorld):
    ddp = gloo.run(norms, str(tmp_path), "ddp", timeout=100)
    for hooked, of_steps in gloo.run(norms, str(tmp_path), "shardcast", timeout=100):
        assert hooked == pytest.approx(ddp[0][0], abs=1e-4)  # logged with four digits
        assert hooked == pytest.approx(of_steps, abs=1e-4)


def test_a_module_without_an_optimizer_runs(tmp_path: Path):
    module = Monitored(sharded=False, trained=False)
    before = [p.detach().clone() for p in module.parameters()]
    trainer_of(str(tmp_path), 1, precision="bf16-true", max_epochs=1).fit(module, loader())
    assert len(module.losses) == 12
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize("name", ["ddp_comm_hook", "model_averaging_period"])
def test_hooks_of_ddp_are_refused(name: str):
    with pytest.raises(ValueError, match=f"{name}: expected nothing, got 3"):
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
    told = gloo.run(under_torchrun, [*SCRIPT, "--output", str(tmp_path)], timeout=100)
    assert ["validation_loss" in text for text in told] == [True, False]
    assert list(tmp_path.rglob("*.ckpt"))
