"""Loops and trainers of general packages that take a model, an optimizer and a loader."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from harness import Report, Variant
from loops import cnn, mlp
from recipes import recipe
from shipped import averaged, edited, loader, pictures, rows_of, seeded, surrounded
from torch import nn


@recipe("facenet_pytorch.training.pass_epoch", "facenet-pytorch", shipped="")
def facenet(variant: Variant) -> Report:
    from facenet_pytorch import training

    plain = cnn()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1])
    losses = []
    with surrounded(variant):
        for _ in range(2):
            loss, _ = training.pass_epoch(
                model.train(),
                F.cross_entropy,
                loader(variant, *pictures(variant)),
                optimizer,
                scheduler,
                batch_metrics={"acc": training.accuracy},
            )
            losses.append(loss.item())
    return variant.report(model, losses)


@recipe("LRFinder.range_test, accumulation 2", "torch-lr-finder", shipped="")
def lr_finder(variant: Variant) -> Report:
    from torch_lr_finder import LRFinder

    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), lr=1e-4))
    finder = LRFinder(model, optimizer, nn.MSELoss(), device="cpu")
    with surrounded(variant):
        finder.range_test(
            loader(variant, *rows_of(variant)), end_lr=0.1, num_iter=10, accumulation_steps=2
        )
    report = variant.report(model, finder.history["loss"])
    finder.reset()
    return report


def metric_learning(
    variant: Variant, name: str, models: dict[str, nn.Module], **given: Any
) -> Report:
    from pytorch_metric_learning import trainers

    plain = nn.ModuleDict(models)
    variant.starts(plain)
    optimizers, wrapped = {}, {}
    for each, part in models.items():
        optimizer = torch.optim.Adam(part.parameters(), lr=1e-2)
        wrapped[each], optimizers[f"{each}_optimizer"] = variant.shard(part, optimizer)
    rng = torch.Generator().manual_seed(variant.rank)
    x = torch.randn(64, 6, generator=rng)
    data = torch.utils.data.TensorDataset(x, torch.randint(0, 4, (64,), generator=rng))
    losses = []
    trainer = getattr(trainers, name)(
        models=wrapped,
        optimizers=optimizers,
        batch_size=16,
        dataset=data,
        data_device="cpu",
        dataloader_num_workers=0,
        sampler=torch.utils.data.SequentialSampler(data),
        end_of_iteration_hook=lambda trainer: losses.append(trainer.losses["total_loss"].item()),
        **given,
    )
    seeded(variant)
    with surrounded(variant):
        trainer.train(num_epochs=2)
    return merged(variant, models, optimizers)(losses)


def merged(variant: Variant, models: dict[str, nn.Module], optimizers: dict[str, Any]) -> Any:
    """Return a function that reports several models as one, each with its own optimizer."""

    def report(losses: list[float]) -> Report:
        parts = {
            name: variant.report(part, losses, optimizers[f"{name}_optimizer"])
            for name, part in models.items()
        }
        weights, seen = (
            {f"{name}.{key}": value for name, part in parts.items() for key, value in of(part)}
            for of in (lambda part: part.weights.items(), lambda part: part.seen.items())
        )
        return Report([float(x) for x in losses], weights, variant.start, seen)

    return report


@recipe(
    "trainers.MetricLossOnly: separate trunk and embedder", "pytorch-metric-learning", shipped=""
)
def pml_metric(variant: Variant) -> Report:
    from pytorch_metric_learning import losses, miners

    return metric_learning(
        variant,
        "MetricLossOnly",
        {"trunk": mlp(out=8), "embedder": nn.Linear(8, 4)},
        loss_funcs={"metric_loss": losses.TripletMarginLoss()},
        mining_funcs={"tuple_miner": miners.MultiSimilarityMiner()},
    )


@recipe("trainers.TrainWithClassifier", "pytorch-metric-learning", shipped="")
def pml_classifier(variant: Variant) -> Report:
    from pytorch_metric_learning import losses

    return metric_learning(
        variant,
        "TrainWithClassifier",
        {"trunk": mlp(out=8), "embedder": nn.Linear(8, 4), "classifier": nn.Linear(4, 4)},
        loss_funcs={
            "metric_loss": losses.ContrastiveLoss(),
            "classifier_loss": nn.CrossEntropyLoss(),
        },
        loss_weights={"metric_loss": 1, "classifier_loss": 0.5},
    )


@recipe("NeuralNet.fit: optimizer.step(closure)", "skorch", shipped="optimizer")
def skorch_net(variant: Variant) -> Report:
    import skorch

    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    net = skorch.NeuralNet(
        model, nn.MSELoss, max_epochs=2, batch_size=4, train_split=None, verbose=0, device=None
    )
    net.initialize()
    net.optimizer_ = optimizer
    x, y = rows_of(variant)
    with surrounded(variant):
        net.partial_fit(x.numpy(), y.numpy())
    return variant.report(model, net.history[:, "train_loss"])


@recipe("Trial.run", "torchbearer", shipped="")
def torchbearer_trial(variant: Variant) -> Report:
    import torchbearer

    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    trial = torchbearer.Trial(model, optimizer, nn.MSELoss(), metrics=["loss"])
    trial.with_train_generator(loader(variant, *rows_of(variant)))
    with surrounded(variant):
        history = trial.run(epochs=2, verbose=0)
    return variant.report(model, [row["loss"] for row in history])


@recipe(
    "AutoUnit: accumulation 2, clip by norm, schedule by step", "torchtnt", shipped="clip, no_sync"
)
def torchtnt_unit(variant: Variant) -> Report:
    from torchtnt.framework.auto_unit import AutoUnit
    from torchtnt.framework.train import train

    plain = mlp()
    variant.starts(plain)
    losses: list[float] = []

    class Unit(AutoUnit):  # type: ignore[misc, type-arg]
        def compute_loss(self, state: Any, data: Any) -> Any:
            with surrounded(variant):
                out = self.module(data[0])
                return F.mse_loss(out.float(), data[1]), out

        def configure_optimizers_and_lr_scheduler(self, module: Any) -> Any:
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
            if not variant.stock:
                optimizer = variant.shard(module, optimizer)[1]
            return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

        def on_train_step_end(self, state: Any, data: Any, step: int, results: Any) -> None:
            losses.append(results.loss.item())

        train_step = edited(
            AutoUnit.train_step,
            (
                "module.no_sync()\n        if not should_update_weights\n"
                "        and (isinstance(module, DDP) or _is_fsdp_module(module))",
                "no_sync(module, self.optimizer) if not should_update_weights",
            ),
            no_sync=variant.no_sync,
        )
        _update_weights = edited(
            AutoUnit._update_weights,
            (
                "total_grad_norm = torch.nn.utils.clip_grad_norm_(\n"
                "                    parameters=module.parameters(),\n"
                "                    max_norm=clip_grad_norm,\n",
                "total_grad_norm = clip(\n module, optimizer, clip_grad_norm\n",
            ),
            clip=variant.clip,
        )

    unit = Unit(
        module=plain,
        device=torch.device("cpu"),
        strategy="ddp" if variant.stock else None,
        gradient_accumulation_steps=2,
        clip_grad_norm=0.5,
        step_lr_interval="step",
    )
    train(unit, loader(variant, *rows_of(variant)), max_epochs=2)
    return variant.report(unit.module, losses)


def monai_data(variant: Variant, same: bool = False) -> Any:
    images, _ = pictures(variant, size=16)
    masks = images if same else (images.mean(1, keepdim=True) > 0).float()
    return torch.utils.data.DataLoader(
        [{"image": x, "label": y} for x, y in zip(images, masks, strict=True)], batch_size=4
    )


@recipe("SupervisedTrainer, UNet, DiceLoss, accumulation 2", "monai", shipped="")
def monai_supervised(variant: Variant) -> Report:
    from monai.engines import SupervisedTrainer
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    plain = UNet(2, 3, 1, channels=(4, 8, 16), strides=(2, 2))
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), 0.05, 0.9))
    losses: list[float] = []
    trainer = SupervisedTrainer(
        torch.device("cpu"),
        2,
        monai_data(variant),
        model,
        optimizer,
        DiceLoss(sigmoid=True),
        accumulation_steps=2,
    )
    from ignite.engine import Events

    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda engine: losses.append(float(engine.state.output[0]["loss"])),
    )
    with surrounded(variant):
        trainer.run()
    return variant.report(model, losses)


@recipe("AdversarialTrainer: reconstruction and discriminator", "monai", shipped="")
def monai_adversarial(variant: Variant) -> Report:
    from ignite.engine import Events
    from monai.engines import AdversarialTrainer

    maker = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    critic = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(392, 1)
    )
    variant.starts(maker)
    make, of_maker = variant.shard(maker, torch.optim.Adam(maker.parameters(), lr=2e-3))
    judge, of_critic = variant.shard(critic, torch.optim.Adam(critic.parameters(), lr=2e-3))
    losses: list[float] = []
    trainer = AdversarialTrainer(
        torch.device("cpu"),
        2,
        monai_data(variant, same=True),
        make,
        of_maker,
        lambda logits: F.softplus(-logits.float()),
        lambda fake, real: F.l1_loss(fake.float(), real),
        judge,
        of_critic,
        lambda real, fake: F.softplus(-real.float()) + F.softplus(fake.float()),
    )
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda engine: losses.append(float(engine.state.output["reconstruction_loss"])),
    )
    with surrounded(variant):
        trainer.run()
    return variant.report(maker, losses, of_maker)


@recipe("utils.train.TrainEpoch, Unet, SGD", "segmentation-models-pytorch", shipped="")
def segmentation(variant: Variant) -> Report:
    import segmentation_models_pytorch as smp
    from segmentation_models_pytorch import utils

    torch.manual_seed(0)  # its imports draw random numbers
    plain = smp.Unet("resnet18", encoder_weights=None, decoder_channels=(16, 8, 8, 4, 4))
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), lr=1e-2))
    images, _ = pictures(variant, count=8, size=32)
    masks = (images.mean(1, keepdim=True) > 0).float()
    epoch = utils.train.TrainEpoch(
        model, utils.losses.DiceLoss(activation="sigmoid"), [], optimizer, verbose=False
    )
    with surrounded(variant):
        logs = [epoch.run(loader(variant, images, masks))["dice_loss"] for _ in range(2)]
    return variant.report(model, logs)


@recipe("lpips.Trainer: weights clamped through weight.data", "lpips", shipped="optimizer")
def perceptual(variant: Variant) -> Report:
    import lpips

    trainer = lpips.Trainer()
    trainer.initialize("lpips", "squeeze", use_gpu=False, is_train=True, pnet_rand=True, lr=1e-2)
    both = nn.ModuleDict({"net": trainer.net, "rank": trainer.rankLoss})
    variant.starts(both)
    trainer.optimizer_net = averaged(variant, both, trainer.optimizer_net)
    rng, losses = seeded(variant), []
    for _ in range(5):
        images = torch.randn(3, 2, 3, 32, 32, generator=rng)
        judge = torch.rand(2, 1, 1, 1, generator=rng)
        trainer.set_input(dict(zip(("ref", "p0", "p1", "judge"), (*images, judge), strict=True)))
        with surrounded(variant):
            trainer.optimize_parameters()
        losses.append(trainer.loss_total.mean().item())
    return variant.report(both, losses, trainer.optimizer_net)


@recipe(
    "open_clip_train.train.train_one_epoch, clip by norm",
    "open-clip-torch",
    shipped="clip",
    fp32=2e-6,
    remark="under DDP, one ulp in the initial weights changes the final weights by 2e-6",
)
def open_clip_epoch(variant: Variant) -> Report:
    from types import SimpleNamespace

    import open_clip
    from open_clip.loss import ClipLoss
    from open_clip_train.data import DataInfo
    from open_clip_train.scheduler import cosine_lr
    from open_clip_train.train import train_one_epoch

    towers = {"width": 32, "layers": 1, "heads": 2}
    plain = open_clip.CLIP(
        16,
        {"image_size": 16, "patch_size": 8, "head_width": 16, "width": 32, "layers": 1},
        {"context_length": 8, "vocab_size": 50, **towers},
        output_dict=True,
    )
    variant.starts(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    model, optimizer = variant.shard(plain, optimizer)
    rng = seeded(variant)
    data = loader(
        variant,
        torch.randn(16, 3, 16, 16, generator=rng),
        torch.randint(1, 49, (16, 8), generator=rng),
    )
    data.num_batches, data.num_samples = len(data), 16
    losses: list[float] = []
    loss = ClipLoss()

    def noted(**given: Any) -> Any:
        parts = loss(**given)
        losses.extend(part.item() for part in parts.values())
        return parts

    args = SimpleNamespace(
        device="cpu",
        precision="amp_bf16" if variant.low else "fp32",
        distill=False,
        accum_freq=1,
        skip_scheduler=False,
        horovod=False,
        grad_clip_norm=1.0,
        rank=1,
        local_rank=1,
        log_local=False,
        log_every_n_steps=10,
        batch_size=4,
        world_size=2,
        wandb=False,
    )
    epoch = edited(
        train_one_epoch,
        (
            "torch.nn.utils.clip_grad_norm_"
            "(model.parameters(), args.grad_clip_norm, norm_type=2.0)",
            "clip(model, optimizer, args.grad_clip_norm)",
        ),
        clip=variant.clip,
    )
    info = DataInfo(data)
    info.set_epoch = lambda epoch: None
    for number in range(2):
        epoch(
            model,
            {"train": info},
            noted,
            number,
            optimizer,
            None,
            cosine_lr(optimizer, 1e-3, 2, 8),
            None,
            args,
        )
    return variant.report(model, losses)
