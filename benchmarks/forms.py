"""Steps with published forms beside steps in bf16: what the casts of blocks take.

One rank, AdamW, no forward: gradients are there already. In processor time, for other processes
may be running.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

import shardcast

FORMS = ("bf16", "mxfp8", "mxfp4", "fp8_block128")
COLUMNS = ("published", "ns per element and step", "x")
WIDTH, LAYERS = 1024, 8


def measure(rounds: int) -> dict[str, list[float]]:
    """Nanoseconds per element of each form, of every round."""
    torch.set_num_threads(1)
    runs = {form: optimizer(form) for form in FORMS}
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    for number in range(rounds + 1):
        for form, run in runs.items():
            start = time.process_time()
            run.step()
            if number:  # the first round warms up
                times[form].append((time.process_time() - start) / (LAYERS * WIDTH**2) * 1e9)
    return times


def optimizer(form: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    fields: dict[str, Any] = {} if form == "bf16" else {"published": {form: "*"}}
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found = shardcast.shard(model, inner, autocast=False, **fields)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    return found


def rows(times: dict[str, list[float]]) -> list[tuple[str, ...]]:
    base = statistics.median(times["bf16"])
    medians = {form: statistics.median(values) for form, values in times.items()}
    return [(form, f"{value:.1f}", f"{value / base:.2f}") for form, value in medians.items()]
