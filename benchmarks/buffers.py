"""Buffers beside DDP's: whole steps of a deep BatchNorm network, with and without its buffers.

DDP sends them before each forward, in messages of 250 MiB for each dtype; shardcast before each
forward and after each step, in one message.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardcast

WIDTH, LAYERS = 64, 50
COLUMNS = ("system", "ms", "buffers, ms")


def _ddp(buffers: bool) -> tuple[nn.Module, Any]:
    model = DistributedDataParallel(_model(), broadcast_buffers=buffers)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def _shardcast(buffers: bool) -> tuple[nn.Module, Any]:
    model = _model()
    plain = torch.optim.SGD(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"param_dtype": torch.float32, "broadcast_buffers": buffers}
    return model, shardcast.shard(model, plain, **options)


SYSTEMS: dict[str, Callable[[bool], tuple[nn.Module, Any]]] = {"DDP": _ddp, "shardcast": _shardcast}


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def measure(_group: Any, rounds: int) -> list[tuple[str, ...]]:
    """The table; every rank must call it."""
    torch.set_num_threads(1)
    runs = {(name, on): make(on) for name, make in SYSTEMS.items() for on in (False, True)}
    times: dict[tuple[str, bool], list[float]] = {key: [] for key in runs}
    for number in range(rounds + 2):
        x = torch.randn(16, WIDTH)
        for key, (model, optimizer) in runs.items():
            start = time.perf_counter()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number > 1:
                times[key].append(time.perf_counter() - start)
    rows = []
    for name in SYSTEMS:
        on, off = times[name, True], times[name, False]
        more = statistics.median(a - b for a, b in zip(on, off, strict=True))
        rows.append((name, f"{1e3 * statistics.median(on):.2f}", f"{1e3 * more:.2f}"))
    return rows
