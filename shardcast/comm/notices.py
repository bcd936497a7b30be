"""Warnings of a job: one rank gives each of them once, with the number of steps.

:mod:`shardcast.messages` warns in this process alone; in a job of a thousand ranks every warning
would appear a thousand times.
"""

from __future__ import annotations

import hashlib

import torch.distributed as dist

from shardcast._compat import groups
from shardcast.comm.group import TensorCollectives
from shardcast.comm.watch import Watch
from shardcast.messages import warn

SAID = "shardcast/said/{}"  # key in the group's store


def warn_first(message: str, key: str = "") -> None:
    """Warn once per job, by the first rank that gets here. Local.

    Args:
        key: identifies the warning, if messages differ between ranks.
    """
    comm = Watch.widest()
    store, rank, steps = None, None, 0
    if comm is not None:
        store, rank, steps = comm.store, comm.rank, comm.watch.steps
    elif dist.is_available() and dist.is_initialized():
        store, rank = groups.default_store(), dist.get_rank()
    if store is not None:
        said = hashlib.sha256((key or message).encode()).hexdigest()[:16]
        try:
            if store.add(SAID.format(said), 1) > 1:
                return
        except RuntimeError:  # the store's process has ended; no other rank can have warned
            pass
    warn(_dated(message, steps, "" if rank is None else f"first on rank {rank}"))


def warn_once_for(comm: TensorCollectives, message: str) -> None:
    """Warn on the first rank of ``comm`` about something that all its ranks know."""
    if comm.rank == 0:
        warn(_dated(message, comm.watch.steps))


def _dated(message: str, steps: int, place: str = "") -> str:
    facts = [place] * bool(place) + [f"after {steps} steps"] * bool(steps)
    return f"{message} ({', '.join(facts)})" if facts else message
