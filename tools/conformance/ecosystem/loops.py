"""Hand-written loops of plain torch, as users write them for DDP."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from harness import Report, Variant
from recipes import recipe
from torch import Tensor, nn

STEPS = 8


def generator(variant: Variant, seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(100 * seed + variant.rank)


def images(variant: Variant, count: int = STEPS, size: int = 8, batch: int = 4) -> Iterator[Any]:
    rng = generator(variant)
    for _ in range(count):
        x = torch.randn(batch, 3, size, size, generator=rng)
        yield x, torch.randint(0, 4, (batch,), generator=rng)


def vectors(variant: Variant, count: int = STEPS, width: int = 6, batch: int = 4) -> Iterator[Any]:
    rng = generator(variant)
    for _ in range(count):
        x = torch.randn(batch, width, generator=rng)
        yield x, x.sin().sum(1, keepdim=True)


def tokens(variant: Variant, count: int = STEPS, length: int = 12, batch: int = 2) -> Iterator[Any]:
    rng = generator(variant)
    for _ in range(count):
        yield torch.randint(0, 31, (batch, length), generator=rng)


def mlp(width: int = 6, inside: int = 24, out: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, inside),
        nn.GELU(),
        nn.Linear(inside, inside),
        nn.GELU(),
        nn.Linear(inside, out),
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def trained(variant: Variant, plain: nn.Module, optimizer: Any, **options: Any) -> Report:
    """The loop of PyTorch's DDP tutorial, on vectors."""
    clip = options.pop("clip", None)
    before = options.pop("before", lambda model, optimizer, step: None)
    graded = options.pop("graded", lambda model, step: None)
    after = options.pop("after", lambda model: None)
    variant.starts(plain)
    model, optimizer = variant.shard(plain, optimizer, **options)
    losses = []
    for step, (x, y) in enumerate(vectors(variant)):
        before(plain, optimizer, step)
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        graded(plain, step)
        if clip:
            variant.clip(model, optimizer, clip)
        optimizer.step()
        after(plain)
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("MLP, AdamW, clip by norm", "torch")
def tutorial(variant: Variant) -> Report:
    model = mlp()
    return trained(variant, model, torch.optim.AdamW(model.parameters(), lr=1e-2), clip=0.5)


@recipe("BatchNorm CNN, SGD momentum, OneCycleLR", "torch")
def batch_norm(variant: Variant) -> Report:
    plain = cnn()
    variant.starts(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    model, optimizer = variant.shard(plain, optimizer)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)
    losses = []
    for x, y in images(variant):
        optimizer.zero_grad(set_to_none=True)
        with variant.autocast():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("BatchNorm CNN, channels_last", "torch")
