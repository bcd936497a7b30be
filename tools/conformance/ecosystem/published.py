"""Loops of well-known repositories and papers, each with its peculiarities."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Report, Variant
from loops import STEPS, Nothing, Rope, generator, images, mlp, tokens, trained, vectors
from optimizers import eight_bit
from patterns import Fgm, adamw
from recipes import recipe
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def loop(
    variant: Variant,
    plain: nn.Module,
    model: Any,
    optimizer: Any,
    count: int = STEPS,
    around: Callable[[str, int], Any] = lambda moment, step: None,
) -> Report:
    """Train, calling ``around`` with "before", "graded" and "after" in each step."""
    losses = []
    for step, (x, y) in enumerate(vectors(variant, count)):
        around("before", step)
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        around("graded", step)
        optimizer.step()
        around("after", step)
        losses.append(loss.item())
    return variant.report(plain, losses)


def averaged_by_hand(gradients: Any) -> None:
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


@recipe("nanoGPT's train.py: GradScaler(enabled=False), tied weights, two groups, warm-up", "torch")
def nanogpt_train(variant: Variant) -> Report:
    plain = Rope()
    plain.head.weight = plain.embed.weight
    variant.starts(plain)
    groups = [
        {"params": [p for p in plain.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in plain.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    model, optimizer = variant.shard(plain, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    losses = []
    for number, ids in enumerate(tokens(variant, 12)):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (number + 1) / 4)
        last = number % 3 == 2
        model.require_backward_grad_sync = last
        with variant.autocast():
            logits = model(ids[:, :-1], torch.arange(11.0))
            loss = F.cross_entropy(logits.reshape(-1, 31).float(), ids[:, 1:].reshape(-1)) / 3
        scaler.scale(loss).backward()
        losses.append(loss.item())
        if last:
            scaler.unscale_(optimizer)
            variant.clip(model, optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
    return variant.report(model, losses)


@recipe("StyleGAN2: lazy R1, path length, average of the generator", "torch", ratio=3.0)
def stylegan(variant: Variant) -> Report:
    maker, critic = mlp(4, 24, 6), mlp(6, 24, 1)
    average = copy.deepcopy(maker).requires_grad_(False)
    variant.starts(average)
    of_maker = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.0, 0.99))
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.99))
    make, of_maker = variant.shard(maker, of_maker)
    judge, of_critic = variant.shard(critic, of_critic)
    mean, rng, losses = torch.zeros(()), generator(variant, 3), []
    for number, (x, _) in enumerate(vectors(variant)):
        z = torch.randn(len(x), 4, generator=rng)
        maker.requires_grad_(False)
        critic.requires_grad_(True)
        with variant.autocast():
            loss = F.softplus(judge(make(z).float())).mean() + F.softplus(-judge(x)).mean()
        losses.append(stepped(of_critic, loss))
        if number % 4 == 0:
            x.requires_grad_()
            with variant.autocast():
                out = judge(x).float()
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            stepped(of_critic, 5 * slope.square().sum(1).mean() + 0 * out[0].sum())
        maker.requires_grad_(True)
        critic.requires_grad_(False)
        with variant.autocast():
            loss = F.softplus(-judge(make(z))).mean()
        losses.append(stepped(of_maker, loss))
        if number % 4 == 0:
            z.requires_grad_()
            with variant.autocast():
                image = make(z).float()
            (slope,) = torch.autograd.grad(image.sum() / 3, z, create_graph=True)
            length = slope.square().sum(1).sqrt()
            mean = mean.lerp(length.mean().detach(), 0.01)
            stepped(of_maker, (length - mean).square().mean() + 0 * image.sum())
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), maker.parameters(), strict=True):
                slow.copy_(fast.to(slow.dtype).lerp(slow, 0.9))
    return variant.report(average, losses, optimizer=Nothing())


def stepped(optimizer: Any, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@recipe("CycleGAN: two models in each optimizer, two backwards of the critics, LambdaLR", "torch")
def cyclegan(variant: Variant) -> Report:
    makers, critics = nn.ModuleList([mlp(out=6), mlp(out=6)]), nn.ModuleList([mlp(), mlp()])
    variant.starts(makers)
    betas = (0.5, 0.999)
    of_makers = torch.optim.Adam(
        itertools.chain(makers[0].parameters(), makers[1].parameters()), lr=2e-3, betas=betas
    )
    of_critics = torch.optim.Adam(critics.parameters(), lr=2e-3, betas=betas)
    models = [*makers, *critics]
    if variant.stock:
        models = [DistributedDataParallel(each) for each in models]
    else:
        _, of_makers = variant.shard(makers, of_makers)
        _, of_critics = variant.shard(critics, of_critics)
    to_b, to_a, of_b, of_a = models
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda epoch: 1 - max(0, epoch - 3) / 8)
        for each in (of_makers, of_critics)
    ]
    losses = []
    for a, _ in vectors(variant):
        b = a.cos()
        critics.requires_grad_(False)
        with variant.autocast():
            fake_b, fake_a = to_b(a), to_a(b)
            again_a, again_b = to_a(fake_b).float(), to_b(fake_a).float()
            loss = sum(
                (d(x).float() - 1).square().mean() for d, x in ((of_b, fake_b), (of_a, fake_a))
            )
        loss = loss + 10 * F.l1_loss(again_a, a) + 10 * F.l1_loss(again_b, b)
        losses.append(stepped(of_makers, loss))
        critics.requires_grad_(True)
        of_critics.zero_grad()
        for critic, real, fake in ((of_b, b, fake_b), (of_a, a, fake_a)):
            with variant.autocast():
                scores = critic(real).float(), critic(fake.detach()).float()
            loss = 0.5 * ((scores[0] - 1).square().mean() + scores[1].square().mean())
            loss.backward()
            losses.append(loss.item())
        of_critics.step()
        for schedule in schedules:
            schedule.step()
    return variant.report(makers, losses, optimizer=None if variant.stock else of_makers)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.one(hidden).float(), self.two(hidden).float()


@recipe("two losses of two heads, backward(retain_graph=True, inputs=...)", "torch")
def two_backwards(variant: Variant) -> Report:
    plain = Heads()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), 0.1, 0.9))
    losses = []
    for x, y in vectors(variant):
        optimizer.zero_grad()
        with variant.autocast():
            one, two = model(x)
        pair = F.mse_loss(one, y), F.l1_loss(two, y)
        if variant.stock:  # DDP supports one backward per forward
            (pair[0] + pair[1]).backward()
        else:
            body = [*plain.body.parameters()]
            pair[0].backward(retain_graph=True, inputs=[*body, *plain.one.parameters()])
            pair[1].backward(inputs=[*body, *plain.two.parameters()])
        optimizer.step()
        losses += [each.item() for each in pair]
    return variant.report(model, losses)


class Normalised(nn.Module):
    """Inputs are normalized by running statistics, as in RL."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        for name, value in (("mean", torch.zeros(6)), ("var", torch.ones(6)), ("count", 1e-4)):
            self.register_buffer(name, torch.as_tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                delta, total = x.mean(0) - self.mean, self.count + len(x)
                var = self.var * self.count + x.var(0, unbiased=False) * len(x)
                self.var.data.copy_((var + delta.square() * self.count * len(x) / total) / total)
                self.mean.data.copy_(self.mean + delta * len(x) / total)
                self.count.data = total
        return self.net((x - self.mean) / (self.var + 1e-8).sqrt())


@recipe("running mean and variance in buffers, written through .data", "torch", ratio=3.0)
def running_statistics(variant: Variant) -> Report:
    model = Normalised()
    return trained(variant, model, torch.optim.SGD(model.parameters(), lr=0.05))


class Following(nn.Module):
    """A net and its average, which is inside the model."""

    def __init__(self, build: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.net = mlp()
        self.ema = build(copy.deepcopy(self.net).requires_grad_(False))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    @torch.no_grad()
    def update(self) -> None:
        for slow, fast in zip(self.ema.parameters(), self.net.parameters(), strict=True):
            slow.mul_(0.999).add_(fast, alpha=0.001)


@recipe(
    "an average inside the model that no optimizer holds",
    "torch",
    ratio=3.0,
    remark="compares the averages",
)
def hidden_average(variant: Variant) -> Report:
    plain = Following(lambda net: nn.ModuleList([net]))
    variant.starts(plain.ema)
    optimizer = torch.optim.AdamW(plain.net.parameters(), lr=1e-2)
    model, optimizer = variant.shard(plain, optimizer)
    report = loop(
        variant,
        plain,
        model,
        optimizer,
        2 * STEPS,
        lambda moment, step: plain.update() if moment == "after" else None,
    )
    return variant.report(plain.ema, report.losses, optimizer=Nothing())


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = mlp(out=8), nn.Linear(8, 1)
        self.centers = nn.Parameter(0.1 * torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        features = self.net(x)
        distance = features.float() - self.centers[torch.arange(len(x)) % 4].float()
        return self.head(features) + distance.square().mean()


@recipe(
    "center loss with its own optimizer, which is not sharded",
    "torch",
    warned="average the gradients",
)
def own_optimizer(variant: Variant) -> Report:
    plain = Centred()
    variant.starts(plain)
    of_centers = torch.optim.SGD([plain.centers], lr=0.5)
    rest = [p for p in plain.parameters() if p is not plain.centers]
    model, optimizer = variant.shard(plain, torch.optim.AdamW(rest, lr=1e-2))
    actions = {"before": of_centers.zero_grad, "after": of_centers.step}
    return loop(
        variant,
        plain,
        model,
        optimizer,
        around=lambda moment, step: actions.get(moment, lambda: None)(),
    )


@recipe("DDP left around a part of the model", "torch", error=ValueError, match="in '0'")
def ddp_inside(variant: Variant) -> Report:
    plain = nn.Sequential(mlp(out=8), nn.Linear(8, 1))
    if not variant.stock:
        plain[0] = DistributedDataParallel(plain[0])
    return trained(variant, plain, adamw(plain))


@recipe(
    "SAM around the optimizer, .grad read without a gather",
    "torch",
    error=RuntimeError,
    match="gather_gradients",
)
def raw_sam(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), 0.1, 0.9))
    losses = []
    for x, y in vectors(variant):
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        kept = [p.data.clone() for p in plain.parameters()]
        norm = torch.stack([p.grad.float().norm() for p in plain.parameters()]).norm()
        with torch.no_grad():
            for p in plain.parameters():
                p.add_(p.grad, alpha=float(0.1 / norm))
        optimizer.zero_grad()
        with variant.autocast():
            F.mse_loss(model(x).float(), y).backward()
        for p, value in zip(plain.parameters(), kept, strict=True):
            p.data = value
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("FGM as in notebooks, through .data", "torch", error=RuntimeError, match="gather_gradients")
def raw_fgm(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))
    adversary, losses = Fgm(plain), []
    for x, y in vectors(variant):
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        adversary.attack()
        with variant.autocast():
            F.mse_loss(model(x).float(), y).backward()
        adversary.restore()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("EWC: Fisher information from .grad", "torch", error=RuntimeError, match="gather_gradients")
