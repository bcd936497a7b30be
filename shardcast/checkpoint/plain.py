"""``load_plain``: an ordinary torch checkpoint into a sharded run.

Every rank reads the same files, mapped into memory, and copies out what it owns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardcast.checkpoint import files
from shardcast.checkpoint.access import Held
from shardcast.checkpoint.shards import Part

Source = str | os.PathLike[str] | Mapping[str, Any]
WRAPPERS = ("module.", "_orig_mod.")  # what DDP and torch.compile put before names


@dataclass(frozen=True)
class Plain:
    """A whole model and optimizer state, by parameter name.

    Attributes:
        where: names the source in errors.
        groups: options of the optimizer's groups with parameter names; ``None`` keeps those here.
        state: whole tensors and plain values by parameter and state name.
    """

    where: str
    weights: Mapping[str, Tensor]
    state: Mapping[str, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]] | None


def load_plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: Source,
    state: Source | None = None,
) -> None:
    """Load a plain torch model, and the state of the plain optimizer, into a sharded pair.

    Every rank of the optimizer's group must call it, with the same files or values. Everything is
    compared before anything in memory changes. Weights of any floating dtype become fp32 masters.

    Args:
        weights: ``model.state_dict()``, or where it is: a ``torch.save`` or safetensors file, or a
            directory with ``model.safetensors`` or an index as the Hub has it. All files of
            ``torch.save`` are read with ``weights_only=True``.
        state: the unsharded optimizer's ``state_dict()``, or its file; ``None`` keeps the options
            of the groups and begins with fresh state.

    Raises:
        ValueError: another model or other groups; names the parameter. Nothing was changed.
        RuntimeError: a file cannot be read.
    """
    held = Held(model, optimizer)
    found: list[Plain] = []
    held.together(lambda: found.append(_opened(held, weights, state)), reached)
    take(held, found[0])


def reached() -> None:
    """The point at which a rank tells the others how its part went."""
    files.SYSTEM.reached("acknowledge", "load")


def _opened(held: Held, weights: Source, state: Source | None) -> Plain:
    where = "weights" if isinstance(weights, Mapping) else f"weights {os.fspath(weights)!r}"
    plain = Plain(where, held.by_name(_unwrapped(_tensors(weights))), {}, None)
    if state is not None:
        loaded = state if isinstance(state, Mapping) else torch_file(Path(state))
        if "state" not in loaded or "param_groups" not in loaded:
            raise ValueError(
                "state: expected a torch optimizer's state_dict with 'state' and 'param_groups', "
                f"got {', '.join(map(repr, list(loaded)[:5]))}"
            )
        named, groups = _named(held, loaded)
        plain = Plain(where, plain.weights, named, groups)
    check(held, plain)
    return plain


def _named(
    held: Held, loaded: Mapping[str, Any]
) -> tuple[dict[str, Mapping[str, Any]], list[dict[str, Any]]]:
    """torch's numbered state by name; the order within the groups decides."""
    held.check_model()
    groups = held.head()["groups"]
    sizes, others = ([len(g["params"]) for g in some] for some in (groups, loaded["param_groups"]))
    if sizes != others:
        raise ValueError(
            f"state: expected groups with {sizes} parameters, got {others}; build the optimizer "
            "with the same groups as when the state was saved"
        )
    names: dict[Any, str] = {}
    for mine, other in zip(groups, loaded["param_groups"], strict=True):
        names.update(zip(other["params"], mine["params"], strict=True))
    named = {names[number]: values for number, values in loaded["state"].items()}
    renamed = [
        {**other, "params": mine["params"]}
        for mine, other in zip(groups, loaded["param_groups"], strict=True)
    ]
    return named, renamed


