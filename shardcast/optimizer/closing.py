"""The end of a sharded optimizer: the model is given back as it was given."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from shardcast.memory import packed_param
from shardcast.memory.aliases import tie
from shardcast.memory.codecs import shown
from shardcast.memory.shard import Shard
from shardcast.messages import warn
from shardcast.optimizer.model import forget_model, note_model
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.optimizer.rest import restore_rest
from shardcast.plan.precision import MASTER_DTYPE


def close(packed: PackedOptimizer, restore: bool) -> None:
    """See :meth:`shardcast.ShardedOptimizer.close`."""
    packed.refuse_averaged("close")
    try:
        if not packed.is_closed:
            _end(packed)
        if restore and sys.exc_info()[0] is None:
            if packed.shards and packed.comm.is_alive:
                packed.decider.meet("close")
            _restore(packed)
    finally:
        packed.process_groups.end_watch()


def _end(packed: PackedOptimizer) -> None:
    """Let go of the model, whose masters wait to be given back."""
    packed.is_closed = True
    later = partial(_restore, packed, MASTER_DTYPE)
    for module in {*packed.stages, *packed.called}:
        note_model(module, restore=later)
    for param in _params(packed):
        note = packed_param.note_of(param)
        if note is not None and note.is_held:
            note.restore = later
    try:
        packed.remove_hooks()
    finally:
        packed.reduce.close()


def _restore(packed: PackedOptimizer, dtype: torch.dtype | None = None) -> None:
    """Give parameters and buffers back, in ``dtype`` or as they were given. Collective."""
    for module in {*packed.stages, *packed.called}:
        forget_model(module)
    for param in _params(packed):
        packed_param.forget(param)
    if not all(shard.pack.comm.is_alive for shard in packed.shards):
        warn(
            "the process group of a sharded model was destroyed before its masters were "
            "gathered, so that its weights stay in low precision: call optimizer.close() first"
        )
        return
    # Those of a group that was added later were made low by shard() already.
    dtypes = packed.given_dtype_of()
    for shard in packed.shards:
        params = zip(shard.pack.in_model, shard.given_dtypes, strict=True)
        _restore_shard(shard, [dtype or dtypes.get(param, low) for param, low in params])
    packed.shards.clear()
    packed.updates.clear()  # operands and state, which a script that keeps this would keep
    restore_rest(packed.stages, packed.given_dtypes)
    tie(packed.aliases)


def _params(packed: PackedOptimizer) -> list[nn.Parameter]:
    """Return the parameters that have notes of this optimizer."""
    held = [param for shard in packed.shards for param in shard.pack.in_model]
    return [*held, *packed.outside.values()]


@torch.no_grad()
def _restore_shard(shard: Shard, dtypes: Sequence[torch.dtype]) -> None:
    """Give parameters back, out of their pack, from all ranks' masters. Collective.

    Every rank of the pack must call it. Parameters that the script changed since the last
    step, also by moving or converting them, keep their values.
    """
    pack, low = shard.pack, shard.pack.layout.dtype
    if shard.in_blocks:  # the owner's copy decides
        for view, param in zip(pack.views(pack.data), pack.params, strict=True):
            if param.dtype == low:
                view.copy_(param.data)
        shard.absorb()
    full = pack.data
    if not shard.in_place:
        full = torch.zeros(pack.layout.numel, dtype=MASTER_DTYPE, device=pack.data.device)
        full[pack.own.start : pack.own.stop] = shard.master.read(slice(None))
        pieces = [(span.owner, full[span.start : span.stop]) for span in pack.layout.owned_spans]
        if pack.comm.size > 1 and pieces:
            pack.comm.broadcast_all(pieces, pack.layout)
    for slot, param, view, dtype in zip(
        pack.layout.slots, pack.params, pack.views(full), dtypes, strict=True
    ):
        values, exact = param.data, view.to(param.device)
        if values.dtype == low and not shard.in_place:
            values = exact if shard.in_blocks else shown(exact, values)
        elif not shard.in_place:  # it was converted since
            published = shard.rounded(slot, exact.reshape(-1)).view(exact.shape)
            same = published.to(values.dtype) == values
            values = torch.where(same, exact, values.to(MASTER_DTYPE))
        param.data = values.to(dtype)
        param.grad = None
        if param.grad_dtype != dtype:
            param.grad_dtype = dtype
    pack.data = pack.own_data = pack.data[:0]
