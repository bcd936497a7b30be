"""The batches that a rank has in a step that is to be reproducible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from accelerate.data_loader import BatchSamplerShard

from shardcast.comm import warn_first


class ConsecutiveBatches:
    """Batches of a sampler in such an order that ranks to which they are dealt in turn have:

    of each step rank 0 the first ones, rank 1 the next, as at any other number of ranks. An epoch
    that begins while no model trains keeps its order, in which metrics are gathered.

    Args:
        shard: what deals them.
        total: batches of a step, over all ranks.
        is_training: whether a model is in training mode. A loader that trained is for training.

    Attributes:
        trains: whether it was begun for training; ``None`` before.
        filled_up: whether the last step of the epoch lacks what Accelerate takes from the first.
    """

    trains: bool | None = None
    filled_up = False

    def __init__(
        self, shard: BatchSamplerShard, total: int, is_training: Callable[[], bool]
    ) -> None:
        self.batch_sampler, self._shard, self._total = shard.batch_sampler, shard, total
        self._is_training = is_training

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batch_sampler, name)

    @property
    def sampler(self) -> Any:
        """The sampler of ``batch_sampler``, which ``loader.set_sampler`` replaces."""
        return self.batch_sampler.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        self.trains, self.filled_up = self.trains or self._is_training(), False
        size = self._shard.batch_size if self._shard.even_batches else None
        share = self._total // self._shard.num_processes
        batches = iter(self.batch_sampler)
        while step := [*islice(batches, self._total)]:
            is_whole = len(step) == self._total
            self.filled_up = not is_whole or (size is not None and len(step[-1]) < size)
            if self.trains and is_whole:
                step = [batch for first in range(share) for batch in step[first::share]]
            yield from step


def deal_consecutive(
    loader: Any, total: int, is_training: Callable[[], bool]
) -> list[ConsecutiveBatches]:
    """Have a prepared loader give each rank the batches of a step that follow one another.

    Returns:
        What does so; nothing where it cannot, of which it warns, or does so already.
    """
    shard = getattr(loader, "batch_sampler", None)
    if not isinstance(shard, BatchSamplerShard) or shard.split_batches:
        warn_first(
            "reproducible: expected a DataLoader whose batches are dealt to the ranks, got "
            f"{type(loader).__name__} with split_batches, dispatch_batches or an IterableDataset, "
            "so that another number of ranks trains other micro-batches, and other bits; use a "
            "Dataset of known length, or leave the loader out of prepare()"
        )
    elif not isinstance(shard.batch_sampler, ConsecutiveBatches):  # a loader may come twice
        shard.batch_sampler = ConsecutiveBatches(shard, total, is_training)
        return [shard.batch_sampler]
    return []


def check_dealt(dealt: Sequence[ConsecutiveBatches], loader: Any) -> None:
    """Refuse a backward whose batches are others on another number of ranks.

    Args:
        loader: the one that is looped over.

    Raises:
        RuntimeError: all began as for an evaluation, or this is a step that was filled up.
    """
    begun = [batches.trains for batches in dealt if batches.trains is not None]
    if begun and not any(begun):
        raise RuntimeError(
            "reproducible: the loop over the DataLoader began while the model was in eval mode, so "
            "its batches are in the order of an evaluation; call model.train() before the loop"
        )
    if loader.end_of_dataloader and any(batches.trains and batches.filled_up for batches in dealt):
        raise RuntimeError(
            "reproducible: the last step of the epoch lacks batches or samples, which Accelerate "
            "takes from the first ones, and on another number of ranks takes others; expected a "
            "DataLoader with drop_last=True whose number of batches is a multiple of those of a "
            "step on all ranks"
        )
