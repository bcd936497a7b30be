"""Optimizers that were given to :func:`shardcast.shard`, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

REASON = "it no longer owns gradients and state"


def take_hooks(optimizer: torch.optim.Optimizer, original: torch.optim.Optimizer) -> None:
    """Give ``optimizer`` the hooks that were registered on ``original``."""
    for name, hooks in vars(original).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            getattr(optimizer, name).update(hooks)


def retire(original: torch.optim.Optimizer) -> None:
    """Free its state, and have it refuse every method, those that its class adds as well.

    Its groups and defaults stay: schedulers read them, and the groups are those of the sharded
    optimizer.
    """
    original.state = GoneState()  # type: ignore[assignment]
    for name in dir(type(original)):
        if not name.startswith("_") and callable(getattr(type(original), name)):
            refuse = refused(name, "the original optimizer", REASON)
            # A scheduler that watches the original looks for its own wrapper's mark, and would
            # warn.
            refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
            setattr(original, name, refuse)


class GoneState:
    """The state of an optimizer that was given to ``shard``: whatever is done with it raises."""

    def _refuse(self, *_args: Any, **_named: Any) -> NoReturn:
        raise RuntimeError(
            f"state of the original optimizer was used: {REASON}; use the optimizer that "
            "shardcast.shard returned"
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse
    __reduce__ = _refuse  # copies and pickles of the optimizer

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # asked for by Python
            raise AttributeError(name)
        self._refuse()


def refused(call: str, owner: str, reason: str) -> Callable[..., Any]:
    """Return what stands for the method ``call`` of an ``owner``, and raises RuntimeError."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(
            f"{call}() of {owner} was called: {reason}; call {call}() of the optimizer that "
            "shardcast.shard returned"
        )

    return refuse
