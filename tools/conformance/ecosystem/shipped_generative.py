"""GANs, autoencoders and diffusion, as their packages train."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from harness import Report, Variant
from recipes import recipe
from shipped import absent, averaged, edited, loader, rows_of, seeded, surrounded
from torch import Tensor, nn


def mimicry(variant: Variant, makers: Any, critics: Any) -> Report:
    """Run the package's train_step of both nets, in the order of its Trainer."""
    from torch_mimicry.training.metric_log import MetricLog

    maker, critic = makers(nz=8, ngf=16), critics(ndf=16)
    variant.starts(maker)
    of_maker = averaged(variant, maker, torch.optim.SGD(maker.parameters(), 0.01, 0.9))
    of_critic = averaged(variant, critic, torch.optim.SGD(critic.parameters(), 0.01, 0.9))
    rng, losses = seeded(variant), []
    with surrounded(variant):
        for step in range(2):
            log = MetricLog()
            batch = torch.randn(2, 3, 32, 32, generator=rng).tanh(), torch.zeros(2)
            for net, other, optimizer, names in (
                (critic, maker, of_critic, ("netG", "optD")),
                (maker, critic, of_maker, ("netD", "optG")),
            ):
                log = net.train_step(
                    batch,
                    log_data=log,
                    global_step=step,
                    device="cpu",
                    **dict(zip(names, (other, optimizer), strict=True)),
                )
            losses.append(float(log["errD"]))
    return variant.report(maker, losses, of_maker)


@recipe("SNGAN: spectral norm by hand, train_step", "torch-mimicry", shipped="optimizer")
def sngan(variant: Variant) -> Report:
    absent("tensorflow", "torch._six")
    from torch_mimicry.nets import sngan

    return mimicry(variant, sngan.SNGANGenerator32, sngan.SNGANDiscriminator32)


@recipe("WGAN-GP: second derivatives, train_step", "torch-mimicry", shipped="optimizer")
def wgan_gp(variant: Variant) -> Report:
    absent("tensorflow", "torch._six")
    from torch_mimicry.nets import wgan_gp

    return mimicry(variant, wgan_gp.WGANGPGenerator32, wgan_gp.WGANGPDiscriminator32)


@recipe(
    "Trainer: clamped critic, norms of .grad in its log",
    "torchgan",
    shipped="optimizer",
    error=RuntimeError,
    match="gather_gradients",
)
def torchgan_trainer(variant: Variant) -> Report:
    import os

    os.environ.update(TENSORBOARD_LOGGING="0", VISDOM_LOGGING="0", CONSOLE_LOGGING="0")
    from torchgan.losses import WassersteinDiscriminatorLoss, WassersteinGeneratorLoss
    from torchgan.models import Discriminator, Generator
    from torchgan.trainer import Trainer

    class Maker(Generator):
        def __init__(self) -> None:
            super().__init__(4, "none")
            self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6))

        def forward(self, z: Tensor) -> Tensor:
            return self.net(z)

    class Critic(Discriminator):
        def __init__(self) -> None:
            super().__init__(6, "none")
            self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    adam = {"name": torch.optim.Adam, "args": {"lr": 1e-2}}
    trainer = Trainer(
        {
            "generator": {"name": Maker, "optimizer": adam},
            "discriminator": {"name": Critic, "optimizer": adam},
        },
        [WassersteinGeneratorLoss(), WassersteinDiscriminatorLoss(clip=(-0.1, 0.1))],
        device=torch.device("cpu"),
        epochs=2,
        checkpoints=variant.folder,
        recon=variant.folder,
        sample_size=1,
    )
    trainer.save_model = lambda *args: None
    # Its log folders have names that are equal if two ranks start within one second.
    trainer.logger.run_mid_epoch = trainer.logger.run_end_epoch = lambda *args: None
    variant.starts(trainer.generator)
    for name in ("generator", "discriminator"):
        optimizer = getattr(trainer, f"optimizer_{name}")
        made = averaged(variant, getattr(trainer, name), optimizer)
        setattr(trainer, f"optimizer_{name}", made)
    seeded(variant)
    with surrounded(variant):
        trainer(loader(variant, *rows_of(variant)))
    losses = [trainer.loss_information[f"{name}_losses"] for name in ("generator", "discriminator")]
    return variant.report(trainer.generator, losses, trainer.optimizer_generator)


