"""Execute: how the fused update runs on a device, compiled into one kernel or eager in pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.config import ShardcastConfig
from shardcast.step.compiling import compiles, or_eager
from shardcast.step.update import fusion
from shardcast.step.update.fusion import Fusion, Numbers

CHUNK = 1 << 17  # elements per thread and eager call on a CPU: all operands stay in its cache
PIECE = 1 << 24  # elements per eager call on an accelerator, where each is a kernel launch
VECTOR = 16  # fp32 elements of the longest vector of a CPU


class Executor:
    """Runs :func:`.fusion.update_` on ranges of any length.

    Args:
        compiled: as one kernel; else eagerly, a piece at a time.
        on_host: numbers of the step and the decision to skip are the host's; only eagerly.
    """

    def __init__(self, compiled: bool, on_host: bool) -> None:
        self.compiled, self.on_host = compiled, on_host
        self._run = _compiled() if compiled else _in_pieces

    def __call__(
        self, fusion: Fusion, operands: Sequence[Tensor], numbers: Numbers, factor: Tensor | None,
        skip: Tensor | None,
    ) -> None:  # fmt: skip
        """See :func:`.fusion.update_`; operands are 1-d, begin with a row, may end within one."""
        row, counts = fusion.row, fusion.counts
        numel = operands[0].numel()
        if self.compiled:
            # One graph serves any number of rows but 0 and 1.
            least, rows = 2, numel // row
            rows = rows if rows >= least else 0
        else:
            # torch's fused kernels round what is left after the last whole vector in another way:
            # results would depend on where ranks and packs are cut.
            least = max(1, VECTOR // row)
            rows = numel // row // least * least
        pairs = list(zip(operands, counts, strict=True))
        if rows:
            whole = operands if rows * row == numel else [t[: rows * count] for t, count in pairs]
            self._run(fusion, self._in_rows(fusion, whole), numbers, factor, skip)
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

    def _in_rows(self, fusion: Fusion, operands: Sequence[Tensor]) -> list[Tensor]:
        """The same memory as rows.

        Their fixed length lets a compiler see that addresses are multiples of 16 bytes, which it
        then moves at a time.
        """
        row = fusion.row
        if self.compiled:
            pairs = zip(operands, fusion.counts, strict=True)
            return [_compat.rows_of(tensor, 0 if count < row else row) for tensor, count in pairs]
        pairs = zip(operands, fusion.counts, strict=True)
        return [tensor if count < row else tensor.view(-1, row) for tensor, count in pairs]


def _in_pieces(in_kernel: Fusion, operands: Sequence[Tensor], *others: Any) -> None:
    """The eager form allocates several times its operands: never for more than one piece."""
    on_cpu = operands[0].device.type == "cpu"
    rows = max(1, (CHUNK * torch.get_num_threads() if on_cpu else PIECE) // in_kernel.row)
    for piece in zip(*(tensor.split(rows) for tensor in operands), strict=True):
        fusion.update_(in_kernel, piece, *others)


@functools.cache  # one compiled function, so that models of one process share its graphs
def _compiled() -> Callable[..., None]:
    return or_eager(_compat.compiled(fusion.update_), _in_pieces)


def choose_executor(config: ShardcastConfig, device: torch.device) -> Executor:
    """How to run the update on ``device``; raises as :func:`compiles` does."""
    compiled = compiles(config, device)
    return Executor(compiled, on_host=device.type == "cpu" and not compiled)
