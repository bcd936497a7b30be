"""What becomes of the optimizers that were given to :func:`shardcast.shard`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from shardcast.plan.originals import Originals

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


class OptimizerHandle(torch.optim.Optimizer):
    """Stands for one of several optimizers that were sharded together.

    Schedulers take it, and a loop over handles steps as one over the optimizers did: ``step()`` of
    the last handle makes the one step of all. ``zero_grad()`` between, which would clear gradients
    before they are used, waits until then.

    Attributes:
        name: the class of the optimizer.
    """

    def __init__(self, join: StepTogether, place: int) -> None:
        self._join, self._place = join, place
        original = join.originals.optimizers[place]
        self.name = type(original).__name__
        self._ready = False
        super().__init__(original.param_groups, original.defaults)
        self._ready = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to this optimizer; see :meth:`ShardedOptimizer.add_param_group`."""
        super().add_param_group(param_group)
        if self._ready:
            added = self.param_groups.pop()
            self._join.add_group(self._place, added)
            self.param_groups.append(added)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count as stepped; the last handle makes the step. Every rank must call all of them."""
        if closure is not None:
            raise TypeError(
                f"step: the handle of {self.name} takes no closure, which each handle would run "
                "again; pass it to step() of what shardcast.shard returned"
            )
        self._join.step(self._place)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of its own parameters, once they are used. Local."""
        if self._place in self._join.stepped:  # and others have not
            self._join.after.append(lambda: self.zero_grad(set_to_none))
        else:
            super().zero_grad(set_to_none)

    def full_state_dict(self) -> dict[str, Any]:
        """As of :class:`ShardedOptimizer`, of this optimizer alone. Every rank must call it."""
        return self._join.gather(self._place)

    def state_dict(self) -> Any:
        """Refused; the state is one."""
        self._refuse("state_dict")

    def load_state_dict(self, state_dict: Any) -> None:
        """Refused; the state is one."""
        self._refuse("load_state_dict")

    def _refuse(self, call: str) -> NoReturn:
        raise RuntimeError(
            f"{call}() of the handle of {self.name} was called: optimizers that are sharded "
            f"together have one state; call {call}() of what shardcast.shard returned"
        )


class StepTogether:
    """Which handles have stepped; the last one makes the step.

    Attributes:
        stepped: the places of those that have.
        after: what was put off until the step is made.
    """

    def __init__(
        self,
        originals: Originals,
        grad_version: Callable[[], int],
        step: Callable[[], Any],
        add_group: Callable[[int, dict[str, Any]], None],
        gather: Callable[[int], dict[str, Any]],
    ) -> None:
        self.originals, self.add_group, self.gather = originals, add_group, gather
        self.after: list[Callable[[], None]] = []
        self._grad_version, self._step = grad_version, step
        self._seen = 0  # the gradients that the first handle stepped with
        self.stepped: set[int] = set()

    def step(self, place: int) -> None:
        """Count the handle at ``place``."""
        names = [type(optimizer).__name__ for optimizer in self.originals.optimizers]
        if place in self.stepped:
            missing = [n for other, n in enumerate(names) if other not in self.stepped]
            raise RuntimeError(
                f"step() of the handle of {names[place]} was called twice before that of "
                f"{', '.join(missing)}: the optimizers step together; call step() of every handle "
                "once, or step() of what shardcast.shard returned"
            )
        version = self._grad_version()
        if self.stepped and version != self._seen:
            raise RuntimeError(
                f"step() of the handle of {names[place]} came after a backward, a clip or "
                "zero_grad() that followed the step() of another one: the optimizers step "
                "together, with the same gradients; call step() of all handles after the last "
                "backward. Losses of their own, as of a GAN, need models that are sharded apart"
            )
        self._seen = version
        self.stepped.add(place)
        if len(self.stepped) == len(names):
            self.stepped.clear()
            self._step()
            after, self.after = self.after, []
            for act in after:
                act()

    def check_whole(self) -> None:
        """Raise RuntimeError if some handles have stepped and others have not."""
        if self.stepped:
            names = [type(self.originals.optimizers[p]).__name__ for p in sorted(self.stepped)]
            raise RuntimeError(
                f"step(): the handle of {', '.join(names)} was stepped, others were not, so this "
                "step would count twice for it; call step() of all handles, or of none"
            )


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(
            f"{name}() of the original optimizer was called; it no longer owns the state: call "
            f"{name}() of the optimizer that shardcast.shard returned"
        )

    # A scheduler that watches the original looks for its own wrapper's mark, and would warn.
    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return refuse
