"""Part 5: GPT training against DDP with autocast, on one rank; then two ranks on one card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
HELD = 26  # bytes per parameter of the hungrier system; activations come on top


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
            for system in (plain, averaged, sharded):
                if bench.free() < HELD * numel + (8 << 30) and not bench.dry:
                    bench.note(model=name, system=system.__name__, skipped="not enough memory")
                    continue
                with bench.row(model=name, system=system.__name__, parameters=numel) as found:
                    found.update(trained(system, config, batch, bench))
            if bench.dry or bench.free() > 2 * HELD * numel + (8 << 30):
                with bench.row(model=name, system="sharded, beside torch's update") as found:
                    found["ulps apart"] = compared(config, batch, bench)


@contextmanager
def one_rank(bench: Bench) -> Iterator[None]:
    """A process group of this process alone, for DDP."""
    backend = "gloo" if bench.dry else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


System = Callable[[nn.Module, torch.device], tuple[Callable[[Tensor, Tensor], Tensor], Any]]


def plain(model: nn.Module, device: torch.device) -> tuple[Any, Any]:
    """Autocast on one process, without DDP."""
    return _autocast(model, device), torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def averaged(model: nn.Module, device: torch.device) -> tuple[Any, Any]:
    """DDP and autocast, fused AdamW on fp32 parameters."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)
    return _autocast(wrapped, device), optimizer


def sharded(model: nn.Module, _device: torch.device) -> tuple[Any, Any]:
    """shardcast in bf16."""
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, shardcast.shard(model, plain, param_dtype=torch.bfloat16)


def _autocast(model: nn.Module, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = model(x, y)
        return loss

    return forward


def trained(system: System, config: GPTConfig, batch: int, bench: Bench) -> dict[str, Any]:
    """Times and memory of a few steps on one batch, and the losses.

    Those of large models part after some steps, of the same system too: the first ones tell.
    """
    torch.manual_seed(0)
    figures: dict[str, Any] = {}
    x, y = tokens(bench, batch, config.context, config.vocabulary)
    with bench.peak(figures, "peak bytes"):
        with torch.device(bench.device):
            model = GPT(config)
        forward, optimizer = system(model, bench.device)
        losses = []

        def step() -> None:
            loss = forward(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        milliseconds = bench.time(step, rounds=STEPS)
    figures["ms"] = milliseconds
    figures["tokens/s"] = 1e3 * batch * config.context / milliseconds
    figures["losses"] = " ".join(f"{loss.item():.3f}" for loss in losses)

    def phase() -> None:
        optimizer.step()

    forward(x, y).backward()
    figures["optimizer ms"] = bench.time(phase, rounds=STEPS)
    return figures


def compared(config: GPTConfig, batch: int, bench: Bench) -> str:
    """How far masters are from parameters that torch's AdamW updates by the same gradients.

    The largest difference after each step, in fp32 units in the last place of the largest weight.
    """
    torch.manual_seed(0)
    x, y = tokens(bench, batch, config.context, config.vocabulary)
    with torch.device(bench.device):
        model = GPT(config)
    beside = [param.detach().clone() for param in model.parameters()]
    reference = torch.optim.AdamW(beside, lr=1e-4, fused=True)
    _, optimizer = sharded(model, bench.device)
    differences = []
    for _ in range(STEPS):
        model(x, y).backward()
        for param, other in zip(model.parameters(), beside, strict=True):
            assert param.grad is not None
            other.grad = param.grad.float().clone()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        pairs = zip(optimizer.state_dict()["state"].values(), beside, strict=True)
        apart = [(entry["master"] - other.flatten()).abs().max() for entry, other in pairs]
        largest = torch.stack([other.abs().max() for other in beside]).max()
        unit = largest * torch.finfo(torch.float32).eps
        differences.append((torch.stack(apart).max() / unit).item())
    return " ".join(f"{difference:.1f}" for difference in differences)


def both(group: dist.ProcessGroup, config: GPTConfig, batch: int, bench: Bench) -> dict[str, Any]:
    """One of two ranks; with a digest of its parameters, which must be equal on both."""
    torch.manual_seed(0)
    bench = bench.of_rank(group.rank())
    model = GPT(config).to(bench.device)
    optimizer = shardcast.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-4), param_dtype=torch.bfloat16,
        process_group=group,
    )  # fmt: skip
    x, y = tokens(bench, batch, config.context, config.vocabulary)
    x, y = x.roll(group.rank(), 1), y.roll(group.rank(), 1)

    def step() -> None:
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    milliseconds = bench.time(step, rounds=4)
    bits = [param.detach().view(torch.int16).long().sum().item() for param in model.parameters()]
    return {"ms": milliseconds, "tokens/s": 2e3 * x.numel() / milliseconds, "digest": bits}
