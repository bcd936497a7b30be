"""Which batches a rank has in a step that is to be reproducible."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from accelerate.data_loader import BatchSamplerShard

from shardcast.messages import warn


class ConsecutiveBatches:
    """Batches of a sampler in such an order that ranks to which they are dealt in turn have:

    of each step rank 0 the first ones, rank 1 the next, as at any other number of ranks.

    Args:
        total: batches of a step, over all ``ranks``.
    """

    def __init__(self, batch_sampler: Any, total: int, ranks: int) -> None:
        self.batch_sampler, self._total, self._share = batch_sampler, total, total // ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batch_sampler, name)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.batch_sampler)
        while step := [*islice(batches, self._total)]:
            for first in range(self._share):
                yield from step[first :: self._share]


def deal_consecutive(loader: Any, total: int) -> None:
    """Have a prepared loader give each rank the batches of a step that follow one another."""
    dealt = getattr(loader, "batch_sampler", None)
    if isinstance(dealt, BatchSamplerShard) and not dealt.split_batches:
        dealt.batch_sampler = ConsecutiveBatches(dealt.batch_sampler, total, dealt.num_processes)
    else:
        warn(
            "reproducible: expected a DataLoader whose batches are dealt to the ranks, got "
            f"{type(loader).__name__} with split_batches, dispatch_batches or an IterableDataset, "
            "so that another number of ranks trains other micro-batches, and other bits; use a "
            "Dataset of known length, or leave the loader out of prepare()"
        )
