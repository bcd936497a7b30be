"""Part 5: GPT training next to DDP with autocast, on one rank; then two ranks on one card.

Losses in low precision drift apart, even for one system. The yardstick shows how far: it compares
autocast with itself, with initial weights perturbed as much as by bf16 rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardcast
from gpu.bench import Bench, tokens
from gpu.ranks import backend_for, on_ranks

VOCABULARY = 50304
MODELS = {  # name: configuration, sequences per step
    "125 M": (GPTConfig(VOCABULARY, 1024, 768, 12, 12), 8),
    "350 M": (GPTConfig(VOCABULARY, 1024, 1024, 24, 16), 4),
    "760 M": (GPTConfig(VOCABULARY, 1024, 1536, 24, 16), 2),
    "1.3 B": (GPTConfig(VOCABULARY, 1024, 2048, 24, 16), 2),
}
TINY = {"tiny": (GPTConfig(64, 16, 32, 2, 2), 2)}
STEPS = 8
RATE = 1e-4  # learning rate
WARMUP = 10  # steps until it is reached; the loss after each is reported
PERTURBED = 1e-3  # the yardstick multiplies weights by 1 + N(0, 1) times this
HELD = 26  # bytes per parameter of the larger system, without activations


def run(bench: Bench) -> None:
    models = TINY if bench.dry else MODELS
    name, (config, batch) = next(iter(models.items()))
    with bench.row(model=name, system="sharded, 2 ranks", backend=backend_for(bench)) as found:
        ranks = on_ranks(bench, both, config, batch, bench)
        found["replicas equal"] = ranks[0].pop("digest") == ranks[1].pop("digest")
        found.update(ranks[0])
    with one_rank(bench):
        for name, (config, batch) in models.items():
            with torch.device("meta"):
                numel = sum(param.numel() for param in GPT(config).parameters())
            exact: list[float] = []
            yardstick: list[float] = []
            for system in (plain, averaged, sharded):
                if bench.free() < HELD * numel + (8 << 30) and not bench.dry:
                    bench.note(model=name, system=system.__name__, skipped="not enough memory")
                    continue
                with bench.row(model=name, system=system.__name__, parameters=numel) as found:
                    own = trained(system, config, batch, bench, found)
                    exact = exact or own
                    found.update(beside(own, exact, yardstick))
                if system is plain and exact:
                    with bench.row(model=name, system="plain, weights moved") as found:
                        yardstick = spread(exact, config, batch, bench)
                        found["yardstick"] = told(yardstick)
            if bench.dry or bench.free() > 2 * HELD * numel + (8 << 30):
                with bench.row(model=name, system="sharded, beside torch's update") as found:
                    found["ulps apart"] = compared(config, batch, bench)


@contextmanager
def one_rank(bench: Bench) -> Iterator[None]:
    """Create a process group of one process, for DDP."""
    backend = "gloo" if bench.dry else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


System = Callable[[nn.Module, torch.device], tuple[Callable[[Tensor, Tensor], Tensor], Any]]


def plain(model: nn.Module, device: torch.device) -> tuple[Any, Any]:
    """Return the forward and optimizer of autocast on one process, without DDP."""
    return _autocast(model, device), torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


def averaged(model: nn.Module, device: torch.device) -> tuple[Any, Any]:
    """Return those of DDP and autocast, with fused AdamW on fp32 parameters."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=RATE, fused=True)
    return _autocast(wrapped, device), optimizer


def sharded(model: nn.Module, _device: torch.device) -> tuple[Any, Any]:
    """Return those of shardcast in bf16."""
    plain = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    return model, shardcast.shard(model, plain, param_dtype=torch.bfloat16)


