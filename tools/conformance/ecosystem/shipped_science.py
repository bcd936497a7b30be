"""Equations, graphs, inference, speech and engines, as their packages train."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from harness import Report, Variant
from loops import mlp
from recipes import recipe
from shipped import absent, averaged, edited, loader, rows_of, seeded, surrounded
from torch import Tensor, nn


@recipe("Trainer.train_one_epoch, a local operator, its own AdamW", "neuraloperator", shipped="")
def neural_operator(variant: Variant) -> Report:
    from neuralop.losses import LpLoss
    from neuralop.training import AdamW, Trainer

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.down = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)

        def forward(self, x: Tensor, **_: Any) -> Tensor:
            return self.down(F.gelu(self.lift(x)))

    plain = Local()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, AdamW(plain.parameters(), lr=1e-2))
    trainer = Trainer(model=model, n_epochs=2)
    trainer.optimizer, trainer.regularizer = optimizer, None
    trainer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    rng, losses = seeded(variant), []
    batches = [
        {"x": x, "y": x.cumsum(-1)} for x in torch.randn(5, 4, 1, 8, 8, generator=rng).unbind()
    ]
    with surrounded(variant):
        for epoch in range(2):
            losses.append(trainer.train_one_epoch(epoch, batches, LpLoss(d=2))[0])
    return variant.report(model, losses)


@recipe("NPE._train_epoch of sbi, a spline flow, clip", "sbi", shipped="clip, optimizer", fp32=1e-5)
def simulation_based(variant: Variant) -> Report:
    from sbi.inference.trainers.base import NeuralInference
    from sbi.neural_nets.net_builders.flow import build_maf

    x, y = rows_of(variant)
    rng = torch.Generator().manual_seed(5)
    plain = build_maf(
        torch.randn(64, 3, generator=rng),
        torch.randn(64, 6, generator=rng),
        hidden_features=8,
        num_transforms=2,
    )
    variant.starts(plain)
    optimizer = averaged(variant, plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    epoch = edited(
        NeuralInference._train_epoch,
        (
            "clip_grad_norm_(\n                self._neural_net.parameters(),\n"
            "                max_norm=clip_max_norm,\n            )",
            "clip(self._neural_net, self.optimizer, clip_max_norm)",
        ),
        clip=variant.clip,
    )
    trainer = SimpleNamespace(
        _neural_net=plain,
        optimizer=optimizer,
        _get_losses=lambda batch: plain.loss(batch[0][:, :3], batch[0]),
    )
    losses = []
    with surrounded(variant):
        for _ in range(3):
            losses.append(epoch(trainer, loader(variant, x, y, batch=8), 1.0, None))
    return variant.report(plain, losses, optimizer)


@recipe(
    "Solver1D.fit: four backwards per step, derivatives in the loss",
    "neurodiffeq",
    shipped="float32",
)
def differential_equation(variant: Variant) -> Report:
    from neurodiffeq import diff
    from neurodiffeq.conditions import IVP
    from neurodiffeq.generators import Generator1D
    from neurodiffeq.networks import FCNN
    from neurodiffeq.solvers import Solver1D

    torch.set_default_dtype(torch.float32)  # the package sets float64; shard() raises for it

    plain = FCNN(1, 1, hidden_units=(16, 16))
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    solver = Solver1D(
        lambda u, t: [diff(u, t) + u],
        [IVP(t_0=0.0, u_0=1.0)],
        t_min=0.0,
        t_max=2.0,
        nets=[model],
        optimizer=optimizer,
        n_batches_train=4,
        n_batches_valid=0,
        train_generator=Generator1D(8, t_min=0.0, t_max=2.0, method="uniform"),
    )
    seeded(variant)
    with surrounded(variant):
        for _ in range(6):
            solver.run_train_epoch()
    return variant.report(model, solver.metrics_history["train_loss"])


@recipe("Trainer.process_batch, TransE, margin loss", "torchkge", shipped="")
def knowledge_graph(variant: Variant) -> Report:
    from torchkge.models import TransEModel
    from torchkge.utils import MarginLoss
    from torchkge.utils.training import Trainer

    plain = TransEModel(8, 20, 4)
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    trainer = SimpleNamespace(model=model, optimizer=optimizer, criterion=MarginLoss(0.5))
    rng, losses = seeded(variant), []
    with surrounded(variant):
        for step in range(6):
            batch = {k: torch.randint(0, 20, (8,), generator=rng) for k in ("h", "t", "nh", "nt")}
            batch["r"] = torch.randint(0, 4, (8,), generator=rng)
            losses.append(Trainer.process_batch(trainer, batch))
            if step % 2:
                plain.normalize_parameters()
    return variant.report(model, losses)


@recipe("backprop.TBPTT of a spiking net", "snntorch", shipped="")
def spiking(variant: Variant) -> Report:
    import snntorch
    from snntorch import backprop, functional

    plain = nn.Sequential(
        nn.Flatten(),
        nn.Linear(6, 16),
        snntorch.Leaky(beta=0.9, init_hidden=True),
        nn.Linear(16, 4),
        snntorch.Leaky(beta=0.9, init_hidden=True, output=True),
    )
    variant.starts(plain)
    optimizer = averaged(variant, plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    rng = seeded(variant)
    x, y = torch.rand(32, 6, generator=rng) * 3, torch.randint(0, 4, (32,), generator=rng)
    losses = []
    with surrounded(variant):
        for _ in range(3):
            loss = backprop.TBPTT(
                plain,
                loader(variant, x, y, batch=8),
                optimizer,
                functional.ce_rate_loss(),
                num_steps=6,
                time_var=False,
                K=3,
            )
            losses.append(loss.item())
    return variant.report(plain, losses, optimizer)


@recipe("ModelWrapper.train_on_dataset with MC dropout", "baal", shipped="")
def active_learning(variant: Variant) -> Report:
    from baal.bayesian.dropout import patch_module
    from baal.modelwrapper import ModelWrapper, TrainingArgs

    plain = patch_module(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 1)))
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    wrapper = ModelWrapper(
        model,
        TrainingArgs(optimizer, 8, 3, False, 0, criterion=nn.MSELoss(), replicate_in_memory=False),
    )
    wrapper.train = model.train
    data = torch.utils.data.TensorDataset(*rows_of(variant))
    seeded(variant)
    with surrounded(variant):
        losses = wrapper.train_on_dataset(data)
    return variant.report(model, losses)


@recipe(
    "BaseModel.train_step, OptimWrapper with accumulation 2 and clip", "mmengine", shipped="clip"
)
def mm_engine(variant: Variant) -> Report:
    from mmengine.model import BaseModel
    from mmengine.optim import OptimWrapper

    class Net(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
            return {"loss": F.mse_loss(self.net(x).float(), y)}

    plain = Net()
    variant.starts(plain)
    optimizer = averaged(variant, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))

    class Wrapper(OptimWrapper):
        def _clip_grad(self) -> None:
            variant.clip(plain, self.optimizer, self.clip_grad_kwargs["max_norm"])

    wrapper = Wrapper(optimizer, accumulative_counts=2, clip_grad={"max_norm": 0.5})
    wrapper.initialize_count_status(plain, 0, 16)
    losses = []
    for _ in range(2):
        for batch in loader(variant, *rows_of(variant)):
            with surrounded(variant):
                losses.append(float(plain.train_step(list(batch), wrapper)["loss"]))
    return variant.report(plain, losses, optimizer)


@recipe("Brain.fit_batch: accumulation 2, clip", "speechbrain", shipped="clip, no_sync")
def speech_brain(variant: Variant) -> Report:
    absent("torchaudio")  # its wheels need CUDA
    from speechbrain.core import Brain, Stage

    plain = nn.GRU(6, 16, batch_first=True)
    both = nn.ModuleDict({"rnn": plain, "head": nn.Linear(16, 4)})
    variant.starts(both)
    optimizer = averaged(variant, both, torch.optim.Adam(both.parameters(), lr=1e-2))

    class Recognizer(Brain):
        def compute_forward(self, batch: Any, stage: Any) -> Tensor:
            return self.modules.head(self.modules.rnn(batch[0])[0])

        def compute_objectives(self, predictions: Tensor, batch: Any, stage: Any) -> Tensor:
            return F.cross_entropy(predictions.float().flatten(0, 1), batch[1].flatten())

        optimizers_step = edited(
            Brain.optimizers_step,
            (
                "torch.nn.utils.clip_grad_norm_(\n"
                '            opt.param_groups[0]["params"], self.max_grad_norm\n        )',
                "clip(self.modules, opt, self.max_grad_norm)",
            ),
            clip=variant.clip,
        )

    brain = Recognizer(
        dict(both), run_opts={"device": "cpu", "grad_accumulation_factor": 2, "max_grad_norm": 0.5}
    )
    brain.modules = both
    brain.optimizer, brain.optimizers_dict = optimizer, {"opt": optimizer}
    brain.opt_class = "set"
    brain.training_ctx = surrounded(variant)
    rng, losses = seeded(variant), []
    for step in range(1, 9):
        brain.step, brain.training_ctx = step, surrounded(variant)
        x = torch.randn(2, 5, 6, generator=rng)
        losses.append(float(brain.fit_batch((x, torch.randint(0, 4, (2, 5), generator=rng)))))
    assert Stage
    return variant.report(both, losses, optimizer)


@recipe(
    "Trainer.train: accumulation 2, clip by value", "pytorch-accelerated", shipped="Accelerator"
)
def pytorch_accelerated(variant: Variant) -> Report:
    from pytorch_accelerated import Trainer

    torch.manual_seed(0)  # its imports draw random numbers

    plain = mlp()
    variant.starts(plain)
    losses: list[float] = []

    class Own(Trainer):
        def _create_accelerator(self) -> Any:
            return variant.accelerator(gradient_accumulation_steps=2)

        def calculate_train_batch_loss(self, batch: Any) -> Any:
            out = super().calculate_train_batch_loss(batch)
            losses.append(out["loss"].item())
            return out

    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    seeded(variant)
    trainer = Own(plain, F.mse_loss, optimizer, callbacks=())
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(64, 6, generator=rng)
    data = torch.utils.data.TensorDataset(x, x.sin().sum(1, keepdim=True))
    trainer.train(
        data,
        2,
        per_device_batch_size=4,
        gradient_accumulation_steps=2,
        train_dataloader_kwargs={"num_workers": 0, "pin_memory": False},
    )
    return variant.report(
        trainer._accelerator.unwrap_model(trainer.model), losses, trainer.optimizer
    )


@recipe("Learner.fit with its own Adam over the optimizer", "fastai", shipped="optimizer")
def fast_ai(variant: Variant) -> Report:
    from fastai.callback import progress
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    assert progress
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    batches = loader(variant, *rows_of(variant))
    learner = Learner(
        DataLoaders(batches, batches),
        model,
        F.mse_loss,
        opt_func=lambda params, **_: OptimWrapper(opt=optimizer),
        cbs=[],
    )
    with surrounded(variant), learner.no_bar(), learner.no_logging():
        learner.fit(2, lr=1e-2)
    return variant.report(model, [0.0])


@recipe("MultitaskRegressor.fit", "deepchem", shipped="optimizer")
def deep_chem(variant: Variant) -> Report:
    import numpy
    from deepchem.data import NumpyDataset
    from deepchem.models.losses import L2Loss
    from deepchem.models.torch_models import TorchModel

    plain = mlp()
    variant.starts(plain)
    model = TorchModel(
        plain,
        L2Loss(),
        batch_size=8,
        device=torch.device("cpu"),
        model_dir=f"{variant.folder}-{variant.rank}",  # the package creates it
    )
    model._ensure_built()
    model._pytorch_optimizer = averaged(variant, plain, model._pytorch_optimizer)
    x, y = (each.numpy() for each in rows_of(variant))
    losses: list[float] = []
    seeded(variant)
    numpy.random.seed(variant.rank)
    with surrounded(variant):
        model.fit(
            NumpyDataset(x, y),
            nb_epoch=3,
            checkpoint_interval=0,
            deterministic=True,
            all_losses=losses,
        )
    return variant.report(plain, losses or [0.0], model._pytorch_optimizer)
