"""``load_plain``: an ordinary torch checkpoint into a sharded run.

Every rank reads the same files, mapped into memory, and copies out what it owns.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.checkpoint.access import Model, Snapshot
from shardcast.checkpoint.loading import import_from
from shardcast.checkpoint.source import Source, from_tensors
from shardcast.optimizer.state_dict import check_groups, join_states

Values = str | os.PathLike[str] | Mapping[str, Any]
WRAPPERS = ("module.", "_orig_mod.")  # what DDP and torch.compile put before names


def load_plain(
    model: Model,
    optimizer: torch.optim.Optimizer,
    weights: Values,
    state: Values | Sequence[Values] | None = None,
) -> None:
    """Load a plain torch model, and the state of the plain optimizer, into a sharded pair.

    Every rank of the optimizer's group must call it, with the same files or values. Everything is
    compared before anything in memory changes. Weights of any floating dtype become fp32 masters.

    Args:
        weights: ``model.state_dict()``, or where it is: a ``torch.save`` or safetensors file, or a
            directory with ``model.safetensors`` or an index as the Hub has it. All files of
            ``torch.save`` are read with ``weights_only=True``.
        state: the unsharded optimizer's ``state_dict()``, or its file; a list of them, where
            several optimizers were sharded together; ``None`` keeps the options of the groups and
            begins with fresh state.

    Raises:
        ValueError: another model or other groups; names the parameter. Nothing was changed.
        RuntimeError: a file cannot be read.
    """
    snapshot = Snapshot(model, optimizer)
    import_from(snapshot, lambda: _opened(snapshot, weights, state), "load_plain")


def _opened(snapshot: Snapshot, weights: Values, state: Values | Sequence[Values] | None) -> Source:
    where = "weights" if isinstance(weights, Mapping) else f"weights {os.fspath(weights)!r}"
    tensors = snapshot.by_name(_unwrapped(_tensors(weights)))
    named, groups = (None, None) if state is None else _named(snapshot, state)
    return dataclasses.replace(from_tensors(where, tensors, named or {}), groups=groups)


def _plain_state(state: Values) -> Mapping[str, Any]:
    loaded = state if isinstance(state, Mapping) else torch_file(Path(state))
    if "state" not in loaded or "param_groups" not in loaded:
        raise ValueError(
            "state: expected a torch optimizer's state_dict with 'state' and 'param_groups', "
            f"got {', '.join(map(repr, list(loaded)[:5]))}"
        )
    return loaded


def _named(
    snapshot: Snapshot, state: Values | Sequence[Values]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """torch's numbered state by name, and its groups; the order within the groups decides."""
    head = snapshot.head()
    if isinstance(state, (str, os.PathLike, Mapping)):
        loaded = _plain_state(state)
    else:
        loaded = join_states([_plain_state(each) for each in state], head["places"])
    groups, loaded_groups = head["groups"], loaded["param_groups"]
    check_groups(groups, loaded_groups)
    names: dict[Any, str] = {}
    for group, loaded_group in zip(groups, loaded_groups, strict=True):
        names.update(zip(loaded_group["params"], group["params"], strict=True))
    named = {names[number]: values for number, values in loaded["state"].items()}
    return named, [
        {**loaded_group, "params": group["params"]}
        for group, loaded_group in zip(groups, loaded_groups, strict=True)
    ]


def torch_file(path: Path, allowed: Callable[[Path], list[Any]] = lambda _path: []) -> Any:
    """What ``torch.save`` wrote, mapped into memory, unable to run code.

    Args:
        allowed: the classes that may be in it, as ``torch.serialization.safe_globals`` has them.

    Raises:
        RuntimeError: it cannot be read.
    """
    try:
        with torch.serialization.safe_globals(allowed(path)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(f"{str(path)!r} cannot be read with weights_only: {reason}") from error


def _tensors(source: Values) -> dict[str, Tensor]:
    if isinstance(source, Mapping):
        tensors = dict(source)
    else:
        tensors = {}
        for path in _files_of(Path(source)):
            tensors.update(
                _safetensors(path) if path.suffix == ".safetensors" else torch_file(path)
            )
    for name, value in tensors.items():
        if _compat.is_dtensor(value):
            raise ValueError(
                f"weights: {name!r} is a DTensor; give whole tensors (full_tensor()), or files"
            )
        if not isinstance(value, Tensor):
            raise ValueError(
                f"weights: expected a model's state_dict, got {type(value).__name__} at {name!r}; "
                "if that is a larger checkpoint, load it and pass the part with the weights"
            )
    return tensors


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        return [path / name for name in sorted(names)]
    return [path / "model.safetensors"]


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file  # not needed unless there are such files

    try:
        return load_file(path)
    except Exception as error:
        raise RuntimeError(f"{str(path)!r} cannot be read as safetensors: {error}") from error


def _unwrapped(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Names without what DDP and ``torch.compile`` put before all of them."""
    for prefix in WRAPPERS:
        if weights and all(name.startswith(prefix) for name in weights):
            bare = {name.removeprefix(prefix): value for name, value in weights.items()}
            return _unwrapped(bare)
    return weights
