"""A ``.grad`` between the reduction and the step: it can be edited, and not be read."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.plan.precision import MASTER_DTYPE

# In-place methods of torch that compute an element from others; a test looks through all methods.
MIXING = frozenset({"cumsum_", "cumprod_", "renorm_"})
COPIES = frozenset({"__deepcopy__", "__reduce_ex__"})  # their results show no tensor
CLEARS = frozenset({"zero_", "_foreach_zero_"})
ATTRIBUTES = frozenset({"__set__", "detach_", "requires_grad_"})  # no element is written
WAY_OUT = (
    "call optimizer.gather_gradients() on every rank after the backward, before .grad is read (to "
    "clip, optimizer.clip_grad_norm_ needs no more than its bound); what changes each element by "
    "itself works in place: param.grad.mul_(0.5)"
)


class Owner(Protocol):
    """The storage whose views are shown as ``.grad``.

    Attributes:
        is_ungathered: whether it has means of the own elements alone at present.
    """

    is_ungathered: bool

    def has(self, address: int) -> bool:
        """Return whether it is in this storage still."""

    def name_at(self, address: int) -> str | None:
        """Name the parameter whose gradient has this address."""

    def note_edit(self, grad: Tensor, clears: bool) -> bool:
        """Hear that a script edits or clears a gradient, or a view; return whether it may."""


# By the address of the storage.
OWNERS: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()


class UngatheredGradient(Tensor):
    """The ``.grad`` of a parameter after the reduction: the mean where this rank owns the elements.

    It can be edited in place, each element by itself, be viewed, and be asked for its shape.
    Whatever takes a value out of it raises a RuntimeError that names the parameter, on every rank,
    also where this one has the mean of all elements: ranks are not to part.

    A view becomes one, and a plain tensor again, by assignment to ``__class__``. Functions called
    from Python come here first; autograd and other callers in C++ see a plain tensor, whose marks
    (:class:`.Marks`) tell that it is no mean.

    Attributes:
        of: the parameter, where the memory has no :class:`Owner`, or none any more.
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
        kwargs = kwargs or {}
        with _compat.without_torch_function():
            grads = [g for g in tensors((args, kwargs)) if type(g) is cls and _is_hidden(g)]
            return _allowed(func, args, kwargs, grads) if grads else func(*args, **kwargs)


def name_of(grad: UngatheredGradient) -> str | None:
    """Name the parameter that it is the gradient of, where that is known."""
    owner = _owner(grad)
    return grad.of if owner is None else owner.name_at(grad.data_ptr())


def _owner(grad: Tensor) -> Owner | None:
    owner = OWNERS.get(grad.untyped_storage().data_ptr())
    return owner if owner is not None and owner.has(grad.data_ptr()) else None


def _is_hidden(grad: UngatheredGradient) -> bool:
    """Return whether it is no mean still; a view that a script made hears of no gather."""
    owner = _owner(grad)
    if owner is None or owner.is_ungathered:
        return True
    reveal(grad)
    return False


def _edit(func: Callable[..., Any], name: str, grad: UngatheredGradient) -> None:
    if grad.is_empty and name not in CLEARS:
        raise RuntimeError(f"{name} edits {_label(grad)} after the backward: {grad.way_out}")
    owner = _owner(grad)
    allowed = owner is None or owner.note_edit(grad, clears=name in CLEARS)
    # It is by an aten operator that autograd adds to the local part of a DTensor.
    if not allowed and not str(getattr(func, "__module__", "")).startswith("torch._ops"):
        raise RuntimeError(
            f"{name} edits {_label(grad)} between two backwards of a step, where it is not all of "
            "the gradient: edit it after the last one, or call optimizer.gather_gradients() before"
        )


def _label(grad: UngatheredGradient) -> str:
    name = name_of(grad)
    return f".grad of {'a parameter' if name is None else repr(name)}"


def _error(func: Callable[..., Any], grad: UngatheredGradient) -> RuntimeError:
    return RuntimeError(
        f"{_name(func)} reads {_label(grad)}, which after the backward is the mean over ranks only "
        f"where this rank owns the elements: {grad.way_out}"
    )


def hide(grad: Tensor, **attributes: Any) -> None:
    """Make a view an :class:`UngatheredGradient`."""
    grad.__class__ = UngatheredGradient
    if attributes:
        vars(grad).update(attributes)


