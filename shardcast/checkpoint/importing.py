"""Load files of plain torch, and of FSDP2 through DCP, into a sharded run.

Files cannot run code. Every rank maps the same files into memory and copies the elements that it
owns. They have no checksums; of DCP's files only the sizes are checked.
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
from shardcast.checkpoint.dcp import Reader
from shardcast.checkpoint.directory import absolute, is_checkpoint, steps
from shardcast.checkpoint.loading import Directory, compare, take
from shardcast.checkpoint.source import StateSource, from_reader, from_tensors
from shardcast.messages import safetensors
from shardcast.optimizer.model import WRAPPERS
from shardcast.optimizer.state import plain_state, state_by_param

Values = str | os.PathLike[str] | Mapping[str, Any]


def load_plain(
    model: Model,
    optimizer: torch.optim.Optimizer,
    weights: Values,
    state: Values | Sequence[Values] | None = None,
) -> None:
    """Load the weights of a plain model, and the state of its plain optimizer.

    Everything is compared before anything in memory changes. Weights of any floating dtype become
    fp32 masters.

    Collective: every rank of the optimizer's group, with the same files or values.

    Args:
        model: model that was passed to :func:`shardcast.shard`.
        optimizer: what :func:`shardcast.shard` returned.
        weights: ``model.state_dict()``, or the path of a ``torch.save`` file, a safetensors file,
            or a directory with ``model.safetensors`` or a Hugging Face index. ``torch.save`` files
            are read with ``weights_only=True``.
        state: the plain optimizer's ``state_dict()``, or its file; a list of them for several
            optimizers that were sharded together. ``None`` starts with fresh state and keeps the
            options of the groups. If the state has ``param_names``, they are compared.

    Raises:
        ValueError: the model or the groups do not match; names the parameter. Nothing has changed.
        FileNotFoundError: a file does not exist.
        RuntimeError: a file cannot be read.
    """

    def opened(snapshot: Snapshot) -> StateSource:
        where = "weights" if isinstance(weights, Mapping) else f"weights {os.fspath(weights)!r}"
        tensors = snapshot.by_name(_unwrapped(_tensors(weights)))
        if state is None:
            return from_tensors(where, tensors, {})
        head = snapshot.head()
        is_one = isinstance(state, (str, os.PathLike, Mapping))
        loaded = plain_state(
            _values(state) if is_one else list(map(_values, state)),  # type: ignore[arg-type]
            head["places"],
        )
        if "shardcast" in loaded:
            raise ValueError(
                "state: expected a plain optimizer's state, got one rank's part of a sharded one; "
                "load that part with optimizer.load_state_dict() on its rank, or pass what "
                "full_state_dict() returned on rank 0 to load_plain() on all ranks"
            )
        by_name = state_by_param(loaded, head["groups"])
        source = from_tensors(where, tensors, by_name)
        _check_param_names(loaded["param_groups"], head["groups"])
        groups = zip(head["groups"], loaded["param_groups"], strict=True)
        named = [{**loaded_group, "params": group["params"]} for group, loaded_group in groups]
        return dataclasses.replace(source, groups=named)

    _import(model, optimizer, opened, "load_plain")


def _check_param_names(
    loaded: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]
) -> None:
    """Raise ValueError if the state's parameter names, or their order, do not match.

    An optimizer that was built over ``named_parameters()`` of a submodule has shorter names.
    """
    for number, (group, present) in enumerate(zip(loaded, expected, strict=True)):
        names = _unwrapped(dict.fromkeys(group.get("param_names") or ()))
        for place, (name, own) in enumerate(zip(names, present["params"], strict=False)):
            ours = _compat.state_key(own)
            if not f".{ours}".endswith(f".{name}") and not f".{name}".endswith(f".{ours}"):
                raise ValueError(
                    f"state: parameter {place} of param_group {number} is {name!r}, expected "
                    f"{ours!r}; build the optimizer over the same parameters in the same order as "
                    "when the state was saved"
                )


def _import(
    model: Model,
    optimizer: torch.optim.Optimizer,
    opened: Callable[[Snapshot], StateSource],
    call: str,
) -> None:
    """Open a source, compare it and load it. Collective: every rank."""
    snapshot = Snapshot(model, optimizer)
    snapshot.meet(call)
    source = snapshot.together(lambda: compare(snapshot, opened(snapshot)), call)
    take(snapshot, source, call)


def _values(source: Values) -> Any:
    return source if isinstance(source, Mapping) else torch_file(Path(source))


def torch_file(path: Path) -> Any:
    """Read a ``torch.save`` file, mapped into memory and without running code.

    Raises:
        FileNotFoundError: there is no such file.
        RuntimeError: the file cannot be read.
    """
    _check_exists(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(f"{str(path)!r} cannot be read with weights_only: {reason}") from error


def _check_exists(path: Path) -> None:
    if not path.exists():
        raise FileNotFoundError(f"weights, state: there is no file {str(path)!r}; check the path")


def _tensors(source: Values) -> dict[str, Tensor]:
    if isinstance(source, Mapping):
        tensors = dict(source)
    else:
        tensors = {}
        given = Path(source)
        if is_checkpoint(given) or steps(given):
            raise ValueError(
                f"weights: expected a file, or a directory with model.safetensors, got the "
                f"checkpoint {str(given)!r}; load it with checkpoint.load(directory, model, "
                "optimizer), weights alone with state=False, or convert it with checkpoint.export"
            )
        for path in _files_of(given):
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
    package = safetensors()
    _check_exists(path)
    try:
        return package.torch.load_file(path)  # type: ignore[no-any-return]
    except Exception as error:
        raise RuntimeError(f"{str(path)!r} cannot be read as safetensors: {error}") from error


def _unwrapped(weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the names without the prefixes of DDP and ``torch.compile``."""
    for prefix in WRAPPERS:
        if weights and all(name.startswith(prefix) for name in weights):
            bare = {name.removeprefix(prefix): value for name, value in weights.items()}
            return _unwrapped(bare)
    return weights


