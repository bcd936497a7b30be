"""One pass over a range of elements: unscale, clip, update, cast, and what else is fused into it.

:func:`update_` is the only arithmetic of Adam, AdamW and SGD here, whatever codecs masters and
moments have. It runs in two ways (see :mod:`.execute`): compiled, where decoded values are in
registers only, and eagerly, a piece at a time. Traffic in bytes per element of AdamW with bf16
parameters (all but the gradient, which is read, and the parameter, which is written, is read and
written): 28; with ``moments: bf16`` 20; with ``split16`` too, whose parameter is read, 18.3; with
``split16`` and ``int8`` 14.5.

An *epilogue* is a set of pure functions that are traced into the same kernel, for it is the only
place where the old and the new master, the gradient, the moments and the published values of an
element meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.memory.chance import random_bits
from shardcast.memory.codecs import Codec, Pieces
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.update.rules import Rule


class Updated(NamedTuple):
    """The values of an update that an epilogue sees, of shape ``(rows, row)``; it changes none.

    Attributes:
        grad: fp32, unscaled and clipped.
        state: the rule's new state, in the order of ``rule.state``.
        old_published, published: bit patterns of the parameter before and after, int16 or int32. A
            compiler leaves out a cast to low precision and back: values would not be rounded.
    """

    grad: Tensor
    old_master: Tensor
    master: Tensor
    state: tuple[Tensor, ...]
    old_published: Tensor
    published: Tensor


class Epilogue(Protocol):
    """What is fused behind a rule. Frozen and hashable: it is a constant of the kernel.

    Attributes:
        state: names of the stored tensors that it owns, with a value per element; zeros at first.
        sums: names of the numbers per fragment that it gives.
    """

    @property
    def state(self) -> tuple[str, ...]: ...

    @property
    def sums(self) -> tuple[str, ...]: ...

    def codec(self, name: str) -> Codec:
        """How a stored tensor of its is kept."""

    def numbers(self, step: Any) -> tuple[Any, ...]:
        """The numbers of one step; ``step`` is a float, or a 0-dim fp64 tensor."""

    def apply_(
        self, updated: Updated, state: tuple[Tensor, ...], numbers: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        """Change ``state`` in place; gives the summands, a tensor like a master for each sum."""


def epilogues_of(config: ShardcastConfig) -> tuple[Epilogue, ...]:
    """The epilogues that a configuration asks for; there is no option for one yet."""
    return ()


class Numbers(NamedTuple):
    """The numbers of one step: of the host, or 0-dim fp32 tensors.

    Attributes:
        step: 0-dim tensor in both cases.
    """

    step: Tensor
    rule: tuple[Any, ...]
    epilogues: tuple[tuple[Any, ...], ...] = ()


class Parts(NamedTuple):
    """Operands by what they are.

    Attributes:
        grad: any floating dtype, read only.
        published: the low-precision parameter, overwritten by the cast of the new masters; ``None``
            where the master is the parameter, or has it.
        stored: pieces of masters, of the rule's state, of the epilogues' state; overwritten.
        keys: of the rows, where a codec rounds by chance.
        sums: of each row, overwritten.
    """

    grad: Tensor
    published: Tensor | None
    stored: list[Pieces]
    keys: Tensor | None
    sums: Sequence[Tensor]


@dataclass(frozen=True)
class Fusion:
    """What is fused into one kernel; constants for a compiler.

    Operands are a flat list of tensors, in the order of :class:`Parts`. They are 1-d, or in the
    shape of :func:`update_`.

    Attributes:
        state: codecs of the rule's state, then of the epilogues'.
        casts: whether there is a published parameter beside the masters' pieces.
    """

    rule: Rule
    master: Codec
    state: tuple[Codec, ...]
    casts: bool
    row: int
    epilogues: tuple[Epilogue, ...] = ()

    @property
    def by_chance(self) -> bool:
        return any(codec.by_chance for codec in self.state)

    @property
    def counts(self) -> list[int]:
        """Elements per row of each operand: ``row`` or 1."""
        codecs = (self.master, *self.state)
        pieces = [count for codec in codecs for _, count in codec.pieces(self.row)]
        sums = sum(len(epilogue.sums) for epilogue in self.epilogues)
        return [self.row] * (1 + self.casts) + pieces + [1] * (self.by_chance + sums)

    def parts(self, operands: Sequence[Tensor]) -> Parts:
        start = 1 + self.casts
        stored = []
        for codec in (self.master, *self.state):
            stop = start + len(codec.pieces(self.row))
            stored.append(tuple(operands[start:stop]))
            start = stop
        return Parts(
            operands[0], operands[1] if self.casts else None, stored,
            operands[start] if self.by_chance else None, operands[start + self.by_chance :],
        )  # fmt: skip


def update_(
    fusion: Fusion, operands: Sequence[Tensor], numbers: Numbers, factor: Tensor | None,
    skip: Tensor | None,
) -> None:  # fmt: skip
    """Unscale, clip, update and cast one range in place, without asking the device.

    Compiled, it is one kernel: what is decoded and cloned here lives in registers there. A product
    and the sum that it enters may be fused or not: Triton fused them up to 3.9, and no longer does
    from 3.10 on. Nothing relies on either; what decodes and encodes exactly is in integers.

    Args:
        operands: of shape ``(rows, row)``, or ``(rows,)`` where there is one number per row.
        factor: 0-dim fp32 multiplier of the gradient, or ``None`` for 1.
        skip: 0-dim bool; if true nothing changes, not even the sign of a zero. ``None``: the host
            has decided that the step is not skipped.
    """
    rule, epilogues = fusion.rule, fusion.epilogues
    grad, published, stored, keys, sums = fusion.parts(operands)
    copied = rule.edits or grad.dtype != MASTER_DTYPE
    exact = grad.to(MASTER_DTYPE, copy=copied)
    if factor is not None:
        exact = exact.mul_(factor) if copied else exact * factor
    codecs = (fusion.master, *fusion.state)
    olds = [codec.decode(pieces) for codec, pieces in zip(codecs, stored, strict=True)]
    # Where nothing can be skipped plain values are updated where they lie. Else the old ones are
    # needed until the end.
    news = olds if skip is None else [old.clone() for old in olds]
    old_master = news[0].clone() if skip is None and epilogues else olds[0]
    unscaled = exact.clone() if rule.edits and epilogues else exact
    master, state = news[0], tuple(news[1 : 1 + len(rule.state)])

    rule.apply_(master, exact, state, numbers.rule)
    encoded = fusion.master.encode(master, None)
    if epilogues:
        old_published, new_published = old_master, master
        if fusion.master.has_published:
            old_published, new_published = stored[0][0], encoded[0]
        elif published is not None:
            old_published, new_published = published, master.to(published.dtype)
        published_bits = _bits(old_published), _bits(new_published)
        updated = Updated(unscaled, old_master, master, state, *published_bits)
        summands: list[Tensor] = []
        start = 1 + len(state)
        for epilogue, its_numbers in zip(epilogues, numbers.epilogues, strict=True):
            stop = start + len(epilogue.state)
            summands += epilogue.apply_(updated, tuple(news[start:stop]), its_numbers)
            start = stop
        for row_sums, summand in zip(sums, summands, strict=True):
            _write_(row_sums, summand.sum(-1), skip)

    # Hazard: what is written from here on was read above, old published values by an epilogue.
    if published is not None:
        published.copy_(master if skip is None else torch.where(skip, old_master, master))
    for number, (codec, pieces) in enumerate(zip(codecs, stored, strict=True)):
        if number:
            bits = None
            if codec.by_chance:
                assert keys is not None
                bits = random_bits(keys, news[number], numbers.step, number - 1)
            encoded = codec.encode(news[number], bits)
        for memory, values in zip(pieces, encoded, strict=True):
            _write_(memory, values, skip)


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.itemsize == 2 else torch.int32)


def _write_(memory: Tensor, values: Tensor, skip: Tensor | None) -> None:
    if skip is not None:
        memory.copy_(torch.where(skip, memory, values))
    elif values is not memory:  # else it was updated where it lies
        memory.copy_(values)
