"""One pass over a range of elements: unscale, clip, update, cast, and what else is fused into it.

:func:`update_` is the only arithmetic of Adam, AdamW and SGD here, whatever codecs masters and
moments have. It runs in two ways: eagerly, a piece at a time, and compiled, where decoded values
are in registers only (:class:`CompiledExecutor`). Traffic in bytes per element of AdamW with bf16
parameters (all but the gradient, which is read, is read and written): 30; with ``moments: bf16``
22; with ``split16`` too 18.3; with ``split16`` and ``int8`` 14.5.

What the model shows is what is trained: a published value that is not the cast of its master, which
a script has written, becomes the master before the rule.
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
from shardcast.step.update.epilogues import Epilogue, UpdateValues
from shardcast.step.update.rules import Numbers, Rule

CACHED = 1 << 18  # elements per thread and eager call on a CPU: all operands stay in its cache
RULE_STATES = 4  # chances that are the rule's; those of epilogues come after them
VECTOR = 16  # fp32 elements of the longest vector of a CPU


class UpdateNumbers(NamedTuple):
    """The numbers of one step: of the host, or fp32 tensors.

    Attributes:
        step: 0-dim tensor in both cases.
        rule: numbers of the host, or a 1-d tensor, or 2-d a table of these, of which each row of
            elements names one.
        epilogues: of each its numbers, or 0-dim tensors.
        epilogue_steps: 1-d tensor in both cases, of each epilogue the steps it has taken part in.
    """

    step: Tensor
    rule: Numbers | Tensor
    epilogues: tuple[Numbers, ...] = ()
    epilogue_steps: Tensor | None = None


class NamedOperands(NamedTuple):
    """The operands by what they are.

    Attributes:
        grad: any floating dtype, read only.
        published: the low-precision parameter, which wins over a master whose cast it is not, and
            is overwritten by the cast of the new one; ``None`` where the master is the parameter,
            or has it.
        stored: pieces of masters, of the rule's state, of the epilogues' state; overwritten.
        keys: of the rows, where a codec rounds by chance.
        places: of the rows, int32: which numbers of a table are theirs; ``None``: all have one's.
        sums: of each row, overwritten.
    """

    grad: Tensor
    published: Tensor | None
    stored: list[Pieces]
    keys: Tensor | None
    places: Tensor | None
    sums: Sequence[Tensor]


@dataclass(frozen=True)
class Fusion:
    """The parts of one kernel; constants for a compiler.

    Operands are a flat list of tensors, in the order of :class:`NamedOperands`. They are 1-d, or in
    the shape of :func:`update_`.

    Attributes:
        state: codecs of the rule's state, then of the epilogues'.
        casts: whether there is a published parameter next to the masters' pieces.
        by_row: whether rows have numbers of several groups, by a table.
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
        """The elements per row of each operand: ``row`` or 1."""
        codecs = (self.master, *self.state)
        pieces = [count for codec in codecs for _, count in codec.pieces(self.row)]
        sums = sum(len(epilogue.sums) for epilogue in self.epilogues)
        return [self.row] * (1 + self.casts) + pieces + [1] * (self.by_chance + self.by_row + sums)

    def parts(self, operands: Sequence[Tensor]) -> NamedOperands:
        start = 1 + self.casts
        stored = []
        for codec in (self.master, *self.state):
            stop = start + len(codec.pieces(self.row))
            stored.append(tuple(operands[start:stop]))
            start = stop
        # An int: Dynamo of torch 2.11 takes no bool for an index.
        of_rows, keys = operands[start:], int(self.by_chance)
        return NamedOperands(
            operands[0],
            operands[1] if self.casts else None,
            stored,
            of_rows[0] if self.by_chance else None,
            of_rows[keys] if self.by_row else None,
            of_rows[keys + self.by_row :],
        )


