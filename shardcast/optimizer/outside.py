"""Parameters of the model that no sharded optimizer holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast._compat.optimizers import before_any_step
from shardcast.comm import is_dense, warn_first
from shardcast.messages import SHOWN
from shardcast.optimizer.setup import Plan
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.step.reduce.reducer import is_reduced


def watch_outside(outside: Mapping[str, nn.Parameter]) -> Callable[[], None]:
    """Warn where another optimizer steps parameters that no sharded one holds.

    Nobody averages their gradients. As long as no optimizer trains them, nobody has to.

    Returns:
        What ends it.
    """
    names = {id(param): (weakref.ref(param), name) for name, param in outside.items()}

    def name_of(param: Any) -> str | None:
        alive, name = names.get(id(param), (None, None))
        return name if alive is not None and alive() is param else None

    def before_step(optimizer: torch.optim.Optimizer) -> None:
        params = (param for group in optimizer.param_groups for param in group["params"])
        trained = [
            repr(name)
            for param in params
            if param.grad is not None and (name := name_of(param)) and not is_reduced(param)
        ]
        if trained:
            end()
            listed = ", ".join(trained[:SHOWN]) + ", ..." * (len(trained) > SHOWN)
            warn_first(
                f"{type(optimizer).__name__} trains {listed} of a "
                "sharded model, which no optimizer that was given to shardcast.shard holds: DDP "
                "would average these gradients over the ranks, here each rank keeps its own. Shard "
                "both optimizers together, shardcast.shard(model, [one, other])"
            )

    end = before_any_step(before_step)
    return end


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
