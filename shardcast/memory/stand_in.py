"""The ``.grad`` of a parameter after the reduction: it can be edited but not read.

All ranks together can compute its norm.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch import Tensor

from shardcast import _compat
from shardcast._compat import dtensor
from shardcast.messages import GRAD_SCALER

if TYPE_CHECKING:  # the second is circular: it imports this module
    from shardcast._compat.dtensor import Placement
    from shardcast.memory.gradients import Gradients
    from shardcast.plan.layout import Slot

DOORS = (
    "To read it, first call optimizer.gather_gradients() on every rank. To change it, edit it in "
    "place and elementwise (param.grad.mul_(mask), param.grad[rows] = 0), or edit this rank's "
    "elements inside `with optimizer.owned()`. To see this rank's own gradient before it is "
    "averaged, use a hook: param.register_post_accumulate_grad_hook(hook). For its norm, call "
    "param.grad.norm() on every rank, or set the option metrics. To clip, call "
    "optimizer.clip_grad_norm_(max_norm)"
)

# Functions that need only shape, dtype, device or identity, and read no element. Not ``data_ptr``:
# a kernel that gets the address would read past one element.
METADATA = frozenset(
    "__hash__ __len__ __dlpack_device__ _is_view _nnz size dim ndimension stride numel nelement "
    "element_size nbytes storage_offset get_device is_contiguous is_complex is_conj "
    "is_neg is_floating_point is_inference is_signed is_same_size is_set_to is_pinned is_shared "
    "is_distributed untyped_storage requires_grad_ detach_ register_hook "
    "retain_grad record_stream share_memory_ dim_order _has_compatible_shallow_copy_type "
    "can_cast result_type is_storage is_tensor_like is_coalesced _is_zerotensor _version "
    "is_functional_tensor _is_functional_tensor "
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like "
    "new_empty new_empty_strided new_zeros new_ones new_full new_tensor".split()
)
VIEWS = frozenset(
    "view view_as reshape reshape_as flatten unflatten unsqueeze squeeze t transpose swapaxes "
    "swapdims permute movedim moveaxis narrow select unbind split chunk tensor_split expand "
    "expand_as __getitem__ detach alias diagonal as_strided unsafe_chunk unsafe_split "
    "split_with_sizes hsplit vsplit dsplit ravel adjoint".split()
)
REPEATING = frozenset({"as_strided", "expand", "expand_as"})  # an element may occur twice
VIEWING = frozenset({"data", "T", "mT", "H", "mH", "real"})  # attributes
CONVERSIONS = frozenset("to cpu cuda type float half double bfloat16 pin_memory type_as".split())
_UNARY = (
    "abs absolute acos acosh arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh "
    "ceil cos cosh deg2rad erf erfc erfinv exp exp2 expm1 fix floor frac log log10 log1p log2 "
    "nan_to_num neg negative positive rad2deg reciprocal relu round rsqrt sgn sigmoid sign sin "
    "sinc sinh sqrt square tan tanh trunc zero i0 digamma lgamma mvlgamma polygamma celu "
    "elu selu silu hardtanh hardswish hardsigmoid leaky_relu relu6 rrelu threshold logit"
)
_BINARY = (
    "add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow "
    "float_power atan2 arctan2 copysign hypot maximum minimum fmax fmin clamp clip clamp_min "
    "clamp_max lerp addcmul addcdiv fill copy masked_fill gcd lcm ldexp nextafter xlogy heaviside "
    "eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor "
    "logical_not bitwise_not where not_equal less less_equal greater greater_equal"
)
# In-place functions that compute each element from itself and from elements at the same place.
ELEMENTWISE = frozenset(f"{name}_" for name in (_UNARY + " " + _BINARY).split()) - {"rrelu_"} | {
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__ifloordiv__",
    "__idiv__",
    "__imod__",
    "__ipow__",
}
# Likewise, with places in the whole parameter.
PLACED = frozenset(
    "__setitem__ index_fill_ index_add_ index_copy_ index_put_ index_reduce_ _index_put_impl_ "
    "scatter_ scatter_add_ scatter_reduce_ fill_diagonal_ tril_ triu_ masked_scatter_ put_".split()
)
EDITS = ELEMENTWISE | PLACED
# Functions that reduce a tensor to one norm, with the names of their arguments after it.
NORMS = {
    "norm": ("p", "dim", "keepdim", "out", "dtype"),
    "linalg_norm": ("ord", "dim"),
    "linalg_vector_norm": ("ord", "dim"),
    "_foreach_norm": ("ord",),
}

Function = Callable[..., object]


class TorchCall(NamedTuple):
    """A call of a function of torch."""

    func: Function
    args: tuple[object, ...]
    kwargs: Mapping[str, object]

    @property
    def name(self) -> str:
        """The function's name; of an aten operator without its overload."""
        return str(getattr(self.func, "__name__", self.func)).partition(".")[0]

    @property
    def attribute(self) -> str:
        """The attribute that it gets or sets, such as ``data``; empty for other functions."""
        return str(getattr(getattr(self.func, "__self__", None), "__name__", ""))

    @property
    def first(self) -> object:
        """The first argument, or ``None``."""
        return self.args[0] if self.args else None

    def run(self) -> object:
        """Call the function."""
        return self.func(*self.args, **self.kwargs)


