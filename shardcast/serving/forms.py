"""Forms: how a block of fp32 values becomes codes and a scale, and the values that these represent.

Each scale is a power of two. So a code represents a bf16 number, and quantizing that again gives
the same value. This holds for every block here: a block whose codes would represent numbers below
bf16's range becomes zeros, and one above it NaN.

Other libraries compute the same bits: torchao's ``to_mx`` with ``ScaleCalculationMode.FLOOR`` for
``mxfp8`` and ``mxfp4``; and, for values below ``2**126``, ``to_mx`` with ``RCEIL`` for forms with
``_rceil``, and transformers' ``Fp8Quantize`` with ``scale_fmt`` ``ue8m0`` for ``fp8_block128``.
Exponents are computed in integers, because a floating-point logarithm or quotient depends on the
device.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

BIAS = 127  # bias of exponents in fp32, bf16 and E8M0
MANTISSA = 23  # mantissa bits in fp32
EXPONENT = 0x7F800000  # exponent bits in fp32
NAN_BITS = 0x7FC0  # torch's bits of a bf16 NaN
NAN_SCALE = 255  # the E8M0 byte of a block with a NaN
E4M3_MAX = 448.0
E4M3_INFINITE = 248.0 * 2.0**120  # rounds to 2**128
E2M1_MAX = 6.0


class Form:
    """One form; its blocks are ``(block_rows, block_columns)`` elements of a matrix.

    Attributes:
        name: name of the form.
        lowest: smallest byte of a scale with which all codes represent bf16 numbers.
        of_zeros: byte of the scale of a block of zeros.
        limit: largest absolute value of a code.
        power: exponent of the largest power of two that is a code.
        bits: bits of a code.
    """

    name: ClassVar[str]
    block_rows: ClassVar[int]
    block_columns: ClassVar[int]
    lowest: ClassVar[int]
    of_zeros: ClassVar[int] = 0
    limit: ClassVar[float] = E4M3_MAX
    power: ClassVar[int] = 8
    bits: ClassVar[int] = 8

    def unit(self, shape: tuple[int, ...]) -> int:
        """Return how many consecutive elements of a parameter must have one owner.

        That is a row of blocks, or a block within one row.
        """
        columns = self.block_columns if self.block_rows == 1 else shape[-1]
        return self.block_rows * columns

    def quantize(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of a matrix.

        Args:
            values: of shape ``(..., rows, columns)``, whole blocks; fp32, or a dtype that fits
                fp32.

        Returns:
            Codes, float8_e4m3fn of that shape, or uint8 with two codes per byte, the first one in
                the lower half; and the bytes of scales, uint8 of
                ``(..., block rows, block columns)``: ``2**(byte - 127)``, 255 for NaN.
        """
        scaled, scale = self._scaled(values)
        return self._codes(scaled.reshape(values.shape)), scale

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the bf16 values of codes, possibly as bytes, and scales."""
        return self.dequantize_bits(codes, scales).view(torch.bfloat16)

    def dequantize_bits(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the same as int16, because a compiler would choose other bits for a NaN."""
        return self._scaled_back(self.values(codes), scales)

    def round(self, values: Tensor) -> Tensor:
        """Round values to the grid: bf16, of their shape; ``dequantize(*quantize(values))``."""
        return self.round_bits(values).view(torch.bfloat16)

    def round_bits(self, values: Tensor) -> Tensor:
        """Return the same as int16."""
        scaled, scale = self._scaled(values)
        return self._scaled_back(self._nearest(scaled).reshape(values.shape), scale)

    def _scaled_back(self, values: Tensor, scales: Tensor) -> Tensor:
        """Return fp32 codes, which may be overwritten, times their scales, as bf16 bits.

        All NaN get the same bits, whatever the device produces.
        """
        blocks = self._blocks(values)
        blocks = blocks.mul_(_power(scales)[..., :, None, :, None])
        bits = blocks.to(torch.bfloat16).view(torch.int16)
        is_nan = scales == NAN_SCALE
        return bits.masked_fill(is_nan[..., :, None, :, None], NAN_BITS).reshape(values.shape)

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
        """Divide blocks by their scales and saturate; return them, to be overwritten, with scales.

        The maximum of a block does not depend on an order.
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
        """Return the fp32 values of codes without a scale."""
        return codes.view(torch.float8_e4m3fn).float()

    def _scale_of(self, largest: Tensor) -> Tensor:
        """Return the byte of a block's scale, int32, possibly negative, from its largest size."""
        return _exponent(largest) - self.power

    def _is_tiny(self, largest: Tensor, byte: Tensor) -> Tensor:
        """Return whether a block rounds to zeros, from its largest size."""
        return byte < self.lowest

    def _is_nan(self, largest: Tensor) -> Tensor:
        """Return whether a block is NaN, from its largest size."""
        return largest.isnan()

    def _nearest(self, scaled: Tensor) -> Tensor:
        """Round to the nearest code, ties to even; fp32."""
        return _to_bits(scaled, 3, -6)

    def _codes(self, scaled: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return scaled.to(torch.float8_e4m3fn)
        # In integers, which every accelerator has: a sign, four exponent bits, three mantissa bits.
        nearest = self._nearest(scaled)
        bits, size = nearest.view(torch.int32), nearest.abs()
        usual = (size.view(torch.int32) >> (MANTISSA - 3)) - ((BIAS - 7) << 3)
        tiny = (size * 2.0**9).to(torch.int32)  # below 2**-6, codes are multiples of 2**-9
        code = torch.where(size < 2.0**-6, tiny, usual) | ((bits >> 24) & 0x80)
        return code.to(torch.uint8).view(torch.float8_e4m3fn)


class MXFP8(Form):
    """OCP MX: E4M3 codes, and an E8M0 scale per 32 codes along the input dimension."""

    name = "mxfp8"
    block_rows, block_columns = 1, 32
    lowest = 3  # 2**-9, the smallest code, times 2**(3 - 127) is the smallest bf16 number


class MXFP4(Form):
    """OCP MX: E2M1 codes, and an E8M0 scale per 32 codes along the input dimension."""

    name = "mxfp4"
    block_rows, block_columns = 1, 32
    lowest = 1
    limit = E2M1_MAX
    power = 2
    bits = 4

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
        # Shifts rather than a stack of both halves, which a compiler would turn into another
        # kernel.
        shifts = 4 * torch.arange(2, dtype=torch.uint8, device=codes.device)
        pair = ((codes.unsqueeze(-1) >> shifts) & 15).flatten(-2)
        size = (pair & 7).float()
        size = torch.where(size < 4, size / 2, torch.where(size < 6, size - 2, 2 * size - 8))
        return torch.where(pair > 7, -size, size)


class Covering(Form):
    """Forms whose scale is the smallest power of two with which no code saturates.

    So values that are codes times any power of two do not change.

    Attributes:
        infinite: a block with a value this large becomes NaN: its code times the scale would be
            infinite in bf16, and would not quantize to the same values again.
    """

    infinite: ClassVar[float] = E4M3_INFINITE

    def _scale_of(self, largest: Tensor) -> Tensor:
        # The next exponent if the mantissa is above that of the limit, by a carry.
        carry = int((2.0 - self.limit / 2.0**self.power) * 2.0**MANTISSA) - 1
        return ((largest.view(torch.int32) + carry) >> MANTISSA) - self.power

    def _is_tiny(self, largest: Tensor, byte: Tensor) -> Tensor:
        # A value that is rounded down to half of the largest code gets half the scale from then on.
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
    """E4M3 codes, and a power-of-two scale for each 128 x 128 codes."""

    name = "fp8_block128"
    block_rows, block_columns = 128, 128
    lowest = 3
    of_zeros = BIAS  # a scale of 1


FORMS: dict[str, Form] = {
    form.name: form for form in (MXFP8(), MXFP4(), FP8Block128(), MXFP8RCEIL(), MXFP4RCEIL())
}


def _to_bits(values: Tensor, bits: int, lowest: int) -> Tensor:
    """Round fp32 values to so many mantissa bits, or to multiples of those at ``2**lowest``.

    It adds a number whose last bit is the last one to keep, which rounds to nearest, ties to even.
    """
    power = (values.view(torch.int32) & EXPONENT).view(torch.float32)
    large = power.clamp_(min=2.0**lowest).mul_(1.5 * 2.0 ** (MANTISSA - bits))
    return (values + large).sub_(large).copysign_(values)


def _exponent(size: Tensor) -> Tensor:
    """Return the biased exponent of nonnegative fp32 numbers."""
    return size.view(torch.int32) >> MANTISSA


def _power(byte: Tensor) -> Tensor:
    """Return ``2**(byte - 127)`` for bytes in [1, 254], fp32; NaN for 255, and 0 for 0."""
    power = (byte.to(torch.int32).clamp(0, NAN_SCALE) << MANTISSA).view(torch.float32)
    return torch.where(byte == NAN_SCALE, torch.nan, power)
