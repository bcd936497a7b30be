"""The process groups of one job, by purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardcast._compat.groups import group_of
from shardcast.comm.objects import Comm
from shardcast.config import ShardcastConfig
from shardcast.plan.parallel_dims import PLAIN, PackGroups, ParallelDims

T = TypeVar("T")


class ProcessGroups:
    """The process groups of this rank; extensions make those that are not :meth:`flat`.

    Attributes:
        everyone: all ranks of the job, which set up, save and load together.
        dp: data-parallel ranks, which hold the same parameters (and equally many experts).
        shard: the ranks of ``dp`` that own the spans of packs; fewer if there are replicas.
        model: model-parallel ranks at one data-parallel coordinate, in the order of the mesh.
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
        """Return groups for data parallelism alone."""
        return cls(comm, comm, comm, Comm(None), {}, ParallelDims(comm.size))

    @property
    def is_data_parallel(self) -> bool:
        """Whether each rank owns a span of every pack, with data parallelism alone."""
        return self.everyone is self.shard

    def check_alike(self, plan: Any, device: torch.device) -> None:
        """Raise RuntimeError on every rank if plans differ; names the first difference.

        Args:
            plan: this rank's :class:`.setup.Plan`.
        """
        if self.dp.size > 1:
            self.dp.check_equal(plan.facts(), device)

    def comm(self, name: str) -> Comm:
        """Return the ranks of a group that a :class:`PackGroups` names."""
        return self.shard if name == PLAIN else self._groups[name]

    def data_parallel(self, pack_groups: PackGroups) -> Comm:
        """Return the data-parallel ranks that hold the same parameters."""
        return self.dp if pack_groups.shard == PLAIN else self.comm(pack_groups.shard)

    def anywhere(
        self, flags: Mapping[T, tuple[PackGroups, Sequence[bool]]], device: torch.device, call: str
    ) -> dict[T, list[bool]]:
        """Return which flags of each pack are true on some rank that holds it. Collective.

        It takes an all-reduce per kind of pack, for which the host waits.
        """
        kinds: dict[PackGroups, list[T]] = {}
        for pack, (pack_groups, _) in flags.items():
            kinds.setdefault(pack_groups._replace(is_primary=True), []).append(pack)
        found: dict[T, list[bool]] = {}
        for pack_groups, packs in kinds.items():
            own = [flag for pack in packs for flag in flags[pack][1]]
            total = torch.tensor(own, dtype=torch.float32).to(device)
            for comm in (self.data_parallel(pack_groups), *self.comms(pack_groups.reduce)):
                comm.all_reduce(total, call)
            every = iter((total > 0).tolist())
            found.update((pack, [*islice(every, len(flags[pack][1]))]) for pack in packs)
        return found

    def end_watch(self) -> None:
        """Stop watching these ranks, once training is over; see :mod:`.watch`. Local."""
        for comm in {self.everyone, self.dp, self.shard, self.model, *self._groups.values()}:
            comm.watch.end(comm)

    def comms(self, names: Sequence[str]) -> list[Comm]:
        """Return the ranks of several such groups."""
        return [self.comm(name) for name in names]


REPLICAS, SHARDS = "dp_replicate", "dp_shard"  # torchtitan's names of these dimensions


def ranks_of_shards(config: ShardcastConfig, size: int) -> int:
    """Return the number of ranks, out of ``size``, over which masters and state are sharded.

    Raises:
        ValueError: the number does not divide the ranks.
    """
    asked = config.shard_ranks
    if isinstance(asked, str) or asked >= size:
        return size
    if size % asked:
        raise ValueError(
            f"shard_ranks: expected a number that divides the {size} ranks, got {asked}; use "
            "'all', or the number of ranks per node"
        )
    return asked


def over_fewer_ranks(config: ShardcastConfig, process_groups: ProcessGroups) -> ProcessGroups:
    """Return groups in which fewer ranks share masters and state; the given groups if all do.

    Collective: every data-parallel rank, with an agreed configuration. Creates two groups.

    Raises:
        ValueError: on every rank: the number does not divide the ranks.
    """
    comm = process_groups.dp
    ranks = ranks_of_shards(config, comm.size)
    if ranks == comm.size:
        return process_groups
    run, number = divmod(comm.rank, ranks)
    shard = range(run * ranks, (run + 1) * ranks)
    copies = range(number, comm.size, ranks)
    groups = {REPLICAS: _among(comm, copies, REPLICAS), SHARDS: _among(comm, shard, SHARDS)}
    parallel_dims = ParallelDims(
        ranks,
        {name: group.size for name, group in groups.items()},
        {name: group.rank for name, group in groups.items()},
        {REPLICAS: tuple(copies), SHARDS: tuple(shard)},
        (REPLICAS, SHARDS),
        replicas=REPLICAS,
    )
    return ProcessGroups(comm, comm, groups[SHARDS], Comm(None), groups, parallel_dims)


def _among(comm: Comm, ranks: Sequence[int], name: str) -> Comm:
    """Return a group of some ranks of ``comm``, including this one. Collective: all of these.

    Raises:
        ValueError: torch does not know this group, such as mock groups of threads.
    """
    group: Any = comm.group
    try:
        members = dist.get_process_group_ranks(group)
    except KeyError:
        raise ValueError(
            "shard_ranks: expected a process_group of torch's init_process_group or new_group, "
            f"from which subgroups can be made, got {type(group).__name__}; use shard_ranks "
            f"'all', or in tests ThreadedWorld({{'dp': {comm.size}}}) without process_group="
        ) from None
    backend = dist.get_backend_config(group)
    return Comm(group_of([members[rank] for rank in ranks], name, backend))