class ViewStep(NamedTuple):
    """A call without its first argument, and which of several results is the view."""

    call: TorchCall
    number: int | None


class Copied(NamedTuple):
    """What a converted copy was made from.

    Attributes:
        root: the whole gradient.
        stays: returns whether its mean is still the one that was converted.
    """

    root: StandIn
    stays: Callable[[], bool]


class StandIn(Tensor):
    """The ``.grad`` of a parameter after the reduction: one NaN element, expanded.

    The mean of the parameter is at the owners of its elements. Functions called from Python reach
    ``__torch_function__``. It answers questions about shape and dtype, makes views, and runs
    functions that compute each element by itself on each owner's part of the mean. All ranks
    together compute a norm of the whole gradient. Everything else raises a RuntimeError on every
    rank that names the parameter. Code in C++ sees a plain tensor of NaN.

    A plain tensor becomes a stand-in by assignment to ``__class__``, so autograd and
    ``torch.compile`` never meet a wrapper without storage.

    Attributes:
        of: name of the parameter.
        position: position of the parameter in the pack.
        grads: returns the gradients of the pack, or ``None`` after it is no longer a ``.grad``.
        root: the whole gradient that it is a view of, or ``None`` if it is the whole.
        path: the views that lead from the whole gradient to this tensor.
        copied: for a copy in another dtype, which can only be asked for its norm; otherwise
            ``None``.
    """

    of: str
    position: int
    grads: Callable[[], Gradients | None]
    root: StandIn | None
    path: tuple[ViewStep, ...]
    copied: Copied | None

    @classmethod
    @_compat.untraced
    def __torch_function__(
        cls,
        func: Function,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run ``func`` if it reads no value but a norm."""
        with _compat.without_torch_function():
            return _run(TorchCall(func, tuple(args), kwargs or {}))

    def set_(self, *_: object, **__: object) -> NoReturn:
        """Raise, because this one does not reach ``__torch_function__``."""
        _refuse_read("set_", self)


class DistributedStandIn:
    """A mixin for DTensors whose local tensor is a :class:`StandIn`, see :func:`distributed`."""

    __slots__ = ()
    placements: tuple[Placement, ...]

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run ``func`` on the local tensors if it reads no value."""
        with _compat.without_torch_function():
            return _run(TorchCall(func, tuple(args), kwargs or {}))

    def __repr__(self) -> str:
        assert isinstance(self, Tensor)
        return _described(_local_of(self))


def _local_of(hidden: Tensor) -> StandIn:
    """Return a stand-in itself, or that of a DTensor."""
    local = _compat.local_tensor(hidden)
    assert isinstance(local, StandIn)
    return local


def distributed(grad: Tensor) -> Tensor:
    """Return the DTensor ``grad``, which hides its values like its local tensor."""
    kind = type(grad)
    if kind not in _DISTRIBUTED:
        name = DistributedStandIn.__name__
        _DISTRIBUTED[kind] = type(name, (DistributedStandIn, kind), {"__slots__": ()})
    grad.__class__ = _DISTRIBUTED[kind]
    return grad


_DISTRIBUTED: dict[type, type] = {}  # by the class of DTensors, which is imported late


OLD = -1  # position of what is no .grad any more


def stand_in(grads: Gradients, position: int, grad: Tensor | None = None) -> StandIn:
    """Return a stand-in for the parameter at ``position``: ``grad``, or a new tensor."""
    if grad is None:
        grad = torch.empty(0, dtype=grads.low, device=grads.own.device)
    hidden = outdated(grad, grads.pack.layout.slots[position])
    hidden.position, hidden.grads = position, weakref.ref(grads)
    return hidden


def outdated(grad: Tensor, slot: Slot) -> StandIn:
    """Make ``grad``, which a script may keep, a stand-in for no gradient."""
    value = torch.full((1,), math.nan, dtype=grad.dtype, device=grad.device)
    # Detached, so that autograd does not treat it as a view and a script can call detach_() on it.
    grad.data = value.expand(1).view([1] * len(slot.shape)).expand(slot.shape).detach()
    grad.__class__ = StandIn
    assert isinstance(grad, StandIn)
    grad.of, grad.position, grad.grads = slot.name, OLD, _nothing
    grad.root, grad.path, grad.copied = None, (), None
    return grad


def _hidden(
    tensor: Tensor, base: StandIn, path: tuple[ViewStep, ...], is_kept: bool = True
) -> None:
    """Make ``tensor`` a stand-in for what ``path`` leads to from the whole gradient."""
    tensor.__class__ = StandIn
    assert isinstance(tensor, StandIn)
    tensor.of, tensor.position, tensor.path = base.of, base.position, path
    tensor.root = _root_of(base) if is_kept else None
    tensor.grads, tensor.copied = _nothing, None  # the root's are used


def _root_of(hidden: StandIn) -> StandIn:
    return hidden if hidden.root is None else hidden.root


def _grads_of(hidden: StandIn) -> Gradients | None:
    return _root_of(hidden).grads()


def tensors(values: object) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples, lists and mappings."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors(value)
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from tensors(value)


@_compat.uncompiled  # otherwise Dynamo traces collectives, and compiles anew for every shape
def _run(call: TorchCall) -> object:
    name, first = call.name, call.first
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        raise RuntimeError(GRAD_SCALER)
    if name.startswith("_foreach_") and name.endswith("_"):
        _each(call)
        return None
    if name == "_foreach_norm":
        assert isinstance(first, (tuple, list))
        return [_norm(call, grad) for grad in first]
    given = [*tensors((call.args, call.kwargs))]
    over_mesh = next((t for t in given if isinstance(t, DistributedStandIn)), None)
    if over_mesh is not None:
        return _run_distributed(call, over_mesh)
    hidden = next(t for t in given if isinstance(t, StandIn))
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute(call)
    if name in ("__repr__", "__str__") or (name == "__format__" and not call.args[1]):
        return _described(hidden)
    if (out := call.kwargs.get("out")) is not None:
        return _out(call, out)
    if isinstance(first, StandIn):
        if name == "is_contiguous" and _only(call):
            return True  # as `contiguous()` says below: DTensor of torch 2.11 gathers nothing else
        makes_new = name.endswith("_like") or name.startswith("new_")
        if name in METADATA and (not makes_new or _only(call)):
            return call.run()
        if name == "contiguous":
            return first
        if name in ("__eq__", "__ne__") and call.args[1] is None:
            return call.run()
        # Of another one ``view_as`` asks for the shape alone.
        if name in VIEWS and (name.endswith("_as") or _only(call)):
            return _views(call, first)
        if name in CONVERSIONS and _only(call):
            return _converted(call, first)
        if name in EDITS:
            return _edit(call, name, first)
        if name in NORMS:
            return _norm(call, first)
    elif name in METADATA:
        return call.run()
    _refuse_read(name, hidden)


def _run_distributed(call: TorchCall, hidden: DistributedStandIn) -> object:
    """Run ``func`` for DTensors: their own metadata, but edits and conversions of the local tensor.

    Every rank edits its own elements, so other operands must have the parameter's placements.
    """
    name, first, attribute = call.name, call.first, call.attribute
    if not isinstance(first, DistributedStandIn) and name in ("__get__", "__set__", "__delete__"):
        return call.run()  # ``param.grad = stand_in``
    assert isinstance(hidden, Tensor)
    local = _local_of(hidden)
    if name == "__format__" and not call.args[1]:
        return repr(hidden)
    views = name == "detach" or (name == "__get__" and attribute == "data")
    sets_data = name == "__set__" and attribute == "data"
    if name in METADATA or (name == "__get__" and attribute not in VIEWING | {"imag"}):
        return call.run()
    if name in NORMS:
        return _norm(call, hidden)
    if not (name in ELEMENTWISE or views or sets_data or name in CONVERSIONS):
        _refuse_read(name, local)
    here = tuple(_local(it, hidden, local) for it in call.args)
    named = {key: _local(value, hidden, local) for key, value in call.kwargs.items()}
    result = _run(TorchCall(call.func, here, named))
    if result is here[0]:
        return first
    if isinstance(result, StandIn):
        assert isinstance(first, DistributedStandIn)
        return distributed(dtensor.wrap_local(result, first, first.placements))
    return result


def _local(value: object, hidden: DistributedStandIn, local: StandIn) -> object:
    """Return the local tensors of DTensors in ``value``."""
    if isinstance(value, (tuple, list)):
        return type(value)(_local(it, hidden, local) for it in value)
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DistributedStandIn):
        return _compat.local_tensor(value)
    if not _compat.is_dtensor(value):
        if value.dim() and not isinstance(value, StandIn):
            raise RuntimeError(
                f".grad of {local.of!r}: expected the other operand to be a number or a DTensor "
                "placed as the parameter is, got a plain tensor; convert it with "
                "distribute_tensor()"
            )
        return value
    places = zip(hidden.placements, value.placements, strict=True)
    # A partial gradient is whole after the reduction.
    if not all(a == b or (a.is_partial() and b.is_replicate()) for a, b in places):
        raise RuntimeError(
            f".grad of {local.of!r}: expected the other operand to have placements "
            f"{hidden.placements}, got {value.placements}; call redistribute() on it"
        )
    return _compat.local_tensor(value)


