"""A hash of the elements of a tensor: 64 bits, a sum over elements in any order.

Each element adds the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) of its bits and its
place. It finds errors, not attacks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardcast.memory.slices import slices

HASHED = 1 << 18  # elements at a time
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, in 64 bits with a sign
ROUNDS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def hash_of(values: Tensor, index: Tensor, key: int) -> Tensor:
    """0-dim int64 of the bits of ``values``, of any dtype, each at its ``index``."""
    bits = bits_of(values)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in slices(bits.numel(), HASHED):
        places = _mixed(index[part].to(bits.device) * GOLDEN + key)
        total += _mixed(places ^ (bits[part].long() * GOLDEN)).sum()
    return total


def bits_of(values: Tensor) -> Tensor:
    """The bits of each element as an integer, 1-d."""
    flat = values.detach().reshape(-1)
    return flat.view(INTEGERS[flat.element_size()])


def _mixed(numbers: Tensor) -> Tensor:
    for shift, factor in ROUNDS:
        # Shifted as if there were no sign.
        numbers = (numbers ^ ((numbers >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return numbers
