"""Tables, survival and recommendation, as their packages train."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import torch
from harness import Report, Variant
from loops import mlp
from recipes import recipe
from shipped import absent, averaged, edited, rows_of, seeded, surrounded
from torch import nn


@recipe(
    "TabNetRegressor.fit, clip by norm",
    "pytorch-tabnet",
    shipped="optimizer, clip",
    fp32=1e-2,
    remark="under DDP, one ulp in the initial weights changes the final weights by 0.2",
)
def tabnet(variant: Variant) -> Report:
    from pytorch_tabnet.tab_model import TabNetRegressor

    class Shared(TabNetRegressor):
        def _set_optimizer(self) -> None:
            super()._set_optimizer()
            variant.starts(self.network)
            self._optimizer = averaged(variant, self.network, self._optimizer)
            seeded(variant)

        _train_batch = edited(
            TabNetRegressor._train_batch,
            (
                "clip_grad_norm_(self.network.parameters(), self.clip_value)",
                "clip(self.network, self._optimizer, self.clip_value)",
            ),
            clip=variant.clip,
        )

    model = Shared(n_d=4, n_a=4, n_steps=2, clip_value=1.0, device_name="cpu", verbose=0)
    x, y = (each.numpy() for each in rows_of(variant, 64))
    with surrounded(variant):
        model.fit(x, y, max_epochs=3, batch_size=16, virtual_batch_size=8, compute_importance=False)
    return variant.report(model.network, model.history["loss"])


@recipe("CoxPH.fit of torchtuples.Model", "pycox", "torchtuples", shipped="")
def cox(variant: Variant) -> Report:
    from pycox.models import CoxPH

    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    seeded(variant)
    x, time = rows_of(variant)
    event = (time > 0).float()
    with surrounded(variant):
        fitted = CoxPH(model, optimizer)
        log = fitted.fit(
            x.numpy(), (time.exp().numpy().ravel(), event.numpy().ravel()), 16, 4, verbose=False
        )
    return variant.report(model, log.to_pandas()["train_loss"].tolist())


def click_rows(variant: Variant) -> Any:
    rng = torch.Generator().manual_seed(variant.rank)
    ids = torch.randint(0, 10, (64, 3), generator=rng)
    return ids, (ids.sum(1) % 2).float()


@recipe("DeepFM.fit", "deepctr-torch", shipped="optimizer")
def deepfm(variant: Variant) -> Report:
    from deepctr_torch.inputs import SparseFeat
    from deepctr_torch.models import DeepFM

    columns = [SparseFeat(name, 10, 4) for name in "abc"]
    model = DeepFM(columns, columns, dnn_hidden_units=(16, 16), device="cpu")
    model.compile("adam", "binary_crossentropy")
    variant.starts(model)
    model.optim = averaged(variant, model, model.optim)
    ids, labels = click_rows(variant)
    seeded(variant)
    with surrounded(variant):
        history = model.fit(
            {name: ids[:, k].numpy() for k, name in enumerate("abc")},
            labels.numpy(),
            batch_size=16,
            epochs=3,
            verbose=0,
        )
    return variant.report(model, history.history["loss"], model.optim)


@recipe("CTRTrainer.train_one_epoch, WideDeep", "torch-rechub", shipped="optimizer")
def rechub(variant: Variant) -> Report:
    from torch_rechub.basic.features import SparseFeature
    from torch_rechub.models.ranking import DeepFM
    from torch_rechub.trainers import CTRTrainer

    features = [SparseFeature(name, 10, embed_dim=4) for name in "abc"]
    plain = DeepFM(features, features, mlp_params={"dims": [16], "dropout": 0.0})
    trainer = CTRTrainer(plain, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, device="cpu")
    variant.starts(plain)
    model, trainer.optimizer = variant.shard(plain, trainer.optimizer)
    trainer.model = model
    ids, labels = click_rows(variant)
    rows = [({n: ids[k, i] for i, n in enumerate("abc")}, labels[k]) for k in range(64)]
    losses = []
    with surrounded(variant):
        for _ in range(3):
            batches = torch.utils.data.DataLoader(rows, batch_size=16)
            losses.append(trainer.train_one_epoch(batches))
    return variant.report(model, losses)


@recipe("Trainer.fit, TabMlp", "pytorch-widedeep", shipped="")
def widedeep(variant: Variant) -> Report:
    absent(
        "spacy",
        "spacy.tokens",
        "spacy.symbols",
        "spacy.lang",
        "spacy.util",
        "gensim",
        "gensim.utils",
    )
    from pytorch_widedeep import Trainer
    from pytorch_widedeep.models import TabMlp, WideDeep

    tab = TabMlp(
        {f"x{k}": k for k in range(6)},
        continuous_cols=[f"x{k}" for k in range(6)],
        mlp_hidden_dims=[16, 8],
    )
    plain = WideDeep(deeptabular=tab)
    variant.starts(plain)
    optimizer = averaged(variant, plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    trainer = Trainer(
        plain, "regression", optimizers=optimizer, verbose=0, device="cpu", num_workers=0
    )
    x, y = (each.numpy() for each in rows_of(variant))
    seeded(variant)
    with surrounded(variant):
        trainer.fit(X_tab=x, target=y.ravel(), n_epochs=3, batch_size=8)
    return variant.report(plain, trainer.history["train_loss"], optimizer)


@recipe("Trainer._train_epoch, BPR, clip by norm", "recbole", shipped="clip, optimizer")
def recbole_bpr(variant: Variant) -> Report:
    from recbole.data.interaction import Interaction
    from recbole.model.general_recommender import BPR
    from recbole.trainer import Trainer

    config = {
        "USER_ID_FIELD": "u",
        "ITEM_ID_FIELD": "i",
        "NEG_PREFIX": "neg_",
        "device": "cpu",
        "embedding_size": 8,
        "single_spec": True,
        "enable_scaler": False,
        "gpu_id": "",
    }
    data = SimpleNamespace(num=lambda field: 20)
    plain = BPR(config, data)
    variant.starts(plain)
    optimizer = averaged(variant, plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    rng = seeded(variant)
    batches = [
        Interaction({k: torch.randint(1, 20, (16,), generator=rng) for k in ("u", "i", "neg_i")})
        for _ in range(6)
    ]
    epoch = edited(
        Trainer._train_epoch,
        (
            "clip_grad_norm_(self.model.parameters(), **self.clip_grad_norm)",
            "clip(self.model, self.optimizer, **self.clip_grad_norm)",
        ),
        ("scaler = amp.GradScaler(enabled=self.enable_scaler)", ""),
        ("scaler.scale(loss + sync_loss).backward()", "(loss + sync_loss).backward()"),
        ("scaler.step(self.optimizer)", "self.optimizer.step()"),
        ("scaler.update()", "pass"),
        clip=lambda model, optimizer, max_norm: variant.clip(model, optimizer, max_norm),
    )
    trainer = SimpleNamespace(
        model=plain,
        optimizer=optimizer,
        config=config,
        device=torch.device("cpu"),
        enable_amp=False,
        enable_scaler=False,
        clip_grad_norm={"max_norm": 0.1},
        gpu_available=False,
        _check_nan=lambda loss: None,
    )
    with surrounded(variant):
        losses = [epoch(trainer, batches, number) for number in range(2)]
    return variant.report(plain, losses, optimizer)


def anomalies(variant: Variant, build: Any, prepare: str, edit: tuple[str, str]) -> Report:
    model = build()
    holder: list[Any] = []

    def shared(net: nn.Module, optimizer: Any) -> Any:
        variant.starts(net)
        holder.extend((net, averaged(variant, net, optimizer)))
        seeded(variant)
        return holder[1]

    setattr(
        model,
        prepare,
        MethodType(edited(getattr(type(model), prepare), edit, shared=shared), model),
    )
    # Scores are skipped, also under DDP: NumPy has no bf16.
    model.decision_function = lambda rows: rows[:, 0]
    with surrounded(variant):
        model.fit(rows_of(variant, 64)[0].numpy())
    return variant.report(holder[0], [0.0], holder[1])


@recipe("AutoEncoder.fit", "pyod", shipped="optimizer, scores removed")
def pyod_autoencoder(variant: Variant) -> Report:
    from pyod.models.auto_encoder import AutoEncoder

    return anomalies(
        variant,
        lambda: AutoEncoder(
            epoch_num=3,
            batch_size=16,
            hidden_neuron_list=[8, 4],
            batch_norm=False,
            dropout_rate=0.0,
            verbose=0,
            device="cpu",
        ),
        "training_prepare",
        (
            "**self.optimizer_params)",
            "**self.optimizer_params)\n    self.optimizer = shared(self.model, self.optimizer)",
        ),
    )


@recipe("DeepSVDD.fit", "deepod", shipped="optimizer, scores removed")
def deepod_svdd(variant: Variant) -> Report:
    from deepod.models.tabular import DeepSVDD

    return anomalies(
        variant,
        lambda: DeepSVDD(
            epochs=3, batch_size=16, rep_dim=4, hidden_dims="8", device="cpu", verbose=0
        ),
        "_training",
        (
            "    self.net.train()\n",
            "    optimizer = shared(self.net, optimizer)\n    self.net.train()\n",
        ),
    )