@_compat.untraced  # the walk over frames breaks a graph, after which torch 2.11 cannot raise
def _refuse_read(name: str, hidden: StandIn) -> NoReturn:
    grads = _grads_of(hidden)
    if grads is not None and hidden.position in grads.held:
        raise RuntimeError(f"{name} reads .grad of {hidden.of!r}, {grads.has_a_part}")
    why = "after the backward each rank holds only the elements of the mean gradient that it owns"
    if hidden.position == OLD:
        why = "it is an old one, which a script kept: read param.grad again"
    elif grads is not None and grads.alone:
        why = "the update applies the last clip, so .grad does not show it yet"
    raise RuntimeError(f"{name} reads .grad of {hidden.of!r}, but {why}. {_second_phase()}{DOORS}")


def _second_phase() -> str:
    """Return a remedy if one of torch's optimizers reads the gradient in its step.

    A gathered gradient would let it train the published weights, without masters.
    """
    frame = inspect.currentframe()
    while frame is not None:
        by = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(by, torch.optim.Optimizer) and type(by).__module__.startswith("torch.optim"):
            return (
                f"To train with another optimizer ({type(by).__name__}), call close() of the "
                "sharded one on every rank, then shard(model, optimizer) with the other. "
            )
        frame = frame.f_back
    return ""


