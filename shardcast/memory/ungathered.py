"""A ``.grad`` between the reduction and the step: it can be edited, and not be read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:  # it imports this module
    from shardcast.memory.gradients import Gradients

WAY_OUT = (
    "call optimizer.gather_gradients() on every rank after the backward, before .grad is read (to "
    "clip, optimizer.clip_grad_norm_ needs no more than its bound); what changes each element by "
    "itself works in place: param.grad.mul_(0.5)"
)

# The storages whose views are shown as ``.grad``, by their addresses.
OWNERS: weakref.WeakValueDictionary[int, Gradients] = weakref.WeakValueDictionary()


class UngatheredGradient(Tensor):
    """The ``.grad`` of a parameter after the reduction: the mean where this rank owns the elements.

    It can be edited in place, each element by itself, be viewed, and be asked for its shape.
    Whatever takes a value out of it raises a RuntimeError that names the parameter, on every rank,
    also where this one has the mean of all elements: ranks are not to part.

    A view becomes one, and a plain tensor again, by assignment to ``__class__``. Functions called
    from Python come here first; autograd and other callers in C++ see a plain tensor, whose marks
    (:class:`.Marks`) tell that it is no mean.

    Attributes:
        of: the parameter, where the memory is that of no :class:`.Gradients`, or of none any more.
        way_out: what a script can do that has to read.
        is_empty: it has no elements to be edited.
    """

    of: str | None = None
    way_out = WAY_OUT
    is_empty = False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` if it reads no value; its views of a gradient are gradients."""
        from shardcast.memory.gradient_access import run  # only where a script touches one

        return run(func, args, kwargs or {})


def hide(grad: Tensor, **attributes: Any) -> None:
    """Make a view an :class:`UngatheredGradient`."""
    grad.__class__ = UngatheredGradient
    if attributes:
        vars(grad).update(attributes)


def reveal(grad: Tensor) -> None:
    """Make it a plain tensor again."""
    grad.__class__ = Tensor
