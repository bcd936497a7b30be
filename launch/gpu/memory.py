"""Part 6: memory according to the card's allocator, next to that of `shardcast estimate`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from gpt import GPT, GPTConfig

import shardcast
from gpu.bench import Bench, give_gradients
from shardcast.estimate import estimate

CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "split16": {"master": "split16"},
    "bf16 moments": {"moments": "bf16"},
    "int8 moments": {"moments": "int8"},
    "split16, int8 moments": {"master": "split16", "moments": "int8"},
    "offload": {"offload": True},
}
SIZES = {False: GPTConfig(50304, 1024, 1024, 24, 16), True: GPTConfig(64, 16, 32, 2, 2)}


def run(bench: Bench) -> None:
    for name, fields in CONFIGS.items():
        with bench.row(config=name) as found:
            found.update(measured(fields, bench))


def measured(fields: dict[str, Any], bench: Bench) -> dict[str, Any]:
    """Return the bytes held after a step, and the peaks of setting up and of a step.

    Held bytes are those on the device, without those that ``offload`` puts on the host.
    """
    torch.manual_seed(0)
    figures: dict[str, Any] = {}
    config = {"param_dtype": "bf16", **fields}
    with torch.device("meta"):
        shape = GPT(SIZES[bench.dry])
    promised = estimate(shape, torch.optim.AdamW(shape.parameters()), 1, copy.deepcopy(config))
    before = 0 if bench.dry else torch.cuda.memory_allocated()
    with bench.peak(figures, "peak of setting up"):
        with torch.device(bench.device):  # initializing on the host would take seconds
            model = GPT(SIZES[bench.dry])
        optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters()), config)
    for _ in range(2):
        give_gradients(model)
        with bench.peak(figures, "rise in a step"):
            optimizer.step()
        optimizer.zero_grad()
    if bench.dry:
        held = sum(optimizer.memory_report().values()) + promised.outside - promised.host
    else:
        held = torch.cuda.memory_allocated() - before
    figures["held"] = held
    figures["estimate"] = promised.total - promised.host
    figures["held / estimate"] = held / figures["estimate"]
    return figures
