"""Means of backwards before whose gradients a script has cleared when the next one begins.

A rank sees its own gradients only, and others may have cleared others. So between two backwards of
a step a script clears all gradients, or none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardcast.memory.gradients import own_part
from shardcast.step.reduce.bucket import BEGUN, Bucket, State

if TYPE_CHECKING:
    from shardcast.step.reduce.reducer import Reducer


def drop_cleared(reducer: Reducer, more_come: bool) -> None:
    """Do as :meth:`.Reducer.drop_cleared`, where there are means of backwards before."""
    buckets = reducer.buckets.values()
    _drop_carried(buckets)
    begun = [bucket for bucket in buckets if bucket.state in BEGUN]
    names: dict[bool, str] = {}  # of a gradient that is there, of one that is not
    for bucket in begun:
        slots, presence = bucket.grads.pack.layout.slots, bucket.grads.presence()
        for position, (slot, is_here) in enumerate(zip(slots, presence, strict=True)):
            if position not in bucket.absent:
                names.setdefault(is_here, slot.name)
    if len(names) == 2 and more_come:
        raise RuntimeError(
            f"backward: .grad of {names[False]!r} was cleared after an earlier backward of "
            f"this step, that of {names[True]!r} was not; between two backwards of a step "
            "clear all gradients, by optimizer.zero_grad(), or none"
        )
    if len(names) == 2:
        for bucket in begun:
            bucket.drop_cleared()
    elif False in names:
        reducer.note_clear()
        for bucket in begun:
            bucket.forget()


def _drop_carried(buckets: Iterable[Bucket]) -> None:
    """Drop means that a step used and a backward has begun upon, of gradients that are no more.

    That backward failed, or was within ``no_sync()``, and no pass has ended since.
    """
    used = [bucket.grads for bucket in buckets if bucket.state is State.COLLECTING]
    for grads in (grads for grads in used if grads.carry is not None):
        presence = grads.presence()
        if not any(presence):
            grads.carry = None
            continue
        for position, is_here in enumerate(presence):
            if grads.carry is not None and not is_here:
                grads.carry[own_part(grads.pack, position)].zero_()
