"""Costs by rank, of a whole world at once."""

from __future__ import annotations

from collections.abc import Mapping

from shardcast.plan.layout import Layout


def by_owner(layout: Layout, values: Mapping[str, float]) -> list[float]:
    """Return what each rank has of the values of trained parameters, by name; 0 for others."""
    sums = [0.0] * layout.world_size
    for pack in layout.trained:
        for owner, slot, count in pack.parts():
            sums[owner] += values.get(slot.name, 0.0) * (count / slot.numel)
    return sums
