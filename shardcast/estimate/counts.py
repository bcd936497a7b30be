"""Counts by rank, of a whole world at once: marks in gradients, costs of what each rank owns."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from operator import attrgetter

from shardcast.memory.marks import MARKED, elsewhere
from shardcast.plan.layout import Layout, PackLayout

_END, _OFFSET = attrgetter("end"), attrgetter("offset")


def count_marks(pack: PackLayout) -> Iterator[int]:
    """Count the marks of each rank, in the order of the spans."""
    counts = [-(-slot.numel // MARKED) for slot in pack.slots]
    every = sum(counts)
    for span in pack.spans:
        first = bisect_right(pack.slots, span.start, key=_END) if span.numel else 0
        last = bisect_left(pack.slots, span.stop, lo=first, key=_OFFSET) if span.numel else 0
        parts = elsewhere(pack.slots[first:last], span)
        marks = sum(-(-(stop - start) // MARKED) for start, stop in parts)
        yield every - sum(counts[first:last]) + marks


def by_owner(layout: Layout, values: Mapping[str, float]) -> list[float]:
    """Return what each rank has of the values of trained parameters, by name; 0 for others."""
    sums = [0.0] * layout.world_size
    for pack in layout.trained:
        for owner, slot, count in pack.parts():
            sums[owner] += values.get(slot.name, 0.0) * (count / slot.numel)
    return sums
