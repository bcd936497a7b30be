"""The process groups of one job, by what they are for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardcast.comm.objects import Comm
from shardcast.plan.pack_groups import PLAIN, PackGroups
from shardcast.plan.parallel_dims import ParallelDims


class ProcessGroups:
    """The process groups of this rank; others than :meth:`flat` ones are made by extensions.

    Attributes:
        everyone: all ranks of the job: they set up, save and load together.
        dp: the data-parallel ranks, which hold the same parameters (of experts: the same number).
        shard: the ranks of ``dp`` that own the spans of packs; fewer where there are replicas.
        model: the model-parallel ranks of one data-parallel coordinate, in the order of the mesh.
        parallel_dims: the dimensions, for planning.
    """

    def __init__(
        self,
        everyone: Comm,
        dp: Comm,
        shard: Comm,
        model: Comm,
        groups: Mapping[str, Comm],
        parallel_dims: ParallelDims,
    ) -> None:
        self.everyone, self.dp, self.shard, self.model = everyone, dp, shard, model
        self.parallel_dims = parallel_dims
        self._groups = groups

    @classmethod
    def flat(cls, comm: Comm) -> ProcessGroups:
        """Data parallelism alone."""
        return cls(comm, comm, comm, Comm(None), {}, ParallelDims(comm.size))

    @property
    def is_data_parallel(self) -> bool:
        """Return whether the job is data-parallel alone, each rank owning a span of every pack."""
        return self.everyone is self.shard

    def check_alike(self, plan: Any, device: torch.device) -> None:
        """Raise a RuntimeError on every rank, naming the first difference, where plans differ.

        Args:
            plan: of this rank, a :class:`.setup.Plan`.
        """
        if self.dp.size > 1:
            self.dp.check_equal(plan.facts(), device)

    def comm(self, name: str) -> Comm:
        """The ranks of a group that a :class:`PackGroups` names."""
        return self.shard if name == PLAIN else self._groups[name]

    def data_parallel(self, pack_groups: PackGroups) -> Comm:
        """The data-parallel ranks that hold the same parameters."""
        return self.dp if pack_groups.shard == PLAIN else self.comm(pack_groups.shard)

    def end_watch(self) -> None:
        """Stop watching these ranks, once training is over; see :mod:`.watch`. Local."""
        for comm in {self.everyone, self.dp, self.shard, self.model, *self._groups.values()}:
            comm.watch.end(comm)

    def comms(self, names: Sequence[str]) -> list[Comm]:
        """The ranks of several such groups."""
        return [self.comm(name) for name in names]