def autoencoder(variant: Variant, adversarial: bool) -> Report:
    from pythae import models, trainers
    from pythae.data.datasets import BaseDataset

    options = {"input_dim": (6,), "latent_dim": 2}
    if adversarial:
        plain = models.Adversarial_AE(models.Adversarial_AE_Config(**options))
        cls, config = trainers.AdversarialTrainer, trainers.AdversarialTrainerConfig
        names = ("autoencoder", "discriminator")
    else:
        plain = models.VAE(models.VAEConfig(**options))
        cls, config = trainers.BaseTrainer, trainers.BaseTrainerConfig
        names = ("",)
    x, _ = rows_of(variant)
    data = BaseDataset(x.sigmoid(), torch.ones(32))
    trainer = cls(
        plain,
        data,
        training_config=config(
            output_dir=variant.folder,
            per_device_train_batch_size=8,
            num_epochs=2,
            no_cuda=True,
            world_size=1,
            local_rank=0,
        ),
    )
    variant.starts(plain.discriminator if adversarial else plain)
    if adversarial:
        trainer.set_autoencoder_optimizer()
        trainer.set_discriminator_optimizer()
        parts = (nn.ModuleList([plain.encoder, plain.decoder]), plain.discriminator)
    else:
        trainer.set_optimizer()
        parts = (plain,)
    made = []
    for name, part in zip(names, parts, strict=True):
        attribute = f"{name}_optimizer".removeprefix("_")
        made.append(averaged(variant, part, getattr(trainer, attribute)))
        setattr(trainer, attribute, made[-1])
    trainer.callback_handler = SimpleNamespace(
        on_train_step_begin=lambda **_: None, on_train_step_end=lambda **_: None
    )
    seeded(variant)
    losses = []
    with surrounded(variant):
        for epoch in range(3):
            loss = trainer.train_step(epoch)
            losses.append(loss[0] if adversarial else loss)
    if adversarial:
        return variant.report(plain.discriminator, losses, made[1])
    return variant.report(plain, losses, made[0])


@recipe("BaseTrainer.train_step, VAE", "pythae", shipped="optimizer")
def pythae_vae(variant: Variant) -> Report:
    return autoencoder(variant, adversarial=False)


@recipe("AdversarialTrainer.train_step: two optimizers, one graph", "pythae", shipped="optimizer")
def pythae_adversarial(variant: Variant) -> Report:
    return autoencoder(variant, adversarial=True)


class Noised(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, size: int) -> None:
        self.images = torch.rand(32, 3, size, size, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index]


@recipe(
    "Trainer of denoising_diffusion_pytorch: accumulation 2, clip, EMA on rank 0",
    "denoising-diffusion-pytorch",
    shipped="Accelerator",
    fp32=1e-5,
)
def ddpm(variant: Variant) -> Report:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet
    from denoising_diffusion_pytorch import denoising_diffusion_pytorch as package

    plain = GaussianDiffusion(
        Unet(8, dim_mults=(1, 2), flash_attn=False), image_size=16, timesteps=50
    )
    variant.starts(plain)
    with (
        mock.patch.object(package, "Accelerator", lambda **_: variant.accelerator()),
        mock.patch.object(package, "Dataset", lambda *_, **__: Noised(16)),
        mock.patch.object(package, "cpu_count", lambda: 0),
        mock.patch.object(Noised, "__len__", lambda self: 128),
        mock.patch.object(Noised, "__getitem__", lambda self, k: self.images[k % 32]),
    ):
        trainer = package.Trainer(
            plain,
            "",
            train_batch_size=8,
            gradient_accumulate_every=2,
            train_num_steps=3,
            train_lr=1e-3,
            calculate_fid=False,
            results_folder=variant.folder,
        )
        seeded(variant)
        trainer.train()
    return variant.report(trainer.accelerator.unwrap_model(trainer.model), [0.0], trainer.opt)


