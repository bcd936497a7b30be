"""Compiled functions."""

from __future__ import annotations

import functools
import subprocess
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

SEVERAL: dict[str, Any] = {  # kernels of one graph become one; of these versions have some
    "combo_kernels": True,
    "combo_kernels_autotune": 0,  # it would run them on copies of what they overwrite
    "combo_kernel_allow_mixed_sizes": 2,
    "combo_kernel_max_num_nodes": 64,
    "combo_kernel_max_num_args": 1000,
    "combo_kernel_peak_memory_pct_threshold": None,
}
FEW: dict[str, Any] = {  # what parts or sums have in common is computed in one kernel, not in many
    "force_pointwise_cat": True,
    "unroll_reductions_threshold": 64,  # numbers
}


def compiled(
    function: Callable[..., Any], several: bool = False, notes: bool = False, few: bool = False
) -> Callable[..., Any]:
    """Compile ``function`` as one graph for all lengths of its tensors.

    Args:
        few: it works on a few numbers, so that launches are all that it costs. It is compiled for
            the lengths of one call, which all others must have.
        several: it does the same to several sets of tensors, which on a GPU become one kernel; that
            some are of equal lengths when it is compiled means nothing.
        notes: :func:`last_call` is asked after each call, by a :class:`KeptCall` for example.

    Under a dispatch mode, such as ``FlopCounterMode``, where Dynamo compiles nothing, the function
    itself runs.
    """
    how: dict[str, Any] = (
        {"backend": _noting(several, few)} if notes else {"options": _settings(several, few)}
    )
    graph = torch.compile(_with_own_code(function), dynamic=not few, fullgraph=True, **how)

    def run(*args: Any) -> Any:
        return (graph if _get_current_dispatch_mode() is None else function)(*args)

    return _apart(run) if several else run


def _apart(graph: Callable[..., Any]) -> Callable[..., Any]:
    """Have ``graph`` compiled without taking equal lengths for one, whenever that is."""
    from torch.fx.experimental import _config  # where torch looks when it begins a graph

    settings: Any = _config

    def run(*args: Any) -> Any:
        with settings.patch(use_duck_shape=False):
            return graph(*args)

    return run


class GraphForLengths:
    """A function as of :func:`compiled`, whose tensors Dynamo looks at once for each length.

    What it finds out in each call, more than half of its time on the host, follows from length and
    device here: all operands (tensors, or ``None`` in some places always) are contiguous, of one
    shape, and have storages of their own. Further ones of a length go to the graph at once.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._graph = torch.compile(
            _with_own_code(function), dynamic=True, fullgraph=True, backend=_noting()
        )
        self._calls: dict[Any, Call] = {}

    def __call__(self, *operands: Tensor | None) -> None:
        first = next(operand for operand in operands if operand is not None)
        call = self.call_for(first)
        if call is not None and call.fits:
            call(operands)
        elif _get_current_dispatch_mode() is not None:
            self._function(*operands)
        else:
            self._graph(*operands)
            if (call := last_call(operands)) is not None:
                self._calls[first.shape, first.device] = call

    def call_for(self, first: Tensor) -> Call | None:
        """Return the call for operands like ``first``; ``None`` before there were any."""
        return self._calls.get((first.shape, first.device))


BoxedGraph = Callable[[list[Any]], Any]


class Call:
    """A call of a graph that Dynamo made, for other operands like the first ones.

    Dynamo takes 40 to 100 microseconds to see that a graph serves, which depends on the operands
    (types, dtypes, shapes, strides, devices, whether they require gradients, which of them are one
    tensor), on constants, and on the state of the thread. This makes the call at once: its owner
    knows that the operands are like the first ones, see :func:`kinds`, and :attr:`fits` is true of
    the rest. Where addresses are not those that a kernel was made for the graph looks itself.

    Args:
        graph: takes the arguments as a list, which it may clear.
        arguments: of the call: numbers, such as lengths, and tensors.
        places: of each tensor among the operands, by its place in ``arguments``.
    """

    def __init__(
        self, graph: BoxedGraph, arguments: Sequence[Any], places: Mapping[int, int]
    ) -> None:
        self._graph = graph
        self._arguments = [None if at in places else it for at, it in enumerate(arguments)]
        self._places = [*places.items()]
        self._state: Any = torch._C._dynamo.guards.GlobalStateGuard()

    @property
    def fits(self) -> bool:
        """Return whether this thread is in the state of then: all Dynamo looks at, and no modes.

        That is gradients, autocast, deterministic algorithms, precision of products, the default
        dtype, the number of threads, functions and operations that a mode would see.
        """
        return (
            self._state.check()
            and not _at_work()
            and _get_current_dispatch_mode() is None
            and not torch._C._len_torch_function_stack()
        )

    def with_first(self, operands: Sequence[Tensor]) -> Call:
        """Bind the first operands: the result is called with those behind them."""
        count, arguments = len(operands), [*self._arguments]
        further: dict[int, int] = {}
        for at, place in self._places:
            if place < count:
                arguments[at] = operands[place]
            else:
                further[at] = place - count
        call = Call(self._graph, arguments, further)
        call._state = self._state
        return call

    def __call__(self, operands: Sequence[Tensor | None]) -> Any:
        """Return what the graph gives: its new tensors, in an order of its own."""
        arguments = self._arguments.copy()
        for at, place in self._places:
            arguments[at] = operands[place]
        return self._graph(arguments)


# What Dynamo does with functions that are called on this thread: nothing, or a function does it.
_at_work: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback


def kinds(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return what Dynamo looks at in plain tensors; equal: a :class:`Call` serves them all."""
    are = [(t.dtype, t.shape, t.stride(), t.device, t.requires_grad, type(t)) for t in tensors]
    return len({*map(id, tensors)}), *are


