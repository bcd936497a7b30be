"""How long a step takes, stage by stage, and what of it backward and the next forward hide.

One model, which ``shard_ranks``, the estimate and its advice ask.

Forward and backward take 6 operations for each parameter and token at the rate of the machine;
nothing that depends on the model's architecture is known. Gradients are taken to arrive evenly
over the backward, last pack first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardcast.config import ShardcastConfig
from shardcast.plan.algorithms import GROUPED
from shardcast.plan.costs import Group, Machine
from shardcast.plan.layout import Layout, PackLayout
from shardcast.plan.precision import MASTER_DTYPE, grad_dtype, wire_dtype

FORWARD, BACKWARD = 2.0, 4.0  # operations per parameter and token


@dataclass(frozen=True)
class Work:
    """What the ranks have to do in a step.

    Attributes:
        world_size: data-parallel ranks.
        layout: the packs that ``shard()`` would make, and how many of the ranks share them.
        updated: bytes that the update reads and writes on the rank that updates most.
        normed: bytes that the norm reads there.
        products: per rank, floating-point operations of Muon's matrix products.
    """

    world_size: int
    layout: Layout
    updated: float
    normed: float
    products: Sequence[float]

    @property
    def copies(self) -> int:
        """How many runs of ranks hold masters and state."""
        return self.world_size // self.layout.world_size


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
    work: Work, config: ShardcastConfig, machine: Machine, numel: int, tokens: int
) -> StepTime:
    """The step of shardcast on a world of data-parallel ranks that fill one node after another.

    Args:
        work: such as :func:`shardcast.estimate.estimate` gives for a world size and ``config``.
        numel: parameters of the model.
        tokens: of one rank in a step.
    """
    group, packs = machine.group(work.layout.world_size), work.layout.trained
    # Ranks of equal number in all runs: one on each node, unless a node has several runs.
    copies = Group(machine, work.copies, max(1, machine.ranks_per_node // group.size))
    forward, backward = compute_times(numel, tokens, machine)
    sizes = [pack.numel * sent_dtype(pack, config).itemsize for pack in reversed(packs)]
    sent = [
        group.reduce(pack.algorithms.reduce, nbytes)
        + copies.all_reduce(max(pack.lengths) * MASTER_DTYPE.itemsize)
        for pack, nbytes in zip(reversed(packs), sizes, strict=True)
    ]
    # On the device that computes, so beside nothing: gradients copied into their packs, and what
    # arrived read and summed.
    local = 2 * sum(sizes) + sum(_summed(pack, config, work.copies) for pack in packs)
    synced = [
        group.sync(
            algorithm, sum(pack.nbytes for pack in together),
            sum(len(pack.owned_spans) for pack in together), len(together),
        )
        for algorithm, together in sync_launches(packs, machine.backend, config)
    ]  # fmt: skip
    # Read backwards in time: a forward waits for each launch before a deadline.
    under = hidden(synced[::-1], arrivals(sizes, forward), forward) if config.overlap_sync else 0.0
    bandwidth = machine.host if config.offload else machine.memory
    return StepTime(
        compute=forward + backward,
        reduce=sum(sent) + local / machine.memory,
        decide=work.normed / machine.memory + machine.group(work.world_size).all_reduce(8),
        update=work.updated / bandwidth + max(work.products) / machine.flops,
        sync=sum(synced),
        in_backward=hidden(sent, arrivals(sizes, backward), backward),
        in_forward=under,
    )


def compute_times(numel: int, tokens: int, machine: Machine) -> tuple[float, float]:
    """Seconds of forward and of backward for ``tokens`` of one rank."""
    return FORWARD * numel * tokens / machine.flops, BACKWARD * numel * tokens / machine.flops


def arrivals(sizes: Sequence[int], seconds: float) -> list[float]:
    """When the gradients of each pack, in their order, are complete."""
    total, so_far, times = sum(sizes) or 1, 0, []
    for size in sizes:
        so_far += size
        times.append(seconds * so_far / total)
    return times


def hidden(works: Sequence[float], ready: Sequence[float], end: float) -> float:
    """What of ``works`` is done before ``end``, each beginning when it is ready.

    One after another, in their order.
    """
    clock = 0.0
    for seconds, begin in zip(works, ready, strict=True):
        clock = max(clock, begin) + seconds
    return max(0.0, sum(works) - max(0.0, clock - end))  # above 0 but for rounding


def sync_launches(
    packs: Sequence[PackLayout], backend: str, config: ShardcastConfig
) -> list[tuple[str, list[PackLayout]]]:
    """Algorithms, and packs that are synced in one launch, or by messages at the same time.

    Beside the next forward, which waits for each pack by itself, each has its own, and messages
    are broadcasts. See ``Comm.all_gather_all``, and ``Sync.begin``.
    """
    launches: dict[Any, tuple[str, list[PackLayout]]] = {}
    for pack in packs:
        sync = pack.algorithms.sync
        if config.overlap_sync and sync == "messages":
            sync = "broadcast"
        together = not config.overlap_sync and (sync == "messages" or backend in GROUPED)
        kind = sync, pack.dtype if sync == "all_gather" else None
        launches.setdefault(kind if together else pack.index, (sync, []))[1].append(pack)
    return list(launches.values())


def sent_dtype(pack: PackLayout, config: ShardcastConfig) -> torch.dtype:
    """Of gradients as they travel: sums of several micro-batches do so in fp32."""
    several = config.reproducible > len(pack.spans)
    return MASTER_DTYPE if several else wire_dtype(pack.dtype, config)


def _summed(pack: PackLayout, config: ShardcastConfig, copies: int) -> int:
    """Bytes that the fp32 sum of what arrived reads and writes, on the rank that owns most."""
    longest, size = max(pack.lengths), len(pack.spans)
    between = 2 * longest * MASTER_DTYPE.itemsize if copies > 1 else 0
    if size == 1:
        return between
    pieces = 1 if pack.algorithms.reduce == "reduce_scatter" else size
    return longest * grad_dtype(pack.dtype, config).itemsize * (pieces + 1) + between
