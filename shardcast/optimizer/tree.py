"""The modules of a model: what a script calls, and where parameters are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn


def called_by_script(module: nn.Module) -> list[nn.Module]:
    """Return ``module``, or modules in it where it has no forward, as a list of models has none."""
    children = list(module.children())
    owns = any(True for _ in module.parameters(recurse=False))
    if type(module).forward is not nn.Module.forward or owns or not children:
        return [module]
    return [inner for child in children for inner in called_by_script(child)]


class Tree:
    """The modules below ``stages``, and the parameters in them, when this was made.

    Args:
        names: of the parameters that are trained.
    """

    def __init__(self, stages: Sequence[nn.Module], names: Mapping[nn.Parameter, str]) -> None:
        self._stages, self._names = stages, names
        self._places: list[tuple[Callable[[str], Any], str, Any]] = [
            (held.get, key, value)
            for module in _modules(stages)
            for held in (module._modules, module._parameters)
            for key, value in held.items()
        ]

    def left(self) -> str:
        """The trained parameters that are no longer in the model, by name; usually empty. Local.

        A look at each place, of a tenth of a microsecond, as long as nothing was replaced.
        """
        if all(get(key) is value for get, key, value in self._places):
            return ""
        present = {param for stage in self._stages for param in stage.parameters()}
        return ", ".join(repr(name) for param, name in self._names.items() if param not in present)


def _modules(stages: Sequence[nn.Module]) -> Iterable[nn.Module]:
    return (module for stage in stages for module in stage.modules())
