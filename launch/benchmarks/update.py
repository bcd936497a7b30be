"""The update alone: unscale, clip, AdamW and cast, beside a copy of as many bytes.

First of masters and moments in fp32, in several ways; then of the forms that hold less, without
a compiler and with one.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from shardcast.memory import forms
from shardcast.memory.forms import Exact, Rounded, Split
from shardcast.step.update import rules
from shardcast.step.update.execute import ChunkedKernel, Kernel, NativeKernel, WholeKernel
from shardcast.step.update.operands import Draw, Flat, Forms

BYTES = 28  # per element: gradient 2, master and moments 12 read and 12 written, parameter 2
FORMS = {  # master and moments as in the configuration
    "split16": ("split16", "fp32"),
    "bf16 moments": ("fp32", "bf16"),
    "int8 moments": ("fp32", "int8"),
    "split16, bf16 moments": ("split16", "bf16"),
    "split16, int8 moments": ("split16", "int8"),
}
GROUP = {
    "lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False,
    "maximize": False, "decoupled_weight_decay": True,
}  # fmt: skip


def measure(elements: int, threads: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per round of every form of the update, of the copy first."""
    torch.set_num_threads(threads)
    flat = operands(elements)
    source = torch.ones(elements * BYTES // 2, dtype=torch.uint8)  # as many are written as read
    target = torch.empty_like(source)
    candidates: dict[str, Callable[[], object]] = {
        "copy of the same bytes": lambda: target.copy_(source),
        "chunks, torch's operations": runner(ChunkedKernel(), flat, fused=False),
        "chunks, torch's fused kernel": runner(ChunkedKernel(), flat, fused=True),
        "whole tensors, one operation each": passes(flat),
    }
    compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
    if compiler:
        candidates["torch.compile"] = runner(WholeKernel(compile=True), flat, fused=False)
        candidates["compiled C++"] = runner(NativeKernel(), flat, fused=False)
    for name, (master, moments) in FORMS.items():
        held = operands(elements, master, moments)
        candidates[f"{name}, chunks"] = runner(ChunkedKernel(), held, fused=True)
        if compiler:
            candidates[f"{name}, compiled C++"] = runner(NativeKernel(), held, fused=False)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if number:  # the first round warms up, and compiles
                times[name].append(time.perf_counter() - start)
    return times


def operands(elements: int, master: str = "fp32", moments: str = "fp32") -> Flat:
    """Random weights and gradients, state of zeros."""
    weights = torch.randn(elements)
    kept: forms.Form = Split() if master == "split16" else Exact()
    state = forms.moment(moments), forms.moment(moments, signed=False)

    def encoded(form: forms.Form, values: Tensor) -> forms.Raw:
        return tuple(raw.clone() for raw in forms.encode_flat(form, values, forms.ROW))

    drawn = Draw(torch.tensor([0, 1], dtype=torch.int32), torch.tensor(3.0))
    return Flat(
        encoded(kept, weights),
        torch.randn(elements).bfloat16(),
        tuple(encoded(form, torch.zeros(elements)) for form in state),
        None if master == "split16" else weights.bfloat16(),
        Forms(kept, state),
        drawn if isinstance(state[0], Rounded) else None,
    )


def runner(kernel: Kernel, flat: Flat, fused: bool) -> Callable[[], None]:
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


def passes(flat: Flat) -> Callable[[], None]:
    """What a mixed-precision wrapper does: cast and unscale, torch's step, cast back."""
    factor = torch.tensor(0.5)
    master = torch.nn.Parameter(flat.master[0])
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
