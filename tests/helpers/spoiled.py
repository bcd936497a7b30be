"""Bits that turn over on one rank, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardcast.optimizer.sharded import packed_of

Flip = Callable[[Any, nn.Module], None]


def flip(values: Tensor, place: int, bit: int = 0) -> None:
    """Turn one bit of one element over."""
    integers = values.detach().view(-1).view({2: torch.int16, 4: torch.int32}[values.itemsize])
    integers[place] ^= 1 << bit


def received(optimizer: Any, _model: nn.Module) -> None:
    """A bit of the last span that this rank has from another one, or where it owns all sent."""
    packs = [shard.pack for shard in packed_of(optimizer).shards]
    spans = [(pack, span) for pack in packs for span in pack.layout.owned_spans]
    others = [(pack, span) for pack, span in spans if span.owner != pack.own.owner]
    pack, span = (others or spans)[-1]
    flip(pack.data, span.start, 3)


def master(optimizer: Any, _model: nn.Module) -> None:
    """The lowest bit of each pack's first master, which no published value shows."""
    for shard in packed_of(optimizer).shards:
        for fragment in shard.fragments[: int(shard.casts)]:  # else it is the parameter itself
            exact = shard.exact(fragment).clone()
            flip(exact, 0)
            shard.set_exact(fragment, exact)


def spoil_after_sync(optimizer: Any, model: nn.Module, change: Flip, step: int) -> None:
    """Have something change after the sync of a step, before anything looks at it."""
    packed = packed_of(optimizer)
    hook = packed.hook_of("replica_check")
    look = hook.after_sync

    def spoiled() -> None:
        if packed.comm.steps + 1 == step:
            packed.sync.wait()
            change(optimizer, model)
        look()

    hook.after_sync = spoiled