class KeptCall:
    """The last call of a function as of :func:`compiled`, which its owner makes again directly.

    Of tensors it has those that are the same in each call bound, and is given the others. A call
    that has none of a kind is made through the function, and then kept.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let go of the call, and of the tensors that are bound."""
        self._call: Call | None = None
        self._kind: Any = None
        self._results: list[int] = []

    def serves(self, kind: Any) -> bool:
        """Return whether the last call may be made again.

        Args:
            kind: all that Dynamo would look at and that the owner does not know to be the same:
                :func:`kinds` of tensors that are given, identities of bound ones, constants.
        """
        return self._call is not None and kind == self._kind and self._call.fits

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Make it; returns what the function does."""
        assert self._call is not None
        results = self._call(given)
        return [results[place] for place in self._results]

    def keep(
        self, kind: Any, bound: Sequence[Tensor], given: Sequence[Tensor],
        returned: Sequence[Tensor] = (), constants: bool = False,
    ) -> None:  # fmt: skip
        """Keep the call that the function has just made, if it is one.

        Args:
            returned: what the function returned.
            constants: what the graph has besides are tensors that the function finds by itself, the
                very same ones in each call of this owner; without it there is nothing else.
        """
        self.forget()
        results, every = _seen.results, [*bound, *given]
        call = last_call(every, constants)
        if call is None or len({*map(id, every)}) < len(every):  # which operand an argument is
            return
        by_id = {id(result): place for place, result in enumerate(results)}
        if all(id(tensor) in by_id for tensor in returned):
            self._call, self._kind = call.with_first(bound), kind
            self._results = [by_id[id(tensor)] for tensor in returned]


def last_call(operands: Sequence[Any], constants: bool = False) -> Call | None:
    """Return the last call of a graph on this thread, if it had ``operands``, or some of them.

    To be asked after each call. ``None`` too where arguments were made of operands, or where the
    function itself ran. An operand that is there twice is looked for in the first of its places.

    Args:
        constants: arguments that are no operands stay what they were.
    """
    graph, arguments = _seen.graph, _seen.arguments
    _seen.forget()
    by_id: dict[int, int] = {}
    for place, operand in enumerate(operands):
        by_id.setdefault(id(operand), place)
    places = {at: by_id.get(id(it)) for at, it in enumerate(arguments) if not isinstance(it, int)}
    known = {at: place for at, place in places.items() if place is not None}
    is_whole = constants or len(known) == len(places)
    return Call(graph, arguments, known) if graph and is_whole else None


class _Seen(threading.local):
    """The last call of a graph by Dynamo on this thread: which graph, with what, what it gave."""

    graph: BoxedGraph | None = None
    arguments: Sequence[Any] = ()
    results: Sequence[Any] = ()

    def forget(self) -> None:
        self.graph, self.arguments, self.results = None, (), ()


_seen = _Seen()


def _noting(several: bool = False, few: bool = False) -> Callable[..., Any]:
    """Return Inductor as a backend of Dynamo that notes its settings and each call of a graph."""
    settings = _settings(several, few)

    def backend(module: Any, inputs: Any) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx  # slow to import

        graph: Any = compile_fx(module, inputs, config_patches=settings)
        boxed: BoxedGraph | None = None

        def noted(*arguments: Any) -> Any:
            nonlocal boxed
            if boxed is None:
                results, boxed = _run(graph, arguments)
            else:
                results = graph(*arguments)
            _seen.graph, _seen.arguments, _seen.results = boxed, arguments, results
            return results

        return noted

    backend.settings = settings  # type: ignore[attr-defined]
    return backend


def _run(graph: Any, arguments: Sequence[Any]) -> tuple[Any, BoxedGraph]:
    """Run a graph for the first time; return its results, and what to call from then on.

    That is the generated code, if it was given the very arguments, and what it gave are the very
    results: what AOTAutograd and Inductor have around it takes three times as long on the host, for
    gradients, aliases and inputs that a graph here has not, and for versions of tensors, which
    nobody reads of an operand.
    """
    from torch._inductor.output_code import CompiledFxGraph  # slow to import

    compiled: Any = CompiledFxGraph
    call, thread, calls = compiled.__call__, threading.get_ident(), list[tuple[Any, ...]]()

    def noted(self: Any, inputs: Sequence[Any]) -> Any:
        before = [*map(id, inputs)]
        results = call(self, inputs)
        if threading.get_ident() == thread:
            calls.append((self, before, results))
        return results

    with _first_runs:
        compiled.__call__ = noted
        try:
            results = graph(*arguments)
        finally:
            compiled.__call__ = call
    owner, *seen = calls[0] if len(calls) == 1 else (None,)
    if seen and seen[0] == [*map(id, arguments)] and _are_same(seen[1], results):
        code = owner.current_callable
        # Held, for it takes parts of the code along when it goes.
        return results, lambda arguments, _owner=owner: code(arguments)
    # Without what keeps Dynamo out of it, which is not at work where a call fits.
    bare = getattr(graph, "_torchdynamo_orig_callable", graph)
    return results, lambda arguments: bare(*arguments)


def _are_same(results: Any, others: Any) -> bool:
    """Return whether two graphs gave the same tensors; none may be None, or nothing."""
    return [*map(id, results or ())] == [*map(id, others or ())]


_first_runs = threading.RLock()


def _with_own_code(function: Callable[..., None]) -> Callable[..., None]:
    """Another function of its own code: Dynamo limits the graphs of a code object."""
    code = function.__code__.replace()
    return types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def _settings(several: bool = False, few: bool = False) -> dict[str, Any]:
    # Triton would else try two block sizes in the first step, on copies of all that the kernel
    # overwrites: memory that no estimate has. The one that is left suits what memory bounds.
    settings: dict[str, Any] = {"triton.autotune_pointwise": False}
    if "size_asserts" in known_settings():  # guards have looked already
        settings["size_asserts"] = False
    if divides_exactly():
        settings[EXACT_DIVISION] = True
    wanted = (SEVERAL if several else {}) | (FEW if few else {})
    settings |= {name: wanted[name] for name in wanted.keys() & known_settings()}
    return settings


EXACT_DIVISION = "eager_numerics.division_rounding"


@functools.cache
def divides_exactly() -> bool:
    """Return whether :func:`compiled` code divides as eager operations do, rounded to nearest.

    Triton's own division may be one bit off; Inductor has a setting for it (torch >= 2.13).
    """
    return EXACT_DIVISION in known_settings()


@functools.cache
def known_settings() -> frozenset[str]:
    """Return the names of Inductor's settings."""
    from torch._inductor import config  # slow to import

    return frozenset(config.get_config_copy())


def compile_errors() -> tuple[type[Exception], ...]:
    """Return what :func:`compiled` code raises if it cannot be compiled."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        from triton.errors import TritonError  # of kernels that are written by hand
    except ImportError:
        by_hand: tuple[type[Exception], ...] = ()
    else:
        by_hand = (TritonError,)
    # The limit, of all graphs of a function in this process, is no TorchDynamoException.
    dynamo = (TorchDynamoException, FailOnRecompileLimitHit)
    compiler = (*dynamo, CppCompileError, InvalidCxxCompiler, *by_hand)
    return *compiler, OSError, subprocess.SubprocessError  # such as a cache that is read-only
