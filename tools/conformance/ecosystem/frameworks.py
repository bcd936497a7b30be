"""Scripts of frameworks: Accelerate, diffusers, timm, Lightning."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from harness import Report, Variant
from loops import STEPS, Nothing, generator, images, mlp, vectors
from recipes import recipe
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


def unet() -> Any:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        norm_num_groups=4,
        block_out_channels=(8, 16),
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


@recipe(
    "UNet2DModel, train_unconditional.py: EMAModel, cosine schedule, clip",
    "diffusers",
    fp32=1e-5,
    remark="the largest difference is in a key bias, whose gradient is rounding noise",
)
def diffusers_unet(variant: Variant) -> Report:
    return unconditional(variant, average=False)


@recipe("the same: its EMAModel", "diffusers", fp32=1e-5, remark="compares the averages", ratio=3.0)
def diffusers_ema(variant: Variant) -> Report:
    return unconditional(variant, average=True)


def unconditional(variant: Variant, average: bool) -> Report:
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.optimization import get_cosine_schedule_with_warmup
    from diffusers.training_utils import EMAModel

    accelerator = variant.accelerator(gradient_accumulation_steps=2)
    model = unet()
    variant.starts(model)
    ema = EMAModel(
        model.parameters(),
        decay=0.999,
        use_ema_warmup=True,
        inv_gamma=1.0,
        power=0.75,
        model_cls=UNet2DModel,
        model_config=model.config,
    )
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-6)
    rng = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 3, 8, 8, generator=rng))
    loader = DataLoader(data, batch_size=2)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    rng = generator(variant, 4)
    for (clean,) in loader:
        noise = torch.randn(clean.shape, generator=rng)
        steps = torch.randint(0, 1000, (len(clean),), generator=rng)
        noisy = noise_scheduler.add_noise(clean, noise, steps)
        with accelerator.accumulate(model):
            out = model(noisy, steps).sample
            loss = F.mse_loss(out.float(), noise.float())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ema.step(model.parameters())
        losses.append(loss.item())
    plain = accelerator.unwrap_model(model)
    if average:
        ema.copy_to(plain.parameters())
        values = [value.clone() for value in ema.shadow_params]
        shadow = unet()
        with torch.no_grad():
            for parameter, value in zip(shadow.parameters(), values, strict=True):
                parameter.copy_(value)
        return variant.report(shadow, losses, optimizer=Nothing())
    return variant.report(plain, losses, optimizer=optimizer)


@recipe("UNet2DConditionModel and text encoder, one optimizer (DreamBooth)", "diffusers")
def dreambooth(variant: Variant) -> Report:
    import itertools

    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    accelerator = variant.accelerator(gradient_accumulation_steps=1)
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=8,
        )
    )
    unet = UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        in_channels=4,
        out_channels=4,
    )
    variant.starts(unet)
    parameters = itertools.chain(unet.parameters(), text.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    unet, text, optimizer = accelerator.prepare(unet, text, optimizer)
    losses = []
    rng = generator(variant, 4)
    for _ in range(STEPS // 2):
        latents, noise = (torch.randn(2, 4, 8, 8, generator=rng) for _ in range(2))
        steps = torch.randint(0, 1000, (2,), generator=rng)
        ids = torch.randint(0, 50, (2, 8), generator=rng)
        with accelerator.accumulate(unet, text):
            hidden = text(ids)[0]
            out = unet(latents, steps, hidden).sample
            loss = F.mse_loss(out.float(), noise.float())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                both = itertools.chain(unet.parameters(), text.parameters())
                accelerator.clip_grad_norm_(both, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    unet = accelerator.unwrap_model(unet)
    return variant.report(unet, losses, None if variant.stock else optimizer, prefix="0.")


@recipe("GAN: one Accelerator, two models, two optimizers", "accelerate")
def accelerate_gan(variant: Variant) -> Report:
    accelerator = variant.accelerator()
    maker, critic = mlp(width=4, out=6), mlp()
    variant.starts(maker)
    opt_g = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    maker, critic, opt_g, opt_d = accelerator.prepare(maker, critic, opt_g, opt_d)
    losses = []
    rng = generator(variant, 3)
    for x, _ in vectors(variant):
        noise = torch.randn(len(x), 4, generator=rng)
        real, fake = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        with accelerator.autocast():
            made = maker(noise)
            loss = F.binary_cross_entropy_with_logits(critic(x).float(), real)
            loss = loss + F.binary_cross_entropy_with_logits(critic(made.detach()).float(), fake)
        opt_d.zero_grad()
        accelerator.backward(loss)
        opt_d.step()
        losses.append(loss.item())
        loss = F.binary_cross_entropy_with_logits(critic(made).float(), real)
        opt_g.zero_grad()
        accelerator.backward(loss)
        opt_g.step()
        losses.append(loss.item())
    maker = accelerator.unwrap_model(maker)
    return variant.report(maker, losses, optimizer=None if variant.stock else opt_g)


@recipe("cv_example.py: ResNet, OneCycleLR, gathered metrics", "accelerate", "timm")
def accelerate_cv(variant: Variant) -> Report:
    import timm

    accelerator = variant.accelerator()
    model = timm.create_model("resnet10t", num_classes=4, drop_rate=0.0)
    variant.starts(model)
    for parameter in model.parameters():
        parameter.requires_grad = False
    for parameter in model.get_classifier().parameters():
        parameter.requires_grad = True
    optimizer = torch.optim.Adam(params=model.parameters(), lr=1e-2 / 25)
    rng = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(24, 3, 32, 32, generator=rng), torch.randint(0, 4, (24,), generator=rng)
    )
    loader = DataLoader(data, batch_size=2, shuffle=False)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer=optimizer, max_lr=1e-2, epochs=1, steps_per_epoch=len(loader)
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    losses = []
    for inputs, labels in loader:
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, labels)
        accelerator.gather_for_metrics((outputs.argmax(-1), labels))
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model = accelerator.unwrap_model(model)
    return variant.report(model, losses, optimizer=None if variant.stock else optimizer)


@recipe("ViT, adamw by param_groups_weight_decay, ModelEmaV3, clip, mixup", "timm", fp32=1e-5)
def timm_train(variant: Variant) -> Report:
    return of_timm(variant, average=False)


@recipe(
    "the same: its ModelEmaV3 made before sharding",
    "timm",
    remark="compares the averages",
    ratio=3.0,
)
def timm_ema(variant: Variant) -> Report:
    return of_timm(variant, average=True)


def of_timm(variant: Variant, average: bool) -> Report:
    import numpy
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3

    numpy.random.seed(variant.rank)
    plain = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=2,
        num_classes=4,
    )
    variant.starts(plain)
    optimizer = create_optimizer_v2(plain, opt="adamw", lr=1e-3, weight_decay=0.05, eps=1e-6)
    ema = ModelEmaV3(plain, decay=0.99, use_warmup=True)
    model, optimizer = variant.shard(plain, optimizer)
    scheduler = CosineLRScheduler(optimizer, t_initial=10, warmup_t=2, warmup_lr_init=1e-4)
    mixup = Mixup(mixup_alpha=0.8, label_smoothing=0.1, num_classes=4)
    criterion = SoftTargetCrossEntropy()
    losses = []
    for number, (x, y) in enumerate(images(variant, size=32)):
        x, y = mixup(x, y)
        with variant.autocast():
            loss = criterion(model(x), y)
        loss.backward()
        variant.clip(model, optimizer, 1.0)
        optimizer.step()
        ema.update(plain, step=number)
        optimizer.zero_grad()
        scheduler.step(number)
        losses.append(loss.item())
    if average:
        return variant.report(ema.module, losses, optimizer=Nothing())
    return variant.report(model, losses)


@recipe("MobileNet with BatchNorm, lamb, jsd/bce loss, clip by norm", "timm", fp32=1e-5)
def timm_convnet(variant: Variant) -> Report:
    import timm
    from timm.loss import BinaryCrossEntropy
    from timm.optim import create_optimizer_v2

    plain = timm.create_model("test_efficientnet", num_classes=4)
    variant.starts(plain)
    optimizer = create_optimizer_v2(
        plain, opt="lamb", lr=2e-3, weight_decay=0.02, max_grad_norm=None
    )
    model, optimizer = variant.shard(plain, optimizer)
    losses = []
    criterion = BinaryCrossEntropy(smoothing=0.1)
    for x, y in images(variant, size=32, count=4):
        with variant.autocast():
            loss = criterion(model(x), y)
        loss.backward()
        variant.clip(model, optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return variant.report(model, losses)


def lightning_trainer(variant: Variant, **options: Any) -> Any:
    from lightning.pytorch import Trainer

    import shardcast.lightning

    assert shardcast.lightning
    precision = {"ddp": "32-true", "autocast": "bf16-mixed", "fp32": "32-true", "bf16": "bf16-true"}
    return Trainer(
        **{
            "strategy": "ddp" if variant.stock else "shardcast",
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": 1,
            "precision": precision[variant.name],
            "default_root_dir": variant.folder,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "use_distributed_sampler": True,
            **options,
        }
    )


def lightning_loader() -> Any:
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(48, 6, generator=rng)
    return DataLoader(TensorDataset(inputs, inputs.sin().sum(1, keepdim=True)), batch_size=4)


def masters_of(variant: Variant, trainer: Any) -> Any:
    return None if variant.stock else trainer.precision_plugin.sharded[0]


@recipe("LightningModule, schedule by step, accumulate 2, clip", "lightning")
def lightning_plain(variant: Variant) -> Report:
    from lightning.pytorch import LightningModule

    losses: list[float] = []

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = F.mse_loss(self.net(batch[0]).float(), batch[1].float())
            losses.append(loss.item())
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    net = Net()
    variant.starts(net)
    trainer = lightning_trainer(variant, accumulate_grad_batches=2, gradient_clip_val=0.5)
    trainer.fit(net, lightning_loader())
    return variant.report(net, losses, optimizer=masters_of(variant, trainer))


@recipe("GAN by manual optimization with toggle_optimizer", "lightning")
def lightning_gan(variant: Variant) -> Report:
    from lightning.pytorch import LightningModule

    losses: list[float] = []

    class Gan(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.discriminator = mlp(width=4, out=6), mlp()
            self.rng = torch.Generator().manual_seed(variant.rank)

        def forward(self, z: Tensor) -> Tensor:
            return self.generator(z)

        def training_step(self, batch: Any, index: int) -> None:
            real = batch[0]
            opt_g, opt_d = self.optimizers()
            z = torch.randn(len(real), 4, generator=self.rng).to(real)
            valid, fake = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            bce = F.binary_cross_entropy_with_logits
            self.toggle_optimizer(opt_g)
            loss = bce(self.discriminator(self(z)).float(), valid)
            self.manual_backward(loss)
            opt_g.step()
            opt_g.zero_grad()
            self.untoggle_optimizer(opt_g)
            losses.append(loss.item())
            self.toggle_optimizer(opt_d)
            loss = bce(self.discriminator(real).float(), valid)
            loss = (loss + bce(self.discriminator(self(z).detach()).float(), fake)) / 2
            self.manual_backward(loss)
            opt_d.step()
            opt_d.zero_grad()
            self.untoggle_optimizer(opt_d)
            losses.append(loss.item())

        def configure_optimizers(self) -> Any:
            betas = (0.5, 0.999)
            return (
                torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=betas),
                torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=betas),
            )

    gan = Gan()
    variant.starts(gan.generator)
    strategy = {"strategy": "ddp_find_unused_parameters_true"} if variant.stock else {}
    trainer = lightning_trainer(variant, **strategy)
    trainer.fit(gan, lightning_loader())
    optimizer = masters_of(variant, trainer)
    return variant.report(gan.generator, losses, optimizer, prefix="generator.")
