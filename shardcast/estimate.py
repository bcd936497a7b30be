"""F3, estimate: what each rank will hold and send, before a job starts. No tensor is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardcast.build import partition_of
from shardcast.config import ShardcastConfig
from shardcast.kernels import STATE_NAMES, rule_of
from shardcast.layout import Layout
from shardcast.pack import describe, plan_packs
from shardcast.precision import MASTER_DTYPE, Precision, is_packable


@dataclass(frozen=True)
class Estimate:
    """Bytes of the rank that holds most, after the first step; per kind as in ``memory_report()``.

    Attributes:
        layout: the packs that ``shard()`` would make.
        sent: bytes that all ranks together send in a step.
        collectives: per step, the small all-reduce included.
        balance: the largest share of a rank over the mean one, 1 at best.
    """

    layout: Layout
    parameters: int
    gradients: int
    masters: int
    state: int
    sent: int
    collectives: int
    balance: float

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.parameters + self.gradients + self.masters + self.state


def estimate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world_size: int,
    config: ShardcastConfig | Mapping[str, Any] | None = None,
) -> Estimate:
    """What :func:`shardcast.shard` would hold on ``world_size`` ranks. Local, any process.

    Args:
        model: usually built on ``meta``.
        optimizer: Adam, AdamW or SGD over its parameters; unchanged.
        config: a config or a mapping; ``None`` reads the environment.

    Raises:
        ValueError: another optimizer, whose state is not known before it runs.
    """
    kind = type(optimizer)
    if kind not in STATE_NAMES:
        raise ValueError(
            f"optimizer: expected Adam, AdamW or SGD, got {kind.__name__}; the state of others is "
            "not known before they run: see optimizer.memory_report() after a step"
        )
    if world_size < 1:
        raise ValueError(f"world_size: expected a number of ranks >= 1, got {world_size}")
    if not isinstance(config, ShardcastConfig):
        config = ShardcastConfig.load(config)
    precision = Precision(model, config)
    groups = {p: number for number, g in enumerate(optimizer.param_groups) for p in g["params"]}
    named = {n: p for n, p in model.named_parameters() if p in groups and is_packable(p)}
    dtypes = {param: precision.storage_dtype(param) for param in named.values()}
    infos = describe(named, config, groups, dtypes)
    layout = plan_packs(infos, world_size, partition_of(optimizer, config), config)
    moments = [len(rule_of(kind, group).state) for group in optimizer.param_groups]
    return _summed(layout, precision, config, moments)


def _summed(
    layout: Layout, precision: Precision, config: ShardcastConfig, moments: list[int]
) -> Estimate:
    size = layout.world_size
    parameters = gradients = sent = 0
    collectives = 1
    masters, state = [0] * size, [0] * size
    kept = [0] * size  # of gradients, where they are sharded
    for pack in layout.packs:
        parameters += pack.numel * pack.dtype.itemsize
        if not pack.requires_grad:
            continue
        grad, wire = precision.grad_dtype(pack.dtype), precision.wire_dtype(pack.dtype)
        gradients += pack.numel * grad.itemsize
        sent += (size - 1) * pack.numel * (wire.itemsize + pack.dtype.itemsize)
        owners = sum(1 for span in pack.spans if pack.fragments(span.owner))
        collectives += 1 + (1 if config.sync == "all_gather" else owners)
        for span in pack.spans:
            kept[span.owner] += span.numel * grad.itemsize
            if pack.dtype != MASTER_DTYPE:
                masters[span.owner] += span.numel * MASTER_DTYPE.itemsize
            if pack.fragments(span.owner):
                moment = span.numel * MASTER_DTYPE.itemsize
                state[span.owner] += moments[pack.group] * moment
    sharded = config.grads == "sharded" and size > 1
    held = [sum(rank) for rank in zip(masters, state, kept if sharded else [0] * size, strict=True)]
    most = max(range(size), key=held.__getitem__)
    balance = held[most] * size / sum(held) if any(held) else 1.0
    return Estimate(
        layout, parameters, kept[most] if sharded else gradients, masters[most], state[most],
        sent, collectives if size > 1 else 0, balance,
    )  # fmt: skip


def peers(numel: int, moments: int, world_size: int) -> dict[str, float]:
    """Bytes per rank that others hold for ``numel`` parameters in mixed precision.

    Persistent tensors after a backward; activations, buckets in flight and temporary casts aside.
    """
    exact = 4.0 * (1 + moments)  # fp32 weights and moments
    return {
        "DDP + autocast": numel * (exact + 4),
        "ZeRO-1": numel * (2 + 2 + exact / world_size),
        "ZeRO-2": numel * (2 + (2 + exact) / world_size),
        "FSDP": numel * (exact + 4) / world_size,
    }