def _described(hidden: StandIn) -> str:
    shape = f"{hidden.dtype} of {tuple(hidden.shape)}"
    return f"<.grad of {hidden.of!r}, {shape}, whose values are at their owners>"


def _only(call: TorchCall) -> bool:
    """Return whether no other stand-in takes part."""
    return not any(isinstance(t, StandIn) for t in tensors((call.args[1:], call.kwargs)))


def _attribute(call: TorchCall) -> object:
    first, attribute = call.first, call.attribute
    if not isinstance(first, StandIn):  # ``param.grad = stand_in``
        return call.run()
    if call.name == "__get__":
        if attribute in VIEWING:
            return _views(call, first)
        if attribute == "imag":
            _refuse_read(attribute, first)
    elif attribute == "data" and call.name == "__set__":
        other = call.args[1]
        if isinstance(other, StandIn) and other.of == first.of:  # from model.to() or model.float()
            call.run()
        else:
            _edit(call._replace(func=Tensor.copy_), "copy_", first)
        return None
    return call.run()


def _views(call: TorchCall, base: StandIn) -> object:
    """Return a view, or several; each records how it was made."""
    result = call.run()
    several = isinstance(result, (tuple, list))
    rest = TorchCall(call.func, call.args[1:], dict(call.kwargs))
    for number, view in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
        if not isinstance(view, Tensor) or not _compat.is_alias(view, base):
            _refuse_read(call.name, base)  # indices that are tensors copy
        if view is base:
            return base
        step = ViewStep(rest, number if several else None)
        _hidden(view, base, (*base.path, step))
    return result


