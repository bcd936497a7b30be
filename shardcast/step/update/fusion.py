"""One pass over a range of elements: unscale, clip, update, cast, and fused epilogues.

:func:`update_` is the only arithmetic of Adam, AdamW and SGD here, for all codecs of masters and
moments. It runs eagerly, a piece at a time, or compiled, where decoded values exist only in
registers (:class:`CompiledExecutor`). Bytes of traffic per element for AdamW with bf16 parameters
(everything is read and written, except the gradient, which is only read): 30; with
``moments: bf16`` 22; with ``split16``, too, 18.3; with ``split16`` and ``int8`` 14.5.

Training continues from what the model shows: if a published value is not the cast of its master, a
script wrote it, and it becomes the master before the rule runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardcast import _compat
from shardcast._compat import inductor
from shardcast.config import ShardcastConfig
from shardcast.memory.codecs import Codec, Pieces, shown, take_shown_
from shardcast.memory.slices import LAUNCH
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.compiling import compiles, or_eager
from shardcast.step.update.epilogues import Epilogue
from shardcast.step.update.rules import Numbers, Rule

CACHED = 1 << 18  # elements per thread and eager call on a CPU, so that all operands stay in cache
VECTOR = 16  # fp32 elements of a CPU's longest vector


class UpdateNumbers(NamedTuple):
    """The numbers of one step: host numbers, or fp32 tensors.

    Attributes:
        step: always a 0-dim tensor.
        rule: host numbers; or a 1-d tensor; or a 2-d table from which each row of elements picks a
            row.
        epilogues: numbers of each epilogue, or 0-dim tensors.
        epilogue_steps: always a 1-d tensor, the steps that each epilogue has taken part in.
    """

    step: Tensor
    rule: Numbers | Tensor
    epilogues: tuple[Numbers, ...] = ()
    epilogue_steps: Tensor | None = None


class NamedOperands(NamedTuple):
    """The operands by name.

    Attributes:
        grad: any floating dtype, read only.
        published: the low-precision parameter. It replaces a master whose cast differs from it, and
            is overwritten with the new master's cast. ``None`` if the master is, or contains, the
            parameter.
        stored: pieces of masters, of the rule's state and of the epilogues' state; overwritten.
        keys: keys of the rows, for a codec with stochastic rounding.
        places: for each row its row in a table of numbers, int32; ``None``: the same for all.
    """

    grad: Tensor
    published: Tensor | None
    stored: list[Pieces]
    keys: Tensor | None
    places: Tensor | None


@dataclass(frozen=True)
class Fusion:
    """The parts of one kernel, constants for a compiler.

    Operands are a flat list of tensors in the order of :class:`NamedOperands`. They are 1-d, or
    have the shape for :func:`update_`.

    Attributes:
        state: codecs of the rule's state, then of the epilogues' state.
        casts: whether there is a published parameter besides the masters' pieces.
        by_row: whether rows take numbers of several groups from a table.
    """

    rule: Rule
    master: Codec
    state: tuple[Codec, ...]
    casts: bool
    row: int
    epilogues: tuple[Epilogue, ...] = ()
    by_row: bool = False

    @property
    def by_chance(self) -> bool:
        return any(codec.by_chance for codec in self.state)

    @property
    def counts(self) -> list[int]:
        """Elements per row of each operand: ``row`` or 1."""
        codecs = (self.master, *self.state)
        pieces = [count for codec in codecs for _, count in codec.pieces(self.row)]
        return [self.row] * (1 + self.casts) + pieces + [1] * (self.by_chance + self.by_row)

    def parts(self, operands: Sequence[Tensor]) -> NamedOperands:
        start = 1 + self.casts
        stored = []
        for codec in (self.master, *self.state):
            stop = start + len(codec.pieces(self.row))
            stored.append(tuple(operands[start:stop]))
            start = stop
        of_rows = operands[start:]
        return NamedOperands(
            operands[0],
            operands[1] if self.casts else None,
            stored,
            of_rows[0] if self.by_chance else None,
            of_rows[-1] if self.by_row else None,
        )


def update_(
    fusion: Fusion,
    operands: Sequence[Tensor],
    numbers: UpdateNumbers,
    factor: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Unscale, clip, update and cast one range in place, without asking the device.

    Compiled, this is one kernel, and decoded and cloned values exist only in registers. A product
    and the sum it enters may or may not be fused: Triton fuses them up to 3.9 and not from 3.10 on.
    Nothing relies on either; exact encoding and decoding use integers.

    Args:
        operands: of shape ``(rows, row)``, or ``(rows,)`` for one number per row.
        factor: 0-dim fp32 factor of the gradient; ``None``: 1; or 1-d, one for each row of the
            table of numbers.
        skip: 0-dim bool. If true nothing changes, not even the sign of a zero, and values that a
            script wrote stay for the next step. ``None``: the host has decided not to skip.
    """
    rule, epilogues = fusion.rule, fusion.epilogues
    grad, published, stored, keys, places = fusion.parts(operands)
    if places is not None and factor is not None and factor.dim():
        factor = factor[places][:, None]
    copied = rule.edits or grad.dtype != MASTER_DTYPE
    exact = grad.to(MASTER_DTYPE, copy=copied)
    if factor is not None:
        exact = exact.mul_(factor) if copied else exact * factor
    codecs = (fusion.master, *fusion.state)
    olds = [codec.decode(pieces) for codec, pieces in zip(codecs, stored, strict=True)]
    if published is not None and skip is not None:
        olds[0] = shown(olds[0], published)
    elif published is not None:
        take_shown_(olds[0], published)
    # If the step cannot be skipped, plain values are updated in place. Otherwise the old ones are
    # needed until the end.
    news = olds if skip is None else [old.clone() for old in olds]
    master, state = news[0], tuple(news[1 : 1 + len(rule.state)])

    of_rule = numbers.rule
    if places is not None and isinstance(of_rule, Tensor):
        columns = of_rule.unbind(1)[: rule.count]  # the rest is padding
        of_rule = tuple(column[places][:, None] for column in columns)
    elif isinstance(of_rule, Tensor):
        of_rule = of_rule.unbind()
    rule.apply_(master, exact, state, of_rule)
    start = 1 + len(state)
    for epilogue, its_numbers in zip(epilogues, numbers.epilogues, strict=True):
        stop = start + len(epilogue.state)
        epilogue.apply_(master, tuple(news[start:stop]), its_numbers)
        start = stop

    # Hazard: from here on, memory that was read above is overwritten.
    if published is not None and skip is None:
        published.copy_(master)
    elif published is not None:
        _write_(published, master.to(published.dtype), skip)
    steps = [numbers.step] * len(codecs)
    if fusion.by_chance and numbers.epilogue_steps is not None:
        # A fragment without a gradient is averaged, too.
        counts = zip(epilogues, numbers.epilogue_steps.unbind(), strict=True)
        steps[1 + len(state) :] = [count for e, count in counts for _ in e.state]
    for number, (codec, pieces) in enumerate(zip(codecs, stored, strict=True)):
        bits = None
        if codec.by_chance:
            assert keys is not None
            bits = codec.random_bits(keys, news[number], steps[number], number - 1)
        for memory, values in zip(pieces, codec.encode(news[number], bits), strict=True):
            _write_(memory, values, skip)


