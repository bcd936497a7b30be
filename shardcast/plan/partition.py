"""Who owns which elements of a pack: equal spans, or whole parameters."""

from __future__ import annotations

from collections.abc import Sequence

from shardcast.plan.layout import ParamInfo, Slot, Span


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
    for position in sorted(range(len(members)), key=lambda i: (-members[i].numel, i)):
        owner = min(range(world_size), key=lambda rank: (load[rank], rank))
        load[owner] += round_up(members[position].numel, align)
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
