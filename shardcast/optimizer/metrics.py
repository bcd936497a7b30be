"""Norms per parameter of the last measured step: of gradient, weights and their change."""

from __future__ import annotations

import fnmatch
import math

import torch
from torch import Tensor

from shardcast.memory.shard import Shard
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.step.update.epilogues import SquareSums

NAMES = ("grad_norm", "weight_norm", "update_norm", "update_to_weight", "swallowed")
ROWS = len(SquareSums.sums) + 1  # sums, and how many elements they are of


class Metrics:
    """Sums of the epilogue :class:`.SquareSums`, over all ranks that have a part of a parameter."""

    def __init__(self, optimizer: PackedOptimizer) -> None:
        self._optimizer = optimizer
        self._period = int(optimizer.config.metrics)
        self._shards: list[Shard] = []  # that are measured
        self._slots: list[str] = []  # their parameters
        self._places = torch.empty(0)  # of this rank's fragments among them
        self._weights = torch.empty(0)  # what a fragment counts, 1 but for copies
        self._numels = torch.empty(0)
        self._totals: Tensor | None = None

    def due(self) -> bool:
        """Whether this step is measured; equal on all ranks."""
        return self._period > 0 and self._optimizer.comm.steps % self._period == 0

    def collect(self) -> None:
        """Add up the sums of this step. Every rank must call it; waits for no device."""
        optimizer, process_groups = self._optimizer, self._optimizer.process_groups
        shards = [shard for shard in optimizer.shards if shard.grads is not None]
        if len(shards) != len(self._shards):
            self._index(shards)
        totals = torch.zeros(ROWS, len(self._slots), dtype=torch.float64, device=optimizer.device)
        owned = [shard for shard in shards if shard.fragments]
        sums = [_of_fragments(*optimizer.update_of(s).sums(s)) for s in owned]
        if sums and all(part.numel() for part in sums):  # none before a step that was not skipped
            own = torch.cat([torch.cat(sums, dim=1), self._numels]) * self._weights
            totals.index_copy_(1, self._places, own)
        for comm in (
            process_groups.dp, *process_groups.comms(process_groups.parallel_dims.replicating),
        ):  # fmt: skip
            comm.all_reduce(totals, "metrics")
        self._totals = totals

    def _index(self, shards: list[Shard]) -> None:
        """Where each fragment of this rank stands."""
        parallel_dims, device = self._optimizer.process_groups.parallel_dims, self._optimizer.device
        places: list[int] = []
        weights: list[float] = []
        numels: list[float] = []
        self._slots = []
        for shard in shards:
            slots, groups = shard.pack.layout.slots, shard.pack.layout.pack_groups
            first = len(self._slots)
            place_of = {slot.name: first + n for n, slot in enumerate(slots)}
            self._slots += place_of
            # All copies are added up: each of them counts for its share.
            copying = [dim for dim in parallel_dims.replicating if dim in groups.replicate]
            copying += [dim for dim in (parallel_dims.replicas,) if dim and dim in groups.reduce]
            share = 1 / math.prod(parallel_dims.sizes[dim] for dim in copying)
            for fragment in shard.fragments:
                places.append(place_of[fragment.slot.name])
                weights.append(share)
                numels.append(float(fragment.numel))
        self._shards = shards
        self._places = torch.tensor(places, dtype=torch.int64).to(device)
        self._weights = torch.tensor(weights, dtype=torch.float64).to(device)
        self._numels = torch.tensor([numels], dtype=torch.float64).to(device)

    def read(self, pattern: str) -> dict[str, dict[str, Tensor]]:
        """See :meth:`shardcast.ShardedOptimizer.metrics`. Local."""
        if not self._period:
            raise RuntimeError(
                "metrics: nothing is measured; pass metrics=True to shard(), or a number of steps"
            )
        if self._totals is None:
            return {}
        chosen = [n for n, name in enumerate(self._slots) if fnmatch.fnmatchcase(name, pattern)]
        grad, weight, update = (row.sqrt() for row in self._totals[:3].unbind())
        swallowed, numel = self._totals[3:].unbind()
        rows = (grad, weight, update, update / weight, swallowed / numel)
        by_metric = [row.float().unbind() for row in rows]
        return {
            self._slots[n]: {
                name: of_metric[n] for name, of_metric in zip(NAMES, by_metric, strict=True)
            }
            for n in chosen
        }


def _of_fragments(row_sums: Tensor, segments: Tensor) -> Tensor:
    """Sums per fragment, fp64 (sums, fragments), in two launches however many there are.

    Padding behind a fragment is zero.
    """
    if not segments.numel():
        return segments.double()
    rows = row_sums.view(-1).double()
    # Not checked: that would wait for the device.
    sums = torch.segment_reduce(rows, "sum", offsets=segments, axis=0, unsafe=True)
    return sums.view(len(row_sums), -1)
