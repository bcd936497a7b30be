"""Over how many of the data-parallel ranks masters and state are sharded, and why.

Sharded over fewer than all of them, each run of neighbours has a copy: more memory, but the sync
stays among neighbours. Then a step sends the gradients to the owners of the own run first, and the
sums of these between the runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

from shardcast.config import ShardcastConfig
from shardcast.plan.algorithms import Topology
from shardcast.plan.layout import Layout
from shardcast.plan.packing import with_algorithms
from shardcast.plan.step_time import StepTime, Work, step_time

HELD = 12  # bytes per element of which each rank of a run has a part: a master and two moments
MOVED = 28  # and that an update reads and writes, the gradient and the parameter included
NORMED = 2  # and that the norm reads
PART = 8  # of the free memory these may take one part in so many, where nobody asked for it
GAIN = 0.02  # of a step that copies must save, likewise
FEWEST = 8  # ranks of a run, likewise: 4 + 12 / 8 bytes are a third of DDP's 16
TOKENS = 8192  # of one rank in a step, which is not known when a job is set up


def shard_ranks(
    config: ShardcastConfig,
    layout: Layout,
    over: Callable[[int], Layout],
    topology: Topology,
    between: float,
    free: float,
    costs: Mapping[str, float] = MappingProxyType({}),
) -> tuple[int, str]:
    """How many ranks are to share masters and state, and the reason; pure, so equal on all ranks.

    Args:
        layout: of a plan over all ranks.
        over: plans one over so many ranks.
        topology: of all ranks.
        between: bytes per second of a rank's share of its node's network cards; 0: not known.
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
    several = topology.backend == "nccl" and 1 < topology.node < size and between > 0
    lean = (config.grads, config.offload, config.moments, config.master)
    saves = lean != ("full", False, "fp32", "fp32")
    exact = bool(config.reproducible)  # sums between copies are in no order of ours
    if asked != "auto" or not several or size % topology.node or saves or exact:
        return size, ""
    numel = sum(pack.numel for pack in layout.trained)
    elements = {slot.name: slot.numel for _, slot in layout.slots()}
    machine = dataclasses.replace(topology.machine, between=between)

    def step_of(layout: Layout) -> StepTime:
        near = topology._replace(node=min(topology.node, layout.world_size))
        layout, owned = with_algorithms(layout, config, near), max(layout.by_owner(elements))
        work = Work(size, layout, MOVED * owned, NORMED * owned, layout.by_owner(costs))
        return step_time(work, config, machine, numel, TOKENS)

    steps, ranks = dict[int, StepTime](), topology.node
    while ranks < size:
        fits = HELD * numel / ranks * PART <= free
        if ranks >= FEWEST and size % ranks == 0 and fits:
            steps[ranks] = step_of(over(ranks))
        ranks *= 2
    if not steps:
        return size, f"sharded over {size} of {size} ranks (fewer would take too much memory)"
    best = min(steps, key=lambda ranks: steps[ranks].added)
    over_best, over_all = steps[best], step_of(layout)
    why = f"{1e3 * over_best.added:.1f} ms over {best}, {1e3 * over_all.added:.1f} ms over all"
    if over_all.step - over_best.step < GAIN * over_all.step:
        best, why = size, f"{why}: not {GAIN:.0%} of a step"
    return best, f"sharded over {best} of {size} ranks ({why})"
