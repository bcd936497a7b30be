"""Parameters of the model that no sharded optimizer holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import is_dense, warn_first
from shardcast.messages import SHOWN
from shardcast.optimizer.setup import Plan
from shardcast.plan.precision import MASTER_DTYPE
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


def warn_of_lowered_copies(plan: Plan) -> None:
    """Warn of parameters that nothing trains, and that equal a trained one but become low.

    An average begins so, which would stand still. So does a teacher, with which nothing is the
    matter, but which nothing tells from it. Call it while the model is as it was given.
    """
    by_shape: dict[torch.Size, list[tuple[str, Tensor]]] = {}
    for name, param in plan.params.items():
        by_shape.setdefault(param.shape, []).append((name, _compat.local_tensor(param)))
    for name, param in plan.outside.items():
        copied, low = _compat.local_tensor(param), plan.precision.rest_dtype(param)
        if param.dtype != MASTER_DTYPE or low == MASTER_DTYPE or not is_dense(copied):
            continue
        for trained, values in by_shape.get(param.shape, ()):
            if values.device != copied.device or not torch.equal(values, copied):
                continue
            # All norms begin as ones, and all biases as zeros.
            if not bool((copied == copied.flatten()[:1]).all()):
                pattern = name.split(".")[0] + ".*"
                warn_first(
                    f"parameter {name!r} begins as a copy of {trained!r}, and shardcast.shard "
                    f"makes it {low}, as all that is not trained: an average that is kept in it "
                    f"stands still, for small changes are rounded away; then give "
                    f"keep_fp32=({pattern!r},)"
                )
                return
