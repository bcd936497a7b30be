"""The needs of an optimizer class; those of others are found by ``any_optimizer.probe``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

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


class OptimizerTraits(NamedTuple):
    """The needs of a class.

    Attributes:
        elementwise: the update of an element needs nothing but that element.
        entangled: why several ranks cannot share its parameters; empty if they can.
        cost: ``cost(name, shape, group)`` gives about how many floating-point operations the update
            of a parameter takes, where it is not so many for each element, and raises ValueError
            for one that the class cannot update.
    """

    elementwise: bool
    entangled: str = ""
    cost: Callable[[str, Sequence[int], Mapping[str, Any]], float] | None = None


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it is of a class of ``torch.optim``."""
    return type(optimizer).__module__.startswith("torch.optim")


def known_traits(optimizer: torch.optim.Optimizer) -> OptimizerTraits | None:
    """Return the traits of an elementwise class of ``torch.optim``; ``None`` for any other. Local.

    Raises:
        TypeError: the class cannot be sharded over any number of ranks; names the remedy.
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
