"""The optimizer phase of many small tensors: tensor by tensor, and on packs of them.

What PaddlePaddle PR 33461 gained by flattening, on one process and without anything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

import shardcast
from benchmarks.models import WORKLOADS

Times = dict[str, list[float]]


def measure(model: str, threads: int, rounds: int) -> Times:
    """Seconds of ``step`` and ``zero_grad`` per round: clip to a norm and AdamW, fp32."""
    torch.set_num_threads(threads)
    candidates = {
        "tensor by tensor": phase(model, packed=False, foreach=False),
        "foreach": phase(model, packed=False, foreach=True),
        "packed": phase(model, packed=True, foreach=False),
    }
    times: Times = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, run in candidates.items():
            seconds = run()
            if number:
                times[name].append(seconds)
    return times


def phase(name: str, packed: bool, foreach: bool) -> Callable[[], float]:
    """One backward, then the optimizer phase, which is timed."""
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    model: nn.Module = workload.build()
    flat = shardcast.pack_parameters(model) if packed else model
    params = list(flat.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3, foreach=foreach)
    batch = workload.batch(0)

    def run() -> float:
        model(*batch).backward()
        start = time.perf_counter()
        nn.utils.clip_grad_norm_(params, 1.0, foreach=foreach)
        optimizer.step()
        flat.zero_grad()
        return time.perf_counter() - start

    return run
