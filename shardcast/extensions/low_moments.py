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

UPPER = -1 << 16  # mask of the half of the bits of an fp32 value that bf16 has


@dataclass(frozen=True)
class Bf16(Codec):
    """2 bytes: rounded to bf16, by chance up or down, so that the mean is the value.

    Rounded to nearest a second moment would stand still: it changes by a thousandth per step, and
    bf16 has steps of a 128th.
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
            # The sum carries into the upper half as often as the lower half is large.
            values = ((values.view(torch.int32) + bits) & UPPER).view(MASTER_DTYPE)
        return (values.to(torch.bfloat16),)


@dataclass(frozen=True)
class Int8(Codec):
    """1 byte and an fp32 scale per row, the row's largest finite absolute value.

    Rounded to nearest as in "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861),
    with powers in place of a table: a signed value is kept as its root, an unsigned one as its
    fourth root, in whole steps of the scale. That is fine where values are small, for a second
    moment that became zero would make the next step explode, and one above zero never becomes it.
    The code above the last step is infinity, as the square of a large gradient may be.
    """

    plain = False

    @property
    def steps(self) -> int:
        """The steps from zero to the scale."""
        return 126 if self.signed else 254

    def pieces(self, row: int) -> tuple[tuple[torch.dtype, int], ...]:
        return ((torch.int8 if self.signed else torch.uint8, row), (MASTER_DTYPE, 1))

    def decode(self, pieces: Pieces) -> Tensor:
        codes, scales = pieces
        root = codes.to(MASTER_DTYPE) / self.steps
        values = root * root.abs() if self.signed else root.square().square()
        infinite = root * torch.inf  # NaN of a zero is not taken
        return torch.where(root.abs() > 1, infinite, values * scales[:, None])

    def encode(self, values: Tensor, bits: Tensor | None) -> Pieces:
        size = values.abs()
        # NaN stays in the scale, so that it is not lost.
        scale = torch.where(size == torch.inf, 0.0, size).amax(dim=-1)
        root = (size / scale.clamp_min(torch.finfo(MASTER_DTYPE).tiny)[:, None]).sqrt()
        if self.signed:
            steps = (root * self.steps).round().clamp(max=self.steps + 1)
            return steps.copysign(values).to(torch.int8), scale
        root = root.sqrt()
        least = (root * 1e30).clamp(max=1)  # 1 for all but zeros
        steps = torch.maximum((root * self.steps).round(), least).clamp(max=self.steps + 1)
        return steps.to(torch.uint8), scale


CODECS: dict[str, type[Codec]] = {"bf16": Bf16, "int8": Int8}

OPTION = Option(
    help="how Adam's moments and SGD's momentum are stored: fp32, bf16 (stochastic rounding) or "
    "int8 (with a scale per block)",
    within=one_of("fp32", *CODECS),
    # A second moment is not below zero.
    codec=lambda config, name: CODECS[config.moments](signed=not name.endswith("_sq")),
    fused=True,
)
