"""A hash of the bits of a tensor, to compare ranks.

A hash is the sum, modulo ``2**64``, of a tensor's words, each multiplied by an odd number that
depends on its place (Carter and Wegman, 1979). It does not depend on the order of the sum, and
detects a change of any single word. It finds errors, not attacks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

COLUMNS = 1 << 12  # words per row, each with its own factor
# rows hashed at a time: in cache on the host; 32 MiB of temporary memory elsewhere
ROWS_ON_HOST, ROWS = 1 << 4, 1 << 10
ODD = 0x9E3779B97F4A7C15 - (1 << 64)
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class Hasher:
    """Hashes of tensors on one device; see :func:`hasher_of`."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)  # equal on all ranks

        def odd(count: int) -> Tensor:
            bits = torch.iinfo(torch.int64)
            return torch.randint(bits.min, bits.max, (count,), generator=generator) | 1

        self._rows = ROWS_ON_HOST if device.type == "cpu" else ROWS
        self._columns, self._of_rows = odd(COLUMNS).to(device), odd(ROWS).to(device)
        self._zero = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self, values: Tensor) -> Tensor:
        """Return the hash of the bits of a dense tensor of any dtype, 0-dim int64."""
        data = values.detach().reshape(-1).view(torch.uint8)
        aligned = data.numel() // 4 * 4  # bytes in whole words
        total = self._zero
        if aligned < data.numel():  # 1 to 3 bytes
            total = (data[aligned:].long() * self._columns[: data.numel() - aligned]).sum()
        words = data[:aligned].view(torch.int32)
        for start in range(0, words.numel(), self._rows * COLUMNS):
            part = words[start : start + self._rows * COLUMNS]
            rows = part.numel() // COLUMNS
            if rows:
                # int32 times int64, so that differences of words do not cancel by their highest
                # bits.
                sums = (part[: rows * COLUMNS].view(rows, COLUMNS) * self._columns).sum(1)
                total = total * ODD + (sums * self._of_rows[:rows]).sum()
            if tail := part[rows * COLUMNS :].numel():
                total = total * ODD + (part[-tail:] * self._columns[:tail]).sum()
        return total

    def joined(self, hashes: Sequence[Tensor]) -> Tensor:
        """Return one hash of several."""
        return self(torch.stack([*hashes])) if hashes else self._zero


@functools.cache
def hasher_of(device: torch.device) -> Hasher:
    """Return the cached hasher of a device; its tables take 40 KiB."""
    return Hasher(device)


def bits_of(values: Tensor) -> Tensor:
    """Return the bits of each element as an integer, 1-d."""
    flat = values.detach().reshape(-1)
    return flat.view(INTEGERS[flat.element_size()])
