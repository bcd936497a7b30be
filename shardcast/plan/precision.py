"""The one rule for the dtype in which each parameter is stored, accumulated and sent.

Every dtype decision of shardcast is made here (PaddlePaddle PR 35878 asked for one global rule
instead of name patterns all over the code). A parameter is stored in ``param_dtype``, unless its
module is kept in fp32, or it is a norm's parameter or a vector under autocast.
``optimizer/forwards.py`` runs the forward under autocast, or casts activations between modules of
the two kinds. Masters and arithmetic are always in fp32. Parameters that are not trained keep their
dtype, unless ``convert_rest`` or ``autocast: false`` converts them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from shardcast import _compat
from shardcast.config import ShardcastConfig
from shardcast.option_values import KeepRule

MASTER_DTYPE = torch.float32
SHORT_SUM = 8  # largest number of gradients that are summed in their own dtype
PACKABLE = (torch.float32, torch.bfloat16, torch.float16)
TABLES = (nn.Embedding, nn.EmbeddingBag)

NORMS: tuple[type[nn.Module], ...] = (
    *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.SyncBatchNorm),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def sum_dtype(wire: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of gradients: wider, so that the mean of equal values is exact."""
    return MASTER_DTYPE if wire.itemsize < MASTER_DTYPE.itemsize else torch.float64


def grad_dtype(storage: torch.dtype, config: ShardcastConfig) -> torch.dtype:
    """Return the dtype in which gradients of a parameter stored as ``storage`` accumulate."""
    return config.grad_dtype or storage


def exact_sums(backwards: int, config: ShardcastConfig) -> bool:
    """Return whether so many backwards of a step are summed in fp32, whatever the dtype.

    Each sum in bf16 loses up to 1/512 of it: 8 % after 512 micro-batches.
    """
    return backwards > SHORT_SUM and config.grad_dtype is None


def wire_dtype(storage: torch.dtype, config: ShardcastConfig) -> torch.dtype:
    """Return the dtype in which these gradients are sent to their owner."""
    return config.reduce_dtype or grad_dtype(storage, config)


def is_packable(param: Tensor) -> bool:
    """Return whether a parameter can be packed: real floating-point ones can."""
    return param.dtype in PACKABLE


class Precision:
    """The dtypes of one model under one configuration.

    Args:
        model: the root module; read only.
        trained: parameters that the optimizer updates; ``None``: all that require a gradient.

    Attributes:
        unmatched: patterns of ``keep_fp32`` and ``fp32_outputs`` that match nothing, as messages.
        fp32_modules: modules that compute in fp32.
        autocast_modules: modules in fp32 that compute under autocast, as under DDP.
        untouched: parameters that are not trained and keep their dtype.
        fp32_outputs: modules that return fp32.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ShardcastConfig,
        trained: AbstractSet[nn.Parameter] | None = None,
    ) -> None:
        self.config = config
        self.unmatched: list[str] = []
        self.fp32_modules: dict[nn.Module, None] = {}
        if config.keep_fp32:
            self.fp32_modules = kept_modules(model, config.keep_fp32, self.unmatched)
        self.fp32_outputs: set[nn.Module] = set()
        if config.fp32_outputs:
            self.fp32_outputs = named_modules(model, config.fp32_outputs, self.unmatched)
        low = config.param_dtype != MASTER_DTYPE
        self.untouched: set[nn.Parameter] = set()
        self._converts_rest = config.convert_rest or (low and not config.autocast)
        if not self._converts_rest:
            if trained is None:
                trained = {param for param in _compat.parameters(model) if param.requires_grad}
            kept = _params_of(self.fp32_modules)
            self.untouched = {*filter(is_packable, _compat.parameters(model))} - trained - kept
        self._untouched_modules = {
            module
            for module in model.modules()
            if (own := {*filter(is_packable, _params_of([module]))}) and own <= self.untouched
        }
        norms = [
            module
            for module in model.modules()
            if isinstance(module, NORMS) and module not in self._untouched_modules
        ]
        with_statistics = [norm for norm in norms if any(map(is_packable, norm.buffers()))]
        unasked: list[nn.Module] = norms if config.autocast else []
        if not config.cast_buffers:
            unasked += _parametrized(model)
            # torch refuses fp32 running statistics with low-precision weights
            if not config.autocast:
                self.fp32_modules.update(dict.fromkeys(with_statistics))
        self.autocast_modules = {
            m: None for m in unasked if m not in self.fp32_modules and _params_of([m])
        }
        self._fp32 = self.fp32_modules | self.autocast_modules
        vectors = _not_multiplied(model) if config.autocast and low else ()
        exact_statistics = [norm for norm in with_statistics if norm in self._fp32]
        self._kept_params = _params_of((*self.fp32_modules, *exact_statistics))
        came_fp32 = {param for param in self.untouched if param.dtype == MASTER_DTYPE}
        self._fp32_params = _params_of(self._fp32).union(vectors) - self.untouched | came_fp32

    def storage_dtype(self, param: nn.Parameter) -> torch.dtype:
        """Return the dtype of ``param`` in forward and backward."""
        dtype, exact = param.dtype, self._fp32_params
        if dtype not in PACKABLE:
            return dtype
        return MASTER_DTYPE if exact and param in exact else self.config.param_dtype

    def rest_dtype(self, param: nn.Parameter) -> torch.dtype:
        """Return the dtype of a parameter that no optimizer holds."""
        asked = self._converts_rest or param in self._kept_params
        return self.storage_dtype(param) if asked else param.dtype

    def frozen_bytes(self, outside: Iterable[nn.Parameter]) -> int:
        """Return the bytes of parameters without an optimizer that ``convert_rest`` would halve."""
        if self.config.param_dtype == MASTER_DTYPE:
            return 0
        exact = (p for p in outside if p in self.untouched and p.dtype == MASTER_DTYPE)
        return sum(_compat.local_tensor(param).nbytes for param in exact)

    def buffer_dtype(self, module: nn.Module, buffer: Tensor) -> torch.dtype:
        """Return the dtype of a buffer that ``module`` owns."""
        if is_packable(buffer) and module in self._fp32 and isinstance(module, NORMS):
            return MASTER_DTYPE  # like its parameters, even if the model came in low precision
        stays = module in self._fp32 or module in self._untouched_modules
        cast = self.config.cast_buffers and is_packable(buffer) and not stays
        return self.config.param_dtype if cast else buffer.dtype


def _params_of(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return modules' own parameters, without submodules."""
    return {param for module in modules for param in _compat.parameters(module, recurse=False)}


