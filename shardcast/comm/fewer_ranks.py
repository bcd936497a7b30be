"""``shard_ranks``: masters and state are sharded over runs of neighbors, each of which has a copy.

The sync stays among neighbors, for more memory. A step sends the gradients to the owners of the own
run first, and the sums of these between the runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from shardcast._compat.groups import group_of
from shardcast.comm.objects import Comm
from shardcast.comm.process_groups import ProcessGroups
from shardcast.config import ShardcastConfig
from shardcast.plan.parallel_dims import ParallelDims

REPLICAS, SHARDS = "dp_replicate", "dp_shard"  # torchtitan's names of such dimensions


def ranks_of_shards(config: ShardcastConfig, size: int) -> int:
    """Over how many of ``size`` data-parallel ranks masters and state are sharded.

    Raises:
        ValueError: a number that does not divide the ranks.
    """
    asked = config.shard_ranks
    if isinstance(asked, str) or asked >= size:
        return size
    if size % asked:
        raise ValueError(
            f"shard_ranks: expected a number that divides the {size} ranks, got {asked}; use "
            "'all', or the number of ranks of a node"
        )
    return asked


def over_fewer_ranks(config: ShardcastConfig, process_groups: ProcessGroups) -> ProcessGroups:
    """The groups of ranks that are to share masters and state; the present ones if all.

    Every data-parallel rank must call it, with an agreed configuration: two groups are made.

    Raises:
        ValueError: on every rank, for a number that does not divide them.
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
    """A group of some ranks of ``comm``, this rank among them. All of them must call it.

    Raises:
        ValueError: torch does not know this group, as mock groups of threads.
    """
    group: Any = comm.group
    try:
        members = dist.get_process_group_ranks(group)
    except KeyError:
        raise ValueError(
            "shard_ranks: expected a process_group of torch's init_process_group or new_group, "
            f"beside which others can be made, got {type(group).__name__}; use shard_ranks "
            f"'all', or in tests ThreadedWorld({{'dp': {comm.size}}}) without process_group="
        ) from None
    backend = dist.get_backend_config(group)
    return Comm(group_of([members[rank] for rank in ranks], name, backend))
