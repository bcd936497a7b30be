"""The one rule that says which dtype each parameter is stored, accumulated and sent in.

Every dtype decision of shardcast is made here (PaddlePaddle PR 35878 asked for one global rule
instead of name patterns spread over the code). A parameter is stored in ``param_dtype`` unless
its module is kept in fp32. Activations are cast where modules of the two kinds call each other, so
the forward just works. Masters and arithmetic are always fp32.
"""

from __future__ import annotations

import fnmatch
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardcast._compat import own_params
from shardcast.config import KeepRule, ShardcastConfig

MASTER_DTYPE = torch.float32
PACKABLE = (torch.float32, torch.bfloat16, torch.float16)

NORMS: tuple[type[nn.Module], ...] = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def sum_dtype(wire: torch.dtype) -> torch.dtype:
    """What gradients are summed in: one size up, so that a mean of equal values is that value."""
    return MASTER_DTYPE if wire.itemsize < MASTER_DTYPE.itemsize else torch.float64


def grad_dtype(storage: torch.dtype, config: ShardcastConfig) -> torch.dtype:
    """The dtype in which gradients of a parameter stored as ``storage`` accumulate."""
    return config.grad_dtype or storage


def wire_dtype(storage: torch.dtype, config: ShardcastConfig) -> torch.dtype:
    """The dtype in which these gradients travel to their owner."""
    return config.reduce_dtype or grad_dtype(storage, config)


def is_packable(param: Tensor) -> bool:
    """Real floating-point parameters are packed, cast and sharded; all others are left alone."""
    return param.dtype in PACKABLE


class Precision:
    """The dtypes of one model under one configuration.

    Args:
        model: the root module; read only.
    Attributes:
        unmatched: patterns of ``keep_fp32`` and ``fp32_outputs`` that match nothing, as messages.
    """

    def __init__(self, model: nn.Module, config: ShardcastConfig) -> None:
        self._config = config
        self.unmatched: list[str] = []
        self._kept = _kept_modules(model, config.keep_fp32, self.unmatched)
        if not config.cast_buffers:  # torch refuses fp32 running statistics with low precision
            self._kept.update(
                (module, None)
                for module in model.modules()
                if isinstance(module, NORMS) and any(map(is_packable, module.buffers()))
            )
        self._kept_params = {param for module in self._kept for param in own_params(module)}
        self._fp32_outputs = _named_modules(model, config.fp32_outputs, self.unmatched)

    def storage_dtype(self, param: nn.Parameter) -> torch.dtype:
        """The dtype in which forward and backward see ``param``."""
        dtype, kept = param.dtype, self._kept_params
        if dtype not in PACKABLE:
            return dtype
        return MASTER_DTYPE if kept and param in kept else self._config.param_dtype

    def buffer_dtype(self, module: nn.Module, buffer: Tensor) -> torch.dtype:
        """The dtype of a buffer that ``module`` owns."""
        if is_packable(buffer) and module in self._kept and isinstance(module, NORMS):
            return MASTER_DTYPE  # as its parameters, also in a model that came in low precision
        cast = self._config.cast_buffers and is_packable(buffer) and module not in self._kept
        return self._config.param_dtype if cast else buffer.dtype

    def install_casts(self, model: nn.Module) -> list[Any]:
        """Register the forward hooks that cast activations of a model in its storage dtypes.

        Every module computes in fp32 or in ``param_dtype``. Where it is called from one that does
        not compute in the same, its floating-point inputs are cast on entry and its outputs on
        exit: kept modules among others, and the low-precision children of a kept one. The root
        casts its inputs, and its outputs only for ``fp32_outputs``. Parameters are never cast in
        forward or backward.
        """
        low = self._config.param_dtype
        if low == MASTER_DTYPE:
            return []
        computes = self._compute_dtypes(model, low)
        handles: list[Any] = []
        for module, caller in _with_callers(model):
            inside = outside = computes[module]
            if caller is None:
                if inside == MASTER_DTYPE or self._config.cast_forward_inputs:
                    handles.append(_cast_inputs(module, inside))
            elif (outside := computes[caller]) != inside:
                handles.append(_cast_inputs(module, inside))
            if module in self._fp32_outputs:
                outside = MASTER_DTYPE
            if inside != outside:
                handles.append(module.register_forward_hook(partial(_cast_output, outside)))
        return handles

    def _compute_dtypes(self, model: nn.Module, low: torch.dtype) -> dict[nn.Module, torch.dtype]:
        """What each module computes in; those without parameters do as their caller."""
        stored: dict[nn.Module, set[torch.dtype]] = {}

        def look(module: nn.Module) -> set[torch.dtype]:
            if module not in stored:
                stored[module] = {param.dtype for param in own_params(module)}
                for child in module.children():
                    stored[module] |= look(child)
            return stored[module]

        found: dict[nn.Module, torch.dtype] = {}
        for module, caller in _with_callers(model):
            inside = look(module)
            if module in self._kept:
                found[module] = MASTER_DTYPE
            elif low in inside or MASTER_DTYPE in inside:
                found[module] = low if low in inside else MASTER_DTYPE
            else:
                found[module] = low if caller is None else found[caller]
        return found


