"""Who owns which elements of a pack: equal spans, or whole parameters."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

from shardcast.config import ShardcastConfig
from shardcast.plan.layout import ParamInfo, Slot, Span

ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)


def partition_of(optimizer: torch.optim.Optimizer, config: ShardcastConfig) -> str:
    """``auto``: even only where the update of an element needs nothing but that element."""
    equal = [
        (name, value)
        for name, value in (("sync", config.sync), ("reduce", config.reduce))
        if value in ("all_gather", "reduce_scatter")
    ]
    elementwise = config.elementwise
    if elementwise is None:
        elementwise = type(optimizer) in ELEMENTWISE
    if config.partition == "auto":
        partition = "even" if elementwise else "whole"
    else:
        partition = config.partition
    if equal and partition == "whole":
        raise ValueError(
            f"{equal[0][0]}: {equal[0][1]} needs equal spans, but {type(optimizer).__name__} is "
            f"sharded with partition 'whole'; use the default {equal[0][0]}"
        )
    if config.partition == "even" and not elementwise:
        raise ValueError(
            f"partition: 'even' cuts parameters, and {type(optimizer).__name__} is not known to "
            "be elementwise; use 'whole' or 'auto', or declare elementwise=True if its update of "
            "an element depends on nothing but that element's gradient and state"
        )
    return partition


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _place(members: Sequence[ParamInfo], offset: int, align: int) -> tuple[list[Slot], int]:
    slots = []
    for param in members:
        offset = round_up(offset, align)
        slots.append(Slot(param.name, param.shape, offset, param.numel))
        offset += param.numel
    return slots, offset


def plan_even(
    members: Sequence[ParamInfo], world_size: int, align: int
) -> tuple[tuple[Slot, ...], tuple[Span, ...]]:
    slots, end = _place(members, 0, align)
    if world_size == 1:  # nothing to cut: a pack of one keeps its exact size
        return tuple(slots), (Span(0, 0, end),)
    size = round_up(-(-end // world_size), align)
    return tuple(slots), tuple(Span(r, r * size, (r + 1) * size) for r in range(world_size))


def plan_whole(
    members: Sequence[ParamInfo], world_size: int, align: int, load: list[int]
) -> tuple[tuple[Slot, ...], tuple[Span, ...]]:
    """Greedy: the biggest parameter goes to the rank with the least so far (``load``, updated)."""
    owned: list[list[int]] = [[] for _ in range(world_size)]
    least = [(total, rank) for rank, total in enumerate(load)]
    heapq.heapify(least)
    for position in sorted(range(len(members)), key=lambda i: (-members[i].numel, i)):
        _, owner = heapq.heappop(least)
        load[owner] += round_up(members[position].numel, align)
        heapq.heappush(least, (load[owner], owner))
        owned[owner].append(position)
    slots: list[Slot] = []
    spans: list[Span] = []
    offset = 0
    for owner, positions in enumerate(owned):
        mine, end = _place([members[i] for i in sorted(positions)], offset, align)
        end = end if world_size == 1 else round_up(end, align)
        slots += mine
        spans.append(Span(owner, offset, end))
        offset = end
    return tuple(slots), tuple(spans)
