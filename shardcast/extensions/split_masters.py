"""``master``: only the bits of masters that the published bf16 parameters lack."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.extensions.chance import lanes
from shardcast.extensions.low_moments import UPPER
from shardcast.memory.codecs import Codec, Pieces
from shardcast.option_values import Option, one_of
from shardcast.plan.precision import MASTER_DTYPE

TIE = 1 << 15  # half of the distance between bf16 neighbors, in fp32 units
BYTE = 8  # elements
GATHER = 0x0102040810204080


@dataclass(frozen=True)
class Split16(Codec):
    """Exact fp32 values in 2 1/8 bytes next to the published bf16 parameter, their upper half.

    Keeping the 16 bits that the cast drops is the idea of "Revisiting BFloat16 Training"
    (arXiv:2010.06192). A value is its bf16 cast (to nearest, ties to even) plus a signed 16-bit
    distance, as integers of the bit pattern. One pattern is missing: 65,537 fp32 values round to an
    even bf16 value, including its two ties. One more bit per element, in one word per row, marks
    the upper tie. One weight in 131,072 is a tie, but one in 16 if the weights were fp16 before, so
    a list of ties would have no useful bound. NaN stays NaN but loses its payload.
    """

    plain = False
    has_published = True
    encoding_bytes = 20

    def pieces(self, row: int) -> tuple[tuple[torch.dtype, int], ...]:
        return ((torch.bfloat16, row), (torch.int16, row), (word_of(row), 1))

    def decode(self, pieces: Pieces) -> Tensor:
        published, distance, ties = pieces
        upper = published.to(MASTER_DTYPE).view(torch.int32)
        tie = (ties[:, None] >> lanes(distance, ties.dtype)) & 1
        bits = upper + distance + tie.to(torch.int32) * (2 * TIE)
        # The sign differs only if a script set a weight to zero; the result would be NaN.
        wrong = (bits ^ upper) >> 31  # all ones if the sign differs, else zero
        return (bits - (wrong & (bits - upper))).view(MASTER_DTYPE)

    def encode(self, values: Tensor, bits: Tensor | None) -> Pieces:
        pattern = values.view(torch.int32)
        # Casts with integers, because a compiler may remove a cast to bf16 and back.
        even = (pattern >> 16) & 1
        nan = (pattern & 0x7FFFFFFF) > 0x7F800000
        upper = torch.where(nan, 0x7FC00000, (pattern + (TIE - 1) + even) & UPPER)
        distance = pattern - upper
        cast = upper.view(MASTER_DTYPE).to(torch.bfloat16)
        # The upper tie wraps around to the lower one.
        return cast, distance.to(torch.int16), words(distance == TIE)

    def merged(self, old: Pieces, new: Pieces, changed: Tensor) -> Pieces:
        mask = words(changed)
        ties = (new[2] & mask) | (old[2] & ~mask)
        return *(torch.where(changed, n, o) for o, n in zip(old[:2], new[:2], strict=True)), ties


def word_of(row: int) -> torch.dtype:
    """Return the integer dtype with one bit for each element of a row."""
    return {16: torch.int16, 32: torch.int32, 64: torch.int64}.get(row, torch.uint8)


def words(changed: Tensor) -> Tensor:
    """Pack bits of elements, contiguous bool ``(rows, row)``, into words, ``(rows,)``."""
    row = changed.shape[-1]
    word = word_of(row)
    if row % BYTE == 0 and not torch.compiler.is_compiling():
        # Eight bytes of 0 or 1, times this number, have their bits in the highest byte. This takes
        # few passes over an eighth of the elements.
        packed = (changed.view(torch.int64) * GATHER) >> 56
        return packed.to(torch.uint8).view(word).view(-1)
    return (changed.to(word) << lanes(changed, word)).sum(-1, dtype=word)


def _check(config: ShardcastConfig) -> None:
    if config.param_dtype != torch.bfloat16:
        raise ValueError(
            f"master: {config.master} needs param_dtype {torch.bfloat16}, which is a part of the "
            f"master, got {config.param_dtype}; use master 'fp32'"
        )


OPTION = Option(
    help="how masters are stored: fp32, or split16: only the 16 bits that the published bf16 "
    "lacks; both are exact",
    within=one_of("fp32", "split16"),
    codec=lambda _config, _name: Split16(),
    check=_check,
)
