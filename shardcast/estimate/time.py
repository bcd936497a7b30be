"""How long a step takes, stage by stage, and what of it backward and the next forward hide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardcast.config import ShardcastConfig
from shardcast.estimate.memory import Estimate, Traffic
from shardcast.plan.algorithms import syncs_at_once
from shardcast.plan.costs import Group, Machine, arrivals, compute_times, hidden


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step with one micro-batch, on the slowest rank.

    Attributes:
        compute: forward and backward.
        reduce: gradients to their owner: what is sent, and the sum of what arrives.
        decide: the norm, and the small all-reduce that all ranks decide with.
        update: bytes over bandwidth, and Muon's matrix products at the rate of the forward; in the
            other systems the cast too, wherever it is.
        sync: updated parameters to everybody.
        in_backward: of ``reduce`` (in FSDP2 of ``sync`` too), what runs beside the backward.
        in_forward: of ``sync``, what runs beside the next forward.
    """

    compute: float
    reduce: float
    decide: float
    update: float
    sync: float
    in_backward: float
    in_forward: float

    @property
    def step(self) -> float:
        """All stages, less what runs beside others."""
        return self.compute + self.added

    @property
    def added(self) -> float:
        """What the step takes beyond forward and backward."""
        stages = self.reduce + self.decide + self.update + self.sync
        return stages - self.in_backward - self.in_forward


def step_time(
    found: Estimate, config: ShardcastConfig, machine: Machine, numel: int, tokens: int
) -> StepTime:
    """The step of shardcast on a world of data-parallel ranks that fill one node after another.

    Args:
        found: what :func:`shardcast.estimate.estimate` gave for this world size and ``config``.
        numel: parameters of the model.
        tokens: of one rank in a step.
    """
    group = machine.group(found.layout.world_size)
    # Ranks of equal number in all runs: one on each node, unless a node has several runs.
    copies = Group(machine, found.copies, max(1, machine.ranks_per_node // group.size))
    forward, backward = compute_times(numel, tokens, machine)
    sent = [reduce_time(pack, group, copies) for pack in reversed(found.traffic)]
    sizes = [pack.wire for pack in reversed(found.traffic)]
    beside = hidden(sent, arrivals(sizes, backward), backward)
    # On the device that computes, so beside nothing: gradients copied into their packs, and what
    # arrived read and summed.
    moved = sum(2 * pack.wire + _summed(pack, group.size, found.copies) for pack in found.traffic)
    local = moved / machine.memory
    synced = sync_times(found.traffic, group, config.overlap_sync)
    under = hidden(synced[::-1], arrivals(sizes, forward), forward) if config.overlap_sync else 0.0
    bandwidth = machine.host if config.offload else machine.memory
    return StepTime(
        compute=forward + backward,
        reduce=sum(sent) + local,
        decide=found.normed / machine.memory + machine.group(found.world_size).all_reduce(8),
        update=found.updated / bandwidth + max(found.products) / machine.flops,
        sync=sum(synced),
        in_backward=beside,
        in_forward=under,
    )


def reduce_time(pack: Traffic, group: Group, copies: Group) -> float:
    """Seconds in which the gradients of one pack travel to their owners, and sums between these."""
    ways = {
        "": lambda _nbytes: 0.0,  # one rank
        "reduce_scatter": group.gather,
        "all_to_all": group.exchange,
        "two_level": group.two_level,
    }
    return ways[pack.algorithms.reduce](pack.wire) + copies.all_reduce(pack.summed)


def sync_times(packs: Sequence[Traffic], group: Group, overlaps: bool) -> list[float]:
    """Seconds in which owners' spans of ``packs`` travel to everybody, for each launch."""
    launches: dict[Any, list[Traffic]] = {}
    for number, pack in enumerate(packs if group.size > 1 else ()):
        together = syncs_at_once(pack.algorithms.sync, group.machine.backend, overlaps)
        launches.setdefault(pack.sync_kind if together else number, []).append(pack)
    seconds = []
    for synced in launches.values():
        algorithm = synced[0].algorithms.sync
        stored = sum(pack.stored for pack in synced)
        if algorithm == "all_gather":
            seconds.append(group.gather(stored, len(synced)))
        elif algorithm == "broadcast" or overlaps:
            seconds.append(group.broadcasts(stored, sum(pack.owners for pack in synced)))
        else:
            seconds.append(group.exchange(stored))
    return seconds or [0.0] * len(packs)


def _summed(pack: Traffic, size: int, copies: int) -> int:
    """Bytes that the fp32 sum of what arrived reads and writes."""
    between = 2 * pack.summed if copies > 1 else 0
    if size == 1:
        return between
    pieces = 1 if pack.algorithms.reduce == "reduce_scatter" else size
    return pack.received * (pieces + 1) + between