def ewc(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    fisher = [torch.zeros(p.shape) for p in plain.parameters()]
    for x, y in vectors(variant, 4):
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        for total, p in zip(fisher, plain.parameters(), strict=True):
            total += p.grad.data.float() ** 2
    optimizer.zero_grad()
    star = [p.detach().float().clone() for p in plain.parameters()]
    losses = []
    for x, y in vectors(variant):
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        for total, old, p in zip(fisher, star, plain.parameters(), strict=True):
            loss = loss + (total * (p.float() - old).square()).sum()
        losses.append(stepped(optimizer, loss))
    return variant.report(model, losses)


@recipe(
    "best weights copied back through .data, late in a run",
    "torch",
    ratio=15.0,
    remark="the copy is in bf16",
)
def late_rollback(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.02))
    best: list[Tensor] = []

    def around(moment: str, step: int) -> None:
        if (moment, step) == ("after", 10):
            best.extend(p.data.clone() for p in plain.parameters())
        if (moment, step) == ("after", 20):
            for p, value in zip(plain.parameters(), best, strict=True):
                p.data.copy_(value)

    return loop(variant, plain, model, optimizer, 24, around)


@recipe("SimCLR: embeddings gathered with their gradients", "torch")
def simclr(variant: Variant) -> Report:
    from torch.distributed.nn.functional import all_gather

    plain = mlp(out=8)
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))
    losses = []
    for x, _ in vectors(variant, batch=8):
        with variant.autocast():
            views = model(x), model(x + 0.1)
        one, two = (F.normalize(view.float(), dim=1) for view in views)
        labels = torch.arange(8) + 8 * variant.rank
        logits = one @ torch.cat(all_gather(two)).T / 0.2, two @ torch.cat(all_gather(one)).T / 0.2
        losses.append(stepped(optimizer, sum(F.cross_entropy(each, labels) for each in logits)))
    return variant.report(model, losses)


