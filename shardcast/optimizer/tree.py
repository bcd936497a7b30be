"""Where parameters are in the model: a layer that is replaced takes its own along."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn


class Tree:
    """The modules below ``stages``, and the parameters in them, when this was made.

    Args:
        names: of the parameters that are trained.
    """

    def __init__(self, stages: Sequence[nn.Module], names: Mapping[nn.Parameter, str]) -> None:
        self._stages, self._names = stages, names
        self._places: list[tuple[Callable[[str], Any], str, Any]] = [
            (held.get, key, it)
            for module in _modules(stages)
            for held in (module._modules, module._parameters)
            for key, it in held.items()
        ]

    def left(self) -> str:
        """The trained parameters that are no longer in the model, by name; usually empty. Local.

        A look at each place, of a tenth of a microsecond, as long as nothing was replaced.
        """
        if all(get(key) is it for get, key, it in self._places):
            return ""
        here = {param for stage in self._stages for param in stage.parameters()}
        return ", ".join(repr(name) for param, name in self._names.items() if param not in here)


def _modules(stages: Sequence[nn.Module]) -> Iterable[nn.Module]:
    return (module for stage in stages for module in stage.modules())
