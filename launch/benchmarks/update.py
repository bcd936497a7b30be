"""The update alone: unscale, clip, AdamW and cast, beside a copy of as many bytes."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from shardcast.step.update import rules
from shardcast.step.update.execute import ChunkedKernel, Kernel, WholeKernel

BYTES = 28  # per element: gradient 2, master and moments 12 read and 12 written, parameter 2
GROUP = {
    "lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False,
    "maximize": False, "decoupled_weight_decay": True,
}  # fmt: skip


def measure(elements: int, threads: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per round of every form of the update, of the copy first."""
    torch.set_num_threads(threads)
    flat = rules.Flat(
        torch.randn(elements),
        torch.randn(elements).bfloat16(),
        (torch.zeros(elements), torch.zeros(elements)),
        torch.empty(elements, dtype=torch.bfloat16),
    )
    source = torch.ones(elements * BYTES // 2, dtype=torch.uint8)  # as many are written as read
    target = torch.empty_like(source)
    candidates: dict[str, Callable[[], object]] = {
        "copy of the same bytes": lambda: target.copy_(source),
        "chunks, torch's operations": runner(ChunkedKernel(), flat, fused=False),
        "chunks, torch's fused kernel": runner(ChunkedKernel(), flat, fused=True),
        "whole tensors, one operation each": passes(flat),
    }
    if any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        candidates["compiled"] = runner(WholeKernel(compile=True), flat, fused=False)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if number:  # the first round warms up, and compiles
                times[name].append(time.perf_counter() - start)
    return times


def runner(kernel: Kernel, flat: rules.Flat, fused: bool) -> Callable[[], None]:
    """One update with a clipping factor."""
    rule = rules.rule_of(torch.optim.AdamW, GROUP, fused)
    factor, skip = torch.tensor(0.5), torch.tensor(False)

    def run() -> None:
        if kernel.on_host:
            numbers = rule.numbers(GROUP, 3.0)
        else:
            step = torch.tensor(3.0, dtype=torch.float64)
            numbers = rules.as_tensors(rule.numbers(GROUP, step), skip)
        kernel(rule, flat, numbers, factor, skip)

    return run


def passes(flat: rules.Flat) -> Callable[[], None]:
    """What a mixed-precision wrapper does: cast and unscale, torch's step, cast back."""
    factor = torch.tensor(0.5)
    master = torch.nn.Parameter(flat.master)
    optimizer = torch.optim.AdamW([master], lr=1e-3, weight_decay=0.1)
    published: Tensor | None = flat.published

    def run() -> None:
        master.grad = flat.grad.float() * factor
        optimizer.step()
        assert published is not None
        published.copy_(master.detach())

    return run


def rows(times: dict[str, list[float]]) -> list[tuple[str, ...]]:
    """Milliseconds and the ratio to the copy in the same round."""
    first = next(iter(times.values()))
    return [
        (
            name,
            f"{1e3 * statistics.median(mine):.1f}",
            f"{statistics.median(a / b for a, b in zip(mine, first, strict=True)):.2f}",
        )
        for name, mine in times.items()
    ]
