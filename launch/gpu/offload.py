"""Part 10: time and bus bytes of a step with masters on the host, next to no offload and CPUAdam.

``DeepSpeedCPUAdam`` is measured if DeepSpeed is installed: gradients down, its step, casts up.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import shardcast
from gpu.bench import Bench, flat_model, give_gradients
from shardcast.extensions import offload

SIZES = {False: 10**8, True: 10**5}


def run(bench: Bench) -> None:
    numel = SIZES[bench.dry]
    threads = torch.get_num_threads()
    for name, fields in (("no offload", {}), ("offload", {"offload": True})):
        with bench.row(form=name, elements=numel, threads=threads) as found:
            model = flat_model(numel, bench.device)
            optimizer = shardcast.shard(
                model, torch.optim.AdamW(model.parameters(), lr=1e-4), **fields
            )
            give_gradients(model)
            moved = counted(offload.copies_of(bench.device)) if fields else {}
            optimizer.step()  # also copies the initial weights down
            moved.clear()
            optimizer.step()
            found.update({f"bytes {way} per element": n / numel for way, n in moved.items()})
            found["ms"] = bench.time(optimizer.step, rounds=5, warm=1)
    if importlib.util.find_spec("deepspeed") is not None:
        with bench.row(form="DeepSpeedCPUAdam", elements=numel, threads=threads) as found:
            found["ms"] = bench.time(cpu_adam(numel, bench), rounds=5, warm=1)


def counted(copies: Any) -> dict[str, int]:
    """Count the bytes that copies move from now on, by direction."""
    moved: dict[str, int] = {}

    def counting(way: str, copy: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
        def call(target: Tensor, source: Tensor) -> Any:
            moved[way] = moved.get(way, 0) + source.nbytes
            return copy(target, source)

        return call

    for way in ("down", "up"):
        setattr(copies, way, counting(way, getattr(copies, way)))
    return moved


def cpu_adam(numel: int, bench: Bench) -> Callable[[], None]:
    """Return a step of DeepSpeed's update on the host, with its copies."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weight = torch.zeros(numel, dtype=torch.bfloat16, device=bench.device)
    grad = torch.randn(numel, dtype=torch.bfloat16, device=bench.device)
    master = torch.nn.Parameter(torch.zeros(numel, device="cpu"))
    pins = not bench.dry
    down, up = (torch.empty(numel, dtype=torch.bfloat16, pin_memory=pins) for _ in range(2))
    adam = DeepSpeedCPUAdam([master], lr=1e-4, adamw_mode=True)

    def step() -> None:
        down.copy_(grad)
        master.grad = down.float()
        adam.step()
        up.copy_(master.detach())
        weight.copy_(up, non_blocking=True)

    return step
