"""Forwards of modules: casts of activations around them, and autocast inside.

Every module computes in one of three modes (:class:`ComputeMode`). With ``autocast`` an
:class:`AutocastForward` replaces the ``forward`` of each module with low-precision weights, because
a script may call any of them; embeddings return fp32, as under DDP. A :class:`LowForward` replaces
the forward of a layer that takes low-precision activations, and of a module whose caller computes
in another mode. Counts, labels, positions and time steps reach the user's code unchanged: only
torch's layers have their inputs cast. 0-dim tensors are never cast.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.plan.precision import (
    MASTER_DTYPE,
    NORMS,
    TABLES,
    Precision,
    is_called,
    is_layer,
    is_matrix,
    is_packable,
)

MATMULS = (  # autocast casts their inputs
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)

KEPT = "_shardcast_forward"  # attribute of a module with a replaced forward
LOOKS = 8  # calls of a forward whose module is checked


class ComputeMode(Enum):
    """The dtypes in which a module's own code computes.

    ``AUTOCAST`` is the mode of a whole model with ``autocast``, of fp32 modules that would be under
    autocast under DDP (frozen or parametrized layers), and of a user's class that holds a matrix
    itself: it may multiply fp32 tensors, and only autocast knows which inputs to cast.
    """

    LOW = "in param_dtype"
    FP32 = "in fp32, with autocast off"
    AUTOCAST = "under autocast"


class LowForward:
    """The forward of one module, between casts; copies and pickles of the module keep it.

    Args:
        inputs: dtype to which floating-point inputs are cast, or that of a weight if the model was
            converted; ``None``: no cast.
        outputs: likewise for outputs.
        weight: a low-precision weight inside, if any. If it now has another dtype, as in an fp32
            copy, inputs are cast to that.
        turns_off: the compute mode in which autocast is turned off: any autocast for ``FP32``; for
            ``LOW`` only that of an :class:`AutocastForward`; ``None``: no change.
    """

    def __init__(
        self,
        module: nn.Module,
        low: torch.dtype,
        device_type: str,
        inputs: torch.dtype | nn.Parameter | None,
        outputs: torch.dtype | None,
        weight: nn.Parameter | None,
        turns_off: ComputeMode | None = None,
    ) -> None:
        self._own = module.forward
        self._module, self._low, self._device_type = module, low, device_type
        self._inputs, self._outputs, self._weight = inputs, outputs, weight
        self._turns_off = turns_off
        self._is_installed, self._replaced = True, "forward" in vars(module)
        self._looks = LOOKS
        self._earlier = vars(module).get(KEPT)
        module.forward, vars(module)[KEPT] = self.forward, self

    @property
    def forward(self) -> MethodType:
        """The replacement, with the signature of the module's own forward.

        It is a bound method of this object. Dynamo guards on the code of a method, which equal
        blocks share, but on the identity of any other callable: it would compile each block.
        """
        own, call = self._own, LowForward._call
        function: Any = FunctionType(call.__code__, call.__globals__, "forward")
        # Not the bound one, which would keep the original alive for its copies.
        function.__wrapped__ = getattr(own, "__func__", own)
        with suppress(ValueError, TypeError):  # a callable in C
            me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            signature = inspect.signature(own)
            parameters = [me, *signature.parameters.values()]
            function.__signature__ = signature.replace(parameters=parameters)
        return MethodType(function, self)

    def _call(self: LowForward | nn.Module, *args: object, **kwargs: object) -> object:
        if isinstance(self, nn.Module):  # Accelerate binds the function of a forward to its module
            self = vars(self)[KEPT]
        assert isinstance(self, LowForward)
        # in this order, so that Dynamo makes no guard
        if not torch.compiler.is_compiling() and self._looks:
            self._looks -= 1
            self._refuse_copies(_compat.calling_module())
        inputs = self._weight if self._is_converted() else self._inputs
        if inputs is not None:
            dtype = inputs.dtype if isinstance(inputs, Tensor) else inputs
            args = tuple([_cast(value, dtype) for value in args])
            if kwargs:
                kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
        run = self._run if self._is_installed else self._own
        output = run(*args, **kwargs)
        return output if self._outputs is None else _cast(output, self._outputs)

    def _run(self, *args: object, **kwargs: object) -> object:
        """Run the module's own forward, with autocast off if required."""
        is_on = self._turns_off is not None and torch.is_autocast_enabled(self._device_type)
        any_autocast = self._turns_off is ComputeMode.FP32
        if is_on and (any_autocast or not torch.is_autocast_cache_enabled()):
            with torch.autocast(
                self._device_type, self._dtype(), enabled=False, cache_enabled=False
            ):
                return self._own(*args, **kwargs)
        return self._own(*args, **kwargs)

    def _refuse_copies(self, caller: nn.Module | None) -> None:
        """Raise for a copy that has this forward and other weights, which this forward ignores."""
        shared = caller is None or caller is self._module
        if shared or getattr(caller, "_parameters", None) is self._module._parameters:
            return
        raise RuntimeError(
            f"model: a shallow copy of a {type(self._module).__name__} was called, as made by "
            "higher and learn2learn; its forward would use the original's weights; use "
            "copy.deepcopy, torch.func.functional_call, or shardcast.shard(..., "
            "param_dtype='fp32')"
        )

    def _is_converted(self) -> bool:
        return self._weight is not None and self._weight.dtype != self._low

    def _dtype(self) -> torch.dtype:
        """Return the dtype of the script's autocast, if one is on."""
        kind = self._device_type
        enabled = torch.is_autocast_enabled(kind)
        return torch.get_autocast_dtype(kind) if enabled else self._low

    def remove(self) -> None:
        """Restore the module's own forward, unless somebody wrapped this one."""
        self._inputs = self._outputs = self._weight = None
        self._is_installed = False
        if getattr(vars(self._module).get("forward"), "__self__", None) is self:
            del self._module.forward, vars(self._module)[KEPT]
            if self._replaced:
                self._module.forward = self._own
            if self._earlier is not None:
                vars(self._module)[KEPT] = self._earlier


