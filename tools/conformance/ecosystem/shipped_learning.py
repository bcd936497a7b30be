"""Ensembles, distillation, adversarial and continual learning, as their packages train."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from harness import Report, Variant
from loops import cnn
from recipes import recipe
from shipped import absent, averaged, edited, loader, pictures, rows_of, seeded, surrounded
from torch import nn


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 1))


def ensemble(variant: Variant, name: str, **options: Any) -> Report:
    import torchensemble
    from torchensemble.utils import set_module

    model = getattr(torchensemble, name)(Net, n_estimators=3, cuda=False)
    model.set_optimizer("Adam", lr=1e-2)
    made: list[Any] = []

    def set_optimizer(part: nn.Module, kind: str, **given: Any) -> Any:
        if not made:
            variant.starts(part)
        optimizer = averaged(variant, part, set_module.set_optimizer(part, kind, **given))
        made.append((part, optimizer))
        return optimizer

    def fit() -> Any:
        return edited(
            type(model).__mro__[1].fit if name == "GradientBoostingRegressor" else type(model).fit,
            ("set_module.set_optimizer(", "set_optimizer("),
            set_optimizer=set_optimizer,
        )

    with surrounded(variant):
        fit()(model, loader(variant, *rows_of(variant)), epochs=3, save_model=False, **options)
    return variant.report(made[0][0], [0.0], made[0][1])


@recipe("FusionRegressor.fit: one optimizer over three nets", "torchensemble", shipped="optimizer")
def fusion(variant: Variant) -> Report:
    return ensemble(variant, "FusionRegressor")


@recipe("SnapshotEnsembleRegressor.fit: a cyclic rate", "torchensemble", shipped="optimizer")
def snapshot(variant: Variant) -> Report:
    return ensemble(variant, "SnapshotEnsembleRegressor")


@recipe("GradientBoostingRegressor.fit: three nets in turn", "torchensemble", shipped="optimizer")
def boosting(variant: Variant) -> Report:
    return ensemble(variant, "GradientBoostingRegressor")


@recipe("PyTorchClassifier.fit", "adversarial-robustness-toolbox", shipped="")
def art_classifier(variant: Variant) -> Report:
    return with_art(variant, adversarial=False)


@recipe("AdversarialTrainer.fit with FGSM", "adversarial-robustness-toolbox", shipped="")
def art_adversarial(variant: Variant) -> Report:
    return with_art(variant, adversarial=True)


def with_art(variant: Variant, adversarial: bool) -> Report:
    from art.attacks.evasion import FastGradientMethod
    from art.defences.trainer import AdversarialTrainer
    from art.estimators.classification import PyTorchClassifier

    plain = cnn()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    classifier = PyTorchClassifier(
        model, nn.CrossEntropyLoss(), (3, 8, 8), 4, optimizer=optimizer, device_type="cpu"
    )
    x, y = (each.numpy() for each in pictures(variant))
    seeded(variant)
    with surrounded(variant):
        if adversarial:
            attack = FastGradientMethod(classifier, eps=0.1)
            AdversarialTrainer(classifier, attack, ratio=0.5).fit(x, y, batch_size=8, nb_epochs=2)
        else:
            classifier.fit(x, y, batch_size=8, nb_epochs=2)
    return variant.report(model, [0.0])


class Classes(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, width), nn.Linear(width, 4)

    def forward(self, x: Any, labels: Any = None) -> Any:
        hidden = self.body(x).tanh()
        logits = self.head(hidden)
        return {"logits": logits, "hidden": hidden, "loss": F.cross_entropy(logits.float(), labels)}


@recipe(
    "GeneralDistiller.train: hidden states projected by an added group, clip",
    "textbrewer",
    shipped="clip",
)
def textbrewer_general(variant: Variant) -> Report:
    from textbrewer import DistillationConfig, GeneralDistiller, TrainingConfig
    from textbrewer.distiller_basic import BasicDistiller

    teacher, plain = Classes(32), Classes()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))

    def adaptor(batch: Any, out: Any) -> Any:
        return {"logits": out["logits"], "hidden": [out["hidden"]], "losses": out["loss"]}

    losses: list[float] = []
    train = edited(
        BasicDistiller.train_with_num_epochs,
        (
            "torch.nn.utils.clip_grad_norm_(self.model_S.parameters(), max_grad_norm)",
            "clip(self.model_S, optimizer, max_grad_norm)",
        ),
        clip=variant.clip,
    )

    class Distiller(GeneralDistiller):
        def train_with_num_epochs(self, *args: Any, **options: Any) -> None:
            train(self, *args, **options)

        def write_loss(self, total: Any, step: int, parts: Any) -> None:
            losses.append(total.item())

        def save_and_callback(self, *args: Any) -> None:
            pass

    distiller = Distiller(
        TrainingConfig(log_dir=None, output_dir=f"{variant.folder}-{variant.rank}", device="cpu"),
        DistillationConfig(temperature=4, hard_label_weight=0.5, kd_loss_type="ce"),
        teacher,
        model,
        adaptor,
        adaptor,
    )
    rng = seeded(variant)
    data = loader(
        variant, torch.randn(32, 6, generator=rng), torch.randint(0, 4, (32,), generator=rng)
    )
    with surrounded(variant):
        distiller.train(optimizer, data, num_epochs=2, max_grad_norm=1.0)
    return variant.report(model, losses)


def continual(variant: Variant, name: str, ported: bool = True, **options: Any) -> Report:
    absent("wandb")
    from avalanche.benchmarks import benchmark_from_datasets, task_incremental_benchmark
    from avalanche.benchmarks.utils import as_classification_dataset
    from avalanche.training import supervised
    from avalanche.training.plugins import EvaluationPlugin

    plain = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, 4))
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.05))

    class Labelled(torch.utils.data.TensorDataset):
        def __init__(self, x: Any, y: Any) -> None:
            super().__init__(x, y)
            self.targets = y.tolist()

        def __getitem__(self, index: int) -> Any:
            return self.tensors[0][index], int(self.tensors[1][index])

    x, y = pictures(variant, count=48)
    parts = [as_classification_dataset(Labelled(x[k::2], y[k::2])) for k in (0, 1)]
    bench = task_incremental_benchmark(benchmark_from_datasets(train=parts, test=parts))
    seeded(variant)
    losses: list[float] = []
    strategy = getattr(supervised, name)(
        model=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=8,
        train_epochs=2,
        device="cpu",
        evaluator=EvaluationPlugin(),
        **options,
    )
    if ported and not variant.stock:
        strategy.make_optimizer = lambda **_: None  # else it replaces optimizer.state
    with surrounded(variant):
        for experience in bench.train_stream:
            strategy.train(experience)
            losses.append(float(strategy.loss))
    return variant.report(model, losses)


@recipe("Naive.train", "avalanche-lib", shipped="state reset removed")
def avalanche_naive(variant: Variant) -> Report:
    return continual(variant, "Naive")


@recipe(
    "Naive.train as it stands: optimizer.state = defaultdict(dict)",
    "avalanche-lib",
    shipped="",
    error=TypeError,
    match="read-only",
)
def avalanche_unported(variant: Variant) -> Report:
    return continual(variant, "Naive", ported=False)


@recipe("Replay.train", "avalanche-lib", shipped="state reset removed")
def avalanche_replay(variant: Variant) -> Report:
    return continual(variant, "Replay", mem_size=16)


@recipe(
    "EWC.train: Fisher information from .grad",
    "avalanche-lib",
    shipped="state reset removed",
    error=RuntimeError,
    match="gather_gradients",
)
def avalanche_ewc(variant: Variant) -> Report:
    return continual(variant, "EWC", ewc_lambda=1.0)


@recipe(
    "AGEM.train: gradients projected on a memory's gradients",
    "avalanche-lib",
    shipped="state reset removed",
    error=RuntimeError,
    match="gather_gradients",
)
def avalanche_agem(variant: Variant) -> Report:
    return continual(variant, "AGEM", patterns_per_exp=8, sample_size=8)


@recipe(
    "GEM.train: gradients replaced by a solution",
    "avalanche-lib",
    shipped="state reset removed",
    error=RuntimeError,
    match="gather_gradients",
)
def avalanche_gem(variant: Variant) -> Report:
    return continual(variant, "GEM", patterns_per_exp=8)


@recipe(
    "SynapticIntelligence.train: fp32 copies times weights; in fp32 it needs gather_gradients",
    "avalanche-lib",
    shipped="state reset removed",
    error=RuntimeError,
    match="same dtype",
)
def avalanche_si(variant: Variant) -> Report:
    return continual(variant, "SynapticIntelligence", si_lambda=1.0)


@recipe("CoTeaching.fit", "cleanlab", shipped="optimizer")
def coteaching(variant: Variant) -> Report:
    from types import SimpleNamespace

    from cleanlab.experimental import coteaching as package

    train = edited(package.train, (".cuda()", ""))

    nets = [cnn(), cnn()]
    variant.starts(nets[0])
    pairs = [variant.shard(net, torch.optim.Adam(net.parameters(), lr=1e-2)) for net in nets]
    x, y = pictures(variant)
    batches = loader(variant, x, y, batch=8)
    seeded(variant)
    with surrounded(variant):
        train(
            batches,
            0,
            pairs[0][0],
            pairs[0][1],
            pairs[1][0],
            pairs[1][1],
            SimpleNamespace(print_freq=100),
            [0.2],
            torch.ones(4),
            lambda *_, **__: (0.0, 0.0),
        )
    return variant.report(nets[0], [0.0], pairs[0][1])