@recipe(
    "Trainer of rectified_flow_pytorch: accelerator.accumulate, clip, EMA",
    "rectified-flow-pytorch",
    shipped="Accelerator",
    fp32=1e-5,
)
def rectified_flow(variant: Variant) -> Report:
    from rectified_flow_pytorch import rectified_flow as package

    class Velocity(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
            self.time = nn.Linear(1, 8)

        def forward(self, x: Tensor, times: Tensor, **_: Any) -> Tensor:
            time = self.time(times.reshape(-1, 1).to(x.dtype))
            return self.last((self.first(x) + time[:, :, None, None]).tanh())

    plain = package.RectifiedFlow(Velocity(), data_shape=(3, 8, 8))
    variant.starts(plain)
    with mock.patch.object(package, "Accelerator", variant.accelerator):
        trainer = package.Trainer(
            plain,
            dataset=Noised(8),
            num_train_steps=6,
            batch_size=4,
            grad_accum_every=2,
            checkpoints_folder=f"{variant.folder}/c",
            results_folder=f"{variant.folder}/r",
            save_results_every=100,
            learning_rate=1e-3,
        )
        seeded(variant)
        trainer()
    return variant.report(trainer.accelerator.unwrap_model(trainer.model), [0.0], trainer.optimizer)


@recipe(
    "StyleGAN2 Trainer.train: gradient penalty, accumulation 2",
    "stylegan2-pytorch",
    shipped="optimizer, cuda",
)
def stylegan2(variant: Variant) -> Report:
    absent("aim")
    with mock.patch("torch.cuda.is_available", lambda: True):
        from stylegan2_pytorch import stylegan2_pytorch as package

    package.StyleGAN2.cuda = lambda self, rank=None: self
    trainer = package.Trainer(
        base_dir=variant.folder,
        image_size=16,
        network_capacity=2,
        fmap_max=16,
        batch_size=2,
        gradient_accumulate_every=2,
        latent_dim=16,
        style_depth=2,
        aug_prob=0.0,
        lr=1e-3,
        rank=variant.rank,
    )
    trainer.rank, trainer.is_main = "cpu", False
    trainer.init_GAN()
    gan = trainer.GAN
    makers = nn.ModuleList([gan.G, gan.S])
    variant.starts(makers)
    gan.G_opt, gan.D_opt = (
        averaged(variant, part, optimizer)
        for part, optimizer in ((makers, gan.G_opt), (gan.D, gan.D_opt))
    )
    rng = seeded(variant)
    trainer.loader = iter(torch.rand(64, 2, 3, 16, 16, generator=rng))
    train = edited(package.Trainer.train, (".cuda(self.rank)", ""))
    losses = []
    for _ in range(3):
        with surrounded(variant), mock.patch("torch.Tensor.cuda", lambda self, _: self):
            train(trainer)
        losses += [trainer.d_loss, trainer.g_loss]
    return variant.report(makers, losses, gan.G_opt)


@recipe("BYOLTrainer: target network", "byol-pytorch", shipped="Accelerator, unwrapped")
def byol(variant: Variant) -> Report:
    from byol_pytorch import byol_pytorch as nets
    from byol_pytorch import trainer as package

    class Backbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool = nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.pool(self.conv(x).relu()).flatten(1)

    net = Backbone()
    random.seed(0)  # the constructor runs a forward on random crops, which creates layers

    def build(**options: Any) -> Any:
        return variant.accelerator(**(options if variant.stock else {}))

    norm = mock.patch.object(nets, "MaybeSyncBatchnorm", lambda *_: nn.BatchNorm1d)  # needs a GPU
    update = "self.byol.update_moving_average()"  # DDP has no such method
    unwrapped = f"self.accelerator.unwrap_model(self.byol){update.removeprefix('self.byol')}"
    forward = edited(package.BYOLTrainer.forward, (update, unwrapped))
    loop = mock.patch.object(package.BYOLTrainer, "forward", forward)
    with norm, loop, mock.patch.object(package, "Accelerator", build):
        trainer = package.BYOLTrainer(
            net,
            image_size=8,
            hidden_layer="pool",
            learning_rate=0.05,
            dataset=Noised(8),
            optimizer_klass=torch.optim.SGD,
            num_train_steps=4,
            batch_size=4,
            checkpoint_folder=variant.folder,
            byol_kwargs={
                "projection_size": 8,
                "projection_hidden_size": 16,
                "sync_batchnorm": False,
            },
        )
        variant.starts(trainer.accelerator.unwrap_model(trainer.byol))
        seeded(variant)
        trainer()
    return variant.report(trainer.accelerator.unwrap_model(trainer.byol), [0.0], trainer.optimizer)
