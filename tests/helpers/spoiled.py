"""Flip bits on one rank at a given time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardcast.optimizer.sharded import packed_of

Flip = Callable[[Any, nn.Module], None]


def flip(values: Tensor, place: int, bit: int = 0) -> None:
    """Flip one bit of one element."""
    integers = values.detach().view(-1).view({2: torch.int16, 4: torch.int32}[values.itemsize])
    integers[place] ^= 1 << bit


def received(optimizer: Any, _model: nn.Module) -> None:
    """Flip a bit of the last span received from another rank, else of the last span."""
    packs = [shard.pack for shard in packed_of(optimizer).shards]
    spans = [(pack, span) for pack in packs for span in pack.layout.owned_spans]
    others = [(pack, span) for pack, span in spans if span.owner != pack.own.owner]
    pack, span = (others or spans)[-1]
    flip(pack.data, span.start, 3)


def master(optimizer: Any, _model: nn.Module) -> None:
    """Flip the lowest bit of each pack's first master, which the cast values do not show."""
    for shard in packed_of(optimizer).shards:
        for fragment in shard.fragments[: int(shard.casts)]:  # else it is the parameter itself
            exact = shard.exact(fragment).clone()
            flip(exact, 0)
            shard.set_exact(fragment, exact)


def spoil_after_sync(optimizer: Any, model: nn.Module, change: Flip, step: int) -> None:
    """Call ``change`` after the sync of a step, before the replica check."""
    packed = packed_of(optimizer)
    hook = packed.hook_of("replica_check")
    look = hook.after_sync

    def spoiled() -> None:
        if packed.comm.steps + 1 == step:
            packed.sync.wait()
            change(optimizer, model)
        look()

    hook.after_sync = spoiled
