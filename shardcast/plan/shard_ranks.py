"""Over how many of the data-parallel ranks masters and state are sharded, and why.

Sharded over fewer than all of them, each run of neighbours has a copy: more memory, but the sync
stays among neighbours. Then a step sends the gradients to the owners of the own run first, and the
sums of these between the runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from shardcast.config import ShardcastConfig
from shardcast.plan.algorithms import Topology, group_of, reduce_costs, sync_costs, syncs_at_once
from shardcast.plan.costs import TOKENS, arrivals, compute_times, exposed
from shardcast.plan.layout import Layout
from shardcast.plan.packing import pack_bytes
from shardcast.plan.precision import MASTER_DTYPE, wire_dtype

HELD = 12  # bytes per element of which each rank of a run has a part: a master and two moments
MOVED = 28  # and that an update reads and writes, the gradient and the parameter included
PART = 8  # of the free memory these may take one part in so many, where nobody asked for it
GAIN = 0.02  # of a step that copies must save, likewise
FEWEST = 8  # ranks of a run, likewise: 4 + 12 / 8 bytes are a third of DDP's 16


def shard_ranks(
    config: ShardcastConfig,
    layout: Layout,
    topology: Topology,
    free: float,
    costs: Mapping[str, float] = MappingProxyType({}),
) -> tuple[int, str]:
    """How many ranks are to share masters and state, and the reason; pure, so equal on all ranks.

    Args:
        layout: of a plan over all ranks.
        topology: of all ranks; with a network of 0 bytes per second it is not known.
        free: bytes of device memory, on the rank that has least.
        costs: operations of the updates that are no elementwise ones.

    Returns:
        The number of ranks, and what ``print(optimizer.layout)`` says of it: nothing, where there
        was no choice.

    Raises:
        ValueError: a number that does not divide the ranks.
    """
    size, asked = layout.world_size, config.shard_ranks
    if isinstance(asked, int) and asked < size:
        if size % asked:
            raise ValueError(
                f"shard_ranks: expected a number that divides the {size} ranks, got {asked}; use "
                "'auto', or the number of ranks of a node"
            )
        return asked, f"sharded over {asked} of {size} ranks (as asked)"
    several = topology.backend == "nccl" and 1 < topology.node < size and topology.between > 0
    lean = (config.grads, config.offload, config.moments, config.master)
    saves = lean != ("full", False, "fp32", "fp32")
    exact = bool(config.reproducible)  # sums between copies are in no order of ours
    if asked != "auto" or not several or size % topology.node or saves or exact:
        return size, ""
    return _fastest(config, layout, topology, free, costs)


def _fastest(
    config: ShardcastConfig, layout: Layout, topology: Topology, free: float,
    costs: Mapping[str, float],
) -> tuple[int, str]:  # fmt: skip
    """What ``auto`` takes on several nodes; arguments as of :func:`shard_ranks`."""
    size = layout.world_size
    numel = sum(pack.numel for pack in layout.packs if pack.requires_grad)
    seconds, ranks = dict[int, float](), topology.node
    while ranks < size:
        fits = HELD * numel / ranks * PART <= free
        if ranks >= FEWEST and size % ranks == 0 and fits:
            seconds[ranks] = sharding_cost(config, layout, ranks, topology, costs)
        ranks *= 2
    if not seconds:
        return size, f"sharded over {size} of {size} ranks (fewer would take too much memory)"
    fastest = min(seconds, key=seconds.__getitem__)
    over_all = sharding_cost(config, layout, size, topology, costs)
    step = over_all + sum(compute_times(numel, TOKENS, group_of(size, topology).machine))
    gains = over_all - seconds[fastest] >= GAIN * step
    why = f"{1e3 * seconds[fastest]:.1f} ms over {fastest}, {1e3 * over_all:.1f} ms over all"
    why += "" if gains else f": not {GAIN:.0%} of a step"
    best = fastest if gains else size
    return best, f"sharded over {best} of {size} ranks ({why})"


def sharding_cost(
    config: ShardcastConfig, layout: Layout, ranks: int, topology: Topology,
    costs: Mapping[str, float],
) -> float:  # fmt: skip
    """Seconds that a step takes beyond forward and backward: what is not hidden of the reduce,
    the update and the sync.

    On H100s, with :data:`TOKENS` of a rank in a step: neither is known when a job is set up. The
    network is, more or less.

    Args:
        layout: for its bytes; its packs may be of another size.
        ranks: that share masters and state.
        costs: operations of updates; those of a parameter have one owner.
    """
    size = layout.world_size
    near = topology._replace(node=min(topology.node, ranks))
    copies = group_of(size // ranks, topology._replace(node=max(1, topology.node // ranks)))
    reduced, synced = list[float](), list[float]()
    by_dtype: dict[tuple[torch.dtype, bool], int] = {}
    for pack in layout.packs:
        if pack.requires_grad:
            kind = pack.dtype, pack.partition == "even"
            by_dtype[kind] = by_dtype.get(kind, 0) + pack.numel
    for (dtype, equal), numel in by_dtype.items():
        wire, stored = numel * wire_dtype(dtype, config).itemsize, numel * dtype.itemsize
        packs = max(1, round(stored / pack_bytes(ranks)))
        ways = reduce_costs(wire / packs, ranks, equal, near)
        if equal and wire_dtype(dtype, config) == MASTER_DTYPE:
            ways["reduce_scatter"] = group_of(ranks, near).gather(wire / packs)
        sums = copies.all_reduce(numel * MASTER_DTYPE.itemsize / ranks / packs)
        reduced += [min(ways.values()) + sums] * packs
        syncs = sync_costs(stored / packs, stored / packs, ranks, ranks, equal, near)
        if syncs_at_once("all_gather", topology.backend, config.overlap_sync):
            group = group_of(ranks, near)
            whole = (
                group.gather(stored, packs) if equal else group.broadcasts(stored, packs * ranks)
            )
            synced.append(whole)
        else:
            synced += [min(syncs.values())] * packs
    numel, machine = sum(by_dtype.values()), copies.machine
    forward, backward = compute_times(numel, TOKENS, machine)
    updated = (MOVED * numel / machine.memory + sum(costs.values()) / machine.flops) / ranks
    updated = max(updated, max(costs.values(), default=0.0) / machine.flops)
    update_and_sync = updated + (
        exposed(synced, arrivals([1] * len(synced), forward), forward)  # read backwards in time
        if config.overlap_sync
        else sum(synced)
    )
    return update_and_sync + exposed(reduced, arrivals([1] * len(reduced), backward), backward)
