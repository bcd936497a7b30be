"""The update compiled as one kernel, for ranges of any length."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardcast import _compat
from shardcast._compat import inductor
from shardcast.step.compiling import or_eager
from shardcast.step.update.fusion import Executor, Fusion, UpdateScalars, in_pieces, update_


class CompiledExecutor(Executor):
    """Runs :func:`.fusion.update_` on each range as one kernel."""

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
    fusion: Fusion, operands: Sequence[Tensor], numbers: UpdateScalars, factor: Tensor | None,
    skip: Tensor | None,
) -> None:  # fmt: skip
    """Run one kernel for all operands of these dtypes, with or without a factor and a skip."""
    dtypes = tuple(tensor.dtype for tensor in operands)
    run = _kernel(fusion, dtypes, factor is None, skip is None)
    run(fusion, operands, numbers, factor, skip)


@functools.cache  # one compiled function, so that models of one process share its graph
def _kernel(fusion: Fusion, dtypes: tuple[torch.dtype, ...], *_: bool) -> Callable[..., None]:
    name = f"the update by {fusion.rule} of gradients in {dtypes[0]}"
    return or_eager(inductor.compiled(update_), in_pieces, name)
