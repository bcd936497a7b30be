"""Count the bytes that a rank keeps for a span, before anything is allocated."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.memory.codecs import Encoded, master_codec, row_of
from shardcast.memory.pack import Pack
from shardcast.memory.shard import shard_of
from shardcast.plan.layout import GroupId, PackLayout, Slot, Span
from shardcast.plan.originals import OptimizerList, ParamGroup
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.update.epilogues import epilogues_of
from shardcast.step.update.rules import STATE_NAMES, NoRule, rule_of
from shardcast.step.update.state import ShardState


class Held(NamedTuple):
    """Bytes that a rank keeps for a span."""

    masters: int
    state: int = 0
    averages: int = 0


def held_of(
    originals: OptimizerList,
    config: ShardcastConfig,
    dtype: torch.dtype,
    group: GroupId,
    cast: str,
    numel: int,
    trained: int,
) -> Held:
    """Allocate on ``meta`` what a run allocates for a span, and count it. Local.

    Args:
        config: without ``offload``; with it the host holds the same number of bytes.
        dtype, cast: dtype and cast of its pack; ``group``: any of its groups, because all need the
            same state.
        numel, trained: elements of the span, and those that are neither padding nor frozen.
    """
    row = row_of(config, dtype)
    slot, span = Slot("", (trained,), 0, trained, group), Span(0, 0, numel)
    layout = PackLayout(0, "meta", dtype, True, "", numel, (slot,), (span,), cast=cast)
    pack = Pack(layout, [nn.Parameter(torch.empty(trained, device="meta"))], Comm(None))
    pack.fill(torch.empty(numel, dtype=dtype, device="meta"))
    shard = shard_of(pack, config)
    # Not Shard.fill, which encodes values piece by piece.
    shard.master = Encoded(master_codec(config, dtype), numel, row, shard.home.zeros)
    masters = shard.nbytes
    if not trained:
        return Held(masters)
    optimizer, options = originals.owner(group), originals.group(group)
    is_fused = type(optimizer) in STATE_NAMES
    shard_state = ShardState(shard, config, epilogues_of(config), 0)
    rule = rule_of(type(optimizer), options) if is_fused else NoRule()
    shard_state.prepare(rule)
    state, averages = (shard_state.nbytes(averages=averages) for averages in (False, True))
    if not is_fused:
        state = state_tensors(optimizer, options) * trained * MASTER_DTYPE.itemsize
    return Held(masters, state, averages)


def state_tensors(optimizer: torch.optim.Optimizer, group: ParamGroup) -> int:
    """Return the number of tensors that a torch optimizer keeps per parameter, except 0-dim ones.

    Local.

    Args:
        optimizer: an elementwise one of torch, or Muon.
        group: options of one of its groups.
    """
    single = nn.Parameter(torch.zeros(1, 1, dtype=MASTER_DTYPE))  # like the masters it will run on
    single.grad = torch.zeros_like(single)
    kind: Any = type(optimizer)
    twin = kind([{**group, "params": [single], "capturable": False}])
    twin.step()
    state = [value for value in twin.state[single].values() if isinstance(value, Tensor)]
    return sum(value.dim() > 0 for value in state)
