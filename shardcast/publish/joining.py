"""Answers of one rank that follow one another, as one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from shardcast.extensions.changes.patches import Changes, WeightPatch
from shardcast.publish.applying import INTEGERS, DamagedChangesError, check_sum, check_values


def joined(chain: Sequence[Changes]) -> Changes:
    """Return one answer that does what several do, one after the other.

    Raises:
        DamagedChangesError: one of them is not what was sent, or does not follow the one before.
    """
    first, last = chain[0], chain[-1]
    if len(chain) == 1:
        return first
    for changes in chain:
        check_sum(changes)
    for before, after in itertools.pairwise(chain):
        if (after.since, after.part) != (before.version, before.part):
            raise DamagedChangesError(
                f"changes: part {after.part} of version {after.version} has changes since "
                f"{after.since}, expected some since {before.version}; nothing was written"
            )
    by_name: dict[str, list[WeightPatch]] = {}
    for patch in (patch for changes in chain for patch in changes):
        check_values(patch)
        by_name.setdefault(patch.name, []).append(patch)
    patches = tuple(_latest(several) for several in by_name.values())
    return Changes(patches, last.version, first.since, last.part, last.parts, last.aliases)


def _latest(patches: Sequence[WeightPatch]) -> WeightPatch:
    """Return one patch with the last value at each place."""
    last = patches[-1]
    if len(patches) == 1:
        return last
    if len({(patch.shape, patch.dtype) for patch in patches}) > 1:
        raise DamagedChangesError(
            f"changes: {last.name!r} has several shapes or dtypes; nothing was written"
        )
    places = torch.cat([_places(patch) for patch in patches])
    bits = INTEGERS[last.dtype.itemsize]  # torch does not index values of all dtypes of codes
    values = torch.cat([patch.values.view(bits) for patch in patches])
    places, order = places.sort(stable=True)
    is_last = torch.ones_like(places, dtype=torch.bool)
    torch.ne(places[1:], places[:-1], out=is_last[:-1])
    return last._replace(values=values[order[is_last]].view(last.dtype), indices=places[is_last])


def _places(patch: WeightPatch) -> torch.Tensor:
    if patch.indices is None:
        return torch.arange(patch.values.numel())
    return patch.indices.long()
