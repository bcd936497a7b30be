"""Time of the update (unscale, clip, AdamW, cast), next to a copy of the same number of bytes.

The first rows have fp32 masters and moments. The others use codecs that take less memory, with and
without a compiler.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import shardcast
from shardcast.extensions.averages import Average, AverageOptions
from shardcast.extensions.offload import Copies
from shardcast.memory.codecs import ROW, master_codec, moment_codec
from shardcast.step.update import rules
from shardcast.step.update.epilogues import Epilogue
from shardcast.step.update.fusion import CompiledExecutor, Executor, Fusion, UpdateNumbers

BYTES = 30  # per element: gradient 2; master, moments and parameter 14 read and 14 written
CODED = {  # the options master and moments
    "split16": ("split16", "fp32"),
    "bf16 moments": ("fp32", "bf16"),
    "int8 moments": ("fp32", "int8"),
    "split16, bf16 moments": ("split16", "bf16"),
    "split16, int8 moments": ("split16", "int8"),
}
EPILOGUES: dict[str, Epilogue] = {
    "fp32 average": Average(AverageOptions("ema", 0.999)),
    "bf16 average": Average(AverageOptions("ema", 0.999, stored="bf16")),
}
GROUP = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
    "decoupled_weight_decay": True,
}


def measure(elements: int, threads: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds per round of the copy, then of every kind of update."""
    torch.set_num_threads(threads)
    fusion, operands = fused(elements)
    by_torch, _ = fused(0, by_torch=True)
    source = torch.ones(elements * BYTES // 2, dtype=torch.uint8)  # read once, written once
    target = torch.empty_like(source)
    eager = Executor(on_host=True)
    candidates: dict[str, Callable[[], object]] = {
        "copy of the same bytes": lambda: target.copy_(source),
        "chunks, torch's operations": runner(eager, fusion, operands),
        "chunks, torch's fused kernel": runner(eager, by_torch, operands),
        "whole tensors, one operation each": passes(operands),
    }
    compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
    if compiler:
        compiled = CompiledExecutor()
        candidates["torch.compile"] = runner(compiled, fusion, operands)
    candidates["offload: mean down, chunks, cast up"] = on_host(eager, by_torch, operands)
    for name, epilogue in EPILOGUES.items():
        fusion, held = fused(elements, by_torch=True, epilogues=(epilogue,))
        candidates[f"{name}, chunks"] = runner(eager, fusion, held)
    for name, (master, moments) in CODED.items():
        fusion, held = fused(elements, master, moments, by_torch=True)
        candidates[f"{name}, chunks"] = runner(eager, fusion, held)
        if compiler:
            fusion, held = fused(elements, master, moments)
            candidates[f"{name}, torch.compile"] = runner(compiled, fusion, held)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if number:  # the first round warms up, and compiles
                times[name].append(time.perf_counter() - start)
    return times


def fused(
    elements: int,
    master: str = "fp32",
    moments: str = "fp32",
    by_torch: bool = False,
    epilogues: tuple[Epilogue, ...] = (),
) -> tuple[Fusion, list[Tensor]]:
    """Return AdamW on random weights and gradients in whole rows, with zero state."""
    elements -= elements % ROW
    rule = rules.rule_of(torch.optim.AdamW, GROUP, by_torch)
    config = shardcast.ShardcastConfig(master=master, moments=moments)
    state = tuple(moment_codec(config, name) for name in rule.state)
    state += tuple(epilogue.codec for epilogue in epilogues for name in epilogue.state)
    codec = master_codec(config, torch.bfloat16)
    fusion = Fusion(rule, codec, state, not codec.has_published, ROW, epilogues)
    weights = torch.randn(elements // ROW, ROW)
    pieces = [weights.bfloat16()] if fusion.casts else []
    for each, values in zip(
        (codec, *state), (weights, *[torch.zeros_like(weights)] * len(state)), strict=True
    ):
        pieces += [piece.clone() for piece in each.encode(values, None)]
    if fusion.by_chance:
        pieces.append(torch.arange(elements // ROW, dtype=torch.int32))
    grad = torch.randn(elements).bfloat16()
    return fusion, [grad, *(piece.flatten() for piece in pieces)]


def runner(executor: Executor, fusion: Fusion, operands: list[Tensor]) -> Callable[[], None]:
    """Return a function that makes one update with a clipping factor."""
    factor, skip, step = torch.tensor(0.5), torch.tensor(False), torch.tensor(3.0)

    def run() -> None:
        if executor.on_host:
            numbers = fusion.rule.numbers(GROUP, 3.0)
        else:
            numbers = rules.as_tensors(fusion.rule.numbers(GROUP, step.double()), skip)
        behind = tuple(epilogue.numbers(3.0) for epilogue in fusion.epilogues)
        if not executor.on_host:
            behind = tuple(rules.as_tensors(each, skip) for each in behind)
        decided = None if executor.on_host else skip
        counts = torch.full((len(behind),), 3.0)
        executor(fusion, operands, UpdateNumbers(step, numbers, behind, counts), factor, decided)

    return run


def on_host(executor: Executor, fusion: Fusion, operands: list[Tensor]) -> Callable[[], None]:
    """Return a function that makes one ``offload`` update, with its copies over a GPU's bus."""
    copies, host = Copies(), [*operands]
    host[:2] = [torch.empty_like(operand) for operand in operands[:2]]
    host[1].copy_(operands[1])
    update = runner(executor, fusion, host)

    def run() -> None:
        copies.down(host[0], operands[0])
        update()
        copies.up(operands[1], host[1])

    return run


def passes(operands: list[Tensor]) -> Callable[[], None]:
    """Return a mixed-precision wrapper's update: cast and unscale, torch's step, cast back."""
    grad, published, weights, *_ = operands
    factor = torch.tensor(0.5)
    master = torch.nn.Parameter(weights)
    optimizer = torch.optim.AdamW([master], lr=1e-3, weight_decay=0.1)

    def run() -> None:
        master.grad = grad.float() * factor
        optimizer.step()
        published.copy_(master.detach())

    return run


def rows(times: dict[str, list[float]]) -> list[tuple[str, ...]]:
    """Return milliseconds, and the ratio to the copy in the same round."""
    first = next(iter(times.values()))
    return [
        (
            name,
            f"{1e3 * statistics.median(mine):.1f}",
            f"{statistics.median(a / b for a, b in zip(mine, first, strict=True)):.2f}",
        )
        for name, mine in times.items()
    ]
