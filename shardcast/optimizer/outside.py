"""Parameters of the model that no sharded optimizer holds."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shardcast.comm import warn_first
from shardcast.messages import SHOWN
from shardcast.step.reduce.reducer import is_reduced


def name_unheld(outside: Mapping[str, nn.Parameter]) -> None:
    """Warn once of parameters that have a gradient and that no sharded optimizer holds. Local.

    Nobody averages these gradients. Called after the first step.
    """
    unheld = [
        repr(name)
        for name, param in outside.items()
        if param.requires_grad and param.grad is not None and not is_reduced(param)
    ]
    if unheld:
        listed = ", ".join(unheld[:SHOWN]) + ", ..." * (len(unheld) > SHOWN)
        warn_first(
            f"{listed} of a sharded model have gradients, and no optimizer that was given to "
            "shardcast.shard holds them: DDP would average these gradients over the ranks, here "
            "each rank keeps its own. If another optimizer trains them, shard both together, "
            "shardcast.shard(model, [one, other]); if none does, freeze them: requires_grad_(False)"
        )
