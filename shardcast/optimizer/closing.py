"""The end of a sharded optimizer: the model is given back as it was given."""

from __future__ import annotations

import sys
from functools import partial

import torch

from shardcast.memory.aliases import tie
from shardcast.messages import warn
from shardcast.optimizer.model_hooks import mark, unmark
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.optimizer.setup import restore_rest
from shardcast.plan.precision import MASTER_DTYPE


def close(packed: PackedOptimizer, restore: bool) -> None:
    """See :meth:`shardcast.ShardedOptimizer.close`."""
    packed.refuse_averaged("close")
    try:
        if not packed.is_closed:
            _end(packed)
        if restore and sys.exc_info()[0] is None:
            _restore(packed)
    finally:
        packed.process_groups.end_watch()


def _end(packed: PackedOptimizer) -> None:
    """Let go of the model, whose masters wait to be given back."""
    packed.is_closed = True
    later = partial(_restore, packed, MASTER_DTYPE)
    for module in {*packed.stages, *packed.called}:
        mark(module, restore=later)
    packed.end_watch_outside()
    try:
        packed.remove_hooks()
    finally:
        packed.reduce.close()


def _restore(packed: PackedOptimizer, dtype: torch.dtype | None = None) -> None:
    """Give parameters and buffers back, in ``dtype`` or as they were given. Collective."""
    for module in {*packed.stages, *packed.called}:
        unmark(module)
    if not all(shard.pack.comm.is_alive for shard in packed.shards):
        warn(
            "the process group of a sharded model was destroyed before its masters were "
            "gathered, so that its weights stay in low precision: call optimizer.close() first"
        )
        return
    # Those of a group that was added later were made low by shard() already.
    given = {
        param: of_stage.get(name, param.dtype)
        for stage, of_stage in zip(packed.stages, packed.given_dtypes, strict=True)
        for name, param in stage.named_parameters()
    }
    for shard in packed.shards:
        params = zip(shard.pack.in_model, shard.given_dtypes, strict=True)
        shard.restore([dtype or given.get(param, low) for param, low in params])
    packed.shards.clear()
    packed.updates.clear()  # operands and state, which a script that keeps this would keep
    restore_rest(packed.stages, packed.given_dtypes)
    tie(packed.aliases)
