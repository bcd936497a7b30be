"""Bytes of all tensors that are in memory."""

from __future__ import annotations

import gc

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