class AutocastForward(LowForward):
    """The forward of one module, under an autocast that is turned on here if none is.

    If a weight was converted, as in a copy, it turns nothing on, neither here nor in submodules.

    Args:
        within: the caller's mode, if not autocast. Otherwise autocast stays off where the script
            turned it off inside the model; a layer then computes in fp32.
        is_root: only the script calls it. So an autocast without cache is the script's own, and one
            that is on is entered again without its cache.
        holds_untouched: a matrix inside is not trained and keeps its dtype.
    """

    def __init__(
        self,
        module: nn.Module,
        low: torch.dtype,
        device_type: str,
        inputs: torch.dtype | nn.Parameter | None,
        outputs: torch.dtype | None,
        weight: nn.Parameter | None,
        within: ComputeMode | None,
        is_root: bool,
        holds_untouched: bool,
    ) -> None:
        super().__init__(module, low, device_type, inputs, outputs, weight)
        self._is_root, self._holds_untouched = is_root, holds_untouched
        self._forced = within in (ComputeMode.FP32, ComputeMode.LOW)
        self._is_product = isinstance(module, MATMULS) and is_layer(module)

    def _run(self, *args: object, **kwargs: object) -> object:
        """Run the module's own forward under autocast, or as the script decides."""
        if self._enters():
            # Without the cache, which would be empty; this distinguishes it from the user's
            # autocast.
            with torch.autocast(
                self._device_type,
                self._dtype(),
                enabled=not self._is_converted(),
                cache_enabled=False,
            ):
                return self._own(*args, **kwargs)
        if self._is_product and self._is_turned_off(args):
            return self._in_fp32(args)
        return self._own(*args, **kwargs)

    def _enters(self) -> bool:
        has_cache = torch.is_autocast_cache_enabled()
        if torch.is_autocast_enabled(self._device_type):  # turned on by the script
            return self._is_root and has_cache and not self._is_converted()
        # An autocast that a script nests in ours inherits the missing cache, and torch.export turns
        # caches off itself.
        if self._is_converted():  # an autocast that is off, without a cache, tells submodules
            return has_cache and self._holds_untouched
        exported = self._weight is not None and torch.compiler.is_exporting()
        return self._forced or self._is_root or has_cache or exported

    def _is_turned_off(self, args: tuple[object, ...]) -> bool:
        """Return whether the script turned autocast off around this layer and passes fp32."""
        return (
            len(args) == 1
            and isinstance(args[0], Tensor)
            and args[0].dtype == MASTER_DTYPE
            and not torch.is_autocast_enabled(self._device_type)
        )

    def _in_fp32(self, args: tuple[Any, ...]) -> Any:
        """Compute as under DDP with fp32 weights; the only place where weights are cast."""
        params = self._module._parameters
        exact: Any = {n: None if p is None else p.to(MASTER_DTYPE) for n, p in params.items()}
        self._module._parameters = exact
        try:
            return self._own(*args)
        finally:
            self._module._parameters = params