def update_(
    fusion: Fusion,
    operands: Sequence[Tensor],
    numbers: UpdateNumbers,
    factor: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Unscale, clip, update and cast one range in place, without asking the device.

    Compiled, it is one kernel: what is decoded and cloned here lives in registers there. A product
    and the sum that it enters may be fused or not: Triton fused them up to 3.9, and no longer does
    from 3.10 on. Nothing relies on either; what decodes and encodes exactly is in integers.

    Args:
        operands: of shape ``(rows, row)``, or ``(rows,)`` where there is one number per row.
        factor: 0-dim fp32 multiplier of the gradient, or ``None`` for 1; 1-d: one for each row of
            the table of numbers.
        skip: 0-dim bool; if true nothing changes, not even the sign of a zero, and what a script
            wrote is still there for the next step. ``None``: the host has decided that the step is
            not skipped.
    """
    rule, epilogues = fusion.rule, fusion.epilogues
    grad, published, stored, keys, places, sums = fusion.parts(operands)
    if places is not None and factor is not None and factor.dim():
        factor = factor[places][:, None]
    copied = rule.edits or grad.dtype != MASTER_DTYPE
    exact = grad.to(MASTER_DTYPE, copy=copied)
    if factor is not None:
        exact = exact.mul_(factor) if copied else exact * factor
    codecs = (fusion.master, *fusion.state)
    olds = [codec.decode(pieces) for codec, pieces in zip(codecs, stored, strict=True)]
    follows = len(epilogues) > 0 and any(epilogue.follows for epilogue in epilogues)
    last_published = None
    if follows and published is not None:
        last_published = olds[0].to(published.dtype)
    if published is not None and skip is not None:
        olds[0] = shown(olds[0], published, last_published)
    elif published is not None:
        take_shown_(olds[0], published, last_published)
    # Where nothing can be skipped plain values are updated where they lie. Else the old ones are
    # needed until the end.
    news = olds if skip is None else [old.clone() for old in olds]
    compares = any(epilogue.compares for epilogue in epilogues)
    old_is_copy = skip is None and compares
    old_master = news[0].clone() if old_is_copy else olds[0]
    unscaled = exact.clone() if rule.edits and compares else exact
    master, state = news[0], tuple(news[1 : 1 + len(rule.state)])

    of_rule = numbers.rule
    if places is not None and isinstance(of_rule, Tensor):
        columns = of_rule.unbind(1)[: rule.count]  # behind them is padding
        of_rule = tuple(column[places][:, None] for column in columns)
    elif isinstance(of_rule, Tensor):
        of_rule = of_rule.unbind()
    rule.apply_(master, exact, state, of_rule)
    encoded = fusion.master.encode(master, None)
    if epilogues:
        updated = UpdateValues(master, state)
    if compares:
        decrease = old_master.sub_(master) if old_is_copy else old_master - master
        updated = UpdateValues(master, state, unscaled, decrease)
        if fusion.master.has_published or published is not None:
            old_published, new_published = stored[0][0], encoded[0]
            if published is not None:
                old_published, new_published = published, master.to(published.dtype)
            published_bits = old_published.view(torch.int16), new_published.view(torch.int16)
            updated = UpdateValues(master, state, unscaled, decrease, *published_bits)
    if last_published is not None and published is not None:
        new_published = master.to(published.dtype)
        updated = updated._replace(
            published=new_published.view(torch.int16),
            last_published=last_published.view(torch.int16),
        )
    if epilogues:
        row_sums: list[Tensor] = []
        start = 1 + len(state)
        for epilogue, its_numbers in zip(epilogues, numbers.epilogues, strict=True):
            stop = start + len(epilogue.state)
            row_sums += epilogue.apply_(updated, tuple(news[start:stop]), its_numbers)
            start = stop
        for memory, values in zip(sums, row_sums, strict=True):
            _write_(memory, values, skip)

    # Hazard: what is written from here on was read above.
    if published is not None and skip is None:
        published.copy_(master)
    elif published is not None:
        _write_(published, master.to(published.dtype), skip)
    steps = [numbers.step] * len(codecs)
    if fusion.by_chance and numbers.epilogue_steps is not None:
        # A fragment without a gradient is averaged too.
        counts = zip(epilogues, numbers.epilogue_steps.unbind(), strict=True)
        steps[1 + len(state) :] = [count for e, count in counts for _ in e.state]
    for number, (codec, pieces) in enumerate(zip(codecs, stored, strict=True)):
        if number:
            bits = None
            if codec.by_chance:
                assert keys is not None
                # An average has the same bits whatever rule, or none, runs in a step.
                of_epilogue = number - 1 - len(state)
                chance = number - 1 if of_epilogue < 0 else RULE_STATES + of_epilogue
                bits = codec.random_bits(keys, news[number], steps[number], chance)
            encoded = codec.encode(news[number], bits)
        for memory, values in zip(pieces, encoded, strict=True):
            _write_(memory, values, skip)


def _write_(memory: Tensor, values: Tensor, skip: Tensor | None) -> None:
    if skip is not None:
        memory.copy_(torch.where(skip, memory, values))
    elif values is not memory:  # else it was updated where it lies
        memory.copy_(values)


class Operands(list[Tensor]):
    """The operands of one range, 1-d.

    Attributes:
        in_rows: the same memory in the shape of :func:`update_`, once it was needed.
    """

    in_rows: list[Tensor] | None = None


class Executor:
    """Runs :func:`update_` on ranges of any length, eagerly and a piece at a time.

    Args:
        on_host: numbers of the step and the decision to skip are the host's.
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
        """Run :func:`update_`; operands are 1-d, begin with a row, may end within one."""
        in_rows: list[Tensor] | None = getattr(operands, "in_rows", None)
        if in_rows is not None:
            self._run(fusion, in_rows, numbers, factor, skip)
            return
        row, counts = fusion.row, fusion.counts
        numel = operands[0].numel()
        rows, least = self._whole(numel // row, row)
        pairs = list(zip(operands, counts, strict=True))
        if rows:
            whole = operands if rows * row == numel else [t[: rows * count] for t, count in pairs]
            in_rows = self._in_rows(fusion, whole)
            if whole is operands and isinstance(operands, Operands):
                operands.in_rows = in_rows
            self._run(fusion, in_rows, numbers, factor, skip)
        if rows * row == numel:
            return
        # The end of the pack of a world of one, or of rows shorter than a vector: a padded copy.
        ends = [tensor[rows * count :] for tensor, count in pairs]
        copies = [end.new_zeros(least * n) for end, n in zip(ends, counts, strict=True)]
        for copy, end in zip(copies, ends, strict=True):
            copy[: end.numel()] = end
        self._run(fusion, self._in_rows(fusion, copies), numbers, factor, skip)
        for copy, end in list(zip(copies, ends, strict=True))[1:]:  # the gradient is only read
            end.copy_(copy[: end.numel()])

    def keep(self, numbers: Tensor) -> Tensor:
        """Return numbers that are given to many calls, or a table of them, as these take it."""
        return numbers

    def _whole(self, rows: int, row: int) -> tuple[int, int]:
        """Return how many of ``rows`` rows are run as they are, and how many a padded copy has."""
        # torch's fused kernels round what is left after the last whole vector in another way:
        # results would depend on where ranks and packs are cut.
        least = max(1, VECTOR // row)
        return rows // least * least, least

    def _in_rows(self, fusion: Fusion, operands: Sequence[Tensor]) -> list[Tensor]:
        """View the same memory as rows."""
        row, counts = fusion.row, fusion.counts
        pairs = zip(operands, counts, strict=True)
        return [tensor if count < row else tensor.view(-1, row) for tensor, count in pairs]


def in_pieces(in_kernel: Fusion, operands: Sequence[Tensor], *others: Any) -> None:
    """Run the eager form, which allocates several times its operands, a piece at a time."""
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
        """Return the same memory, no view: a graph would be bound to what it is a view of."""
        if numbers.dim() > 1:  # one graph for tables of any number of rows
            return _compat.rows_of(numbers, numbers.shape[1])
        return _compat.constants_of(numbers)

    def _whole(self, rows: int, row: int) -> tuple[int, int]:
        least = 2  # one graph serves any number of rows but 0 and 1
        return rows if rows >= least else 0, least

    def _in_rows(self, fusion: Fusion, operands: Sequence[Tensor]) -> list[Tensor]:
        """View the same memory as rows.

        Their fixed length lets a compiler see that addresses are multiples of 16 bytes, which it
        then moves at a time.
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
    """Run one kernel for all operands of these dtypes, with or without a factor and a skip."""
    dtypes = tuple(tensor.dtype for tensor in operands)
    run = _kernel(fusion, dtypes, factor is None, skip is None)
    run(fusion, operands, numbers, factor, skip)


@functools.cache  # one compiled function, so that models of one process share its graph
def _kernel(fusion: Fusion, dtypes: tuple[torch.dtype, ...], *_: bool) -> Callable[..., None]:
    name = f"the update by {fusion.rule} of gradients in {dtypes[0]}"
    return or_eager(inductor.compiled(update_), in_pieces, name)


def choose_executor(
    config: ShardcastConfig, device: torch.device, is_apart: bool = False
) -> Executor:
    """Choose how to run the update on ``device``; raises as :func:`compiles` does.

    Args:
        is_apart: the model is elsewhere, see :class:`.Home`.
    """
    if compiles(config, device):
        return CompiledExecutor()
    return Executor(on_host=is_apart or _compat.is_host(device))
