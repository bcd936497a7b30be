"""A sum that tells of writes to a tensor which torch does not count."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_WORD = torch.int64


def checksum(tensor: Tensor) -> Tensor:
    """A sum over the bits of a dense tensor, 0-dim int64; the order of words does not count.

    Waits for no device, and copies no tensor that is contiguous.
    """
    flat = tensor.detach().reshape(-1)
    size = flat.element_size()
    if size >= _WORD.itemsize:
        return flat.view(_WORD).sum()
    per_word = _WORD.itemsize // size
    # A sum of smaller integers would copy them to int64 first.
    whole = 0 if flat.storage_offset() % per_word else flat.numel() // per_word * per_word
    return flat[:whole].view(_WORD).sum() + flat[whole:].view(_INTEGERS[size]).sum()
