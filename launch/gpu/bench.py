"""Code that the parts share: device, figures, and timing."""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile


@dataclass
class Bench:
    """Device and output of a part. Every figure is written to disk at once.

    Attributes:
        dry: run on the CPU with tiny sizes.
        path: the JSON file of the part; existing rows are kept.
        card: number of the device.
        until: time of ``time.monotonic()``, equal in all processes, at which the part is stopped.
        figures: rows, each a flat dictionary of JSON values.
    """

    dry: bool
    path: Path
    card: int = 0
    until: float = math.inf

    def __post_init__(self) -> None:
        self.figures: list[dict[str, Any]] = read(self.path)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.dry else torch.device("cuda", self.card)

    def of_rank(self, rank: int) -> Bench:
        """Return the same for one of several ranks, on its own card if there are enough."""
        if self.dry:
            return self
        card = rank % torch.cuda.device_count()
        torch.cuda.set_device(card)
        return Bench(self.dry, self.path, card, self.until)

    @property
    def left(self) -> float:
        """Seconds until the part is stopped."""
        return max(1.0, min(self.until - time.monotonic(), 1e6))

    def note(self, **figure: Any) -> None:
        """Add a row."""
        self.figures.append(figure)
        self.write()

    def write(self) -> None:
        """Replace the file atomically: the part may be stopped, and its file read, at any time."""
        whole = self.path.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(self.figures, indent=1, default=str))
        whole.replace(self.path)

    @contextmanager
    def row(self, **known: Any) -> Iterator[dict[str, Any]]:
        """Add a row that the block fills; an exception is caught and added to the row."""
        found = dict(known)
        try:
            yield found
        except Exception as error:
            found["error"] = "".join(traceback.format_exception_only(error)).strip()[:500]
        self.note(**found)
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()

    def free(self) -> int:
        """Return the bytes that can still be allocated on the device."""
        return 1 << 40 if self.dry else torch.cuda.mem_get_info()[0]

    def sync(self) -> None:
        """Wait for the device."""
        if not self.dry:
            torch.cuda.synchronize()

    def times(self, run: Callable[[], object], rounds: int = 10, warm: int = 3) -> list[float]:
        """Return the milliseconds of ``run`` on the device, per round."""
        for _ in range(warm):
            run()
        if self.dry:
            return [_host_time(run) for _ in range(2)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(events)]

    def time(self, run: Callable[[], object], rounds: int = 10, warm: int = 3) -> float:
        """Return the median of :meth:`times`."""
        return statistics.median(self.times(run, rounds, warm))

    @contextmanager
    def peak(self, found: dict[str, Any], key: str) -> Iterator[None]:
        """Store the peak of bytes allocated inside the block, relative to its start."""
        if self.dry:
            yield
            return
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        torch.cuda.synchronize()
        found[key] = torch.cuda.max_memory_allocated() - before


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a part so far."""
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return rows


def _host_time(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def flat_model(numel: int, device: torch.device) -> nn.ParameterList:
    """Return matrices of up to 2**24 elements each; vectors would stay in fp32."""
    sizes = [1 << 24] * (numel // (1 << 24)) + ([numel % (1 << 24)] if numel % (1 << 24) else [])
    return nn.ParameterList(torch.randn(2, size // 2, device=device) for size in sizes)


def give_gradients(model: nn.Module, scale: float = 1e-3) -> None:
    """Set gradients as a backward would, in the dtype that each parameter requires."""
    for param in model.parameters():
        dtype = param.grad_dtype or param.dtype
        param.grad = torch.full_like(param, scale, dtype=dtype)


def tokens(bench: Bench, batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return random tokens, and targets that can be learned from them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(vocabulary, (batch, length), generator=generator).to(bench.device)
    return x, (x * 7 + 3) % vocabulary


def kernels(run: Callable[[], object]) -> dict[str, tuple[int, float]]:
    """Return the count and total microseconds of each kernel and copy during ``run``."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return {
        event.key: (event.count, event.self_device_time_total)
        for event in seen.key_averages()
        # Skip operators and annotations: their times include those of their kernels.
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    }
