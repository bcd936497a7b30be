"""What becomes of the optimizer that was given to :func:`shardcast.shard`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

# Attributes in which a torch optimizer keeps the hooks that users registered on it.
HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def take_hooks(optimizer: torch.optim.Optimizer, original: torch.optim.Optimizer) -> None:
    """Give ``optimizer`` the hooks that were registered on ``original``."""
    for hooks in HOOKS:
        getattr(optimizer, hooks).update(getattr(original, hooks))


def retire(original: torch.optim.Optimizer) -> None:
    """Free its state, and have it refuse what would bypass the sharded optimizer.

    Its groups stay: schedulers that were built on it go on to set their options.
    """
    original.state = defaultdict(dict)
    for name in ("step", "add_param_group", "state_dict", "load_state_dict"):
        setattr(original, name, _refused(name))


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(
            f"{name}() of the original optimizer was called; it no longer owns the state: call "
            f"{name}() of the optimizer that shardcast.shard returned"
        )

    # A scheduler that watches the original looks for its own wrapper's mark, and would warn.
    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return refuse
