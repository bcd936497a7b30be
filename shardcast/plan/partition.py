"""Owners of the elements of a pack: equal spans, or whole parameters.

Each whole parameter is updated by one rank, such that ranks have equal work.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence

import torch

from shardcast.config import ShardcastConfig
from shardcast.plan.layout import ParamInfo, Slot, Span

ELEMENT = 20.0  # approximate floating-point operations per element of an elementwise update


def partition_of(
    optimizer: torch.optim.Optimizer, elementwise: bool, config: ShardcastConfig
) -> str:
    """Return the partition. ``auto`` is even only for elementwise updates."""
    chosen = (("sync", config.sync), ("reduce", config.reduce))
    equal = [(name, way) for name, way in chosen if way in ("all_gather", "reduce_scatter")]
    partition = config.partition
    if partition == "auto":
        partition = "even" if elementwise else "whole"
    if equal and partition == "whole":
        raise ValueError(
            f"{equal[0][0]}: {equal[0][1]} needs equal spans, but {type(optimizer).__name__} is "
            f"sharded with partition 'whole'; use the default {equal[0][0]}"
        )
    if config.partition == "even" and not elementwise:
        raise ValueError(
            f"partition: 'even' splits parameters, and {type(optimizer).__name__} is not "
            "elementwise; use 'whole' or 'auto', or declare elementwise=True if its update of "
            "an element depends on nothing but that element's gradient and state"
        )
    return partition


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def placed(members: Sequence[ParamInfo], offset: int, align: int) -> tuple[list[Slot], int]:
    """Return slots of ``members`` starting at ``offset``, and where they end."""
    slots = []
    for param in members:
        offset, numel = round_up(offset, align), param.numel
        slots.append(Slot(param.name, param.shape, offset, numel, param.group))
        offset += numel
    return slots, offset


def plan_even(
    members: Sequence[ParamInfo], world_size: int, align: int
) -> tuple[tuple[Slot, ...], tuple[Span, ...]]:
    slots, end = placed(members, 0, align)
    if world_size == 1:  # one rank: the pack keeps its exact size
        return tuple(slots), (Span(0, 0, end),)
    size = round_up(-(-end // world_size), align)
    cuts = [rank * size for rank in range(world_size + 1)]
    if any(align % param.unit for param in members):
        units = [param.unit for param in members]
        whole = (_between_units(cut, slots, units, align) for cut in cuts[1:-1])
        cuts = [0, *whole, round_up(end, align)]
    spans = enumerate(itertools.pairwise(cuts))
    return tuple(slots), tuple(Span(rank, start, stop) for rank, (start, stop) in spans)


def _between_units(cut: int, slots: Sequence[Slot], units: Sequence[int], align: int) -> int:
    """Return the position nearest to ``cut`` that splits no unit of a slot; monotonic in it."""
    for slot, unit in zip(slots, units, strict=True):
        if cut < slot.end:
            within = max(0, cut - slot.offset)
            return round_up(slot.offset + (within + unit // 2) // unit * unit, align)
    return round_up(slots[-1].end, align)


def assign_owners(params: Sequence[ParamInfo], world_size: int) -> dict[str, int]:
    """Return the rank that updates each of ``params``, by name.

    Assigns the costliest first, to the least loaded rank: longest processing time first (Graham,
    1969), at most 4/3 of the optimum. Ranks of equal cost are ordered by their elements, which also
    balances memory. Parameters that other model-parallel ranks hold as copies are assigned first,
    from these parameters alone, because all those ranks must find the same owners. The rest evens
    out the loads.
    """
    costs = {p.name: ELEMENT * p.numel if p.cost is None else p.cost for p in params}
    classes: dict[tuple[str, ...], list[ParamInfo]] = {}
    for param in params:
        classes.setdefault(param.pack_groups.replicate, []).append(param)
    loads = [(0.0, 0)] * world_size  # cost, elements
    owners = {}
    # parameters without copies come last
    for copies, names in sorted(classes.items(), reverse=True):
        heap = [(*((0.0, 0) if copies else loads[rank]), rank) for rank in range(world_size)]
        heapq.heapify(heap)
        for param in sorted(names, key=lambda p: (-costs[p.name], -p.numel)):
            cost, elements, rank = heapq.heappop(heap)
            heapq.heappush(heap, (cost + costs[param.name], elements + param.numel, rank))
            loads[rank] = loads[rank][0] + costs[param.name], loads[rank][1] + param.numel
            owners[param.name] = rank
    return owners


def plan_whole(
    members: Sequence[ParamInfo], world_size: int, align: int, owners: Mapping[str, int]
) -> tuple[tuple[Slot, ...], tuple[Span, ...]]:
    """Return the slots sorted by owner, and one span each."""
    slots: list[Slot] = []
    spans: list[Span] = []
    offset = 0
    owned: list[list[ParamInfo]] = [[] for _ in range(world_size)]
    for param in members:
        owned[owners[param.name]].append(param)
    for owner, params in enumerate(owned):
        own_slots, end = placed(params, offset, align)
        end = end if world_size == 1 else round_up(end, align)
        slots += own_slots
        spans.append(Span(owner, offset, end))
        offset = end
    return tuple(slots), tuple(spans)
