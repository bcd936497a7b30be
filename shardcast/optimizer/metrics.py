"""Norms per parameter of the last measured step: of gradient, weights and their change."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from fnmatch import fnmatchcase as match

import torch
from torch import Tensor

from shardcast.memory.shard import Shard
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.step.decide.options import to_device
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
        self._choices: dict[Hashable, tuple[list[str], Tensor, Tensor]] = {}  # see _chosen

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
        sums = [_of_fragments(*optimizer.update_of(s).sums(s), len(s.fragments)) for s in owned]
        if sums:
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
        self._choices.clear()
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
        self._places = to_device(places, torch.int64, device)
        self._weights = to_device(weights, torch.float64, device)
        self._numels = to_device([numels], torch.float64, device)

    def read(self, patterns: str | Mapping[str, str]) -> dict[str, dict[str, Tensor]]:
        """See :meth:`shardcast.ShardedOptimizer.metrics`. Local."""
        if not self._period:
            raise RuntimeError(
                "metrics: nothing is measured; pass metrics=True to shard(), or a number of steps"
            )
        if self._totals is None:
            return {}
        labels, slots, rows = self._chosen(patterns)
        chosen = self._totals.new_zeros(ROWS, len(labels))
        chosen.index_add_(1, rows, self._totals[:, slots])
        grad, weight, update = (row.sqrt() for row in chosen[:3].unbind())
        swallowed, numel = chosen[3:].unbind()
        values = (grad, weight, update, update / weight, swallowed / numel)
        columns = torch.stack(values, dim=1).float().unbind()
        return {
            label: dict(zip(NAMES, of.unbind(), strict=True))
            for label, of in zip(labels, columns, strict=True)
        }

    def _chosen(self, patterns: str | Mapping[str, str]) -> tuple[list[str], Tensor, Tensor]:
        """Labels, and on the device slots with the label of each; kept for the next call."""
        key = patterns if isinstance(patterns, str) else tuple(patterns.items())
        if key not in self._choices:
            if isinstance(patterns, str):
                pairs = [(name, n) for n, name in enumerate(self._slots) if match(name, patterns)]
                labels = [name for name, _ in pairs]
            else:
                labels = [*patterns]
                pairs = [
                    (label, n)
                    for label, pattern in patterns.items()
                    for n, name in enumerate(self._slots)
                    if match(name, pattern)
                ]
            unmatched = set(labels) - {label for label, _ in pairs}
            if unmatched:
                raise ValueError(
                    f"metrics: expected patterns of parameter names, got none that match for "
                    f"{', '.join(map(repr, sorted(unmatched)))}"
                )
            rows = {label: row for row, label in enumerate(labels)}
            places = [n for _, n in pairs], [rows[label] for label, _ in pairs]
            slots, rows_of_slots = to_device(places, torch.int64, self._optimizer.device)
            self._choices[key] = labels, slots, rows_of_slots
        return self._choices[key]


def _of_fragments(row_sums: Tensor, segments: Tensor, count: int) -> Tensor:
    """Sums per fragment, fp64 (sums, fragments), in three launches however many there are.

    Padding behind a fragment is zero. Of a shard without a step that was not skipped they are 0.
    """
    if not segments.numel():
        return segments.new_zeros(len(SquareSums.sums), count, dtype=torch.float64)
    rows = row_sums.double()
    rows[: SquareSums.squares].square_()
    # Not checked: that would wait for the device.
    sums = torch.segment_reduce(rows.view(-1), "sum", offsets=segments, axis=0, unsafe=True)
    return sums.view(len(row_sums), -1)
