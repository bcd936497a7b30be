"""Mistakes in scripts that were ported from DDP: they raise, warn or do no harm."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Report, Variant
from loops import Nothing, mlp, trained, vectors
from patterns import adamw
from recipes import recipe
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def reduced_by_hand(model: Any, step: int) -> None:
    """CleanRL: one flat all-reduce of all gradients after backward."""
    flat = torch.cat([parameter.grad.view(-1) for parameter in model.parameters()])
    dist.all_reduce(flat)
    at = 0
    for parameter in model.parameters():
        part = flat[at : at + parameter.numel()].view_as(parameter) / dist.get_world_size()
        parameter.grad.data.copy_(part)
        at += parameter.numel()


@recipe(
    "CleanRL: gradients all-reduced by hand, p.grad.data.copy_",
    "torch",
    error=RuntimeError,
    match="gather_gradients",
)
def all_reduced(variant: Variant) -> Report:
    model = mlp()
    return trained(
        variant, model, torch.optim.SGD(model.parameters(), lr=0.1), graded=reduced_by_hand
    )


@recipe(
    "StyleGAN2-ADA: p.grad = part of a flat all-reduce",
    "torch",
    error=RuntimeError,
    match="gather_gradients",
)
def all_reduced_replaced(variant: Variant) -> Report:
    def graded(model: Any, step: int) -> None:
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        dist.all_reduce(flat)
        flat = torch.nan_to_num(flat / dist.get_world_size(), nan=0, posinf=1e5, neginf=-1e5)
        parts = flat.split([parameter.numel() for parameter in model.parameters()])
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad = part.reshape(parameter.shape)

    model = mlp()
    return trained(variant, model, torch.optim.SGD(model.parameters(), lr=0.1), graded=graded)


@recipe(
    "DDP left around the model that is sharded",
    "torch",
    error=ValueError,
    match="in DistributedDataParallel",
)
def ddp_left(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    if variant.stock:
        return trained(variant, plain, adamw(plain))
    model, optimizer = variant.shard(DistributedDataParallel(plain), adamw(plain))
    return loop(variant, model, optimizer, plain)


@recipe(
    "DDP built after shard()",
    "torch",
    error=RuntimeError,
    match="wrapped in DistributedDataParallel",
)
def ddp_after(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    if variant.stock:
        return trained(variant, plain, adamw(plain))
    model, optimizer = variant.shard(plain, adamw(plain))
    return loop(variant, DistributedDataParallel(model), optimizer, plain)


def loop(variant: Variant, model: Any, optimizer: Any, plain: nn.Module) -> Report:
    losses = []
    for x, y in vectors(variant):
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(plain, losses)


@recipe("nn.DataParallel", "torch", error=TypeError, match="nn.DataParallel")
def data_parallel(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(nn.DataParallel(plain), adamw(plain))
    return loop(variant, model, optimizer, plain)


@recipe("autocast left around the forward", "torch")
def autocast_left(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))
    losses = []
    for x, y in vectors(variant):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=variant.low):
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("nanoGPT: model.require_backward_grad_sync = ...", "torch")
def nanogpt(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))
    losses = []
    for number, (x, y) in enumerate(vectors(variant, 12)):
        last = number % 3 == 2
        model.require_backward_grad_sync = last
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y) / 3
        loss.backward()
        losses.append(loss.item())
        if last:
            variant.clip(model, optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return variant.report(model, losses)


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(16, 1)
        self.log_std = nn.Parameter(torch.zeros(3))

    def value(self, x: Tensor) -> Tensor:
        return self.critic(self.body(x).tanh())

    def forward(self, x: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        normal = torch.distributions.Normal(self.actor(hidden).float(), self.log_std.float().exp())
        return normal.log_prob(action).sum(1), self.critic(hidden).float()


@recipe("PPO: methods beside forward, bare parameters, several epochs", "torch")
def ppo(variant: Variant) -> Report:
    plain = Agent()
    variant.starts(plain)
    optimizer = torch.optim.Adam(plain.parameters(), lr=3e-3, eps=1e-5)
    model, optimizer = variant.shard(plain, optimizer)
    losses = []
    for x, y in vectors(variant, 4, batch=8):
        action = x[:, :3]
        with torch.no_grad(), variant.autocast():
            old, _ = model(x, action)
            baseline = plain.value(x).float()  # bypasses DDP, like model.module.value
        for _ in range(3):
            with variant.autocast():
                new, value = model(x, action)
            ratio = (new - old).exp()
            gain = (y - baseline)[:, 0]
            loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            loss = loss + 0.5 * F.mse_loss(value, y)
            optimizer.zero_grad()
            loss.backward()
            variant.clip(model, optimizer, 0.5)
            optimizer.step()
            losses.append(loss.item())
    return variant.report(model, losses)


@recipe("evaluation and saving on rank 0 alone", "torch")
def rank_zero(variant: Variant) -> Report:
    plain = nn.Sequential(mlp(out=8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    losses = []
    for x, y in vectors(variant):
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if variant.rank == 0:
            plain.eval()
            with torch.no_grad(), variant.autocast():
                plain(x)
            torch.save(plain.state_dict(), f"{variant.folder}.pt")
            plain.train()
    return variant.report(model, losses)


@recipe(
    "AveragedModel after shard()", "torch", error=RuntimeError, match="expected dtype float for"
)
def averaged_after(variant: Variant) -> Report:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    plain = mlp()
    model, optimizer = variant.shard(plain, adamw(plain))
    ema = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    variant.starts(ema.module)
    losses = []
    for x, y in vectors(variant):
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        ema.update_parameters(plain)
        losses.append(loss.item())
    return variant.report(ema.module, losses, optimizer=Nothing())


class Cast(nn.Module):
    """Its inputs get the dtype of its weights, so it trains in any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.to(next(self.parameters()).dtype))  # type: ignore[no-any-return]


