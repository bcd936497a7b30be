"""Bytes of all live tensors, and their peak."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Memory = tuple[int, int]  # first address, one past the last


def memory(tensor: Tensor) -> Memory:
    """Return the address range of a tensor's storage, regardless of the storage object."""
    start = tensor.untyped_storage().data_ptr()
    return start, start + tensor.untyped_storage().nbytes()


def live(threshold: int = 2048) -> dict[int, int]:
    """Return the bytes of all storages larger than ``threshold`` by address.

    Overlapping storages count once. The smaller ones are scalars of the step.
    """
    gc.collect()
    kinds = (Tensor, nn.Parameter)  # not the fake tensors that compiled tests may leave
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
    """Return the peak of CPU bytes allocated during ``run()``, relative to its start."""
    gc.collect()  # else garbage of earlier tests would be freed during this run
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        run()
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def settle(_group: object) -> None:
    """Exclude all current objects of this process from garbage collections."""
    gc.collect()
    gc.freeze()
