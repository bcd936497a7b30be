"""Stores: fp32 values of an owned span, kept exactly or in fewer bytes, here or on the host.

The update works on fp32; a store hands it a window (:meth:`Store.read`) and takes it back
(:meth:`Store.write`). Bytes per element, and what comes back:

* :class:`ExactStore`, 4: the same bits. On the device a window is the memory itself.
* :class:`SplitStore`, 2: the same bits, for masters beside a bf16 parameter. The idea of keeping
  the 16 bits that the cast drops is that of "Revisiting BFloat16 Training" (arXiv:2010.06192).
* :class:`Bf16Store`, 2: rounded stochastically, so that small changes count in the mean.
* :class:`Blocks8Store`, 1 and a scale per block: rounded on a scale of the block's largest value,
  as in "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861), with powers in place
  of a table.

Values that were read and are written back unchanged stay the same in all of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Protocol

import torch
from torch import Tensor

from shardcast.plan.precision import MASTER_DTYPE

TIE = 1 << 15  # half of the distance between neighbours in bf16, in steps of fp32
BLOCK = 128  # most elements that share a scale


class Store(Protocol):
    """Fp32 values; slices are of the owned span, and begin at a multiple of the alignment."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    @property
    def direct(self) -> bool:
        """Whether :meth:`read` returns the memory itself, so that nothing need be written back."""

    def read(self, part: slice) -> Tensor:
        """1-d fp32, on the device where the update runs."""

    def write(self, part: slice, values: Tensor, chance: Tensor | None = None) -> None:
        """Take 1-d fp32 values.

        Args:
            chance: for stochastic rounding, per value a number in [0, 65536), int32, which may be
                overwritten; ``None`` rounds to nearest.
        """