def reveal(grad: Tensor) -> None:
    """Make it a plain tensor again."""
    grad.__class__ = Tensor


def tensors(values: Any) -> Iterator[Any]:
    """Give all tensors in nested tuples, lists and mappings."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors(value)
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from tensors(value)


def _allowed(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
    grads: Sequence[UngatheredGradient],
) -> Any:  # fmt: skip
    """Return what ``func`` returns, unless it reads a value.

    torch's names say which function writes to its first argument (``_`` at the end), and which one
    makes a new tensor of the same shape. Any other one is run on tensors without values: it
    reads nothing where it answers without them, or by a view of them.

    Raises:
        RuntimeError: it reads, or may read.
    """
    name = _name(func)
    if name in ("__repr__", "__str__") or (name == "__format__" and not args[1]):
        shape = f"{grads[0].dtype} of {tuple(grads[0].shape)}"
        return f"<{_label(grads[0])}, {shape}, whose values are on other ranks>"
    first = [*tensors(args[0] if args else next(iter(kwargs.values()), None))]
    only_first = len(grads) == sum(type(g) is UngatheredGradient for g in first)
    makes_new = name.endswith("_like") or name.startswith("new_")
    writes_it = name.endswith("_") and not name.endswith("__")
    writes_it = writes_it or name in ("__setitem__", "__set__")
    out = kwargs.get("out")
    if out is not None and len(grads) == 2 and len(first) == 1 and first[0] is out:
        only_first = writes_it = hasattr(Tensor, name := f"{name}_")  # as that method
    if only_first and makes_new:
        return func(*args, **kwargs)
    if only_first and writes_it and name not in MIXING:
        if name not in ATTRIBUTES:
            for grad in grads:
                _edit(func, name, grad)
        return func(*args, **kwargs)
    if writes_it and name == "__set__" and args[0] is args[1]:
        return func(*args, **kwargs)  # grad.data = grad, as of model.to() where nothing moves
    outside = str(getattr(func, "__module__", "")).startswith("torch.distributed")
    if writes_it or makes_new or outside or out is not None or name in COPIES:
        raise _error(func, grads[0])
    result = _probe(func, args, kwargs, grads)
    for value in tensors(result):
        if type(value) is Tensor:
            hide(value)
            vars(value).update(vars(grads[0]))
    return result


def _probe(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
    grads: Sequence[UngatheredGradient],
) -> Any:  # fmt: skip
    """Return what ``func`` returns, if it needs no value for it."""
    twins = {id(grad): grad.to("meta") for grad in grads}
    try:
        answer = [*tensors(func(*_twins_of(args, twins), **_twins_of(kwargs, twins)))]
    except Exception:
        # There may be no way from that device: .to() of the one where it is.
        twins = {id(grad): torch.zeros_like(grad) for grad in grads}
        try:
            answer = [func(*_twins_of(args, twins), **_twins_of(kwargs, twins))]
        except Exception:
            # It may mix bf16 and fp32, which it would not under DDP: to have the means is first.
            twins = {id(grad): torch.zeros_like(grad, dtype=MASTER_DTYPE) for grad in grads}
            reads = False
            with contextlib.suppress(Exception):
                func(*_twins_of(args, twins), **_twins_of(kwargs, twins))
                reads = True
            if reads:
                raise _error(func, grads[0]) from None
            raise
        if not any(answer[0] is twin for twin in twins.values()):
            raise _error(func, grads[0]) from None
    if not all(any(_compat.is_alias(t, twin) for twin in twins.values()) for t in answer):
        raise _error(func, grads[0])
    return func(*args, **kwargs)


def _twins_of(values: Any, twins: Mapping[int, Tensor]) -> Any:
    if isinstance(values, Tensor):
        return twins.get(id(values), values)
    if isinstance(values, (tuple, list)):
        swapped = (_twins_of(value, twins) for value in values)
        # A tuple stays one, since x[0, 1] is not x[[0, 1]].
        return tuple(swapped) if isinstance(values, tuple) else [*swapped]
    if isinstance(values, Mapping):
        return {key: _twins_of(value, twins) for key, value in values.items()}
    return values


def _name(func: Any) -> str:
    """Return torch's name for it: ``mul_``; ``__get__`` or ``__set__`` of an attribute; for an aten
    operator without its overload.
    """
    return str(getattr(func, "__name__", func)).partition(".")[0]