def channels_last(variant: Variant) -> Report:
    plain = cnn().to(memory_format=torch.channels_last)
    variant.starts(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model, optimizer = variant.shard(plain, optimizer)
    losses = []
    for x, y in images(variant):
        with variant.autocast():
            loss = F.cross_entropy(model(x.to(memory_format=torch.channels_last)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("gradient accumulation with no_sync", "torch")
def accumulation(variant: Variant) -> Report:
    import contextlib

    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    losses = []
    for number, (x, y) in enumerate(vectors(variant, 12)):
        last = number % 3 == 2
        with contextlib.nullcontext() if last else variant.no_sync(model, optimizer):
            with variant.autocast():
                loss = F.mse_loss(model(x), y) / 3
            loss.backward()
        losses.append(loss.item())
        if last:
            variant.clip(model, optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return variant.report(model, losses)


@recipe("gradient accumulation without no_sync", "torch")
def accumulation_synchronised(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    losses = []
    for number, (x, y) in enumerate(vectors(variant, 12)):
        with variant.autocast():
            loss = F.mse_loss(model(x), y) / 3
        loss.backward()
        losses.append(loss.item())
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return variant.report(model, losses)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.backends.mkldnn.enabled = False  # it has no LSTM in bf16 without AVX-512
        self.embed = nn.Embedding(31, 16)
        self.rnn = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 31)

    def forward(self, ids: Tensor, state: Any = None) -> Any:
        hidden, state = self.rnn(self.embed(ids), state)
        return self.head(hidden), state


@recipe("LSTM language model, clip by norm", "torch")
def lstm(variant: Variant) -> Report:
    plain = Lstm()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    losses = []
    for ids in tokens(variant):
        optimizer.zero_grad()
        with variant.autocast():
            logits, _ = model(ids[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, 31), ids[:, 1:].reshape(-1))
        loss.backward()
        variant.clip(model, optimizer, 0.25)
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("truncated BPTT with a detached state", "torch")
def truncated(variant: Variant) -> Report:
    plain = Lstm()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    state, losses = None, []
    for ids in tokens(variant):
        optimizer.zero_grad()
        state = tuple(x.detach() for x in state) if state is not None else None
        with variant.autocast():
            logits, state = model(ids[:, :-1], state)
            loss = F.cross_entropy(logits.reshape(-1, 31).float(), ids[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


class Rope(nn.Module):
    """One block with rotary embeddings, computed in fp32 from int64 positions."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(31, width)
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 31, bias=False)
        inverse = 1.0 / 10000 ** (torch.arange(0, width // heads, 2).float() / (width // heads))
        self.register_buffer("inverse", inverse, persistent=False)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions.float()[:, None] * self.inverse.float()
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(ids)
        split = (*ids.shape, self.heads, -1)
        q, k, v = (y.view(split).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


@recipe("RoPE block, float positions as an input of forward", "torch")
def rope(variant: Variant) -> Report:
    plain = Rope()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    losses = []
    for ids in tokens(variant, length=16):
        positions = torch.arange(300.0, 315.0) * 1.01
        with variant.autocast():
            logits = model(ids[:, :-1], positions)
            loss = F.cross_entropy(logits.reshape(-1, 31), ids[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("WGAN: weights clamped through .data after the step", "torch")
def wgan_clamp(variant: Variant) -> Report:
    def clamp(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.05, 0.05)

    model = mlp()
    return trained(variant, model, torch.optim.RMSprop(model.parameters(), lr=1e-2), after=clamp)


@recipe("weights clamped under no_grad", "torch")
def clamp_no_grad(variant: Variant) -> Report:
    @torch.no_grad()
    def clamp(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.05, 0.05)

    model = mlp()
    return trained(variant, model, torch.optim.AdamW(model.parameters(), lr=1e-2), after=clamp)


@recipe("rows normalized after each step (nGPT, EDM2)", "torch")
def normalized(variant: Variant) -> Report:
    @torch.no_grad()
    def normalize(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(F.normalize(parameter.float(), dim=1))

    model = mlp()
    return trained(variant, model, torch.optim.Adam(model.parameters(), lr=1e-2), after=normalize)


@recipe("model.apply(init) after shard()", "torch")
def initialized(variant: Variant) -> Report:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            nn.init.zeros_(module.bias)

    plain = mlp()
    model, optimizer = variant.shard(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    torch.manual_seed(7)
    if variant.name == "bf16":  # orthogonal_ needs fp32: the fix after the error
        fresh = mlp()
        torch.manual_seed(7)
        fresh.apply(init)
        with torch.no_grad():
            for parameter, value in zip(plain.parameters(), fresh.parameters(), strict=True):
                parameter.copy_(value)
    else:
        plain.apply(init)
    variant.starts(plain)
    losses = []
    for x, y in vectors(variant):
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return variant.report(model, losses)


def two_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decay, "weight_decay": 0.1, **options}, {"params": plain, "lr": 5e-3}]


@recipe("groups by layer, learning rates and decay set by the script", "torch")
def layerwise(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    layers = [layer for layer in plain if isinstance(layer, nn.Linear)]
    groups = [
        {"params": list(layer.parameters()), "lr": 1e-2 * 0.7 ** (2 - depth), "base": depth}
        for depth, layer in enumerate(layers)
    ]
    model, optimizer = variant.shard(plain, torch.optim.AdamW(groups, weight_decay=0.05))
    losses = []
    for number, (x, y) in enumerate(vectors(variant)):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.7 ** (2 - group["base"]) * (1 + math.cos(number / 4)) / 2
            group["weight_decay"] = 0.1 if number > 3 else 0.05
        optimizer.param_groups[0]["betas"] = (0.8, 0.99)
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("frozen, unfrozen with add_param_group", "torch")
def unfreezing(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    for layer in list(plain)[:2]:
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = variant.shard(plain, optimizer, ddp={"find_unused_parameters": True})
    losses = []
    for number, (x, y) in enumerate(vectors(variant)):
        if number == 4:
            if variant.stock:
                plain.requires_grad_(True)
                model = torch.nn.parallel.DistributedDataParallel(plain)
            else:
                plain.requires_grad_(True)
            optimizer.add_param_group({"params": list(plain[0].parameters()), "lr": 1e-3})
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("all parameters in the optimizer, the body frozen for the first steps", "torch")
def frozen_first(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model, optimizer = variant.shard(plain, optimizer, ddp={"find_unused_parameters": True})
    losses = []
    for number, (x, y) in enumerate(vectors(variant)):
        if variant.stock:  # DDP chooses its parameters when it is built
            frozen = number < 4
        else:
            frozen = number < 4
            plain[0].requires_grad_(not frozen)
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        if variant.stock and frozen:
            for parameter in plain[0].parameters():
                parameter.grad = None
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


class Unused(nn.Module):
    """Three experts; each rank uses one of them per step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.experts = nn.ModuleList([nn.Linear(16, 1) for _ in range(3)])

    def forward(self, x: Tensor, index: int) -> Tensor:
        return self.experts[index](self.body(x).relu())


@recipe("find_unused_parameters, different parameters on each rank", "torch")
def unused(variant: Variant) -> Report:
    plain = Unused()
    variant.starts(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model, optimizer = variant.shard(plain, optimizer, ddp={"find_unused_parameters": True})
    losses = []
    for number, (x, y) in enumerate(vectors(variant)):
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x, (number // 2 + variant.rank) % 3).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe(
    "several forwards before one backward (siamese)",
    "torch",
    fp32=1e-5,
    remark="with `fp32_outputs: ['']`, so the loss is in fp32, as under autocast",
)
def siamese(variant: Variant) -> Report:
    plain = mlp(out=8)
    variant.starts(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model, optimizer = variant.shard(plain, optimizer, fp32_outputs=[""])
    losses = []
    for x, _ in vectors(variant, batch=8):
        optimizer.zero_grad()
        with variant.autocast():
            left, right = model(x), model(x + 0.1)
            loss = (
                F.cosine_embedding_loss(left, right, torch.ones(8)) + left.float().square().mean()
            )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("gradient penalty (double backward)", "torch")
def penalty(variant: Variant) -> Report:
    plain = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    variant.starts(plain)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2, betas=(0.0, 0.9))
    model, optimizer = variant.shard(plain, optimizer)
    losses = []
    for x, y in vectors(variant):
        x.requires_grad_()
        optimizer.zero_grad()
        with variant.autocast():
            out = model(x).float()
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = F.mse_loss(out, y) + 0.1 * (slope.norm(2, dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inward = nn.Linear(6, 24)
        self.blocks = nn.ModuleList([nn.Linear(24, 24) for _ in range(3)])
        self.out = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.inward(x)
        for block in self.blocks:
            x = F.gelu(checkpoint(block, x, use_reentrant=self.reentrant))
        return self.out(x)


@recipe("activation checkpointing, non-reentrant", "torch")
def checkpointing(variant: Variant) -> Report:
    return of_checkpoints(variant, reentrant=False)


def of_checkpoints(variant: Variant, reentrant: bool) -> Report:
    model = Checkpointed(reentrant)
    # eps exceeds rounding errors of gradients, which Adam's first steps would amplify.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    return trained(variant, model, optimizer, clip=1.0)


@recipe("activation checkpointing, re-entrant", "torch")
def checkpointing_reentrant(variant: Variant) -> Report:
    return of_checkpoints(variant, reentrant=True)


@recipe("SWA: AveragedModel, SWALR, update_bn", "torch", remark="compares the averages")
def swa(variant: Variant) -> Report:
    from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

    plain = cnn()
    averaged = AveragedModel(plain)  # before sharding: it stays fp32
    variant.starts(averaged.module)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = variant.shard(plain, optimizer)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    losses = []
    for number, (x, y) in enumerate(images(variant)):
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if number >= 3:
            averaged.update_parameters(plain)
            schedule.step()
        losses.append(loss.item())
    rng = torch.Generator().manual_seed(9)
    update_bn([torch.randn(4, 3, 8, 8, generator=rng) for _ in range(2)], averaged)
    return variant.report(averaged.module, losses, optimizer=Nothing())


class Nothing:
    """Optimizer without masters, to report a model's own weights."""

    def full_parameters(self) -> dict[str, Tensor]:
        return {}


@recipe("EMA by deepcopy before shard()", "torch", remark="compares the averages", ratio=3.0)
def ema_before(variant: Variant) -> Report:
    plain = mlp()
    ema = copy.deepcopy(plain).requires_grad_(False)
    return averaged_by_hand(variant, plain, ema)


# The copy starts from rounded weights, and in so few steps the average hardly moves.
@recipe("EMA by deepcopy after shard()", "torch", remark="starts from rounded weights", ratio=20.0)
def ema_after(variant: Variant) -> Report:
    return averaged_by_hand(variant, mlp(), None)


def averaged_by_hand(variant: Variant, plain: nn.Module, ema: nn.Module | None) -> Report:
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model, optimizer = variant.shard(plain, optimizer)
    if ema is None:
        ema = copy.deepcopy(plain).requires_grad_(False)
    variant.starts(ema)
    losses = []
    for x, y in vectors(variant, 2 * STEPS):
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for average, value in zip(ema.parameters(), plain.parameters(), strict=True):
                average.mul_(0.999).add_(value, alpha=0.001)
        losses.append(loss.item())
    return variant.report(ema, losses, optimizer=Nothing())


class Byol(nn.Module):
    """Student and momentum teacher in one module, as in the papers' code."""

    def __init__(self) -> None:
        super().__init__()
        self.student = mlp(out=8)
        self.predictor = nn.Linear(8, 8)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def momentum(self, m: float = 0.99) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.data = slow.data * m + fast.data * (1.0 - m)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(right)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.student(left)), target, -1).mean()


@recipe("BYOL: momentum teacher inside the model", "torch", ratio=3.0)
def byol(variant: Variant) -> Report:
    plain = Byol()
    variant.starts(plain)
    trained_ones = [p for p in plain.parameters() if p.requires_grad]
    model, optimizer = variant.shard(plain, torch.optim.AdamW(trained_ones, lr=1e-2))
    losses = []
    for x, _ in vectors(variant, 2 * STEPS, batch=8):
        optimizer.zero_grad()
        with variant.autocast():
            loss = model(x, x + 0.05)
        loss.backward()
        optimizer.step()
        plain.momentum()
        losses.append(loss.item())
    return variant.report(model, losses)


class Moco(nn.Module):
    """Teacher updated with copy_ and mul_, and a queue of keys in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.query = mlp(out=8)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 16), dim=0))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        q = F.normalize(self.query(left), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.data.mul_(0.99).add_(fast.data, alpha=0.01)
            k = F.normalize(self.key(right), dim=1)
        positive = (q * k).sum(1, keepdim=True)
        negative = q.float() @ self.queue.clone().detach().float()
        logits = torch.cat([positive.float(), negative], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
        self.enqueue(k)
        return loss

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        import torch.distributed as dist

        parts = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, keys.contiguous())
        keys = torch.cat(parts)
        at = int(self.position)
        self.queue[:, at : at + len(keys)] = keys.T.to(self.queue.dtype)
        self.position[0] = (at + len(keys)) % self.queue.shape[1]


@recipe("MoCo: teacher, queue in a buffer, gathered keys", "torch", ratio=3.0)
def moco(variant: Variant) -> Report:
    plain = Moco()
    variant.starts(plain)
    trained_ones = [p for p in plain.parameters() if p.requires_grad]
    model, optimizer = variant.shard(plain, torch.optim.SGD(trained_ones, lr=0.1, momentum=0.9))
    losses = []
    for x, _ in vectors(variant, batch=4):
        with variant.autocast():
            loss = model(x, x + 0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


class Gcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        nodes = 10
        dense = (torch.rand(nodes, nodes) > 0.6).float() + torch.eye(nodes)
        self.register_buffer("adjacency", (dense / dense.sum(1, keepdim=True)).to_sparse())
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.spread(self.two(self.spread(self.one(x)).relu()))

    def spread(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):  # torch.sparse does not support autocast
            return torch.sparse.mm(self.adjacency, x.float())


@recipe("GCN with a sparse adjacency buffer", "torch")
def gcn(variant: Variant) -> Report:
    plain = Gcn()
    variant.starts(plain)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2, weight_decay=5e-4)
    # DDP cannot broadcast sparse buffers.
    model, optimizer = variant.shard(
        plain, optimizer, ddp={"broadcast_buffers": False, "init_sync": False}
    )
    losses = []
    for x, y in vectors(variant, batch=10):
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("GAN with spectral_norm, two models and optimizers", "torch")
def spectral_gan(variant: Variant) -> Report:
    from torch.nn.utils.parametrizations import spectral_norm

    critic = nn.Sequential(
        spectral_norm(nn.Linear(6, 16)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(16, 1))
    )
    maker = mlp(width=4, out=6)
    variant.starts(maker)
    opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    opt_g = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.999))
    critic, opt_d = variant.shard(critic, opt_d, ddp={"broadcast_buffers": False})
    maker, opt_g = variant.shard(maker, opt_g)
    losses = []
    rng = generator(variant, 3)
    for x, _ in vectors(variant):
        noise = torch.randn(len(x), 4, generator=rng)
        with variant.autocast():
            fake = maker(noise)
            loss = F.relu(1 - critic(x)).mean() + F.relu(1 + critic(fake.detach())).mean()
        opt_d.zero_grad()
        loss.backward()
        opt_d.step()
        losses.append(loss.item())
        with variant.autocast():
            loss = -critic(fake).mean()
        opt_g.zero_grad()
        loss.backward()
        opt_g.step()
        losses.append(loss.item())
    return variant.report(maker, losses)


@recipe("DreamBooth: two models, one optimizer", "torch")
def two_models(variant: Variant) -> Report:
    text, unet = mlp(out=8), mlp(width=8, out=1)
    both = nn.ModuleList([text, unet])
    variant.starts(both)
    optimizer = torch.optim.AdamW([*text.parameters(), *unet.parameters()], lr=1e-2)
    if variant.stock:
        from torch.nn.parallel import DistributedDataParallel

        text, unet = DistributedDataParallel(text), DistributedDataParallel(unet)
    else:
        _, optimizer = variant.shard(both, optimizer)
    losses = []
    for x, y in vectors(variant):
        with variant.autocast():
            loss = F.mse_loss(unet(text(x)).float(), y)
        loss.backward()
        variant.clip(both, optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return variant.report(both, losses)


@recipe("weights tied after shard()", "torch")
def tied_late(variant: Variant) -> Report:
    plain = Rope()
    variant.starts(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model, optimizer = variant.shard(plain, optimizer, ddp={"find_unused_parameters": True})
    plain.head.weight = plain.embed.weight
    losses = []
    for ids in tokens(variant):
        with variant.autocast():
            logits = model(ids[:, :-1], torch.arange(11.0))
            loss = F.cross_entropy(logits.reshape(-1, 31), ids[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("weights tied before shard()", "torch")
def tied(variant: Variant) -> Report:
    plain = Rope()
    plain.head.weight = plain.embed.weight
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    losses = []
    for ids in tokens(variant):
        with variant.autocast():
            logits = model(ids[:, :-1], torch.arange(11.0))
            loss = F.cross_entropy(logits.reshape(-1, 31), ids[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("hooks on parameters that scale and clip gradients", "torch")
def hooked(variant: Variant) -> Report:
    model = mlp()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-0.1, 0.1) * 0.5)
    return trained(variant, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@recipe("clip by value", "torch")
def clip_value(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.2))
    losses = []
    for x, y in vectors(variant):
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        if variant.stock:
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
        else:
            optimizer.clip_grad_value_(0.05)
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("torch's clip_grad_norm_ left in the script", "torch")
def clip_of_torch(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.2))
    losses = []
    for x, y in vectors(variant):
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("saved, loaded and resumed by optimizer.state_dict()", "torch")
def resumed(variant: Variant) -> Report:
    import io

    def build() -> Any:
        torch.manual_seed(0)
        plain = mlp()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        return plain, *variant.shard(plain, optimizer)

    plain, model, optimizer = build()
    variant.starts(plain)
    losses = []
    for number, (x, y) in enumerate(vectors(variant)):
        if number == 4:
            weights = plain.state_dict() if variant.stock else optimizer.full_parameters()
            file = io.BytesIO()
            torch.save({"model": weights, "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=True)
            if not variant.stock:
                optimizer.close()
            plain, model, optimizer = build()
            if variant.stock:
                plain.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
        optimizer.zero_grad()
        with variant.autocast():
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return variant.report(model, losses)


@recipe("a second phase with a new optimizer, after close()", "torch")
def second_phase(variant: Variant) -> Report:
    plain = mlp()
    variant.starts(plain)
    losses = []
    for phase in range(4):  # two small steps each: bf16 weights would not move
        optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-5 * (phase + 1))
        model, optimizer = variant.shard(plain, optimizer)
        for x, y in vectors(variant, 2):
            optimizer.zero_grad()
            with variant.autocast():
                loss = F.mse_loss(model(x).float(), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if phase < 3 and not variant.stock:
            optimizer.close()
    return variant.report(model, losses)