@recipe("progressive growing: a layer appended, its group added", "torch")
def growing(variant: Variant) -> Report:
    plain = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = adamw(plain)
    model, optimizer = variant.shard(plain, optimizer)
    variant.starts(plain)
    losses = []
    for number, (x, y) in enumerate(vectors(variant)):
        if number == 4:
            plain.append(nn.Linear(1, 1))
            optimizer.add_param_group({"params": plain[3].parameters(), "lr": 5e-3})
            if variant.stock:
                model = DistributedDataParallel(plain)
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        losses.append(stepped(optimizer, loss))
    return variant.report(plain, losses)


@recipe("forward and loss in one torch.compile, after shard()", "torch")
def compiled_loss(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))

    @torch.compile(backend="aot_eager")
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with variant.autocast():
            return F.mse_loss(model(x).float(), y)

    losses = [stepped(optimizer, loss_of(x, y)) for x, y in vectors(variant)]
    return variant.report(plain, losses)


@recipe("DP-SGD: gradients of each sample by vmap, clipped, p.grad = their mean", "torch")
def per_sample(variant: Variant) -> Report:
    from torch.func import functional_call, grad, vmap

    plain = mlp()
    variant.starts(plain)
    _, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.1))

    def loss_of(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        with variant.autocast():
            return F.mse_loss(functional_call(plain, params, (x[None],)).float(), y[None])

    losses = []
    for x, y in vectors(variant):
        params = {name: p.detach() for name, p in plain.named_parameters()}
        grads = vmap(grad(loss_of), in_dims=(None, 0, 0))(params, x, y)
        norms = torch.stack([g.float().flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factors = (0.5 / norms).clamp(max=1) / len(x)
        for name, p in plain.named_parameters():
            mean = torch.einsum("b...,b->...", grads[name].float(), factors)
            averaged_by_hand([mean])
            p.grad = mean.to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(norms.mean().item())
    return variant.report(plain, losses)


@recipe("MAML by functional_call, second order", "torch", ratio=3.0)
def maml(variant: Variant) -> Report:
    from torch.func import functional_call

    plain = mlp()
    variant.starts(plain)
    _, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    losses = []
    for x, y in vectors(variant, batch=8):
        optimizer.zero_grad()
        params = dict(plain.named_parameters())
        with variant.autocast():
            loss = F.mse_loss(functional_call(plain, params, (x[:4],)).float(), y[:4])
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        fast = {n: p - 0.05 * g for (n, p), g in zip(params.items(), grads, strict=True)}
        with variant.autocast():
            loss = F.mse_loss(functional_call(plain, fast, (x[4:],)).float(), y[4:])
        loss.backward()
        if variant.stock:  # the loop never calls DDP's forward
            averaged_by_hand(p.grad for p in plain.parameters())
        optimizer.step()
        losses.append(loss.item())
    return variant.report(plain, losses)


@recipe("MAML by higher", "higher", error=RuntimeError, match="functional_call")
def maml_by_higher(variant: Variant) -> Report:
    import higher

    plain = mlp()
    variant.starts(plain)
    _, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    losses = []
    for x, y in vectors(variant, batch=8):
        optimizer.zero_grad()
        inner = torch.optim.SGD(plain.parameters(), lr=0.05)
        with higher.innerloop_ctx(plain, inner, copy_initial_weights=False) as (fast, steps):
            with variant.autocast():
                loss = F.mse_loss(fast(x[:4]).float(), y[:4])
            steps.step(loss)
            with variant.autocast():
                loss = F.mse_loss(fast(x[4:]).float(), y[4:])
            loss.backward()
        if variant.stock:
            averaged_by_hand(p.grad for p in plain.parameters())
        optimizer.step()
        losses.append(loss.item())
    return variant.report(plain, losses)


class Binary(nn.Linear):
    """itayhubara/BinaryNet.pytorch: the forward uses signs; the weights are saved elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self.weight, "org"):
            self.weight.org = self.weight.data.clone()
        self.weight.data = self.weight.org.sign()
        return F.linear(x, self.weight, self.bias)


@recipe("BinaryNet: p.data = sign(p.org) in forward, p.org back before the step", "torch")
def binary(variant: Variant) -> Report:
    plain = nn.Sequential(
        nn.Linear(6, 24), nn.Hardtanh(), Binary(24, 24), nn.Hardtanh(), nn.Linear(24, 1)
    )
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.05))

    def around(moment: str, step: int) -> None:
        p = plain[2].weight
        if moment == "graded":
            p.data.copy_(p.org)
        if moment == "after":
            p.org.copy_(p.data.clamp_(-1, 1))

    return loop(variant, plain, model, optimizer, around=around)


class LowRank(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, out).requires_grad_(False)
        self.down, self.up = (
            nn.Parameter(0.1 * torch.randn(4, width)),
            nn.Parameter(torch.zeros(out, 4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


@recipe("ReLoRA: merged into the base, restarted with a fresh state", "torch", ratio=3.0)
def relora(variant: Variant) -> Report:
    plain = nn.Sequential(LowRank(6, 24), nn.GELU(), LowRank(24, 1))
    variant.starts(plain)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = variant.shard(plain, optimizer)

    @torch.no_grad()
    def around(moment: str, step: int) -> None:
        if (moment, step % 4) != ("after", 3):
            return
        torch.manual_seed(step)
        for layer in (plain[0], plain[2]):
            merged = layer.up.float() @ layer.down.float()  # a vector stays fp32, a matrix does not
            layer.base.weight.add_(merged.to(layer.base.weight.dtype))
            layer.down.copy_(0.1 * torch.randn(layer.down.shape))
            layer.up.zero_()
        if variant.stock:
            for state in optimizer.state.values():
                for key in {"exp_avg", "exp_avg_sq"} & state.keys():
                    state[key].zero_()
            return
        with optimizer.owned() as parts:
            for part in parts:
                for moment in part.state.values():
                    moment.zero_()

    return loop(variant, plain, model, optimizer, 2 * STEPS, around)


@recipe("SAC: two critics in one optimizer, targets, a learned temperature", "torch")
def sac(variant: Variant) -> Report:
    actor, critics = mlp(out=4), nn.ModuleList([mlp(8), mlp(8)])
    targets = copy.deepcopy(critics).requires_grad_(False)
    log_alpha = torch.zeros(1, requires_grad=True)
    variant.starts(actor)
    of_alpha = torch.optim.Adam([log_alpha], lr=1e-2)
    of_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
    of_critics = torch.optim.Adam(critics.parameters(), lr=1e-3)
    act: Any = actor
    judges: Any = critics
    if variant.stock:
        act, judges = DistributedDataParallel(actor), [DistributedDataParallel(c) for c in critics]
    else:
        _, of_actor = variant.shard(actor, of_actor)
        _, of_critics = variant.shard(critics, of_critics)
    rng, losses = generator(variant, 6), []

    def sample(x: Tensor, model: Any) -> tuple[Tensor, Tensor]:
        with variant.autocast():
            mean, spread = model(x).float().chunk(2, 1)
        normal = torch.distributions.Normal(mean, spread.clamp(-5, 2).exp())
        action = mean + torch.randn(mean.shape, generator=rng) * normal.scale
        return action.tanh(), normal.log_prob(action).sum(1, keepdim=True)

    def values(models: Any, x: Tensor, action: Tensor) -> list[Tensor]:
        with variant.autocast():
            return [each(torch.cat([x, action], 1)).float() for each in models]

    for x, y in vectors(variant, batch=8):
        with torch.no_grad():
            action, log_prob = sample(x + 0.1, actor)
            best = torch.min(*values(targets.float(), x + 0.1, action))
            wanted = y + 0.9 * (best - log_alpha.exp() * log_prob)
        taken = torch.randn(8, 2, generator=rng).tanh()
        loss = sum(F.mse_loss(value, wanted) for value in values(judges, x, taken))
        losses.append(stepped(of_critics, loss))
        critics.requires_grad_(False)
        action, log_prob = sample(x, act)
        gain = torch.min(*values(critics, x, action)) - log_alpha.exp().detach() * log_prob
        losses.append(stepped(of_actor, -gain.mean()))
        critics.requires_grad_(True)
        of_alpha.zero_grad()
        (log_alpha * (2 - log_prob.detach().mean())).sum().backward()
        averaged_by_hand([log_alpha.grad])
        of_alpha.step()
        with torch.no_grad():
            for slow, fast in zip(targets.parameters(), critics.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
    return variant.report(actor, losses, optimizer=None if variant.stock else of_actor)


@recipe(
    "ReduceLROnPlateau given this rank's loss", "torch", error=RuntimeError, match="lr of group"
)
def plateau(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    losses = []
    for x, y in vectors(variant):
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        losses.append(stepped(optimizer, loss))
        schedule.step(losses[-1])
    return variant.report(model, losses)


class Fourier(nn.Module):
    """A spectral convolution of FNO."""

    def __init__(self, is_complex: bool) -> None:
        super().__init__()
        weight = 0.1 * torch.randn(8, 8, 3, dtype=torch.cfloat)
        self.lift, self.out = nn.Linear(1, 8), nn.Linear(8, 1)
        self.weight = nn.Parameter(weight if is_complex else torch.view_as_real(weight))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        modes = torch.fft.rfft(self.lift(x[..., None]).transpose(1, 2).float())
        low = torch.einsum("bix,iox->box", modes[:, :, :3], weight)
        back = torch.fft.irfft(F.pad(low, (0, 1)), n=6)
        return self.out(back.transpose(1, 2)).mean(1)


@recipe("FNO: complex weights", "torch", error=TypeError, match="complex")
def fourier(variant: Variant) -> Report:
    model = Fourier(True)
    return trained(variant, model, adamw(model))


@recipe("FNO: a real view of them", "torch")
def fourier_real(variant: Variant) -> Report:
    model = Fourier(False)
    return trained(variant, model, torch.optim.SGD(model.parameters(), lr=0.05))


@recipe("EMA made before shard(), coerce_dtype=True", "ema-pytorch", remark="compares the averages")
def ema_pytorch(variant: Variant) -> Report:
    from ema_pytorch import EMA

    plain = mlp()
    ema = EMA(plain, beta=0.9, update_after_step=2, update_every=2, coerce_dtype=True)
    variant.starts(ema.ema_model)
    model, optimizer = variant.shard(plain, adamw(plain))
    report = loop(
        variant,
        plain,
        model,
        optimizer,
        2 * STEPS,
        lambda moment, step: ema.update() if moment == "after" else None,
    )
    return variant.report(ema.ema_model, report.losses, optimizer=Nothing())


@recipe("update and average_parameters() for evaluation", "torch-ema")
def torch_ema(variant: Variant) -> Report:
    from torch_ema import ExponentialMovingAverage

    plain = mlp()
    ema = ExponentialMovingAverage(plain.parameters(), decay=0.9)
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))

    def around(moment: str, step: int) -> None:
        if moment == "after":
            ema.update()
            with ema.average_parameters(), torch.no_grad(), variant.autocast():
                plain(torch.ones(2, 6))

    return loop(variant, plain, model, optimizer, 20, around)


@recipe("create_supervised_trainer, accumulation, PiecewiseLinear", "pytorch-ignite")
def ignite(variant: Variant) -> Report:
    from ignite.engine import Events, create_supervised_trainer
    from ignite.handlers import PiecewiseLinear

    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))

    def called(module: Any, x: Tensor) -> Tensor:
        with variant.autocast():
            return module(x).float()

    trainer = create_supervised_trainer(
        model, optimizer, F.mse_loss, gradient_accumulation_steps=2, model_fn=called
    )
    rates = PiecewiseLinear(optimizer, "lr", [(0, 1e-3), (4, 1e-2), (12, 1e-3)])
    trainer.add_event_handler(Events.ITERATION_STARTED, rates)
    losses: list[float] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output)
    )
    trainer.run(list(vectors(variant, 12)), max_epochs=1)
    return variant.report(plain, losses)


@recipe("VectorQuantize with an averaged codebook", "vector-quantize-pytorch")
def vector_quantize(variant: Variant) -> Report:
    from vector_quantize_pytorch import VectorQuantize

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = mlp(out=8), mlp(8, out=6)
            self.codes = VectorQuantize(8, 16, decay=0.9, sync_codebook=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            code, _, commitment = self.codes(self.encode(x)[:, None].float())
            return self.decode(code[:, 0]), commitment

    plain = Coder()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, adamw(plain))
    losses = []
    for x, _ in vectors(variant, batch=8):
        with variant.autocast():
            out, commitment = model(x)
        losses.append(stepped(optimizer, F.mse_loss(out.float(), x) + commitment.float().sum()))
    return variant.report(model, losses)


@recipe("GCN, GAT, SAGE and BatchNorm over a Data object", "torch-geometric")
def geometric(variant: Variant) -> Report:
    from torch_geometric.data import Data
    from torch_geometric.nn import BatchNorm, GATConv, GCNConv, SAGEConv, global_mean_pool

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm, self.two = GCNConv(6, 16), BatchNorm(16), GATConv(16, 8, heads=2)
            self.three, self.out = SAGEConv(16, 8), nn.Linear(8, 1)

        def forward(self, data: Any) -> Tensor:
            x = self.norm(self.one(data.x, data.edge_index)).relu()
            x = self.three(self.two(x, data.edge_index).relu(), data.edge_index)
            return self.out(global_mean_pool(x, data.batch))

    plain = Graph()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    rng, losses = generator(variant, 4), []
    for x, y in vectors(variant, batch=8):
        edges = torch.randint(0, 8, (2, 20), generator=rng)
        with variant.autocast():
            out = model(Data(x=x, edge_index=edges, batch=torch.arange(8) // 4))
        losses.append(stepped(optimizer, F.mse_loss(out.float(), y[:2])))
    return variant.report(model, losses)


@recipe("CLIP with ClipLoss(local_loss, gather_with_grad)", "open-clip-torch", fp32=1e-5)
def open_clip(variant: Variant) -> Report:
    from open_clip.loss import ClipLoss
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=1, width=32, head_width=16, patch_size=4, image_size=8)
    text = CLIPTextCfg(context_length=8, vocab_size=31, width=32, heads=2, layers=1)
    plain = CLIP(16, vision, text)
    variant.starts(plain)
    groups = [
        {"params": [p for p in plain.parameters() if p.dim() < 2], "weight_decay": 0.0},
        {"params": [p for p in plain.parameters() if p.dim() >= 2], "weight_decay": 0.2},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    model, optimizer = variant.shard(plain, optimizer)
    loss_of = ClipLoss(local_loss=True, gather_with_grad=True, rank=variant.rank, world_size=2)
    rng, losses = generator(variant, 5), []
    for x, _ in images(variant):
        optimizer.zero_grad()
        with variant.autocast():
            loss = loss_of(*model(x, torch.randint(1, 31, (4, 8), generator=rng)))
        loss.backward()
        variant.clip(model, optimizer, 1.0)
        optimizer.step()
        with torch.no_grad():
            plain.logit_scale.clamp_(0, math.log(100))
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("DPOptimizer around SGD", "opacus", error=TypeError, match="DPOptimizer")
def opacus(variant: Variant) -> Report:
    from opacus.optimizers import DPOptimizer

    plain = mlp()
    optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.1)
    if not variant.stock:
        optimizer = DPOptimizer(
            optimizer, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=4
        )
    return trained(variant, plain, optimizer)


@recipe("CAME", "came-pytorch")
def came(variant: Variant) -> Report:
    from came_pytorch import CAME

    model = mlp()
    optimizer = CAME(model.parameters(), lr=1e-3, betas=(0.9, 0.999, 0.9999))
    return trained(variant, model, optimizer)


@recipe("GaLoreAdamW, rank 4", "galore-torch")
def galore(variant: Variant) -> Report:
    from galore_torch import GaLoreAdamW

    model = mlp(inside=32)
    low_rank = {"params": [model[2].weight], "rank": 4, "update_proj_gap": 3, "scale": 1.0}
    rest = [p for p in model.parameters() if p is not model[2].weight]
    optimizer = GaLoreAdamW([{"params": rest}, {**low_rank, "proj_type": "std"}], lr=1e-2)
    return trained(variant, model, optimizer)


@recipe("AdamW", "torch-optimi")
def optimi(variant: Variant) -> Report:
    from optimi import AdamW

    model = mlp()
    return trained(variant, model, AdamW(model.parameters(), lr=1e-2))


@recipe("SOAP", "heavyball", ratio=3.0)
def heavyball(variant: Variant) -> Report:
    import heavyball as library

    library.utils.compile_mode = None
    model = mlp(inside=32)
    return trained(variant, model, library.SOAP(model.parameters(), lr=1e-2))


@recipe("AdamW8bit, saved and resumed", "bitsandbytes")
def bitsandbytes(variant: Variant) -> Report:
    from bitsandbytes.optim import AdamW8bit

    return eight_bit(variant, lambda model: AdamW8bit(model.parameters(), lr=1e-3))
