"""The update compiled as one kernel, and direct calls of its graphs."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast._compat import inductor
from shardcast.step.fallback import or_eager
from shardcast.step.update.fusion import (
    Executor,
    Fusion,
    Operands,
    UpdateScalars,
    in_pieces,
    update_,
)


class CompiledExecutor(Executor):
    """Runs :func:`.fusion.update_` on ranges of any length as one kernel.

    Args:
        in_batches: whether several ranges are compiled as one. A graph of them takes a C++ compiler
            ten seconds, and on a CPU the host's part is nothing that is waited for.
    """

    def __init__(self, in_batches: bool = False) -> None:
        super().__init__(on_host=False)
        self._run, self.in_batches = _compiled, in_batches
        self._changing: list[Tensor | None] = []
        self._present: list[Tensor] = []
        self._kinds: Any = None

    def __call__(
        self, fusion: Fusion, operands: Sequence[Tensor], numbers: UpdateScalars,
        factor: Tensor | None, skip: Tensor | None,
    ) -> None:  # fmt: skip
        if isinstance(operands, Operands) and operands.in_rows is not None:
            self._again(operands, operands.in_rows, fusion, numbers, factor, skip)
        else:
            super().__call__(fusion, operands, numbers, factor, skip)

    def _again(
        self, operands: Operands, in_rows: Sequence[Tensor], fusion: Fusion, numbers: UpdateScalars,
        factor: Tensor | None, skip: Tensor | None,
    ) -> None:  # fmt: skip
        """Update a range again: by a direct call of the graph where all is like the last time.

        Operands, the count and the rule's numbers are the very tensors of then, which are bound;
        others may be new ones of the same kinds. They are those of many ranges, and looked at once.
        """
        changing = [factor, skip, numbers.epilogue_steps]
        changing += itertools.chain.from_iterable(numbers.epilogues)
        if len(changing) != len(self._changing) or not all(
            map(operator.is_, changing, self._changing)
        ):
            present = [it for it in changing if it is not None]
            absent = [it is None for it in changing]
            self._changing, self._present = changing, present
            self._kinds = absent, [*map(len, numbers.epilogues)], inductor.kinds(present)
        bound = [*in_rows, numbers.step, *numbers.rule]
        kind, call = ([*map(id, bound)], self._kinds), operands.last_call
        if call is not None and call.serves(kind):
            call(self._present)
            return
        _compiled(fusion, in_rows, numbers, factor, skip, keeps=True)
        operands.last_call = inductor.KeptCall()
        operands.last_call.keep(kind, bound, self._present)

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
    in_kernel: Fusion, operands: Sequence[Tensor], numbers: UpdateScalars, *others: Tensor | None,
    keeps: bool = False,
) -> None:  # fmt: skip
    """Run one kernel for all operands of these dtypes, with or without a factor and a skip.

    Args:
        keeps: the caller keeps the call of its graph, which else would hold the operands.
    """
    dtypes = tuple(tensor.dtype for tensor in operands)
    absent = tuple(other is None for other in others)
    _kernel(in_kernel, dtypes, absent)(in_kernel, operands, numbers, *others)
    if not keeps:
        inductor.last_call(())


@functools.cache  # one compiled function, so that models of one process share its graph
def _kernel(in_kernel: Fusion, dtypes: tuple[torch.dtype, ...], *_: Any) -> Callable[..., None]:
    name = f"the update by {in_kernel.rule} of gradients in {dtypes[0]}"
    return or_eager(inductor.compiled(update_, notes=True), in_pieces, name)
