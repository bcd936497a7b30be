"""Methods that the class of an optimizer adds to those of torch's, on masters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shardcast.optimizer.packed import PackedOptimizer
from shardcast.step.decide.decision import Decision
from shardcast.step.update.state import OwnMethod


def find(packed: PackedOptimizer, name: str, decide: Callable[[], Decision]) -> Callable[..., None]:
    """Return the method of that name which one of the optimizers has, as all ranks may call it.

    Args:
        decide: gives the decision on the present gradients, on all ranks.

    Raises:
        AttributeError: none has it, or it cannot be called on masters of one rank alone.
    """
    offered = (update.own_method(name) for update in packed.updates)
    methods = [method for method in offered if method is not None]
    if len(methods) == 1:
        return partial(_call, packed, methods[0], name, decide)
    raise _without(name, packed.originals.optimizers)


@torch.no_grad()
def _call(
    packed: PackedOptimizer, method: OwnMethod, name: str, decide: Callable[[], Decision], /,
    *args: Any, **named: Any,
) -> None:  # fmt: skip
    """Call a method that the optimizer's class adds, on masters with the mean in ``.grad``.

    Every rank must call it, with the same arguments.

    Raises:
        AttributeError: on all ranks: the method lets elements meet, or returns something.
    """

    def check() -> None:
        if not method.fits(args, named):
            raise _without(name, packed.originals.optimizers)

    packed.together(check, name)
    decision = decide()
    packed.sync.wait()
    method.call(decision, args, named)
    packed.sync()


def _without(name: str, originals: Sequence[torch.optim.Optimizer]) -> AttributeError:
    """The error of a method that only the class of an original optimizer has."""
    owners = [type(original).__name__ for original in originals if hasattr(type(original), name)]
    if not owners:
        return AttributeError(f"'ShardedOptimizer' object has no attribute {name!r}")
    return AttributeError(
        f"{name}: {owners[0]} has it, the sharded optimizer has not: each rank has gradients and "
        "state of its own part alone, on which a method can work that takes each element by itself "
        "and returns nothing; use DDP, or an optimizer that updates in step()"
    )
