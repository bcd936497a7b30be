"""The state of steps beside masters and moments, in state dicts and checkpoints.

Loss scale, skipped steps, what signals and step hooks keep, and the steps of averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardcast.optimizer.packed import PackedOptimizer


def step_state(packed: PackedOptimizer) -> dict[str, Any]:
    """Return loss scale, skipped steps, state of signals and hooks, as plain numbers. Local."""
    hooks = {hook.name: state for hook in packed.step_hooks if (state := hook.state_dict())}
    state = packed.decider.state_dict()
    return {**state, "hooks": hooks} if hooks else state


def load_step_state(packed: PackedOptimizer, state: Mapping[str, Any]) -> None:
    """The inverse of :func:`step_state`. Local."""
    packed.decider.load_state_dict(state)
    hooks = state.get("hooks", {})
    for hook in packed.step_hooks:
        if hook.name in hooks:
            hook.load_state_dict(hooks[hook.name])


def forget_averages(packed: PackedOptimizer) -> None:
    """Count the steps of averages from zero, before a state is loaded. Local."""
    for update in packed.updates:
        update.epilogue_steps = [0.0] * len(update.epilogue_steps)


def agree_on_averages(packed: PackedOptimizer) -> None:
    """Count the steps of averages alike on all ranks, after a state was loaded. Collective."""
    if any(update.epilogues for update in packed.updates):
        own = [update.epilogue_steps for update in packed.updates]
        by_rank = packed.process_groups.everyone.exchange(own, packed.device)
        for update, counts in zip(packed.updates, zip(*by_rank, strict=True), strict=True):
            update.epilogue_steps = [max(steps) for steps in zip(*counts, strict=True)]