def check(held: Held, plain: Plain) -> None:
    """Raise for whatever does not belong to this model and optimizer. Local.

    Raises:
        ValueError: names the parameter.
    """
    held.check_model()
    expected, ties = held.shapes(), held.head()["ties"]
    _check_names(plain.where, expected.keys(), plain.weights.keys() - ties.keys())
    for name, shape in expected.items():
        if tuple(plain.weights[name].shape) != tuple(shape):
            raise ValueError(
                f"{plain.where}: parameter {name!r} has shape {tuple(plain.weights[name].shape)}, "
                f"expected {tuple(shape)}; build the model that these weights are of"
            )
    if plain.groups is not None:
        _check_groups(held, plain)
    for name, values in plain.state.items():
        for key, value in values.items():
            _check_state(held, plain.where, name, key, value)


def _check_names(where: str, expected: Any, given: Any) -> None:
    for what, names in (("lacks", expected - given), ("has too much:", given - expected)):
        if names:
            shown = ", ".join(repr(name) for name in sorted(names)[:5])
            raise ValueError(
                f"{where}: it {what} {len(names)} parameters or buffers, among them {shown}; "
                "build the model that these weights are of"
            )


def _check_groups(held: Held, plain: Plain) -> None:
    assert plain.groups is not None
    mine = [set(group["params"]) for group in held.head()["groups"]]
    theirs = [set(group["params"]) for group in plain.groups]
    if len(mine) != len(theirs):
        raise ValueError(f"{plain.where}: expected {len(mine)} param_groups, got {len(theirs)}")
    for number, (here, there) in enumerate(zip(mine, theirs, strict=True)):
        if here != there:
            raise ValueError(
                f"{plain.where}: parameter {min(here ^ there)!r} is in param_group {number} on one "
                "side only; build the optimizer with the same groups"
            )


def _check_state(held: Held, where: str, name: str, key: str, value: Any) -> None:
    if name not in held.slots:
        raise ValueError(f"{where}: it has optimizer state of {name!r}, which is not trained here")
    if not isinstance(value, Tensor) or value.dim() == 0:
        return
    slot = held.slots[name]
    if value.numel() != slot.numel and held.partition != "whole":
        raise ValueError(
            f"{where}: {key!r} of parameter {name!r} has shape {tuple(value.shape)}, expected "
            f"{tuple(slot.shape)}; such a state cannot be cut, use partition 'whole'"
        )


def take(held: Held, plain: Plain) -> None:
    """Put checked values into memory and publish them. Collective."""
    head = held.head()
    if plain.groups is not None:
        head["groups"] = plain.groups
    held.load_head(head, {name for name, values in plain.state.items() if values})

    def read(parts: Sequence[Part]) -> None:
        for part in parts:
            whole = plain.weights[part.path[1]].reshape(-1)
            part.flat.copy_(whole[part.start : part.start + part.flat.numel()])

    def fresh(name: str, start: int, stop: int) -> tuple[list[Part], dict[str, Any]]:
        numel = held.slots[name].numel
        values = plain.state.get(name, {}).items()
        return [], {key: _cut(value, numel, start, stop) for key, value in values}

    held.together(lambda: held.load(read, fresh), reached)
    held.publish()


def _cut(value: Any, numel: int, start: int, stop: int) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0 or value.numel() != numel:
        return value
    part = value.reshape(-1)[start:stop]
    return part.float() if part.is_floating_point() else part


def torch_file(path: Path) -> Any:
    """What ``torch.save`` wrote, mapped into memory, unable to run code.

    Raises:
        RuntimeError: it cannot be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(f"{str(path)!r} cannot be read with weights_only: {reason}") from error


def _tensors(source: Source) -> dict[str, Tensor]:
    if isinstance(source, Mapping):
        found = dict(source)
    else:
        found = {}
        for path in _files_of(Path(source)):
            found.update(_safetensors(path) if path.suffix == ".safetensors" else torch_file(path))
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"weights: expected a model's state_dict, got {type(value).__name__} at {name!r}; "
                "if that is a larger checkpoint, load it and pass the part with the weights"
            )
    return found


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
