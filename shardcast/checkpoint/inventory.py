"""What all ranks of a job hold between them, by name: with a pipeline no rank has all of it.

Names and shapes alone, and pure, so that jobs of any grid can be looked at in one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardcast.checkpoint.region import Region, Shape


class Copy(NamedTuple):
    """A parameter as one rank has it.

    Attributes:
        counts: this copy is the one that is stored.
        trained: the optimizer has it.
        cut: several ranks may own a part of it.
        place: the pipeline stage, and which of the experts of one name.
    """

    region: Region
    counts: bool
    trained: bool
    cut: bool
    place: tuple[int, ...] = ()


class Held(NamedTuple):
    """What one rank holds.

    Attributes:
        groups: names in each of the optimizer's groups.
        ties: names of tied parameters with the names under which they are in ``params``.
        tied: pairs of names of weights that two pipeline stages hold.
        extra: what has a state of its own besides tensors.
    """

    params: Mapping[str, Copy]
    buffers: Mapping[str, Region]
    groups: Sequence[Sequence[str]]
    ties: Mapping[str, str]
    tied: Sequence[tuple[str, str]] = ()
    extra: Sequence[str] = ()


@dataclass(frozen=True)
class Inventory:
    """What is stored, of all ranks.

    Attributes:
        shapes: of parameters and buffers.
        trained: parameters that the optimizer has, and whether several ranks may own a part.
        groups: names in each of the optimizer's groups, in the order of the whole model.
        ties: names that are not stored, with those of the same weights that are.
        buffers, extra: the rank that stores each.
    """

    shapes: Mapping[str, Shape]
    trained: Mapping[str, bool]
    groups: Sequence[Sequence[str]]
    ties: Mapping[str, str]
    buffers: Mapping[tuple[str, Region], int]
    extra: Mapping[str, int]

    def stored(self, name: str) -> str:
        """The name under which a parameter of this rank is stored."""
        return self.ties.get(name, name)


def merge(found: Mapping[int, Held]) -> Inventory:
    """What ranks hold between them; of ranks that hold the same, one is enough.

    Raises:
        ValueError: two pipeline stages, or experts, have different parameters of one name, or a
            part of one is nowhere; names it.
    """
    ranks = dict(sorted(found.items()))
    ties = _ties(ranks)
    shapes: dict[str, Shape] = {}
    copies: dict[str, dict[Copy, int]] = {}
    for rank, content in ranks.items():
        for name, copy in content.params.items():
            if ties.get(name, name) == name:
                copies.setdefault(name, {}).setdefault(copy, rank)
    for name, entries in copies.items():
        _check_tiled(name, entries)
        shapes[name] = next(iter(entries)).region.shape
    buffers: dict[tuple[str, Region], int] = {}
    extra: dict[str, int] = {}
    for rank, content in ranks.items():
        for name, region in content.buffers.items():
            buffers.setdefault((name, region), rank)
            if shapes.setdefault(name, region.shape) != region.shape:
                raise ValueError(
                    f"model: buffer {name!r} has shape {region.shape} on rank {rank} and "
                    f"{shapes[name]} elsewhere; give different buffers different names"
                )
        for name in content.extra:
            extra.setdefault(name, rank)
    lists = [content.groups for content in ranks.values()]
    groups = [
        [name for name in _interleaved(entries) if ties.get(name, name) == name]
        for entries in zip(*lists, strict=True)
    ]
    trained = {
        n: any(c.cut for c in entries)
        for n, entries in copies.items()
        if next(iter(entries)).trained
    }
    return Inventory(shapes, trained, groups, ties, buffers, extra)


def _ties(ranks: Mapping[int, Held]) -> dict[str, str]:
    """Tied names, within a stage or between two, by the names that are stored."""
    ties: dict[str, str] = {}
    for content in ranks.values():
        ties.update(content.ties)
    for first, second in {pair for content in ranks.values() for pair in content.tied}:
        counted = any(first in h.params and h.params[first].counts for h in ranks.values())
        stored, same = (first, second) if counted else (second, first)
        ties[same] = stored
    return {name: ties.get(stored, stored) for name, stored in ties.items()}


def _check_tiled(name: str, copies: Mapping[Copy, int]) -> None:
    """The copies that are stored must be the whole parameter, once."""
    counting = {copy: rank for copy, rank in copies.items() if copy.counts}
    size = math.prod(next(iter(copies)).region.shape)
    covered = sum(math.prod(copy.region.local) for copy in counting)
    shapes = {copy.region.shape for copy in copies}
    if len(shapes) == 1 and covered == size and len({copy.trained for copy in copies}) == 1:
        return
    if covered < size:
        raise ValueError(
            f"model: of parameter {name!r} the ranks hold {covered} elements between them, it has "
            f"{size}; every rank of the mesh that it was cut over must take part"
        )
    shown = " and ".join(str(rank) for rank in list(counting.values())[:2])
    raise ValueError(
        f"model: parameter {name!r} is another one on ranks {shown}; give the parameters of "
        "different pipeline stages the names that they have in the whole model, make experts "
        "DTensors that are cut over their dimension (docs/hybrid.md), and name weights that two "
        "stages share in shard(tied=...)"
    )


def _interleaved(lists: Sequence[Sequence[str]]) -> Iterator[str]:
    """Names of several stages in one order: each stage's own, and layers as they are numbered.

    A stage may have layers 0 and 2 and another one layers 1 and 3.
    """
    remaining = [list(reversed(names)) for names in dict.fromkeys(map(tuple, lists))]
    seen: set[str] = set()
    while remaining := [names for names in remaining if names]:
        best = remaining[0]
        for names in remaining[1:]:
            best = names if _comes_before(names[-1], best[-1]) else best
        name = best.pop()
        if name not in seen:
            seen.add(name)
            yield name


def _comes_before(name: str, other: str) -> bool:
    for part, second_part in zip(name.split("."), other.split("."), strict=False):
        if part != second_part:
            return part.isdigit() and second_part.isdigit() and int(part) < int(second_part)
    return False
