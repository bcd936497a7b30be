"""Modules that a script names: those that are kept in fp32, and those that return fp32."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from functools import partial

from torch import nn

from shardcast.option_values import KeepRule

NORMS: tuple[type[nn.Module], ...] = (
    *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.SyncBatchNorm),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def kept_modules(
    model: nn.Module, rules: tuple[KeepRule, ...], unmatched: list[str]
) -> dict[nn.Module, None]:
    """Find modules kept in fp32, as an ordered set: those of rules, and who shares parameters.

    Appends patterns that match nothing to ``unmatched``, as messages.
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
    """Find modules of a class with all inside, or owners of a parameter that a rule names."""
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


def _params_of(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """List their own parameters, without those of the modules inside."""
    return {param for module in modules for param in module.parameters(recurse=False)}


def named_modules(
    model: nn.Module, patterns: tuple[str, ...], unmatched: list[str]
) -> set[nn.Module]:
    """Find modules whose names match a pattern; what matches nothing goes to ``unmatched``."""
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