@recipe("an fp64 model", "torch", error=TypeError, match="float64")
def double(variant: Variant) -> Report:
    model = Cast().double()
    return trained(variant, model, adamw(model))


@recipe("model.half() after shard()", "torch", error=RuntimeError, match="moved out of its pack")
def half_after(variant: Variant) -> Report:
    def convert(model: Any, optimizer: Any, step: int) -> None:
        if step == 2:
            model.half()

    model = Cast()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)  # AdamW's fp32 moments would not fit
    return trained(variant, model, sgd, before=convert)


@recipe("LBFGS", "torch", error=TypeError, match="LBFGS")
def lbfgs(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.LBFGS(plain.parameters()))
    losses = []
    for x, y in vectors(variant):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x).float(), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return variant.report(plain, losses)


@recipe("amsgrad, maximize, tensor learning rate", "torch")
def options(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    rate = torch.tensor(1e-2)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=rate, amsgrad=True, maximize=True)
    model, optimizer = variant.shard(plain, optimizer)
    losses = []
    for x, y in vectors(variant):
        for group in optimizer.param_groups:
            group["lr"].mul_(0.9)
        optimizer.zero_grad()
        with variant.autocast():
            loss = -F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("LocalSGD of Accelerate", "accelerate", error=AttributeError, match="no_sync")
def local_sgd(variant: Variant) -> Report:
    from accelerate.local_sgd import LocalSGD

    accelerator = variant.accelerator()
    plain = mlp()
    variant.starts(plain)
    model, optimizer = accelerator.prepare(plain, adamw(plain))
    losses = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True) as local:
        for x, y in vectors(variant):
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = F.mse_loss(model(x).float(), y)
            accelerator.backward(loss)
            optimizer.step()
            local.step()
            losses.append(loss.item())
    return variant.report(plain, losses, optimizer=None if variant.stock else optimizer)
