"""How long a step takes, stage by stage, and what of it backward and the next forward hide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardcast.config import ShardcastConfig
from shardcast.estimate.memory import Estimate, sent_dtype, sync_launches
from shardcast.plan.costs import Group, Machine, arrivals, compute_times, hidden
from shardcast.plan.layout import PackLayout
from shardcast.plan.precision import MASTER_DTYPE, grad_dtype


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
    packs = found.layout.trained
    sent = [reduce_time(pack, config, group, copies) for pack in reversed(packs)]
    sizes = [_sent_bytes(pack, config) for pack in reversed(packs)]
    beside = hidden(sent, arrivals(sizes, backward), backward)
    # On the device that computes, so beside nothing: gradients copied into their packs, and what
    # arrived read and summed.
    local = (2 * sum(sizes) + sum(_summed(pack, config, found.copies) for pack in packs)) / (
        machine.memory
    )
    synced = sync_times(packs, group, config.overlap_sync)
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


def reduce_time(pack: PackLayout, config: ShardcastConfig, group: Group, copies: Group) -> float:
    """Seconds in which the gradients of one pack travel to their owners, and sums between these."""
    ways = {
        "": lambda _nbytes: 0.0,  # one rank
        "reduce_scatter": group.gather,
        "all_to_all": group.exchange,
        "two_level": group.two_level,
    }
    summed = max(pack.lengths) * MASTER_DTYPE.itemsize
    return ways[pack.algorithms.reduce](_sent_bytes(pack, config)) + copies.all_reduce(summed)


def sync_times(packs: Sequence[PackLayout], group: Group, overlaps: bool) -> list[float]:
    """Seconds in which owners' spans of ``packs`` travel to everybody, for each launch."""
    if group.size == 1:
        return [0.0] * len(packs)
    seconds = []
    for synced in sync_launches(packs, group.machine.backend, overlaps):
        algorithm = synced[0].algorithms.sync
        stored = sum(pack.nbytes for pack in synced)
        if algorithm == "all_gather":
            seconds.append(group.gather(stored, len(synced)))
        elif algorithm == "broadcast" or overlaps:
            owners = sum(len(pack.owned_spans) for pack in synced)
            seconds.append(group.broadcasts(stored, owners))
        else:
            seconds.append(group.exchange(stored))
    return seconds


def _sent_bytes(pack: PackLayout, config: ShardcastConfig) -> int:
    return pack.numel * sent_dtype(pack, config).itemsize


def _summed(pack: PackLayout, config: ShardcastConfig, copies: int) -> int:
    """Bytes that the fp32 sum of what arrived reads and writes, on the rank that owns most."""
    longest, size = max(pack.lengths), len(pack.spans)
    between = 2 * longest * MASTER_DTYPE.itemsize if copies > 1 else 0
    if size == 1:
        return between
    pieces = 1 if pack.algorithms.reduce == "reduce_scatter" else size
    return longest * grad_dtype(pack.dtype, config).itemsize * (pieces + 1) + between
