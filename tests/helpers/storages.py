"""Bytes of all tensors that are in memory, and of all that were at the most."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Memory = tuple[int, int]  # first address, one past the last


def memory(tensor: Tensor) -> Memory:
    """The address range that a tensor's storage spans, whatever storage object it is."""
    start = tensor.untyped_storage().data_ptr()
    return start, start + tensor.untyped_storage().nbytes()


def live(threshold: int = 2048) -> dict[int, int]:
    """Bytes in memory by address: all tensors whose storage is larger than ``threshold``.

    Storages that overlap count once; smaller ones are the scalars of the step.
    """
    gc.collect()
    kinds = (Tensor, nn.Parameter)  # no fake ones, which compiled tests may leave behind
    tensors = [item for item in gc.get_objects() if type(item) in kinds and not item.is_meta]
    ranges = sorted({memory(tensor) for tensor in tensors})
    found: dict[int, int] = {}
    end = 0
    for start, stop in ranges:
        if stop - start > threshold and stop > end:
            found[max(start, end)] = stop - max(start, end)
            end = stop
    return found


def peak_of(run: Callable[[], Any]) -> int:
    """Largest sum of bytes allocated on CPU during ``run()``, above what was there before."""
    gc.collect()  # what an earlier run left behind must not be freed, and counted, in this one
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        run()
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def settle(_group: object) -> None:
    """Have the collector of this process pass over what is there already."""
    gc.collect()
    gc.freeze()
