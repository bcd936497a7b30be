"""update: unscale, clip and update own masters and moments; one update per optimizer."""

from __future__ import annotations

import torch

from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.option_values import load_extension
from shardcast.plan.originals import OptimizerList
from shardcast.step.update import rules
from shardcast.step.update.epilogues import epilogues_of
from shardcast.step.update.fused import FusedUpdate
from shardcast.step.update.state import Ready, Update

__all__ = ["Ready", "Update", "updates_of"]


def updates_of(
    originals: OptimizerList,
    config: ShardcastConfig,
    comm: Comm,
    ready: Ready = lambda _packs: None,
) -> list[Update]:
    """Make the update of each optimizer, which reads that optimizer's groups in every step.

    Args:
        ready: called, on all ranks alike, with packs that are updated before others.

    Raises:
        ValueError: a form of masters or moments is not possible for a class with its own state.
    """
    return [_update_of(optimizer, config, comm, ready) for optimizer in originals.optimizers]


def _update_of(
    optimizer: torch.optim.Optimizer, config: ShardcastConfig, comm: Comm, ready: Ready
) -> Update:
    if type(optimizer) in rules.STATE_NAMES:
        return FusedUpdate(optimizer, config, epilogues_of(config), ready)
    for name, option in config.extensions().items():
        if option.codec is not None:
            raise ValueError(
                f"{name}: {getattr(config, name)!r} needs Adam, AdamW or SGD of torch.optim, got "
                f"{type(optimizer).__name__}, which keeps its state itself; use the default "
                f"{getattr(ShardcastConfig(), name)!r}"
            )
    update: Update = load_extension("any_optimizer").AnyOptimizerUpdate(
        optimizer, comm, ready, config, epilogues_of(config)
    )
    return update