class Place:
    """Where the bytes of a store lie.

    Args:
        device: where the update runs.
        host: keep them in host memory, pinned for an accelerator, and send windows.
    """

    def __init__(self, device: torch.device, host: bool) -> None:
        self.device, self.host = device, host

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of a store."""
        if not self.host:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        return torch.zeros(numel, dtype=dtype, pin_memory=self.device.type == "cuda")

    def fetch(self, kept: Tensor) -> Tensor:
        """A window for the update; a copy where the bytes are on the host."""
        # Copies are ordered by the device: a window is sent back before it is fetched anew (see
        # lanes), and the host never reads this memory except by a fetch.
        return kept.to(self.device, copy=True, non_blocking=True) if self.host else kept


class ExactStore:
    """All 32 bits.

    Args:
        data: 1-d fp32, the memory; :meth:`Place.zeros` makes it, if it is not there already.
    """

    def __init__(self, data: Tensor, place: Place) -> None:
        self.data, self._place = data, place

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def direct(self) -> bool:
        return not self._place.host

    def read(self, part: slice) -> Tensor:
        return self._place.fetch(self.data[part])

    def write(self, part: slice, values: Tensor, chance: Tensor | None = None) -> None:
        mine = self.data[part]
        if values.data_ptr() != mine.data_ptr():
            mine.copy_(values, non_blocking=True)


class SplitStore:
    """The exact values, of which ``published`` holds the upper half.

    A value is its bf16 cast (nearest, ties to even) plus a signed distance that fits 16 bits, as
    integers of the bit pattern. One pattern is missing: an even bf16 value has 65,537 fp32 values
    that round to it, its two ties among them, and :attr:`_ties` lists those at the upper one; of
    weights without a pattern it is one in 131,072. NaN stays NaN but loses its payload.

    The list has no fixed length and lies on the host, so on an accelerator :meth:`write` waits.

    Args:
        published: 1-d bf16, the owned span of the pack; :meth:`write` casts into it.
    """

    direct = False

    def __init__(self, published: Tensor, place: Place) -> None:
        self._published, self._place = published, place
        self._rest = place.zeros(published.numel(), torch.int16)
        self._ties = array("q")  # positions in the span, ascending

    @property
    def nbytes(self) -> int:
        return self._rest.nbytes + self._ties.itemsize * len(self._ties)

    def _listed(self, part: slice) -> tuple[slice, int]:
        """Where in the list the ties of a part are, and where the part begins."""
        start, stop, _ = part.indices(self._rest.numel())
        return slice(bisect_left(self._ties, start), bisect_left(self._ties, stop)), start

    def read(self, part: slice) -> Tensor:
        upper = _upper(self._published[part])
        bits = upper + self._place.fetch(self._rest[part])
        listed, start = self._listed(part)
        if listed.start < listed.stop:
            bits[torch.tensor(self._ties[listed], device=bits.device) - start] += 2 * TIE
        # Only of a weight that was set to zero by hand the sign can change: it would be a NaN.
        wrong = (bits ^ upper).bitwise_right_shift_(31)  # all ones there, else zero
        bits -= wrong.bitwise_and_(bits - upper)
        return bits.view(MASTER_DTYPE)

    def write(self, part: slice, values: Tensor, chance: Tensor | None = None) -> None:
        published = self._published[part]
        published.copy_(values)
        rest = values.contiguous().view(torch.int32) - _upper(published)
        self._rest[part].copy_(rest, non_blocking=True)  # the upper tie becomes the lower one
        listed, start = self._listed(part)
        new = array("q")
        if rest.numel() and rest.max() >= TIE:  # more than that: a NaN
            new.extend((rest.eq_(TIE).nonzero().view(-1) + start).tolist())
        self._ties[listed] = new


class Bf16Store:
    """Values rounded to bf16, by chance up or down, so that the mean is the value.

    With round-to-nearest a second moment would stand still: it changes by a thousandth per step,
    and bf16 has steps of a 128th.
    """

    direct = False

    def __init__(self, numel: int, place: Place) -> None:
        self._place = place
        self._data = place.zeros(numel, torch.bfloat16)

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def read(self, part: slice) -> Tensor:
        return self._place.fetch(self._data[part]).to(MASTER_DTYPE)

    def write(self, part: slice, values: Tensor, chance: Tensor | None = None) -> None:
        if chance is not None:
            # What is added carries into the upper half as often as the lower half is large.
            chance.add_(values.view(torch.int32)).bitwise_and_(-1 << 16)
            values = chance.view(MASTER_DTYPE)
        self._data[part].copy_(values, non_blocking=True)


class Blocks8Store:
    """One byte per value and an fp32 scale per block, the block's largest absolute value.

    A signed value is kept as its root, an unsigned one as its fourth root, in whole steps of the
    scale: fine where values are small, for a second moment that became zero would make the next
    step explode, and one above zero never becomes it. Rounded to nearest.

    Args:
        block: elements per scale, a divisor of the alignment of slots, so that no block has
            elements of two parameters.
    """

    direct = False

    def __init__(self, numel: int, block: int, signed: bool, place: Place) -> None:
        self._numel, self._block, self._signed, self._place = numel, block, signed, place
        blocks = -(-numel // block)
        self._codes = place.zeros(blocks * block, torch.int8 if signed else torch.uint8)
        self._scales = place.zeros(blocks, MASTER_DTYPE)

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    def _blocks(self, part: slice) -> tuple[slice, slice, int]:
        """The codes and the scales of a part, whole blocks, and the part's length."""
        start, stop, _ = part.indices(self._numel)
        first, last = start // self._block, -(-stop // self._block)
        return slice(first * self._block, last * self._block), slice(first, last), stop - start

    def read(self, part: slice) -> Tensor:
        codes, scales, numel = self._blocks(part)
        root = self._place.fetch(self._codes[codes]).to(MASTER_DTYPE)
        root = root.div_(127 if self._signed else 255)
        values = root * root.abs() if self._signed else root.square_().square_()
        scale = self._place.fetch(self._scales[scales])
        return values.view(-1, self._block).mul_(scale[:, None]).view(-1)[:numel]

    def write(self, part: slice, values: Tensor, chance: Tensor | None = None) -> None:
        codes, scales, numel = self._blocks(part)
        missing = codes.stop - codes.start - numel
        if missing:  # the padding behind the last slot
            values = torch.nn.functional.pad(values, (0, missing))
        rows = values.view(-1, self._block)
        scale = rows.abs().amax(dim=1)
        share = rows / scale.clamp_min(torch.finfo(MASTER_DTYPE).tiny)[:, None]
        if self._signed:
            steps = share.abs().sqrt_().mul_(127).round_().copysign_(share)
        else:
            root = share.sqrt().sqrt_()
            least = (root * 1e30).clamp_(max=1)  # 1 for all but zeros
            steps = torch.maximum(root.mul_(255).round_(), least, out=root)
        self._codes[codes].copy_(steps.view(-1), non_blocking=True)
        self._scales[scales].copy_(scale, non_blocking=True)


def block_of(alignment: int, dtype: torch.dtype) -> int:
    """Elements that share a scale in a pack of ``dtype``; ``alignment`` is in bytes."""
    return min(BLOCK, alignment // dtype.itemsize)


def _upper(published: Tensor) -> Tensor:
    """The bit patterns of bf16 values as fp32, int32."""
    return published.to(MASTER_DTYPE).view(torch.int32)


def chances(start: int, numel: int, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent numbers in [0, 65536) for each of ``numel`` elements, int32.

    Each is a function of the element's position and of ``seed`` alone, so that rounding depends
    neither on the world size nor on how an update is cut. A multiply-and-shift hash in wrapping
    32-bit arithmetic, with the mixing steps of MurmurHash3.

    Args:
        start: position of the first element in its pack.
        seed: 0-dim int32; its device is where the numbers are made.
    """
    bits = torch.arange(numel, dtype=torch.int32, device=seed.device)
    bits += _wrapped(start)
    bits *= _wrapped(0x9E3779B1)
    bits ^= seed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits ^= (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        bits *= _wrapped(factor)
    return (bits >> 16).bitwise_and_(0xFFFF), bits.bitwise_and_(0xFFFF)


def _wrapped(number: int) -> int:
    """``number`` modulo 2**32, as a signed integer of 32 bits."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
