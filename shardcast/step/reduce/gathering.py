"""Gather the means: on every rank into every ``.grad``, not on the owners alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardcast.comm import ProcessGroups
from shardcast.memory.gathering import gather
from shardcast.memory.pack import Pack
from shardcast.plan.pack_groups import PackGroups
from shardcast.step.reduce.bucket import Bucket


def gather_all(buckets: Mapping[Pack, Bucket], process_groups: ProcessGroups) -> None:
    """Have the mean in every ``.grad`` that some rank has. Collective."""
    for pack, present in _present_anywhere(buckets, process_groups).items():
        gather(buckets[pack].grads, present)
        buckets[pack].absent = {n for n, is_there in enumerate(present) if not is_there}


def _present_anywhere(
    buckets: Mapping[Pack, Bucket], process_groups: ProcessGroups
) -> dict[Pack, list[bool]]:
    """Return per pack and slot whether a rank has a gradient; an all-reduce per kind of pack.

    The host waits for the answer only where a gradient is missing here.
    """
    kinds: dict[PackGroups, list[Pack]] = {}
    for pack in buckets:
        kinds.setdefault(pack.layout.pack_groups._replace(is_primary=True), []).append(pack)
    present: dict[Pack, list[bool]] = {}
    for pack_groups, packs in kinds.items():
        flags = [has for pack in packs for has in buckets[pack].grads.presence()]
        total = torch.tensor(flags, dtype=torch.float32).to(packs[0].data.device)
        for comm in (
            process_groups.data_parallel(pack_groups), *process_groups.comms(pack_groups.reduce)
        ):  # fmt: skip
            comm.all_reduce(total, "gather_gradients")
        if not all(flags):
            flags = (total > 0).tolist()
        for pack in packs:
            count = len(pack.params)
            present[pack], flags = flags[:count], flags[count:]
    return present
