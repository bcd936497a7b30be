"""Optimizers that were given to :func:`shardcast.shard`, and the handles that stand for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from shardcast import _compat
from shardcast.messages import page
from shardcast.optimizer.groups import add_group, assign_groups
from shardcast.optimizer.state_view import (
    StateView,
    called_by_dcp,
    outside_as_plain,
    refuse_write,
)

if TYPE_CHECKING:  # it imports this module
    from shardcast.optimizer.packed import PackedOptimizer
    from shardcast.optimizer.sharded import ShardedOptimizer

REASON = "it no longer owns gradients and state"
LOSSES = (
    "For a loss of each optimizer: models that are sharded apart, as of a GAN; within one model, "
    "as of DARTS, set .grad of what is not to move to None and call step() of what shardcast.shard "
    f"returned ({page('optimizers')})"
)


class OptimizerHandle(torch.optim.Optimizer):
    """Stands for one of several optimizers that were sharded together.

    Schedulers take it, and a loop over handles steps as one over the optimizers did: ``step()`` of
    the last handle makes the one step of all. ``zero_grad()`` between, which would clear gradients
    before they are used, waits until then. ``state_dict`` and ``load_state_dict`` are
    refused: there is one state, that of the sharded optimizer.

    Attributes:
        name: the class of the optimizer.
    """

    _ready = False  # the base class fills in the groups

    def __init__(
        self,
        sharded: ShardedOptimizer,
        packed: PackedOptimizer,
        handles: Sequence[OptimizerHandle],
        place: int,
    ) -> None:
        self._sharded, self._packed, self._handles, self._place = sharded, packed, handles, place
        self._stepped_with: Any = None  # state of the gradients, until all have stepped
        self._zero_grad_after: bool | None = None  # set_to_none of what is put off until then
        original = packed.originals.optimizers[place]
        self.name = type(original).__name__
        super().__init__(original.param_groups, original.defaults)
        for call in ("state_dict", "load_state_dict"):
            reason = "optimizers that are sharded together have one state"
            setattr(self, call, refused(call, f"the handle of {self.name}", reason))
        self._ready = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the original optimizer; see :attr:`ShardedOptimizer.param_groups`."""
        return self._packed.originals.optimizers[self._place].param_groups

    @param_groups.setter
    def param_groups(self, value: Sequence[dict[str, Any]]) -> None:
        if self._ready:
            for group in assign_groups(self._packed, value, self._place):
                self.add_param_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to this optimizer; see :meth:`ShardedOptimizer.add_param_group`."""
        if self._ready:
            add_group(self._packed, self._place, param_group)

    @_compat.uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count as stepped; the last handle makes the step. Every rank must call all of them."""
        if closure is not None:
            raise TypeError(
                f"step: the handle of {_named(self)} takes no closure, which each handle would run "
                "again; pass it to step() of what shardcast.shard returned"
            )
        handles = self._handles
        waiting = [handle for handle in handles if handle._stepped_with is None]
        if self not in waiting:
            raise RuntimeError(
                f"step() of the handle of {_named(self)} was called twice before that of "
                f"{_names(waiting)}: the optimizers step together; call step() of every handle "
                "once, or step() of what shardcast.shard returned"
            )
        state = self._packed.reduce.state()
        if any(handle._stepped_with not in (None, state) for handle in handles):
            raise RuntimeError(
                f"step() of the handle of {_named(self)} came after a backward, a clip or "
                "zero_grad() that followed the step() of another one: the optimizers step "
                "together, with the same gradients; call step() of all handles after the last "
                f"backward. {LOSSES}"
            )
        self._stepped_with = state
        if waiting == [self]:
            for handle in handles:
                handle._stepped_with = None
            self._sharded.step()
            for handle in handles:
                set_to_none, handle._zero_grad_after = handle._zero_grad_after, None
                if set_to_none is not None:
                    handle.zero_grad(set_to_none)

    @_compat.uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of its own parameters, once they are used. Local."""
        stepped = [handle for handle in self._handles if handle._stepped_with is not None]
        if self in stepped:  # and other handles have not stepped
            self._zero_grad_after = set_to_none
            return
        if stepped:
            raise RuntimeError(
                f"zero_grad() of the handle of {_named(self)} came after step() of that of "
                f"{_names(stepped)} and before its own: the optimizers step together, with the "
                f"gradients of the same backwards. {LOSSES}"
            )
        super().zero_grad(set_to_none)

    def full_state_dict(self) -> dict[str, Any]:
        """Do as :class:`ShardedOptimizer` for this optimizer alone. Every rank must call it."""
        return self._sharded.full_state_dict(self._place)

    @property
    def state(self) -> Any:
        """The state of its own parameters; see :attr:`ShardedOptimizer.state`."""
        if called_by_dcp("state"):
            raise outside_as_plain("state")
        self._packed.need_masters("state")
        return StateView(self._packed, self._place)

    @state.setter
    def state(self, value: Any) -> None:
        if self._ready:
            refuse_write()


def check_stepped(handles: Sequence[OptimizerHandle]) -> None:
    """Raise RuntimeError if some handles have stepped and others have not."""
    stepped = [handle for handle in handles if handle._stepped_with is not None]
    if stepped:
        raise RuntimeError(
            f"step(): the handle of {_names(stepped)} was stepped, others were not, so this step "
            "would count twice for it; call step() of all handles, or of none"
        )


def _names(handles: Sequence[OptimizerHandle]) -> str:
    return ", ".join(map(_named, handles))


def _named(handle: OptimizerHandle) -> str:
    """Return its class, and its place among several of the same class."""
    names = [each.name for each in handle._handles]
    place = f" (optimizers[{handle._place}])" if names.count(handle.name) > 1 else ""
    return f"{handle.name}{place}"


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
