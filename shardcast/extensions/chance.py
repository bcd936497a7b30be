"""Random bits for stochastic rounding, from parameter name, element and step alone.

The bits do not depend on the number of ranks, packs, partition or mesh, so a run gives the same
values for any of them. An element's bits are a multiply-and-shift hash, in wrapping 32-bit
arithmetic with the mixing steps of MurmurHash3, of the parameter's name, the element's index, the
step and the state tensor. The parameter's part is one number per row, its *key*; within the update
an element has only its place in the row.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from shardcast import _compat
from shardcast._compat import dtensor
from shardcast.memory.shard import Shard

# All odd, as signed 32-bit numbers.
INDEX = 0x9E3779B1 - (1 << 32)  # from one element to the next
STEP = 0x165667B1  # from one step to the next
SALT = 0x27D4EB2F  # from one pair of state tensors to the next
MIXING = ((16, 0x85EBCA6B - (1 << 32)), (13, 0xC2B2AE35 - (1 << 32)))  # shifts and factors


def row_keys(shard: Shard, row: int) -> Tensor:
    """Return the key of each row of this rank's span, 1-d int32; 0 for rows of padding."""
    keys = torch.zeros(-(-shard.pack.own.numel // row), dtype=torch.int64, device="cpu")
    for _, fragment, param in shard.owned():
        first, last = fragment.param_range
        start = shard.local(fragment.start, fragment.stop).start // row
        begins = global_index(param, torch.arange(first, last, row, device="cpu"))
        keys[start : start + len(begins)] = name_hash(fragment.slot.name) + begins * INDEX
    half = 1 << 31
    return ((keys + half) % (2 * half) - half).to(shard.home.device, torch.int32)


def name_hash(name: str) -> int:
    """Return a 32-bit hash of a parameter's name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


def global_index(param: Tensor, index: Tensor) -> Tensor:
    """Convert places in the flat local tensor to places in the flat parameter of a mesh.

    If a matrix is cut by columns and a row of the span crosses a line of the matrix, only the first
    part of the row is exact; the rest gets other elements' bits.
    """
    if not _compat.is_dtensor(param):
        return index
    local, indices, stride = _compat.local_tensor(param), torch.zeros_like(index), 1
    for dim in reversed(range(local.dim())):
        where = dtensor.indices_of(param, dim).to(index.device)
        indices += where[index % len(where)] * stride
        index = index // len(where)
        stride *= param.shape[dim]
    return indices


def lanes(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0, 1, 2, ... for the elements of a row."""
    return torch.arange(like.shape[-1], dtype=dtype, device=like.device)


def random_bits(keys: Tensor, like: Tensor, step: Tensor, number: int) -> Tensor:
    """Return numbers in [0, 65536) for the ``number``-th state tensor, int32, ``(rows, row)``.

    One hash serves two state tensors, with half of its bits each.

    Args:
        keys: keys of the rows.
        step: 0-dim, number of this step.
    """
    seed = step.to(torch.int32) * STEP + (number // 2 * SALT & 0x7FFFFFFF)
    bits = (keys[:, None] + lanes(like, torch.int32) * INDEX) ^ seed
    for shift, factor in MIXING:
        bits = (bits ^ ((bits >> shift) & ((1 << (32 - shift)) - 1))) * factor
    return ((bits >> 16) if number % 2 else bits) & 0xFFFF