def _parametrized(model: nn.Module) -> Iterator[nn.Module]:
    """Return modules that compute their weight, for example by an SVD, which bf16 does not have."""
    hooks = ("torch.nn.utils.spectral_norm", "torch.nn.utils.weight_norm")
    for module in model.modules():
        if parametrize.is_parametrized(module):
            yield module
            yield from module.parametrizations.modules()  # type: ignore[union-attr]
        elif any(type(hook).__module__ in hooks for hook in module._forward_pre_hooks.values()):
            yield module


def _not_multiplied(model: nn.Module) -> Iterator[nn.Parameter]:
    """Return parameters that no matmul uses: vectors, and embeddings in a model without matrices.

    So all embeddings of a knowledge graph or a matrix factorization stay in fp32. Autocast would
    only compute their products in low precision.
    """
    yield from _vectors(model)
    modules = [*model.modules()]
    if not any(
        is_matrix(param)
        for module in modules
        if not isinstance(module, TABLES)
        for param in _compat.parameters(module, recurse=False)
    ):
        yield from _params_of(module for module in modules if isinstance(module, TABLES))


def _vectors(model: nn.Module) -> Iterator[nn.Parameter]:
    """Return scales, gains, means, temperatures and the like, which no matmul uses.

    These have more than one element along at most one dimension. Vectors in a torch layer, or in a
    module that holds a matrix, are biases, which are cast with it.
    """
    for module in model.modules():
        if is_layer(module) and not isinstance(module, TABLES):
            continue
        params = [*_compat.parameters(module, recurse=False)]
        with_matrix = any(map(is_matrix, params))
        for param in params:
            if not (is_matrix(param) or (with_matrix and param.dim() == 1)):
                yield param


def is_matrix(param: Tensor) -> bool:
    """Return whether a parameter has more than one element along several dimensions."""
    return is_packable(param) and sum(size > 1 for size in param.shape) > 1


def is_layer(module: nn.Module) -> bool:
    """Return whether a module's forward is torch's own, or the module is a user's norm."""
    torchs = is_called(module) and type(module).forward.__module__.startswith("torch.nn.")
    return torchs or isinstance(module, NORMS)


def is_called(module: nn.Module) -> bool:
    """Return whether a module is called; lists and the like are not."""
    return type(module).forward is not nn.Module.forward


def kept_modules(
    model: nn.Module, rules: tuple[KeepRule, ...], unmatched: list[str]
) -> dict[nn.Module, None]:
    """Return modules kept in fp32, as an ordered set: those of rules, and sharers of parameters.

    Patterns that match nothing are appended to ``unmatched``, as messages.
    """
    kept_modules: dict[nn.Module, None] = {}
    for rule in rules:
        matching = _matching(model, rule)
        if not matching and isinstance(rule, str) and rule != "norms":
            unmatched.append(
                f"keep_fp32: the pattern {rule!r} matches no parameter of the model; patterns "
                "are matched against names as in model.named_parameters()"
            )
        kept_modules.update(dict.fromkeys(matching))
    while True:
        shared = _params_of(kept_modules)
        tied = [
            module
            for module in model.modules()
            if module not in kept_modules and not shared.isdisjoint(_params_of([module]))
        ]
        if not tied:
            return kept_modules
        kept_modules.update(dict.fromkeys(tied))


def _matching(model: nn.Module, rule: KeepRule) -> list[nn.Module]:
    """Return modules of a class with submodules, or owners of a parameter that a rule names."""
    if rule == "norms":
        return [module for module in model.modules() if isinstance(module, NORMS)]
    if isinstance(rule, type):
        outer = (module for module in model.modules() if isinstance(module, rule))
        return [inside for module in outer for inside in module.modules()]
    test = partial(_is_named, rule) if isinstance(rule, str) else rule
    return [
        module
        for prefix, module in model.named_modules()
        for name, param in module.named_parameters(prefix, recurse=False, remove_duplicate=False)
        if test(name, param)
    ]


def _is_named(pattern: str, name: str, _param: nn.Parameter) -> bool:
    return fnmatch.fnmatchcase(name, pattern)


def named_modules(
    model: nn.Module, patterns: tuple[str, ...], unmatched: list[str]
) -> set[nn.Module]:
    """Return modules whose names match a pattern; append patterns without one to ``unmatched``."""
    modules: set[nn.Module] = set()
    for pattern in patterns:
        named = model.named_modules()
        matching = {module for name, module in named if fnmatch.fnmatchcase(name, pattern)}
        if not matching:
            unmatched.append(
                f"fp32_outputs: the pattern {pattern!r} matches no module of the model; patterns "
                "are matched against names as in model.named_modules(), '' is the model itself"
            )
        modules |= matching
    return modules
