"""The tensors that all ranks of a job hold, by name; in a pipeline no rank has all.

It uses only names and shapes and is pure, so one process can test jobs of any grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cmp_to_key
from typing import NamedTuple

from shardcast.checkpoint.region import Region, Shape
from shardcast.messages import page


class Replica(NamedTuple):
    """A parameter as one rank holds it.

    Attributes:
        is_primary: among ranks with equal copies, this one's is stored.
        trained: the optimizer has it.
        cut: several ranks may own a part of it.
        place: the pipeline stage, and the index among experts of one name.
    """

    region: Region
    is_primary: bool
    trained: bool
    cut: bool
    place: tuple[int, ...] = ()


class LocalInventory(NamedTuple):
    """The tensors that one rank holds.

    Attributes:
        groups: names in each of the optimizer's groups.
        ties: names of tied parameters, with the names under which they are in ``params``.
        tied: pairs of names of weights that two pipeline stages hold.
        extra: names with their own state besides tensors.
    """

    params: Mapping[str, Replica]
    buffers: Mapping[str, Region]
    groups: Sequence[Sequence[str]]
    ties: Mapping[str, str]
    tied: Sequence[tuple[str, str]] = ()
    extra: Sequence[str] = ()


@dataclass(frozen=True)
class Inventory:
    """The tensors of all ranks that are stored.

    Attributes:
        shapes: shapes of parameters and buffers.
        trained: parameters that the optimizer has, and whether several ranks may own a part.
        groups: names in each of the optimizer's groups, in the order of the whole model.
        ties: names that are not stored, with the stored names of the same weights.
        buffers, extra: the rank that stores each.
    """

    shapes: Mapping[str, Shape]
    trained: Mapping[str, bool]
    groups: Sequence[Sequence[str]]
    ties: Mapping[str, str]
    buffers: Mapping[tuple[str, Region], int]
    extra: Mapping[str, int]

    def stored(self, name: str) -> str:
        """Return the name under which a parameter of this rank is stored."""
        return self.ties.get(name, name)


def merge(by_rank: Mapping[int, LocalInventory]) -> Inventory:
    """Merge the inventories of ranks; for ranks that hold the same, one suffices.

    Raises:
        ValueError: two pipeline stages, or experts, have different parameters of one name, or a
            part of a parameter is missing; names it.
    """
    ranks = dict(sorted(by_rank.items()))
    ties = _ties(list(ranks.values()))
    replicas: dict[str, dict[Replica, int]] = {}
    buffers: dict[tuple[str, Region], int] = {}
    extra: dict[str, int] = {}
    for rank, content in ranks.items():
        for name, replica in content.params.items():
            if name not in ties:
                replicas.setdefault(name, {}).setdefault(replica, rank)
        for name, region in content.buffers.items():
            buffers.setdefault((name, region), rank)
        for name in content.extra:
            extra.setdefault(name, rank)
    for name, rank_by_replica in replicas.items():
        _check_tiled(name, rank_by_replica)
    shapes = {name: next(iter(copies)).region.shape for name, copies in replicas.items()}
    for name, region in buffers:
        if shapes.setdefault(name, region.shape) != region.shape:
            raise ValueError(
                f"model: buffer {name!r} has shape {shapes[name]} on one rank and {region.shape} "
                "on another; give different buffers different names"
            )
    lists_of_groups = zip(*(content.groups for content in ranks.values()), strict=True)
    groups = [[n for n in _in_model_order(lists) if n not in ties] for lists in lists_of_groups]
    trained = {
        name: any(replica.cut for replica in copies)
        for name, copies in replicas.items()
        if next(iter(copies)).trained
    }
    return Inventory(shapes, trained, groups, ties, buffers, extra)


def _ties(ranks: Sequence[LocalInventory]) -> dict[str, str]:
    """Return tied names, within a stage or between two, with the stored names."""
    ties = {alias: name for content in ranks for alias, name in content.ties.items()}
    primary = {n for content in ranks for n, copy in content.params.items() if copy.is_primary}
    for first, second in {pair for content in ranks for pair in content.tied}:
        stored, alias = (first, second) if first in primary else (second, first)
        ties[alias] = stored
    return {name: ties.get(stored, stored) for name, stored in ties.items()}


def _check_tiled(name: str, replicas: Mapping[Replica, int]) -> None:
    """Check that the stored replicas cover the whole parameter exactly once."""
    primary = {replica: rank for replica, rank in replicas.items() if replica.is_primary}
    size = math.prod(next(iter(replicas)).region.shape)
    covered = sum(math.prod(replica.region.local) for replica in primary)
    if covered < size:
        raise ValueError(
            f"model: the ranks together hold {covered} elements of parameter {name!r}, which has "
            f"{size}; every rank of the mesh over which it is sharded must take part"
        )
    kinds = {(replica.region.shape, replica.trained) for replica in replicas}
    if covered > size or len(kinds) > 1:
        shown = " and ".join(str(rank) for rank in list(primary.values())[:2])
        raise ValueError(
            f"model: ranks {shown} have different parameters named {name!r}; name parameters of "
            "pipeline stages as in the whole model, make experts DTensors that are sharded over "
            f"their dimension ({page('hybrid')}), and pass weights that two stages share as "
            "shard(tied=...)"
        )


def _in_model_order(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return names of several stages in one order: each stage's own order, and layers by number.

    One stage may have layers 0 and 2 and another one layers 1 and 3.
    """
    by_number = cmp_to_key(_compare_numbers)
    remaining = [list(reversed(names)) for names in dict.fromkeys(map(tuple, lists))]
    ordered: dict[str, None] = {}
    while remaining := [names for names in remaining if names]:
        ordered[min(remaining, key=lambda names: by_number(names[-1])).pop()] = None
    return list(ordered)


def _compare_numbers(name: str, second: str) -> int:
    pairs = zip(name.split("."), second.split("."), strict=False)
    parts = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    return int(parts[0]) - int(parts[1]) if all(map(str.isdigit, parts)) else 0