def _converted(call: TorchCall, first: StandIn) -> object:
    """Return it in another dtype or on another device, as NaN, for conversions of a module.

    All ranks can compute the norm of a copy on the same device until the gradient changes.
    """
    result = call.run()
    if isinstance(result, Tensor) and result is not first:
        _hidden(result, first, first.path, is_kept=False)
        root = _root_of(first)
        grads, copied = root.grads(), root.copied
        if grads is not None:
            copied = Copied(root, grads.moment(root.position))
        if result.device == first.device:
            _local_of(result).copied = copied
    return result


def _nothing() -> None:
    """Return None, like a dead weak reference."""


def _each(call: TorchCall) -> None:
    """Run functions like ``torch._foreach_mul_`` for one tensor after another."""
    single, targets = call.name.removeprefix("_foreach_"), call.first
    assert isinstance(targets, (tuple, list))
    count = len(targets)
    for number, target in enumerate(targets):
        rest, named = (
            [v[number] if isinstance(v, (tuple, list)) and len(v) == count else v for v in values]
            for values in (call.args[1:], call.kwargs.values())
        )
        keywords = dict(zip(call.kwargs, named, strict=True))
        if single in ("addcmul_", "addcdiv_") and len(rest) == 3:
            keywords["value"] = rest.pop()
        method = getattr(Tensor, single, None)
        if isinstance(target, (StandIn, DistributedStandIn)) and method is not None:
            _run(TorchCall(method, (target, *rest), keywords))
            continue
        for value in tensors((rest, keywords)):
            if isinstance(value, (StandIn, DistributedStandIn)):
                _refuse_read(call.name, _local_of(value))
        if method is None:
            _refuse_read(call.name, next(t for t in tensors(call.args) if isinstance(t, StandIn)))
        method(target, *rest, **keywords)


def _out(call: TorchCall, out: object) -> object:
    """Run ``torch.mul(grad, 0.5, out=grad)`` as the in-place method, or write another result."""
    func, args = call.func, call.args
    named = {key: value for key, value in call.kwargs.items() if key != "out"}
    if not args and "input" in named:
        args = (named.pop("input"),)
    hidden = [t for t in tensors((args, named)) if isinstance(t, StandIn)]
    in_place = f"{call.name}_"
    if not isinstance(out, StandIn):
        _refuse_read(call.name, hidden[0])
    if not hidden:
        _edit(TorchCall(Tensor.copy_, (out, func(*args, **named)), {}), "copy_", out)
        return out
    if args and args[0] is out and in_place in ELEMENTWISE:
        method = getattr(Tensor, in_place, lambda own, *rest, **k: own.copy_(func(own, *rest, **k)))
        return _edit(TorchCall(method, args, named), in_place, out)
    _refuse_read(call.name, hidden[0])


def _edit(call: TorchCall, name: str, target: StandIn) -> object:
    """Edit this rank's part of the mean as the function edits the whole."""
    if name == "__setitem__" and _is_own_item(call, target):
        return None  # the end of ``grad[rows] *= 2``, which has edited the view
    rest = call.args[1:], call.kwargs
    for other in tensors(rest):
        if isinstance(other, StandIn) and not _same(other, target):
            _refuse_read(name, other)
    grads = _grads_of(target)
    if grads is None:
        raise RuntimeError(
            f"{name} edits an old .grad of {target.of!r}, which a script kept; its mean no longer "
            f"exists. For the current param.grad: {DOORS}"
        )
    is_zero = name == "zero_" or (name == "fill_" and _is_zero(call.args[1:]))
    if is_zero and _is_all(target, grads):
        grads.zero(target.position)
        return target

    def change(tensor: Tensor) -> None:
        named = {key: _in(value, tensor) for key, value in call.kwargs.items()}
        call.func(tensor, *(_in(value, tensor) for value in call.args[1:]), **named)

    if not target.path and name in ELEMENTWISE and not any(t.dim() for t in tensors(rest)):
        change(grads.edited(target.position))
    else:
        _change(target, grads, change)
    return None if name == "__setitem__" else target


