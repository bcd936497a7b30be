"""Access of scripts to gradients that are not gathered: which functions, and what is set as one.

Imported where a script touches such a gradient; see :class:`.UngatheredGradient`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.memory.gradients import Gradients, own_part
from shardcast.memory.pack import Pack
from shardcast.memory.ungathered import OWNERS, UngatheredGradient, hide, reveal
from shardcast.plan.precision import MASTER_DTYPE

# In-place methods of torch that compute an element from others; a test looks through all methods.
MIXING = frozenset({"cumsum_", "cumprod_", "renorm_"})
COPIES = frozenset({"__deepcopy__", "__reduce_ex__"})  # their results show no tensor
CLEARS = frozenset({"zero_", "_foreach_zero_"})
ATTRIBUTES = frozenset({"__set__", "detach_", "requires_grad_"})  # no element is written


def run(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``func`` if it reads no value; its views of a gradient are gradients.

    Raises:
        RuntimeError: it reads a gradient whose mean is on other ranks, or may read one.
    """
    with _compat.without_torch_function():
        grads = [
            g for g in tensors((args, kwargs)) if type(g) is UngatheredGradient and _is_hidden(g)
        ]
        return _allowed(func, args, kwargs, grads) if grads else func(*args, **kwargs)


def check_given(pack: Pack, position: int, grad: Tensor) -> None:
    """Raise a TypeError for a sparse gradient, a RuntimeError for one of another parameter."""
    slot = pack.layout.slots[position]
    if isinstance(grad, UngatheredGradient) and (
        name_of(grad) not in (slot.name, None) or tuple(grad.shape) != slot.shape
    ):
        raise RuntimeError(
            f"gradient of {slot.name!r}: expected its own, got .grad of {name_of(grad)!r}, of "
            "which this rank has the mean of other elements; call optimizer.gather_gradients() "
            "before"
        )
    if grad.layout != torch.strided:
        raise TypeError(
            f"gradient of {slot.name!r}: expected a dense tensor, got "
            f"{grad.layout}; use sparse=False in the embedding, or leave this parameter to an "
            "optimizer of its own"
        )


def name_of(grad: UngatheredGradient) -> str | None:
    """Name the parameter that it is the gradient of, where that is known."""
    owner = _owner(grad)
    if owner is None:
        return grad.of
    position = _position_in(owner, grad)
    return None if position is None else owner.pack.layout.slots[position].name


def _owner(grad: Tensor) -> Gradients | None:
    owner = OWNERS.get(grad.untyped_storage().data_ptr())
    if owner is None or not owner.allocated:
        return None
    return owner if 0 <= grad.data_ptr() - owner.data.data_ptr() < owner.data.nbytes else None


def _position_in(owner: Gradients, grad: Tensor) -> int | None:
    """Return the position of the parameter in whose gradient the view begins, if in one."""
    offset = (grad.data_ptr() - owner.data.data_ptr()) // owner.dtype.itemsize
    return next((n for n, slot in enumerate(owner.pack.layout.slots) if offset < slot.end), None)


def _is_hidden(grad: UngatheredGradient) -> bool:
    """Return whether it is no mean still; a view that a script made hears of no gather."""
    owner = _owner(grad)
    if owner is None or owner.is_ungathered:
        return True
    reveal(grad)
    return False


def _edit(func: Callable[..., Any], name: str, grad: UngatheredGradient) -> None:
    """Note an edit, which ``func`` of that ``name`` is about to make, or refuse it."""
    if grad.is_empty and name not in CLEARS:
        raise RuntimeError(f"{name} edits {_label(grad)} after the backward: {grad.way_out}")
    owner = _owner(grad)
    allowed = owner is None or _note_edit(owner, grad, clears=name in CLEARS)
    # It is by an aten operator that autograd adds to the local part of a DTensor.
    if not allowed and not str(getattr(func, "__module__", "")).startswith("torch._ops"):
        raise RuntimeError(
            f"{name} edits {_label(grad)} between two backwards of a step, where it is not all of "
            "the gradient: edit it after the last one, or call optimizer.gather_gradients() before"
        )


def _note_edit(owner: Gradients, grad: Tensor, clears: bool) -> bool:
    """Note that a script edits or clears a gradient, or a view of it; return whether it may.

    Not while means are kept apart: what is shown is not all of the gradient.
    """
    position = _position_in(owner, grad)
    if position is None:
        return True
    if clears and grad.numel() == owner.pack.layout.slots[position].numel:
        owner.zeroed.add(position)
        if owner.carry is not None:
            owner.carry[own_part(owner.pack, position)].zero_()
        if len(owner.zeroed) == len(owner.pack.params):
            owner.reveal()  # zeros are what they seem to be
        return True
    owner.zeroed.discard(position)
    return owner.carry is None


def _label(grad: UngatheredGradient) -> str:
    name = name_of(grad)
    return f".grad of {'a parameter' if name is None else repr(name)}"


def _error(func: Callable[..., Any], grad: UngatheredGradient) -> RuntimeError:
    return RuntimeError(
        f"{_name(func)} reads {_label(grad)}, which after the backward is the mean over ranks only "
        f"where this rank owns the elements: {grad.way_out}"
    )


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
