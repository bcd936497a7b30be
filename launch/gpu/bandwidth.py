"""Part 4: the update next to a copy of the same number of bytes, and to other libraries."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shardcast
from gpu.bench import Bench, flat_model, give_gradients, kernels

BYTES = 30  # per element: gradient 2, masters and moments 24, parameter 4
SIZES = {False: (10**6, 10**7, 10**8, 10**9, 2 * 10**9), True: (10**5,)}
HELD = 24  # bytes per element of the form that needs most


def run(bench: Bench) -> None:
    for numel in SIZES[bench.dry]:
        copied: list[float] = []
        for name, make in forms().items():
            if bench.free() < HELD * numel:
                bench.note(form=name, elements=numel, skipped="not enough memory on the card")
                continue
            with bench.row(form=name, elements=numel) as found:
                measure(make, numel, bench, found, copied)


def measure(
    make: Callable[[int, Bench], Callable[[], object]],
    numel: int,
    bench: Bench,
    found: dict[str, Any],
    copied: list[float],
) -> None:
    """Measure one form; its memory is free when this returns.

    Args:
        copied: starts with the time of the copy, which is the first form.
    """
    step = make(numel, bench)
    found["ms"] = bench.time(step)
    copied.append(found["ms"])
    found["of copy"] = copied[0] / found["ms"]
    found["GB/s"] = BYTES * numel / found["ms"] / 1e6
    if make is sharded and not bench.dry:
        found.update(kernel_share(step, numel))


def forms() -> dict[str, Callable[[int, Bench], Callable[[], object]]]:
    """Return the compared forms, the copy first."""
    found: dict[str, Callable[[int, Bench], Callable[[], object]]] = {
        "copy": copy,
        "shardcast": sharded,
        "shardcast, in a graph": captured,
        "torch fused + cast": lambda n, b: wrapped(n, b, fused=True),
        "torch foreach + cast": lambda n, b: wrapped(n, b, foreach=True),
    }
    if importlib.util.find_spec("apex") is not None:
        found["Apex FusedAdam"] = apex
    if importlib.util.find_spec("flashoptim") is not None:
        less: dict[str, Any] = {"quantize": False, "master_weight_bits": 32}
        found["FlashAdamW, 32-bit masters, bf16 moments"] = lambda n, b: flash(n, b, **less)
        found["FlashAdamW"] = flash
    return found


def copy(numel: int, bench: Bench) -> Callable[[], object]:
    """Return a copy that reads half of the bytes and writes half."""
    source = torch.ones(BYTES * numel // 2, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def sharded(numel: int, bench: Bench) -> Callable[[], object]:
    """Return a whole step on one rank: the norm, the decision, and the update with its cast."""
    model = flat_model(numel, bench.device)
    optimizer = shardcast.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-4), param_dtype=torch.bfloat16
    )
    give_gradients(model)
    return optimizer.step  # the gradients stay in their pack


def captured(numel: int, bench: Bench) -> Callable[[], object]:
    """Return the same as a CUDA graph, which takes almost no host time."""
    step = sharded(numel, bench)
    if bench.dry:
        return step
    for _ in range(3):  # compiles
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_kept: object = step) -> None:
        graph.replay()

    return replay


def wrapped(numel: int, bench: Bench, **options: Any) -> Callable[[], object]:
    """Return mixed precision without a fused kernel: cast, torch's step, cast back."""
    masters = flat_model(numel, bench.device)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-4, **options)
    params = [param.detach().bfloat16() for param in masters.parameters()]
    low = [torch.full_like(param, 1e-3) for param in params]
    exact: list[Tensor] = [torch.zeros_like(param) for param in masters.parameters()]
    for param, grad in zip(masters.parameters(), exact, strict=True):
        param.grad = grad

    def step() -> None:
        torch._foreach_copy_(exact, low)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, list(masters.parameters()))

    return step


def apex(numel: int, bench: Bench) -> Callable[[], object]:
    """Return a step of NVIDIA Apex with its fp32 masters."""
    from apex.optimizers import FusedAdam

    model: nn.Module = flat_model(numel, bench.device).bfloat16()
    optimizer = FusedAdam(model.parameters(), lr=1e-4, capturable=True, master_weights=True)
    give_gradients(model)
    step: Callable[[], object] = optimizer.step
    return step


def flash(numel: int, bench: Bench, **options: Any) -> Callable[[], object]:
    """Return a step of FlashOptim: bf16 parameters with correction bits, and 8-bit moments."""
    from flashoptim import FlashAdamW

    model: nn.Module = flat_model(numel, bench.device).bfloat16()
    optimizer = FlashAdamW(model.parameters(), lr=1e-4, **options)
    give_gradients(model)
    step: Callable[[], object] = optimizer.step
    return step


def kernel_share(step: Callable[[], object], numel: int) -> dict[str, Any]:
    """Return the time of a step's longest kernel, which is the update, and of all others."""
    times = {name: spent for name, (_, spent) in kernels(step).items()}
    longest = max(times, key=lambda name: times[name])
    return {
        "kernel": longest[:60],
        "kernel ms": times[longest] / 1e3,
        "kernel GB/s": BYTES * numel / times[longest] / 1e3,
        "all kernels ms": sum(times.values()) / 1e3,
    }