def _norm(call: TorchCall, of: Tensor) -> Tensor:
    """Return the norm of a whole gradient, which all ranks compute together.

    It is a plain 0-dim tensor in fp32, or in the given dtype or that of a converted copy; for a
    DTensor the norm of all of it.
    """
    if not isinstance(of, (StandIn, DistributedStandIn)):
        norm_of: Callable[..., Tensor] = torch.linalg.vector_norm
        return norm_of(of, *call.args[1:], **call.kwargs)
    here = _local_of(of)
    options = {**dict(zip(NORMS[call.name], call.args[1:], strict=False)), **call.kwargs}
    dtype = options.pop("dtype", None)
    p = next((options.pop(key) for key in ("p", "ord") if key in options), None)
    # ``linalg.norm(matrix, 2)`` is its largest singular value
    is_flat = call.name != "linalg_norm" or p is None or here.dim() < 2
    p = 2.0 if p is None or p == "fro" else p
    is_default = all(value is None or value is False for value in options.values())
    grads, norm, copied = _grads_of(here), None, _root_of(here).copied
    if copied is not None and copied.stays():
        grads, dtype = copied.root.grads(), dtype or here.dtype
    if isinstance(p, (int, float)) and p > 0 and grads is not None:
        if is_flat and is_default and _is_all(here, grads):
            norm = grads.norm_of(grads, here.position, float(p))
        if norm is not None and here is not of:
            norm = dtensor.norm_over(of, norm, float(p))
    if norm is None:
        _refuse_read(call.name, here)
    return norm.to(dtype) if isinstance(dtype, torch.dtype) else norm


def _is_all(shown: StandIn, grads: Gradients) -> bool:
    """Return whether it shows each element of its gradient once."""
    repeats = any(step.call.name in REPEATING for step in shown.path)
    return shown.numel() == grads.pack.layout.slots[shown.position].numel and not repeats


def _is_zero(values: tuple[object, ...]) -> bool:
    return len(values) == 1 and isinstance(values[0], (int, float)) and values[0] == 0


def _same(one: StandIn, other: StandIn) -> bool:
    """Return whether both show the same elements in the same places."""
    if one is other:
        return True
    is_whole = not one.path and not other.path
    return is_whole and _grads_of(one) is _grads_of(other) and one.position == other.position


def _is_own_item(call: TorchCall, target: StandIn) -> bool:
    """Return whether the call assigns ``target[index]`` to itself."""
    index, value = call.args[1:]
    root = target if target.root is None else target.root
    if not isinstance(value, StandIn) or value.root is not root or not value.path:
        return False
    *before, (made, _) = value.path
    read = made.first
    # Since CPython 3.12 ``grad[1:3] *= 2`` reads and assigns with two slices.
    is_read = read is index or (type(read) is type(index) is slice and read == index)
    of_target = [*map(id, before)] == [*map(id, target.path)]
    return is_read and of_target and made.name == "__getitem__"


def _in(values: object, tensor: Tensor) -> object:
    """Return the values, with ``tensor`` instead of the gradient."""
    if isinstance(values, StandIn):
        return tensor
    if isinstance(values, dict):
        return {key: _in(value, tensor) for key, value in values.items()}
    if isinstance(values, (tuple, list)):
        changed = [_in(value, tensor) for value in values]
        return tuple(changed) if isinstance(values, tuple) else changed
    return values


def _change(target: StandIn, grads: Gradients, change: Callable[[Tensor], object]) -> None:
    """Run ``change`` on a tensor of the whole parameter that has this rank's part of the mean.

    All other elements are zeros, and are not used.
    """
    part, (start, stop) = grads.edited(target.position), grads.within(target.position)
    shape = grads.pack.layout.slots[target.position].shape
    scratch = torch.zeros(shape, dtype=part.dtype, device=part.device)
    own = scratch.view(-1)[start:stop]
    own.copy_(part)
    view = scratch
    for (func, arguments, keywords), number in target.path:
        made = func(view, *arguments, **keywords)
        if isinstance(made, (tuple, list)) and number is not None:
            made = made[number]
        assert isinstance(made, Tensor)
        view = made
    change(view)
    part.copy_(own)
