"""Warnings of a job: each is said once, by one rank, with the number of steps.

:mod:`shardcast.messages` warns in this process alone; a job of a thousand ranks would say all
things a thousand times.
"""

from __future__ import annotations

import hashlib

import torch.distributed as dist

from shardcast._compat import groups
from shardcast.comm.group import TensorCollectives
from shardcast.comm.watch import Watch
from shardcast.messages import warn

SAID = "shardcast/said/{}"  # a key in the store of the group


def warn_first(message: str, key: str = "") -> None:
    """Warn once in a job: the rank that comes here first does so, for all. Local.

    Args:
        key: what is one warning, where messages of ranks differ.
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
        except RuntimeError:  # its process has ended: nobody else can have said it
            pass
    warn(_dated(message, steps, "" if rank is None else f"first on rank {rank}"))


def warn_once_for(comm: TensorCollectives, message: str) -> None:
    """Warn of what all ranks of ``comm`` know: the first of them does so, as often as it comes."""
    if comm.rank == 0:
        warn(_dated(message, comm.watch.steps))


def _dated(message: str, steps: int, place: str = "") -> str:
    facts = [place] * bool(place) + [f"after {steps} steps"] * bool(steps)
    return f"{message} ({', '.join(facts)})" if facts else message
