"""Whole parameters: each is updated by one rank, such that ranks have equal work."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from shardcast.plan.layout import ParamInfo, Slot, Span
from shardcast.plan.partition import placed, round_up

ELEMENT = 20.0  # floating-point operations per element of an elementwise update, about


def assign_owners(params: Sequence[ParamInfo], world_size: int) -> dict[str, int]:
    """The rank that updates each of ``params``, by name: the costliest first, to the least loaded.

    Longest processing time first (Graham, 1969): at most 4/3 of the best balance. Ranks of equal
    cost are told apart by the elements that they hold, so that memory is balanced too. Owners of
    what other model-parallel ranks hold as well are found from that alone, since these ranks must
    find the same and have other parameters too; the rest evens the loads out.
    """
    costs = {p.name: ELEMENT * p.numel if p.cost is None else p.cost for p in params}
    classes: dict[tuple[str, ...], list[ParamInfo]] = {}
    for param in params:
        classes.setdefault(param.pack_groups.replicate, []).append(param)
    loads = [(0.0, 0)] * world_size  # cost, elements
    owners = {}
    for copies, names in sorted(classes.items(), reverse=True):  # what has no copies last
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
    """Return the slots sorted by owner, one span each."""
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
