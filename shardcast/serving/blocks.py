"""``fp8_block128`` in one Triton kernel: a program reads a block of 128 x 128 once, and writes it.

Inductor would need three kernels, because it reduces 16,384 elements in two steps and reads them
twice. The results are bitwise those of :mod:`.forms`. Arithmetic is in integers wherever the order
of operations or the device could matter.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SIDE = 128
WARPS = 16  # gives each thread 32 elements


@triton.jit
def _nearest(values):
    """See :func:`.forms._to_bits`: a mantissa of three bits, multiples of those at 2**-6."""
    bits = values.to(tl.int32, bitcast=True)
    power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    large = tl.maximum(power, 0.015625) * 1572864.0
    size = ((values + large) - large).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return (size | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _block(
    values,
    output,
    scales,
    width,
    rounds: tl.constexpr,
    side: tl.constexpr,
):
    """Quantize a block; write codes and scale, or its values on the grid."""
    row, column = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, side)
    start = row.to(tl.int64) * side * width + column * side
    place = start + lane[:, None] * width + lane[None, :]
    given = tl.load(values + place)
    if given.dtype == tl.int16:  # bits of bf16
        given = (given.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    bits = given.to(tl.int32, bitcast=True)
    # As integers, so that a NaN is the largest.
    most = tl.max(tl.max(bits & 0x7FFFFFFF, 1), 0)
    largest = most.to(tl.float32, bitcast=True)
    # torch divides a number by a tensor by multiplying with the reciprocal.
    inverse = tl.math.div_rn(1.0, tl.math.div_rn(1.0, largest) * 448.0)
    inverse = inverse.to(tl.int32, bitcast=True)
    byte = (inverse >> 23) + tl.where((inverse & 0x7FFFFF) != 0, 1, 0)
    lowest = tl.minimum(largest * 21267647932558653966460912964485513216.0, 448.0)  # 2**124
    is_tiny = _nearest(lowest) <= 224.0
    is_nan = most >= 0x7F780000  # 248 * 2**120
    exponent = tl.minimum(tl.maximum(254 - byte, 0), 255)
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    factor = tl.where(is_tiny, 0.0, factor)
    scaled = given * factor
    scaled = tl.where(scaled > 448.0, 448.0, tl.where(scaled < -448.0, -448.0, scaled))
    code = _nearest(scaled)
    byte = tl.where(is_nan, 255, tl.where(is_tiny, 127, byte))
    if rounds:
        back = code * (byte << 23).to(tl.float32, bitcast=True)
        # exact, because it is a bf16 number
        out = (back.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
        out = tl.where(is_nan, 0x7FC0, out).to(tl.int16)
        tl.store(output + place, out)
    else:
        raw = code.to(tl.int32, bitcast=True)
        size = raw & 0x7FFFFFFF
        tiny = (size.to(tl.float32, bitcast=True) * 512.0).to(tl.int32)
        usual = (size >> 20) - 960
        byte_of_code = tl.where(size < 0x3C800000, tiny, usual) | ((raw >> 24) & 0x80)
        tl.store(output + place, byte_of_code.to(tl.uint8))
        tl.store(scales + row.to(tl.int64) * (width // side) + column, byte.to(tl.uint8))


def _launch(values: Tensor, output: Tensor, scales: Tensor, rounds: bool) -> None:
    height, width = values.numel() // values.shape[-1], values.shape[-1]
    grid: Any = (height // SIDE, width // SIDE)
    with torch.cuda.device_of(values):
        _block[grid](values, output, scales, width, rounds=rounds, side=SIDE, num_warps=WARPS)


def round_(masters: Tensor, output: Tensor) -> None:
    """Write the published values of masters, as int16.

    Args:
        masters: fp32, contiguous, of shape ``(..., rows, columns)``.
    """
    _launch(masters, output, output, rounds=True)


def collapse_(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write codes and scales, as bytes, of contiguous fp32 or bf16 values."""
    assert codes.dtype == scales.dtype == torch.uint8
    given = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
    _launch(given, codes, scales, rounds=False)
