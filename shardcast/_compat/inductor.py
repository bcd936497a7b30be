"""Compiled functions."""

from __future__ import annotations

import functools
import subprocess
import threading
import types
from collections.abc import Callable, Sequence
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
    "size_asserts": False,  # guards have looked already, and it takes 2 microseconds per range
}


def compiled(function: Callable[..., None], several: bool = False) -> Callable[..., None]:
    """``function`` as one compiled graph for all lengths of its tensors.

    Args:
        several: it does the same to several sets of tensors, which on a GPU become one kernel; that
            some are of equal lengths when it is compiled means nothing.

    Under a dispatch mode, such as ``FlopCounterMode``, where Dynamo compiles nothing, the function
    itself runs.
    """
    graph = torch.compile(
        _with_own_code(function), dynamic=True, fullgraph=True, options=_settings(several)
    )

    def run(*args: Any) -> None:
        (graph if _get_current_dispatch_mode() is None else function)(*args)

    return _apart(run) if several else run


def _apart(graph: Callable[..., None]) -> Callable[..., None]:
    """``graph`` compiled without taking equal lengths for one."""
    from torch.fx.experimental import _config  # where torch looks when it begins a graph

    settings: Any = _config
    is_made = False

    def run(*args: Any) -> None:
        nonlocal is_made
        if is_made:
            graph(*args)
            return
        with settings.patch(use_duck_shape=False):
            graph(*args)
        is_made = True

    return run


def compiled_for_lengths(function: Callable[..., None]) -> Callable[..., None]:
    """As :func:`compiled`, of tensors that Dynamo looks at once for each length.

    What it finds out in each call, more than half of its time on the host, follows from length and
    device here: all operands (tensors, or ``None`` in some places always) are contiguous, of one
    shape, and have storages of their own. Further ones of a length go to the graph at once.
    """
    seen = _Seen()
    graph = torch.compile(
        _with_own_code(function), dynamic=True, fullgraph=True, backend=seen.backend
    )
    direct: dict[Any, Callable[[Sequence[Tensor | None]], None]] = {}

    def run(*operands: Tensor | None) -> None:
        if _get_current_dispatch_mode() is not None:
            function(*operands)
            return
        first = next(operand for operand in operands if operand is not None)
        kind = first.shape, first.device
        if (known := direct.get(kind)) is not None:
            known(operands)
            return
        graph(*operands)
        if (found := seen.call_of(operands)) is not None:
            direct[kind] = found

    return run


class _Seen(threading.local):
    """The last call of a graph by Dynamo on this thread: which one, and with what."""

    call: Callable[..., Any] | None = None
    args: Sequence[Any] = ()

    def backend(self, module: Any, inputs: Any) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx  # slow to import

        call: Any = compile_fx(module, inputs, config_patches=_settings())

        def seen(*args: Any) -> Any:
            self.call, self.args = call, args
            return call(*args)

        return seen

    def call_of(self, operands: Sequence[Any]) -> Callable[[Sequence[Tensor | None]], None] | None:
        """The same call of the graph with other operands of that length; None where it is unknown.

        Numbers are among its arguments, such as lengths.
        """
        call, args, self.call, self.args = self.call, self.args, None, ()
        numbers = [arg if isinstance(arg, int) else None for arg in args]
        places = {
            at: next((n for n, operand in enumerate(operands) if operand is arg), None)
            for at, arg in enumerate(args)
            if not isinstance(arg, int)
        }
        if call is None or None in places.values():
            return None
        pairs: Any = [*places.items()]

        def again(operands: Sequence[Tensor | None]) -> None:
            present: list[Any] = [*numbers]
            for at, place in pairs:
                present[at] = operands[place]
            call(*present)

        return again


def _with_own_code(function: Callable[..., None]) -> Callable[..., None]:
    """Another function of its own code: Dynamo limits the graphs of a code object."""
    code = function.__code__.replace()
    return types.FunctionType(
        code, function.__globals__, None, function.__defaults__, function.__closure__
    )


def _settings(several: bool = False) -> dict[str, Any]:
    # Triton would else try two block sizes in the first step, on copies of all that the kernel
    # overwrites: memory that no estimate has. The one that is left suits what memory bounds.
    settings: dict[str, Any] = {"triton.autotune_pointwise": False}
    if divides_exactly():
        settings[EXACT_DIVISION] = True
    if several:
        settings |= {name: SEVERAL[name] for name in SEVERAL.keys() & known_settings()}
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
    """Names of Inductor's settings."""
    from torch._inductor import config  # slow to import

    return frozenset(config.get_config_copy())


def compile_errors() -> tuple[type[Exception], ...]:
    """Return what :func:`compiled` code raises if it cannot be compiled."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    # The limit, of all graphs of a function in this process, is no TorchDynamoException.
    dynamo = (TorchDynamoException, FailOnRecompileLimitHit)
    compiler = (*dynamo, CppCompileError, InvalidCxxCompiler)
    return *compiler, OSError, subprocess.SubprocessError  # such as a cache that is read-only
