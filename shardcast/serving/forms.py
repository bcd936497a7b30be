"""Forms: how a block of fp32 values becomes codes and a scale, and the values that these stand for.

Each scale is a power of two, so what a code stands for *is* a bf16 number, and quantizing it again
gives the same value. That holds for all values that a block can have here: a block whose codes
would stand for numbers below those of bf16 is zeros, and one beyond them NaN.

Bits are those of others: ``mxfp8`` and ``mxfp4`` of torchao's ``to_mx`` with
``ScaleCalculationMode.FLOOR``, those with ``_rceil`` with ``RCEIL``, ``fp8_block128`` of
transformers' ``Fp8Quantize`` with ``scale_fmt`` ``ue8m0``. Exponents are found in integers, for a
logarithm in floating point depends on the device.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from shardcast import _compat

BIAS = 127  # of an exponent in fp32, bf16 and E8M0
MANTISSA = 23  # bits in fp32
EXPONENT = 0x7F800000  # its bits there
NAN_BITS = 0x7FC0  # of bf16, as torch has them
NAN_SCALE = 255  # the E8M0 byte of a block with a NaN
E4M3_MAX = 448.0
E4M3_INFINITE = 248.0 * 2.0**120  # rounds to 2**128
E2M1_MAX = 6.0


class Form(ABC):
    """One form; blocks are of ``(block_rows, block_columns)`` elements of a matrix.

    Attributes:
        name: of the form.
        lowest: the least byte of a scale whose codes all stand for bf16 numbers.
        of_zeros: the byte of the scale of zeros.
        limit: the largest size of a code.
        bits: of a code.
    """

    name: ClassVar[str]
    block_rows: ClassVar[int]
    block_columns: ClassVar[int]
    lowest: ClassVar[int]
    of_zeros: ClassVar[int] = 0
    limit: ClassVar[float] = E4M3_MAX
    bits: ClassVar[int] = 8

    def unit(self, shape: tuple[int, ...]) -> int:
        """Return how many elements of a parameter, from its first one, have one owner together.

        That is a row of blocks, or a block of elements that are in a row.
        """
        columns = self.block_columns if self.block_rows == 1 else shape[-1]
        return self.block_rows * columns

    def quantize(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of a matrix.

        Args:
            values: of shape ``(..., rows, columns)``, whole blocks; fp32, or what is exact in it.

        Returns:
            Codes, float8_e4m3fn of that shape, or uint8 with two codes in a byte, the first one in
            its lower half; and the bytes of scales, uint8 of ``(..., block rows, block columns)``:
            ``2**(byte - 127)``, 255 for NaN.
        """
        scaled, scale = self._scaled(values)
        return self._codes(scaled.reshape(values.shape)), scale

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the bf16 values that codes, maybe as bytes, and scales stand for."""
        return self.dequantize_bits(codes, scales).view(torch.bfloat16)

    def dequantize_bits(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the same as int16: a compiler would choose other bits of a NaN."""
        if _compat.is_host(codes.device) and not torch.compiler.is_compiling():
            # torch's own conversions from fp8 take the longest on a CPU.
            index = codes.view(torch.uint8).reshape(-1).int()
            values = _table(self).index_select(0, index).view(torch.float32)
            return self._scaled_back(values.view(*codes.shape[:-1], -1), scales)
        return self._scaled_back(self.values(codes), scales)

    def round(self, values: Tensor) -> Tensor:
        """Round values to the grid: bf16, of their shape; ``dequantize(*quantize(values))``."""
        return self.round_bits(values).view(torch.bfloat16)

    def round_bits(self, values: Tensor) -> Tensor:
        """Return the same as int16."""
        scaled, scale = self._scaled(values)
        return self._scaled_back(self._nearest(scaled).reshape(values.shape), scale)

    def _scaled_back(self, values: Tensor, scales: Tensor) -> Tensor:
        """Return the codes as fp32, which may be overwritten, times their scales: bits of bf16.

        All NaN have the same bits, whatever a device makes of others.
        """
        blocks = self._blocks(values)
        blocks = blocks.mul_(_power(scales)[..., :, None, :, None])
        bits = blocks.to(torch.bfloat16).view(torch.int16)
        is_nan = scales == NAN_SCALE
        looks = _compat.is_host(values.device) and not torch.compiler.is_compiling()
        if not looks or is_nan.any():
            bits = bits.masked_fill(is_nan[..., :, None, :, None], NAN_BITS)
        return bits.reshape(values.shape)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix, or of a stack of matrices."""
        *stack, rows, columns = shape
        return (*stack, rows // self.block_rows, columns // self.block_columns)

    def _blocks(self, values: Tensor) -> Tensor:
        """View as ``(..., block rows, rows of a block, block columns, columns of a block)``."""
        *stack, rows, columns = values.shape
        return values.view(
            *stack,
            rows // self.block_rows,
            self.block_rows,
            columns // self.block_columns,
            self.block_columns,
        )

    def _scaled(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Divide blocks by their scales and saturate; return them, to be overwritten, and scales.

        The maximum of a block depends on no order.
        """
        blocks = self._blocks(values.contiguous().float())
        size = blocks.abs()
        largest = size.amax((-3, -1))
        byte = self._scale_of(largest)
        tiny = self._is_tiny(largest, byte)
        is_nan = self._is_nan(largest)
        factor = _power(2 * BIAS - byte).masked_fill_(tiny, 0.0)  # a zero keeps its sign
        scaled = torch.mul(blocks, factor[..., :, None, :, None], out=size)
        byte = byte.masked_fill(tiny, self.of_zeros).masked_fill_(is_nan, NAN_SCALE)
        return scaled.clamp_(-self.limit, self.limit), byte.to(torch.uint8)

    def values(self, codes: Tensor) -> Tensor:
        """Return what codes stand for without a scale: fp32."""
        return codes.view(torch.float8_e4m3fn).float()

    @abstractmethod
    def _scale_of(self, largest: Tensor) -> Tensor:
        """The byte of the scale of a block, int32, maybe below zero, from its largest size."""

    def _is_tiny(self, largest: Tensor, byte: Tensor) -> Tensor:
        """Return whether a block is zeros, as it would be once it was rounded."""
        return byte < self.lowest

    def _is_nan(self, largest: Tensor) -> Tensor:
        """Return whether a block is NaN, from its largest size."""
        return largest.isnan()

    def _nearest(self, scaled: Tensor) -> Tensor:
        """Rounded to the nearest code, ties to even; fp32."""
        return _to_bits(scaled, 3, -6)

    def _codes(self, scaled: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return scaled.to(torch.float8_e4m3fn)
        # In integers, which any accelerator has: a sign, four bits of exponent, three of mantissa.
        nearest = self._nearest(scaled)
        bits, size = nearest.view(torch.int32), nearest.abs()
        usual = (size.view(torch.int32) >> (MANTISSA - 3)) - ((BIAS - 7) << 3)
        tiny = (size * 2.0**9).to(torch.int32)  # below 2**-6, multiples of 2**-9
        code = torch.where(size < 2.0**-6, tiny, usual) | ((bits >> 24) & 0x80)
        return code.to(torch.uint8).view(torch.float8_e4m3fn)


class MXFP8(Form):
    """OCP MX: E4M3 codes, an E8M0 scale for each 32 of them along the input dimension."""

    name = "mxfp8"
    block_rows, block_columns = 1, 32
    lowest = 3  # 2**-9, the least code, times 2**(3 - 127) is the least bf16 number

    def _scale_of(self, largest: Tensor) -> Tensor:
        return _exponent(largest) - 8  # 2**8 is the largest power of two that is a code


class MXFP4(Form):
    """OCP MX: E2M1 codes, an E8M0 scale for each 32 of them along the input dimension."""

    name = "mxfp4"
    block_rows, block_columns = 1, 32
    lowest = 1
    limit = E2M1_MAX
    bits = 4

    def _scale_of(self, largest: Tensor) -> Tensor:
        return _exponent(largest) - 2

    def _nearest(self, scaled: Tensor) -> Tensor:
        return _to_bits(scaled, 1, 0)

    def _codes(self, scaled: Tensor) -> Tensor:
        values = self._nearest(scaled)
        twice = (2 * values.abs()).to(torch.int8)  # 0, 1, 2, 3, 4, 6, 8, 12
        code = twice - ((twice - 4).clamp_(min=0) >> 1) - ((twice - 8).clamp_(min=0) >> 2)
        sign = (values.view(torch.int32) >> 28).to(torch.int8) & 8
        code = ((code & 7) | sign).view(torch.uint8)
        return code[..., ::2] | (code[..., 1::2] << 4)

    def values(self, codes: Tensor) -> Tensor:
        # Shifts, not a stack of both halves, of which a compiler would make a kernel of its own.
        shifts = 4 * torch.arange(2, dtype=torch.uint8, device=codes.device)
        pair = ((codes.unsqueeze(-1) >> shifts) & 15).flatten(-2)
        size = (pair & 7).float()
        size = torch.where(size < 4, size / 2, torch.where(size < 6, size - 2, 2 * size - 8))
        return torch.where(pair > 7, -size, size)


class Covering(Form):
    """Forms whose scale is the least power of two by which no code saturates.

    So of codes times any power of two, however they were found, all values stay as they are.

    Attributes:
        infinite: a block with so large a value is NaN: its code times the scale would be an
            infinity in bf16, and not quantized as it was before.
    """

    infinite: ClassVar[float] = E4M3_INFINITE

    def _scale_of(self, largest: Tensor) -> Tensor:
        return _exponent_above(largest / self.limit)

    def _is_tiny(self, largest: Tensor, byte: Tensor) -> Tensor:
        # What is rounded down to half of the largest code has half the scale from then on.
        lowest = (largest * 2.0 ** (BIAS - self.lowest)).clamp_(max=self.limit)
        return self._nearest(lowest) <= self.limit / 2

    def _is_nan(self, largest: Tensor) -> Tensor:
        return ~(largest < self.infinite)


class MXFP8RCEIL(Covering, MXFP8):
    """``mxfp8`` with exponents rounded up."""

    name = "mxfp8_rceil"


class MXFP4RCEIL(Covering, MXFP4):
    """``mxfp4`` with exponents rounded up."""

    name = "mxfp4_rceil"
    infinite = 3.5 * 2.0**126  # rounds to 2**128


class FP8Block128(Covering):
    """E4M3 codes, and a scale for each 128 x 128 of them that is a power of two."""

    name = "fp8_block128"
    block_rows, block_columns = 128, 128
    lowest = 3
    of_zeros = BIAS  # a scale of 1

    def _scale_of(self, largest: Tensor) -> Tensor:
        # The least power of two that is not below the reciprocal of a reciprocal: as transformers.
        inverse = 1.0 / (E4M3_MAX / largest)
        return _exponent_above(inverse)


FORMS: dict[str, Form] = {
    form.name: form for form in (MXFP8(), MXFP4(), FP8Block128(), MXFP8RCEIL(), MXFP4RCEIL())
}


@functools.cache
def _table(form: Form) -> Tensor:
    """Return what each byte of codes stands for: fp32, two of them as one int64."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = form.values(codes)
    return values if form.bits == 8 else values.view(torch.int64)


def _to_bits(values: Tensor, bits: int, lowest: int) -> Tensor:
    """Fp32 values with so many bits of mantissa, or multiples of those at ``2**lowest``.

    Rounded by adding a number whose last bit is the one to be kept: to nearest, ties to even.
    """
    power = (values.view(torch.int32) & EXPONENT).view(torch.float32)
    large = power.clamp_(min=2.0**lowest).mul_(1.5 * 2.0 ** (MANTISSA - bits))
    return (values + large).sub_(large).copysign_(values)


def _exponent(size: Tensor) -> Tensor:
    """The biased exponent of fp32 numbers without a sign."""
    return size.view(torch.int32) >> MANTISSA


def _exponent_above(size: Tensor) -> Tensor:
    """The biased exponent of the least power of two that is not below a number."""
    bits = size.view(torch.int32)
    return (bits >> MANTISSA) + ((bits & ((1 << MANTISSA) - 1)) != 0)


def _power(byte: Tensor) -> Tensor:
    """Return ``2**(byte - 127)`` of bytes in [1, 254], fp32; NaN of 255, and zero of 0."""
    power = (byte.to(torch.int32).clamp(0, NAN_SCALE) << MANTISSA).view(torch.float32)
    return torch.where(byte == NAN_SCALE, torch.nan, power)