def _write_(memory: Tensor, values: Tensor, skip: Tensor | None) -> None:
    if skip is not None:
        memory.copy_(torch.where(skip, memory, values))
    elif values is not memory:  # otherwise it was updated in place
        memory.copy_(values)


class Executor:
    """Runs :func:`update_` on ranges of any length, eagerly and a piece at a time.

    Args:
        on_host: the step's numbers and the decision to skip are on the host.
    """

    def __init__(self, on_host: bool) -> None:
        self.on_host = on_host
        self._run: Callable[..., object] = in_pieces

    def __call__(
        self,
        fusion: Fusion,
        operands: Sequence[Tensor],
        numbers: UpdateNumbers,
        factor: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        """Run :func:`update_`. Operands are 1-d, start with a row, and may end inside one."""
        row, counts = fusion.row, fusion.counts
        numel = operands[0].numel()
        rows, least = self._whole(numel // row, row)
        pairs = list(zip(operands, counts, strict=True))
        if rows:
            whole = operands if rows * row == numel else [t[: rows * count] for t, count in pairs]
            self._run(fusion, self._in_rows(fusion, whole), numbers, factor, skip)
        if rows * row == numel:
            return
        # The end of a pack on one rank, or of rows shorter than a vector, is run on a padded copy.
        ends = [tensor[rows * count :] for tensor, count in pairs]
        copies = [end.new_zeros(least * n) for end, n in zip(ends, counts, strict=True)]
        for copy, end in zip(copies, ends, strict=True):
            copy[: end.numel()] = end
        self._run(fusion, self._in_rows(fusion, copies), numbers, factor, skip)
        for copy, end in list(zip(copies, ends, strict=True))[1:]:  # the gradient is read only
            end.copy_(copy[: end.numel()])

    def keep(self, numbers: Tensor) -> Tensor:
        """Return numbers, or a table, in the form in which many calls take them."""
        return numbers

    def _whole(self, rows: int, row: int) -> tuple[int, int]:
        """Return how many of ``rows`` rows run in place, and how many run on a padded copy."""
        # torch's fused kernels round elements after the last whole vector differently, so results
        # would depend on how ranks and packs are cut.
        least = max(1, VECTOR // row)
        return rows // least * least, least

    def _in_rows(self, fusion: Fusion, operands: Sequence[Tensor]) -> list[Tensor]:
        """View the same memory as rows."""
        row, counts = fusion.row, fusion.counts
        pairs = zip(operands, counts, strict=True)
        return [tensor if count < row else tensor.view(-1, row) for tensor, count in pairs]


def in_pieces(in_kernel: Fusion, operands: Sequence[Tensor], *others: Any) -> None:
    """Run the eager form a piece at a time, because it allocates several times its operands."""
    on_cpu = _compat.is_host(operands[0].device)
    rows = max(1, (CACHED * torch.get_num_threads() if on_cpu else LAUNCH) // in_kernel.row)
    for piece in zip(*(tensor.split(rows) for tensor in operands), strict=True):
        update_(in_kernel, piece, *others)


class CompiledExecutor(Executor):
    """Runs :func:`update_` on each range as one kernel."""

    def __init__(self) -> None:
        super().__init__(on_host=False)
        self._run = _compiled

    def keep(self, numbers: Tensor) -> Tensor:
        """Return the memory itself, not a view, because a graph would be bound to a view's base."""
        if numbers.dim() > 1:  # one graph serves tables with any number of rows
            return _compat.rows_of(numbers, numbers.shape[1])
        return _compat.constants_of(numbers)

    def _whole(self, rows: int, row: int) -> tuple[int, int]:
        least = 2  # one graph serves any number of rows except 0 and 1
        return rows if rows >= least else 0, least

    def _in_rows(self, fusion: Fusion, operands: Sequence[Tensor]) -> list[Tensor]:
        """View the same memory as rows.

        Their fixed length tells a compiler that addresses are multiples of 16 bytes, so it moves 16
        bytes at a time.
        """
        row, counts = fusion.row, fusion.counts
        pairs = zip(operands, counts, strict=True)
        return [_compat.rows_of(tensor, 0 if count < row else row) for tensor, count in pairs]


def _compiled(
    fusion: Fusion,
    operands: Sequence[Tensor],
    numbers: UpdateNumbers,
    factor: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Run one kernel for operands of these dtypes, with or without a factor and a skip."""
    dtypes = tuple(tensor.dtype for tensor in operands)
    run = _kernel(fusion, dtypes, factor is None, skip is None)
    run(fusion, operands, numbers, factor, skip)


@functools.cache  # one compiled function, so that models in one process share its graph
def _kernel(fusion: Fusion, dtypes: tuple[torch.dtype, ...], *_: bool) -> Callable[..., None]:
    name = f"the update by {fusion.rule} of gradients in {dtypes[0]}"
    return or_eager(inductor.compiled(update_), in_pieces, name)


def choose_executor(
    config: ShardcastConfig, device: torch.device, is_apart: bool = False
) -> Executor:
    """Choose how to run the update on ``device``; raises like :func:`compiles`.

    Args:
        is_apart: the model is on another device, see :class:`.Home`.
    """
    if compiles(config, device):
        return CompiledExecutor()
    return Executor(on_host=is_apart or _compat.is_host(device))