# -- DCP ------------------------------------------------------------------------------------


def import_dcp(
    directory: Directory,
    model: Model,
    optimizer: torch.optim.Optimizer,
    *,
    model_key: str = "model",
    optimizer_key: str | None = "optim",
) -> None:
    """Load a checkpoint of ``torch.distributed.checkpoint``, such as FSDP2's.

    It expects the files of ``dcp.save({"model": ..., "optim": ...})`` with the two results of
    ``get_state_dict``.

    Collective: every rank of the optimizer's group.

    Args:
        directory: directory that contains ``.metadata``.
        model: model that was passed to :func:`shardcast.shard`.
        optimizer: what :func:`shardcast.shard` returned.
        model_key, optimizer_key: keys under which the two were saved. With
            ``optimizer_key=None`` the optimizer starts with fresh state.

    Raises:
        ValueError: the model or the groups do not match; names the parameter. Nothing has changed.
        RuntimeError: a file is missing, too short, or cannot be read.
    """
    folder = absolute(directory)
    opened = lambda _snapshot: _from_dcp(folder, model_key, optimizer_key)  # noqa: E731
    _import(model, optimizer, opened, "import_dcp")


def _from_dcp(folder: Path, model_key: str, optimizer_key: str | None) -> StateSource:
    where, reader = f"checkpoint {str(folder)!r}", Reader(folder)
    for name, needed in reader.sizes.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size < needed:
            raise RuntimeError(f"{str(path)!r} has {size} bytes, expected at least {needed}")
    source = from_reader(where, reader, model_key, optimizer_key)
    if not source.weights:
        keys = ", ".join(sorted({repr(path[0]) for path in reader.paths})[:5])
        raise ValueError(
            f"{where}: it has nothing under {model_key!r}, but {keys}; pass the right model_key="
        )
    if optimizer_key is None:
        return source
    options: dict[int, dict[str, Any]] = {}
    for key in reader.paths:
        if key[:2] == (optimizer_key, "param_groups") and len(key) == 4:
            value = reader.tensor(key) if key in reader.stored else reader.object(key)
            options.setdefault(int(key[2]), {})[key[3]] = value
    if not options:
        raise ValueError(
            f"{where}: it has no param_groups under {optimizer_key!r}; save the result of "
            "get_state_dict (not flattened), or pass optimizer_key=None to load the model alone"
        )
    return dataclasses.replace(source, groups=[options[number] for number in sorted(options)])
