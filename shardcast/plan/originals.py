"""The optimizers that were passed to :func:`shardcast.shard`, and the needs of their classes.

Their own lists hold the groups. ``any_optimizer.probe`` measures the needs of third-party classes.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardcast.plan.layout import GroupId

Group = dict[str, Any]  # group of a torch optimizer: "params", and options by name
ParamGroup = Mapping[str, Any]  # a group that is only read

ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)


class OptimizerList:
    """One optimizer, or several over disjoint parameters of one model.

    Only each optimizer's own ``param_groups`` holds its groups. The next step reads any change that
    a script makes there.

    Attributes:
        optimizers: in the order given to ``shard()``.
        sharded: parameters of each group when it was sharded, for all groups in order.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self.sharded = {number: list(group["params"]) for number, _, group in self.numbered()}

    @classmethod
    def of(
        cls, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | OptimizerList
    ) -> OptimizerList:
        """Wrap one optimizer or a sequence; return an ``OptimizerList`` unchanged."""
        if isinstance(optimizers, OptimizerList):
            return optimizers
        return cls([optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers)

    @property
    def name(self) -> str:
        """Names of their classes, for messages."""
        return " + ".join(type(optimizer).__name__ for optimizer in self.optimizers)

    @property
    def groups(self) -> list[Group]:
        """Groups of all optimizers, one optimizer after another; for one optimizer its own list."""
        if len(self.optimizers) == 1:
            return self.optimizers[0].param_groups
        return JoinedGroups(group for _, _, group in self.numbered())

    @property
    def places(self) -> list[int]:
        """Index of the optimizer of each of ``groups``."""
        return [number.optimizer for number, _, _ in self.numbered()]

    def owner(self, number: GroupId) -> torch.optim.Optimizer:
        """Return the optimizer of a group."""
        return self.optimizers[number.optimizer]

    def group(self, number: GroupId) -> Group:
        """Return the current group of that number."""
        return self.optimizers[number.optimizer].param_groups[number.position]

    def numbered(self) -> Iterator[tuple[GroupId, torch.optim.Optimizer, Group]]:
        """Yield every group with its number and optimizer."""
        for place, optimizer in enumerate(self.optimizers):
            for position, group in enumerate(optimizer.param_groups):
                yield GroupId(place, position), optimizer, group

    def flags(self, number: GroupId) -> str:
        """Return the options of a group that choose code or state of an update, not its numbers.

        They have the values at ``shard()``; a script may change a group's options later.
        """
        group = self.group(number)
        flags = {
            name: value
            for name in sorted(self.owner(number).defaults)
            if (value := group.get(name)) is None or isinstance(value, (bool, str))
        }
        if "momentum" in group:  # zero momentum has no buffer
            flags["momentum"] = bool(group["momentum"])
        return repr(flags)

    def option_names(self) -> tuple[str, ...]:
        """Names of their classes' options; other entries of a group are a script's own."""
        return tuple(dict.fromkeys(n for o in self.optimizers for n in o.defaults))

    def check(self) -> None:
        """Raise RuntimeError if a script removed groups, or changed their parameters. Local."""
        sizes = [len(optimizer.param_groups) for optimizer in self.optimizers]
        expected = [0] * len(sizes)
        for number in self.sharded:
            expected[number.optimizer] += 1
        if sizes != expected:
            raise RuntimeError(
                f"param_groups: expected {expected} groups of {self.name}, got {sizes}; add groups "
                "with add_param_group, and keep those that are no longer to be trained: freeze "
                "their parameters with requires_grad_(False)"
            )
        for number, _, group in self.numbered():
            params, sharded = group["params"], self.sharded[number]
            if len(params) != len(sharded) or not all(map(operator.is_, params, sharded)):
                raise RuntimeError(
                    f"param_groups: expected the {len(sharded)} parameters in group {number} that "
                    f"were sharded with it, in order, got {len(params)} or others; freeze a "
                    "parameter with requires_grad_(False), add others with add_param_group"
                )


class JoinedGroups(list[Group]):
    """Groups of several optimizers; changes go to the optimizers' own lists."""

    def __reduce__(self) -> tuple[object, ...]:
        return list, (list(self),)  # a copy is a plain list

    def _refuse(self, *_args: object, **_options: object) -> Any:
        raise RuntimeError(
            "param_groups: the joint list of several optimizers cannot be changed; add a group "
            "with add_param_group of one of optimizer.optimizers, replace one in its "
            "param_groups, and freeze parameters with requires_grad_(False)"
        )

    __setitem__ = __delitem__ = __iadd__ = append = clear = extend = insert = pop = _refuse
    remove = reverse = sort = _refuse


class OptimizerTraits(NamedTuple):
    """The needs of an optimizer class.

    Attributes:
        elementwise: the update of an element needs only that element.
        entangled: why several ranks cannot share its parameters; empty if they can.
        cost: ``cost(name, shape, group)`` returns about how many floating-point operations the
            update of a parameter takes, if that is not proportional to its elements. It raises
            ValueError for a parameter that the class cannot update.
        hazard: what a script should know if several ranks share its parameters; usually empty.
    """

    elementwise: bool
    entangled: str = ""
    cost: Callable[[str, Sequence[int], ParamGroup], float] | None = None
    hazard: str = ""


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its class is one of ``torch.optim``."""
    return type(optimizer).__module__.startswith("torch.optim")


def known_traits(optimizer: torch.optim.Optimizer) -> OptimizerTraits | None:
    """Return the traits of an elementwise class of ``torch.optim``; ``None`` for others. Local.

    Raises:
        TypeError: the class cannot be sharded over any number of ranks; the error has a remedy.
    """
    _refuse_kind(optimizer)
    return OptimizerTraits(elementwise=True) if type(optimizer) in ELEMENTWISE else None


def _refuse_kind(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError for a class whose step needs more than dense gradients."""
    arguments = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    if isinstance(optimizer, torch.optim.SparseAdam):
        reason = "it works on sparse gradients"
    elif any(a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD for a in arguments):
        reason = "its step needs arguments, such as a closure that evaluates the loss again"
    else:
        return
    raise TypeError(
        f"optimizer: {type(optimizer).__name__} cannot be sharded ({reason}); use a first-order "
        "optimizer on dense gradients, such as AdamW"
    )