def _with_callers(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """Each module once, with the one that holds it and calls it, before those inside it.

    Lists and the like, which are never called, are left out: who holds them calls what is inside.
    """
    seen = {model}
    waiting: deque[tuple[nn.Module, nn.Module | None]] = deque([(model, None)])
    while waiting:
        module, caller = waiting.popleft()
        called = caller is None or type(module).forward is not nn.Module.forward
        if called:
            yield module, caller
        for child in module.children():
            if child not in seen:
                seen.add(child)
                waiting.append((child, module if called else caller))


def _cast_inputs(module: nn.Module, dtype: torch.dtype) -> Any:
    return module.register_forward_pre_hook(partial(_cast_arguments, dtype), with_kwargs=True)


def _cast_arguments(
    dtype: torch.dtype, _module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast_output(dtype: torch.dtype, _module: nn.Module, _args: Any, output: Any) -> Any:
    return _cast(output, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with each packable tensor inside cast; containers keep their type."""
    if isinstance(value, Tensor):
        return value.to(dtype) if is_packable(value) else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        items = {key: _cast(item, dtype) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)
    return value


def _kept_modules(
    model: nn.Module, rules: tuple[KeepRule, ...], unmatched: list[str]
) -> dict[nn.Module, None]:
    """Modules kept in fp32, as an ordered set.

    A rule keeps the modules that own a matching parameter (patterns, predicates) or that are of
    the class, with all modules inside. A tie keeps every module that shares a parameter with them.
    """
    kept: dict[nn.Module, None] = {}
    for rule in rules:
        matches = _matcher(rule)
        found = [module for prefix, module in model.named_modules() if matches(prefix, module)]
        if not found and isinstance(rule, str) and rule != "norms":
            unmatched.append(
                f"keep_fp32: the pattern {rule!r} matches no parameter of the model; patterns "
                "are matched against names as in model.named_parameters()"
            )
        for module in found:
            inside = module.modules() if isinstance(rule, type) else [module]
            kept.update(dict.fromkeys(inside))
    while True:
        shared = {param for module in kept for param in own_params(module)}
        tied = [
            module
            for module in model.modules()
            if module not in kept and shared.intersection(own_params(module))
        ]
        if not tied:
            return kept
        kept.update(dict.fromkeys(tied))


def _named_modules(
    model: nn.Module, patterns: tuple[str, ...], unmatched: list[str]
) -> set[nn.Module]:
    found: set[nn.Module] = set()
    for pattern in patterns:
        named = model.named_modules()
        matching = {module for name, module in named if fnmatch.fnmatchcase(name, pattern)}
        if not matching:
            unmatched.append(
                f"fp32_outputs: the pattern {pattern!r} matches no module of the model; patterns "
                "are matched against names as in model.named_modules(), '' is the model itself"
            )
        found |= matching
    return found


def _matcher(rule: KeepRule) -> Callable[[str, nn.Module], bool]:
    if rule == "norms":
        return lambda _prefix, module: isinstance(module, NORMS)
    if isinstance(rule, type):
        return lambda _prefix, module: isinstance(module, rule)
    if isinstance(rule, str):
        return _owns(lambda name, _param: fnmatch.fnmatchcase(name, rule))
    return _owns(rule)


def _owns(
    test: Callable[[str, nn.Parameter], bool],
) -> Callable[[str, nn.Module], bool]:
    def matches(prefix: str, module: nn.Module) -> bool:
        dot = f"{prefix}." if prefix else ""
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        return any(test(dot + name, param) for name, param in own)

    return matches