def install_casts(model: nn.Module, precision: Precision) -> list[LowForward]:
    """Install casts of activations in a model with its storage dtypes.

    Modules kept in fp32 get fp32 and return their caller's dtype. Forward and backward never cast
    parameters, except those of fp32 modules that compute under autocast.
    """
    config, low = precision.config, precision.config.param_dtype
    if low == MASTER_DTYPE:
        return []
    device_type = next((param.device.type for param in _compat.parameters(model)), "cpu")
    stored: dict[nn.Module, set[torch.dtype]] = {}
    computes: dict[nn.Module | None, ComputeMode] = {}
    forwards: list[LowForward] = []
    for module, caller in _with_callers(model):
        outside = computes.get(caller)
        inside = computes[module] = _compute(module, outside, precision, stored)
        has_low = low in _dtypes(module, stored)
        lows = (param for param in _compat.parameters(module) if param.dtype == low)
        weight = next(lows, None) if has_low else None
        holds_untouched = not isinstance(module, TABLES) and any(
            param in precision.untouched and is_matrix(param)
            for param in _compat.parameters(module)
        )
        inputs: torch.dtype | nn.Parameter | None = None
        outputs: torch.dtype | None = None
        switch: ComputeMode | None = None
        if inside is ComputeMode.AUTOCAST and config.autocast and (has_low or holds_untouched):
            switch = inside  # the script may call it
        if inside is not outside:
            is_product = isinstance(module, MATMULS) and is_layer(module)
            switch = (
                None if inside is ComputeMode.LOW and (is_product or outside is None) else inside
            )
            if inside is ComputeMode.FP32:
                inputs = MASTER_DTYPE
                # A norm returns its input's dtype, like torch's own norms.
                is_low_norm = isinstance(module, NORMS) and outside is ComputeMode.LOW
                outputs = low if is_low_norm else None
            elif outside is ComputeMode.FP32:
                outputs = MASTER_DTYPE
        if inside is not ComputeMode.FP32 and _takes_activations(module, precision, stored):
            inputs = weight
        is_table = isinstance(module, TABLES)
        if module in precision.fp32_outputs or (config.autocast and is_table and has_low):
            outputs = MASTER_DTYPE
        if inputs is not None or outputs or switch:
            casts = module, low, device_type, inputs, outputs, weight
            if switch is ComputeMode.AUTOCAST:
                is_root = config.autocast and outside is None
                forwards.append(AutocastForward(*casts, outside, is_root, holds_untouched))
            else:
                forwards.append(LowForward(*casts, switch))
    return forwards


def _compute(
    module: nn.Module,
    outside: ComputeMode | None,
    precision: Precision,
    stored: dict[nn.Module, set[torch.dtype]],
) -> ComputeMode:
    """Return the mode of ``module``; modules without parameters use their caller's."""
    config, dtypes = precision.config, _dtypes(module, stored)
    if module in precision.fp32_modules:
        return ComputeMode.FP32
    if module in precision.autocast_modules:
        return ComputeMode.FP32 if outside is ComputeMode.FP32 else ComputeMode.AUTOCAST
    if config.param_dtype in dtypes:
        bare = config.cast_forward_inputs and not is_layer(module) and _holds_matrix(module)
        return ComputeMode.AUTOCAST if config.autocast or bare else ComputeMode.LOW
    if config.autocast:
        owners = [
            m for m in module.modules() if any(True for _ in _compat.parameters(m, recurse=False))
        ]
        if owners and precision.fp32_modules.keys() >= {*owners}:
            return ComputeMode.FP32
        return outside or ComputeMode.AUTOCAST
    if MASTER_DTYPE in dtypes:
        as_beside_ddp = any(child in precision.autocast_modules for child in module.modules())
        return ComputeMode.AUTOCAST if as_beside_ddp else ComputeMode.FP32
    return outside or ComputeMode.LOW


def _dtypes(module: nn.Module, stored: dict[nn.Module, set[torch.dtype]]) -> set[torch.dtype]:
    """Return the dtypes of all parameters inside."""
    if module not in stored:
        stored[module] = {param.dtype for param in _compat.parameters(module, recurse=False)}
        stored[module].update(*(_dtypes(child, stored) for child in module.children()))
    return stored[module]


def _takes_activations(
    module: nn.Module, precision: Precision, stored: dict[nn.Module, set[torch.dtype]]
) -> bool:
    """Return whether this torch layer's inputs are all activations that it needs in low precision.

    Under autocast these are layers without an autocast rule on every device, such as LSTMs.
    """
    config, low = precision.config, precision.config.param_dtype
    if not is_layer(module) or isinstance(module, (nn.Embedding, nn.Sequential)):
        return False
    if config.autocast:
        own = {param.dtype for param in _compat.parameters(module, recurse=False)}
        return low in own and not isinstance(module, MATMULS)
    return config.cast_forward_inputs and low in _dtypes(module, stored)


def _holds_matrix(module: nn.Module) -> bool:
    """Return whether its own code reads a parameter of several dimensions, even from a list."""
    return any(map(is_matrix, _compat.parameters(module, recurse=False))) or any(
        _holds_matrix(child) for child in module.children() if not is_called(child)
    )


def _with_callers(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """Yield each module once, with the module that calls it, before its submodules.

    Lists and the like are never called, so they are left out; their holder calls the modules
    inside.
    """
    seen = {model}
    waiting: deque[tuple[nn.Module, nn.Module | None]] = deque([(model, None)])
    while waiting:
        module, caller = waiting.popleft()
        called = caller is None or is_called(module)
        if called:
            yield module, caller
        for child in module.children():
            if child not in seen:
                seen.add(child)
                waiting.append((child, module if called else caller))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with each packable tensor inside cast; containers keep their type."""
    if isinstance(value, Tensor):
        same = value.dtype == dtype or not (is_packable(value) and value.dim())
        return value if same else value.to(dtype)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        items = {key: _cast(item, dtype) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)
    return value
