"""What the parts share: where they run, where figures go, and how time is taken."""

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
    """Where a part runs and writes. Every figure is on disk as soon as it is known.

    Attributes:
        dry: run on the CPU with tiny sizes.
        path: the JSON file of the part; what is in it already stays.
        card: number of the device.
        until: when the part is stopped, in ``time.monotonic()``, which all processes share.
        figures: rows, each a flat dictionary that JSON knows.
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
        """The same for one of several ranks: on a card of its own, where there are enough."""
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
        """In one go: the part may be stopped, and its file read, at any moment."""
        whole = self.path.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(self.figures, indent=1, default=str))
        whole.replace(self.path)

    @contextmanager
    def row(self, **known: Any) -> Iterator[dict[str, Any]]:
        """A row that is filled within; an error becomes a part of it and does not go on."""
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
        """Bytes that can still be allocated on the device."""
        return 1 << 40 if self.dry else torch.cuda.mem_get_info()[0]

    def sync(self) -> None:
        """Wait for the device."""
        if not self.dry:
            torch.cuda.synchronize()

    def times(self, run: Callable[[], object], rounds: int = 10, warm: int = 3) -> list[float]:
        """Milliseconds of ``run`` on the device, per round."""
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
        """The median of :meth:`times`."""
        return statistics.median(self.times(run, rounds, warm))

    @contextmanager
    def peak(self, found: dict[str, Any], key: str) -> Iterator[None]:
        """Note the most bytes allocated within, above what was there before."""
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
    """The rows of a part so far."""
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return rows


def _host_time(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def flat_model(numel: int, device: torch.device) -> nn.ParameterList:
    """Matrices of 2**24 elements each, the last one of the rest; vectors would stay fp32."""
    sizes = [1 << 24] * (numel // (1 << 24)) + ([numel % (1 << 24)] if numel % (1 << 24) else [])
    return nn.ParameterList(torch.randn(2, size // 2, device=device) for size in sizes)


def give_gradients(model: nn.Module, scale: float = 1e-3) -> None:
    """Gradients as a backward would leave them, in the dtype that each parameter wants."""
    for param in model.parameters():
        dtype = param.grad_dtype or param.dtype
        param.grad = torch.full_like(param, scale, dtype=dtype)


def tokens(bench: Bench, batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and targets that can be learned from them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(vocabulary, (batch, length), generator=generator).to(bench.device)
    return x, (x * 7 + 3) % vocabulary


def kernels(run: Callable[[], object]) -> dict[str, tuple[int, float]]:
    """Kernels and copies on the device during ``run``: how often, and microseconds together."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return {
        event.key: (event.count, event.self_device_time_total)
        for event in seen.key_averages()
        # An operator has its kernels' time too, an annotation that of everything in it.
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    }
