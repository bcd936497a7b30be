"""Sources from which a model and its optimizer can be loaded.

Our checkpoints, plain torch files and other DCP files all become a :class:`StateSource`. It lists
its contents before any of them is read, and then reads only what a rank owns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardcast.checkpoint.dcp import Reader, Stored
from shardcast.checkpoint.region import KeyPath, ShardView, slices_of


@dataclass(frozen=True)
class StateSource:
    """A whole model and optimizer state, by parameter name; ``None`` keeps the present values.

    Attributes:
        where: name of the source in errors.
        state: :class:`Stored` or a plain value, by parameter and state name.
        read: fills views that have the paths of our checkpoints.
        groups: options of the optimizer's groups, with parameter names.
        exact: state keeps its dtypes; otherwise floats become fp32, like masters.
        optimizer: name of the optimizer's class.
        chosen: names to load; everything else stays. ``None``: all.
    """

    where: str
    weights: Mapping[str, Stored]
    state: Mapping[str, Mapping[str, Any]]
    read: Callable[[Sequence[ShardView]], None]
    groups: Sequence[Mapping[str, Any]] | None = None
    exact: bool = False
    optimizer: str | None = None
    chosen: frozenset[str] | None = None

    def takes(self, name: str) -> bool:
        """Return whether a parameter or buffer is to be loaded."""
        return self.chosen is None or name in self.chosen

    scaler: Mapping[str, object] | None = None
    extra_state: Mapping[str, Any] | None = None


def model_path(name: str) -> KeyPath:
    """Return where a parameter or buffer is stored."""
    return ("model", name)


def state_path(name: str, state: str) -> KeyPath:
    """Return where a tensor of a parameter's optimizer state is stored."""
    return ("optimizer", "state", name, state)


def from_reader(
    where: str, reader: Reader, model_key: str = "model", optimizer_key: str | None = "optimizer"
) -> StateSource:
    """Return what DCP files hold under two keys, in the dtypes in which it is stored."""
    weights: dict[str, Stored] = {}
    state: dict[str, dict[str, Any]] = {}
    stored_paths: dict[KeyPath, KeyPath] = {}
    for path in reader.paths:
        stored = reader.stored.get(path)
        if path[0] == model_key and len(path) == 2 and stored is not None:
            weights[path[1]] = stored
            stored_paths[model_path(path[1])] = path
        elif path[:2] == (optimizer_key, "state") and len(path) == 4:
            state.setdefault(path[2], {})[path[3]] = stored or reader.object(path)
            stored_paths[state_path(path[2], path[3])] = path

    def read(views: Sequence[ShardView]) -> None:
        reader.read([dataclasses.replace(view, path=stored_paths[view.path]) for view in views])

    return StateSource(where, weights, state, read)


def from_tensors(
    where: str,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Mapping[str, Any]],
) -> StateSource:
    """Return a source of what is in memory, or mapped into it."""
    values = {model_path(name): value for name, value in weights.items()} | {
        state_path(name, key): value
        for name, tensors in state.items()
        for key, value in tensors.items()
    }

    def read(views: Sequence[ShardView]) -> None:
        for view in views:
            tensor = values[view.path]
            for chunk, target in view.chunks():
                target.copy_(tensor.reshape(view.region.shape)[slices_of(chunk)])

    return StateSource(
        where,
        {name: _stored(value) for name, value in weights.items()},
        {name: {k: _stored(v) for k, v in tensors.items()} for name, tensors in state.items()},
        read,
    )


def _stored(value: Any) -> Any:
    """Describe a tensor; return other values as they are."""
    return Stored(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
