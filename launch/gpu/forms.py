"""Part 7: time, kernels and memory of forms with fewer bytes, next to the default."""

from __future__ import annotations

import torch

import shardcast
from gpu.bench import Bench, flat_model, give_gradients, kernels
from gpu.memory import CONFIGS

SIZES = {False: 3 * 10**8, True: 10**5}


def run(bench: Bench) -> None:
    numel = SIZES[bench.dry]
    default = None
    for name, fields in CONFIGS.items():
        with bench.row(form=name, elements=numel) as found:
            model = flat_model(numel, bench.device)
            optimizer = shardcast.shard(
                model,
                torch.optim.AdamW(model.parameters(), lr=1e-4),
                param_dtype=torch.bfloat16,
                **fields,
            )
            give_gradients(model)
            found["ms"] = bench.time(optimizer.step, rounds=5)
            default = default or found["ms"]
            found["x"] = found["ms"] / default
            if not bench.dry:
                found["launched"] = sum(count for count, _ in kernels(optimizer.step).values())
            found["bytes held per element"] = sum(optimizer.memory_report().values()) / numel