def _autocast(model: nn.Module, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = model(x, y)
        return loss

    return forward


def trained(
    system: System, config: GPTConfig, batch: int, bench: Bench, figures: dict[str, Any]
) -> list[float]:
    """Return losses of the first steps on one batch; note times and memory in ``figures``."""
    x, y = tokens(bench, batch, config.context, config.vocabulary)
    with bench.peak(figures, "peak bytes"):
        forward, optimizer = system(built(config, bench), bench.device)
        found = [loss.item() for loss in losses(forward, optimizer, x, y)]

        def step() -> None:
            forward(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()

        milliseconds = bench.time(step, rounds=STEPS)
    figures["ms"] = milliseconds
    figures["tokens/s"] = 1e3 * batch * config.context / milliseconds

    def phase() -> None:
        optimizer.step()

    forward(x, y).backward()
    figures["optimizer ms"] = bench.time(phase, rounds=STEPS)
    return found


def built(config: GPTConfig, bench: Bench) -> GPT:
    """Return the model, always with the same weights."""
    torch.manual_seed(0)
    with torch.device(bench.device):
        return GPT(config)


def losses(
    forward: Callable[[Tensor, Tensor], Tensor],
    optimizer: Any,
    x: Tensor,
    y: Tensor,
    warmup: int = WARMUP,
) -> Iterator[Tensor]:
    """Yield the loss before the first step, and after each of :data:`WARMUP` steps.

    The learning rate grows meanwhile. Without a warm-up, Adam's first steps are as long as later
    ones, all in the direction of one batch. The loss then oscillates, and two runs soon diverge.
    """
    for step in range(WARMUP):
        loss = forward(x, y)
        yield loss.detach()
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / warmup)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        yield forward(x, y)


@torch.no_grad()
def perturb(model: nn.Module, share: float, seed: int) -> None:
    """Multiply each weight by 1 + N(0, 1) times ``share``."""
    for number, param in enumerate(model.parameters()):
        generator = torch.Generator(param.device).manual_seed(1000 * seed + number)
        noise = torch.empty_like(param).normal_(0.0, share, generator=generator)
        param.mul_(1 + noise)


def spread(exact: list[float], config: GPTConfig, batch: int, bench: Bench) -> list[float]:
    """Return the larger difference of two perturbed runs of autocast, after each step."""
    x, y = tokens(bench, batch, config.context, config.vocabulary)
    most = [0.0] * len(exact)
    for seed in (1, 2):
        model = built(config, bench)
        perturb(model, PERTURBED, seed)
        moved = [loss.item() for loss in losses(*plain(model, bench.device), x, y)]
        most = [max(pair) for pair in zip(most, apart(moved, exact), strict=True)]
    return most


def apart(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


def beside(own: list[float], exact: list[float], yardstick: list[float]) -> dict[str, str]:
    """Return the losses after each step, their differences from autocast's, and the yardstick."""
    figures = {"losses": " ".join(f"{loss:.3f}" for loss in own)}
    if yardstick:
        figures |= {"from plain": told(apart(own, exact)), "yardstick": told(yardstick)}
    return figures


def told(differences: Sequence[float]) -> str:
    return " ".join(f"{difference:.1e}" for difference in differences)


def compared(config: GPTConfig, batch: int, bench: Bench) -> str:
    """Compare masters with parameters that torch's AdamW updates with the same gradients.

    Return the largest difference after each step, in fp32 ulps of the largest weight.
    """
    torch.manual_seed(0)
    x, y = tokens(bench, batch, config.context, config.vocabulary)
    with torch.device(bench.device):
        model = GPT(config)
    others = [param.detach().clone() for param in model.parameters()]
    reference = torch.optim.AdamW(others, lr=RATE, fused=True)
    _, optimizer = sharded(model, bench.device)
    differences = []
    for _ in range(STEPS):
        model(x, y).backward()
        for param, other in zip(model.parameters(), others, strict=True):
            assert param.grad is not None
            other.grad = param.grad.float().clone()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        pairs = zip(optimizer.state_dict()["state"].values(), others, strict=True)
        apart = [(entry["master"] - other.flatten()).abs().max() for entry, other in pairs]
        largest = torch.stack([other.abs().max() for other in others]).max()
        unit = largest * torch.finfo(torch.float32).eps
        differences.append((torch.stack(apart).max() / unit).item())
    return " ".join(f"{difference:.1f}" for difference in differences)


def both(group: dist.ProcessGroup, config: GPTConfig, batch: int, bench: Bench) -> dict[str, Any]:
    """Train on one of two ranks; return a digest of the parameters, which must be equal on both."""
    torch.manual_seed(0)
    bench = bench.of_rank(group.rank())
    model = GPT(config).to(bench.device)
    optimizer = shardcast.shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        param_dtype=torch.bfloat16,
        process_group=group,
    )
    x, y = tokens(bench, batch, config.context, config.vocabulary)
    x, y = x.roll(group.rank(), 1), y.roll(group.rank(), 1)

    def step() -> None:
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    milliseconds = bench.time(step, rounds=4)
    bits = [param.detach().view(torch.int16).long().sum().item() for param in model.parameters()]
    return {"ms": milliseconds, "tokens/s": 2e3 * x.numel() / milliseconds, "digest": bits}
