"""``moments``: Adam's moments and SGD's momentum in 2 bytes or 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardcast.extensions import chance
from shardcast.memory.codecs import Codec, Pieces
from shardcast.memory.shard import Shard
from shardcast.option_values import Option, one_of
from shardcast.plan.precision import MASTER_DTYPE

UPPER = -1 << 16  # mask of the upper half of an fp32 value, its bf16 bits


@dataclass(frozen=True)
class Bf16(Codec):
    """2 bytes: bf16 with stochastic rounding, so that the expected value is exact.

    With rounding to nearest a second moment would stand still: it changes by a thousandth per step,
    and neighboring bf16 values differ by a 128th.
    """

    plain = False
    by_chance = True

    def pieces(self, row: int) -> tuple[tuple[torch.dtype, int], ...]:
        return ((torch.bfloat16, row),)

    def row_keys(self, shard: Shard, row: int) -> Tensor:
        return chance.row_keys(shard, row)

    def random_bits(self, keys: Tensor, like: Tensor, step: Tensor, number: int) -> Tensor:
        return chance.random_bits(keys, like, step, number)

    def decode(self, pieces: Pieces) -> Tensor:
        return pieces[0].to(MASTER_DTYPE)

    def encode(self, values: Tensor, bits: Tensor | None) -> Pieces:
        if bits is not None:
            # The probability of a carry into the upper half is the lower half's fraction.
            values = ((values.view(torch.int32) + bits) & UPPER).view(MASTER_DTYPE)
        return (values.to(torch.bfloat16),)


@dataclass(frozen=True)
class Int8(Codec):
    """1 byte, and one fp32 scale per row: the row's largest finite absolute value.

    Rounds to nearest, as in "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861), but
    with powers instead of a table: a signed value is stored as its square root, an unsigned one as
    its fourth root, in whole steps of the scale. So small values keep precision. That matters for a
    second moment: if it became zero, the next step would explode, and a positive one never becomes
    zero. The code above the last step is infinity, which the square of a large gradient may be.
    """

    plain = False

    @property
    def steps(self) -> int:
        """Number of steps from zero to the scale."""
        return 126 if self.signed else 254

    def pieces(self, row: int) -> tuple[tuple[torch.dtype, int], ...]:
        return ((torch.int8 if self.signed else torch.uint8, row), (MASTER_DTYPE, 1))

    def decode(self, pieces: Pieces) -> Tensor:
        codes, scales = pieces
        root = codes.to(MASTER_DTYPE) / self.steps
        values = root * root.abs() if self.signed else root.square().square()
        infinite = root * torch.inf  # 0 * inf is NaN, and is not used
        return torch.where(root.abs() > 1, infinite, values * scales[:, None])

    def encode(self, values: Tensor, bits: Tensor | None) -> Pieces:
        size = values.abs()
        # NaN stays in the scale and is not lost.
        scale = torch.where(size == torch.inf, 0.0, size).amax(dim=-1)
        root = (size / scale.clamp_min(torch.finfo(MASTER_DTYPE).tiny)[:, None]).sqrt()
        if self.signed:
            steps = (root * self.steps).round().clamp(max=self.steps + 1)
            return steps.copysign(values).to(torch.int8), scale
        root = root.sqrt()
        least = (root * 1e30).clamp(max=1)  # 1 for all values except zeros
        steps = torch.maximum((root * self.steps).round(), least).clamp(max=self.steps + 1)
        return steps.to(torch.uint8), scale


CODECS: dict[str, type[Codec]] = {"bf16": Bf16, "int8": Int8}

OPTION = Option(
    help="how Adam's moments and SGD's momentum are stored: fp32, bf16 (stochastic rounding) or "
    "int8 (with a scale per block)",
    within=one_of("fp32", *CODECS),
    # A second moment is never negative.
    codec=lambda config, name: CODECS[config.moments](signed=not name.endswith("_sq")),
)
