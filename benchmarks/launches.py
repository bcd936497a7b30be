"""What a step on an accelerator costs the host: kernel launches by stage, and its time.

The path of accelerators runs on a CPU, whose values the host is told not to read. Collectives
return at once, packs are small, and the update of a pack does nothing, so what remains is the host.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardcast
from benchmarks.worlds import Idle
from shardcast import _compat
from shardcast.step.update import fusion

SIZE, RANKS = 1 << 12, 8  # elements of a pack
OPTIONS: dict[str, dict[str, Any]] = {
    "no options": {},
    "max_grad_norm": {"max_grad_norm": 1.0},
    "fp16, dynamic scale": {"param_dtype": torch.float16, "loss_scale": "dynamic"},
}
STAGES = ("decide", "update", "sync")
COLUMNS = ("options", *STAGES, "others", "launches", "beside packs", "host us", "least")
ROOT = str(Path(shardcast.__file__).parent / "step")


class Launches(TorchDispatchMode):
    """Counts operations but views and allocations, by the stage that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.by_stage: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view and "empty" not in str(func) and func.namespace == "aten":
            self.by_stage[_stage()] += 1
        return func(*args, **(kwargs or {}))


def _stage() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(ROOT):
        frame = frame.f_back
    name = "" if frame is None else Path(frame.f_code.co_filename).relative_to(ROOT).parts[0]
    return name if name in STAGES else "others"


@contextmanager
def accelerator() -> Iterator[None]:
    """A CPU passes for one, and an update of a range is one operation, as where it is compiled."""
    is_host, in_pieces = _compat.is_host, fusion.in_pieces
    _compat.is_host = lambda _device: False
    fusion.in_pieces = lambda _fusion, operands, *_: operands[-1].relu_()
    try:
        yield
    finally:
        _compat.is_host, fusion.in_pieces = is_host, in_pieces


def measure(packs: int, rounds: int) -> dict[str, tuple[Counter[str], list[float]]]:
    """Launches of a step by stage, and seconds of the processor of some steps."""
    torch.set_num_threads(1)
    with accelerator():
        return {name: one(packs, rounds, fields) for name, fields in OPTIONS.items()}


def one(packs: int, rounds: int, fields: dict[str, Any]) -> tuple[Counter[str], list[float]]:
    model = nn.ParameterList(torch.ones(2, SIZE // 2) for _ in range(packs))
    plain = torch.optim.AdamW(model.parameters())
    fields = {"param_dtype": torch.bfloat16, **fields}
    optimizer = shardcast.shard(
        model, plain, process_group=Idle(0, RANKS), pack_params=1, fuse="eager", **fields
    )
    grads: list[Tensor] = [torch.full_like(param, 1e-3) for param in model]
    counter, seconds = Launches(), []
    for number in range(rounds + 3):
        torch.autograd.backward(list(map(optimizer.scale_loss, model)), grads)
        begin = time.process_time()
        if number == 2:  # state and constants are there
            with counter:
                optimizer.step()
        else:
            optimizer.step()
        seconds.append(time.process_time() - begin)
        optimizer.zero_grad()
    counter.by_stage["packs"] = packs
    return counter.by_stage, seconds[3:]


def rows(results: dict[str, tuple[Counter[str], list[float]]]) -> Sequence[tuple[str, ...]]:
    """A row for each set of options; times are the median and the least of all steps."""
    lines = []
    for name, (by_stage, seconds) in results.items():
        by_stage["sync"] += 1  # nothing is sent here
        stages = [by_stage[stage] for stage in (*STAGES, "others")]
        packs = int(by_stage["packs"])
        times = [f"{1e6 * statistics.median(seconds):.0f}", f"{1e6 * min(seconds):.0f}"]
        total = sum(stages)
        lines.append((name, *map(str, stages), str(total), str(total - packs), *times))
    return lines
