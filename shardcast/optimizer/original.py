"""What becomes of the optimizers that were given to :func:`shardcast.shard`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from shardcast.messages import DCP_STATE, caller_of
from shardcast.optimizer.state_view import StateView

if TYPE_CHECKING:  # it imports this module
    from shardcast.optimizer.sharded import ShardedOptimizer

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

    Its groups stay: they are those of the sharded optimizer.
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


class OptimizerHandle(torch.optim.Optimizer):
    """Stands for one of several optimizers that were sharded together.

    Schedulers take it, and a loop over handles steps as one over the optimizers did: ``step()`` of
    the last handle makes the one step of all. ``zero_grad()`` between, which would clear gradients
    before they are used, waits until then.

    Attributes:
        name: the class of the optimizer.
    """

    _ready = False  # the base class fills in the groups

    def __init__(
        self,
        sharded: ShardedOptimizer,
        place: int,
        handles: Sequence[OptimizerHandle],
        add_group: Callable[[int, dict[str, Any]], None],
        gather: Callable[[int], dict[str, Any]],
    ) -> None:
        self._sharded, self._place, self._handles = sharded, place, handles
        self._add_group, self._gather = add_group, gather
        self._stepped_with: int | None = None  # version of the gradients, until all have stepped
        self._zero_grad_after: bool | None = None  # set_to_none of what is put off until then
        self._originals = sharded.originals
        original = self._originals.optimizers[place]
        self.name = type(original).__name__
        super().__init__(original.param_groups, original.defaults)
        self._ready = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the original optimizer; see :attr:`ShardedOptimizer.param_groups`."""
        return self._originals.optimizers[self._place].param_groups

    @param_groups.setter
    def param_groups(self, value: Sequence[dict[str, Any]]) -> None:
        if self._ready:
            for group in self._originals.assign(value, self._place):
                self.add_param_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to this optimizer; see :meth:`ShardedOptimizer.add_param_group`."""
        if self._ready:
            self._add_group(self._place, param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count as stepped; the last handle makes the step. Every rank must call all of them."""
        if closure is not None:
            raise TypeError(
                f"step: the handle of {self.name} takes no closure, which each handle would run "
                "again; pass it to step() of what shardcast.shard returned"
            )
        stepped, waiting = _by_stepped(self._handles)
        if self in stepped:
            raise RuntimeError(
                f"step() of the handle of {self.name} was called twice before that of "
                f"{_names(waiting)}: the optimizers step together; call step() of every handle "
                "once, or step() of what shardcast.shard returned"
            )
        version = self._sharded.reduce.grad_version
        if any(handle._stepped_with != version for handle in stepped):
            raise RuntimeError(
                f"step() of the handle of {self.name} came after a backward, a clip or "
                "zero_grad() that followed the step() of another one: the optimizers step "
                "together, with the same gradients; call step() of all handles after the last "
                "backward. Losses of their own, as of a GAN, need models that are sharded apart"
            )
        self._stepped_with = version
        if waiting == [self]:
            for handle in self._handles:
                handle._stepped_with = None
            self._sharded.step()
            for handle in self._handles:
                set_to_none, handle._zero_grad_after = handle._zero_grad_after, None
                if set_to_none is not None:
                    handle.zero_grad(set_to_none)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of its own parameters, once they are used. Local."""
        if self._stepped_with is not None:  # and other handles have not stepped
            self._zero_grad_after = set_to_none
        else:
            super().zero_grad(set_to_none)

    def full_state_dict(self) -> dict[str, Any]:
        """As of :class:`ShardedOptimizer`, of this optimizer alone. Every rank must call it."""
        return self._gather(self._place)

    @property
    def state(self) -> Any:
        """That of its own parameters; see :attr:`ShardedOptimizer.state`."""
        module, _ = caller_of("state")
        if module == DCP_STATE:  # its next call makes a step, to begin the state
            self._refuse("state_dict")
        shards = [s for s in self._sharded.shards if s.pack.layout.group.optimizer == self._place]
        return StateView(shards, self._sharded.update_of)

    @state.setter
    def state(self, value: Any) -> None:
        if self._ready:
            self.state.replace(value)

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


def check_stepped(handles: Sequence[OptimizerHandle]) -> None:
    """Raise RuntimeError if some handles have stepped and others have not."""
    stepped, _ = _by_stepped(handles)
    if stepped:
        raise RuntimeError(
            f"step(): the handle of {_names(stepped)} was stepped, others were not, so this step "
            "would count twice for it; call step() of all handles, or of none"
        )


def _by_stepped(
    handles: Sequence[OptimizerHandle],
) -> tuple[list[OptimizerHandle], list[OptimizerHandle]]:
    """The handles that have stepped since the last step of all, and those that have not."""
    stepped = [handle for handle in handles if handle._stepped_with is not None]
    return stepped, [handle for handle in handles if handle._stepped_with is None]


def _names(handles: Sequence[OptimizerHandle]) -> str:
    return ", ".join(handle.name for handle in handles)
