"""``load`` and ``resume``: verify, compare, and only then change anything."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardcast.checkpoint import commit, files
from shardcast.checkpoint.access import Held
from shardcast.checkpoint.commit import DamagedCheckpointError
from shardcast.checkpoint.dcp import Reader
from shardcast.checkpoint.shards import Part, state_path

Directory = str | os.PathLike[str]


@dataclass(frozen=True)
class Resumed:
    """What was loaded: the step, ``extra``, every saving rank's ``per_rank``, and from where."""

    step: int
    extra: Any
    per_rank: list[Any]
    path: Path


def load(directory: Directory, model: nn.Module, optimizer: torch.optim.Optimizer) -> Resumed:
    """Load the newest sound checkpoint of a directory, or the one that is named.

    Every rank of the optimizer's group must call it; it returns on all of them, or raises on all.
    World size, partition, packs and ``param_dtype`` may differ from when it was saved: masters,
    state and step counts are the same to the bit. Everything is verified and compared before
    anything in memory changes. Extra memory is the state of one pack's span, on the host.

    Args:
        directory: of a run, or one checkpoint in it.

    Raises:
        FileNotFoundError: there is no checkpoint; see :func:`resume`.
        DamagedCheckpointError: the named one, or every one, is damaged; names file and parameters.
        ValueError: it is one of another model or optimizer; nothing was changed.
    """
    resumed = resume(directory, model, optimizer)
    if resumed is None:
        raise FileNotFoundError(
            f"directory: no committed checkpoint in {str(directory)!r}; check the path, or use "
            "resume() where a run may be new"
        )
    return resumed


def resume(
    directory: Directory, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Resumed | None:
    """As :func:`load`, but ``None`` where the directory has no checkpoint yet. Collective."""
    held = Held(model, optimizer)
    folder = _choose(held, Path(os.path.abspath(directory)))
    if folder is None:
        return None

    def compare() -> tuple[Reader, dict[str, Any], Resumed]:
        reader = Reader(folder)
        head = reader.object(("shardcast",))
        head["groups"] = reader.object(("optimizer", "param_groups"))
        _compare(held, reader, head, folder)
        step = commit.manifest_of(folder)["step"]
        extra, per_rank = reader.object(("extra",)), reader.object(("per_rank",))
        return reader, head, Resumed(step, extra, per_rank, folder)

    opened: list[tuple[Reader, dict[str, Any], Resumed]] = []
    held.together(lambda: opened.append(compare()), _nothing)
    (reader, head, resumed), states = opened[0], _state_names(opened[0][0])

    def fresh(name: str, start: int, stop: int) -> tuple[list[Part], dict[str, Any]]:
        return _fresh(held, reader, states.get(name, ()), head["objects"], (name, start, stop))

    def take() -> None:
        held.load_head(head, set(states) | set(head["objects"]))
        held.load(reader.read, fresh)

    try:
        held.together(take, _nothing)
    except Exception as error:
        raise RuntimeError(
            f"checkpoint {str(folder)!r} could no longer be read after it had been verified "
            f"({error}); model and optimizer are loaded in part: load again before training on"
        ) from error
    held.publish()
    return resumed


def _nothing() -> None:
    files.SYSTEM.reached("acknowledge", "load")


def _choose(held: Held, path: Path) -> Path | None:
    """The sound checkpoint to load; each rank verifies a share of the files."""

    def check(folder: Path) -> DamagedCheckpointError | None:
        def attempt() -> str | None:
            try:
                commit.verify(folder, held.rank, held.size)
            except DamagedCheckpointError as error:
                return str(error)
            return None

        errors = [error for error in held.together(attempt, _nothing) if error is not None]
        return DamagedCheckpointError(errors[0]) if errors else None

    def look() -> tuple[bool, list[str]]:
        held.check_model()
        return commit.is_checkpoint(path), [str(p) for p in commit.steps(path).values()]

    seen = held.together(look, _nothing)
    if any(theirs != seen[0] for theirs in seen):
        raise RuntimeError(
            f"directory: the ranks see different checkpoints in {str(path)!r}; it must be on a "
            "file system that all ranks share"
        )
    if not seen[0][0]:
        return commit.newest(path, check, loud=held.rank == 0)
    error = check(path)
    if error is not None:
        raise error
    return path


def _state_names(reader: Reader) -> dict[str, tuple[str, ...]]:
    """The stored state tensors of each parameter."""
    names: dict[str, tuple[str, ...]] = {}
    for path in reader.paths:
        if path[:2] == ("optimizer", "state"):
            names[path[2]] = (*names.get(path[2], ()), path[3])
    return names


def _fresh(
    held: Held,
    reader: Reader,
    names: Sequence[str],
    objects: dict[str, dict[str, Any]],
    interval: tuple[str, int, int],
) -> tuple[list[Part], dict[str, Any]]:
    """Memory for the stored state of one interval of a parameter, and the state made of it."""
    name, start, stop = interval
    shape = held.slots[name].shape
    parts, values = [], dict(objects.get(name, {}))
    for key in names:
        path = state_path(name, key)
        stored = reader.shape(path)
        assert stored is not None
        cut = stored == shape and len(shape) > 0
        if cut:
            flat = torch.empty(stop - start, dtype=reader.dtype(path))
            parts.append(Part(path, shape, start, flat))
            values[key] = flat
        else:
            flat = torch.empty(torch.Size(stored).numel(), dtype=reader.dtype(path))
            parts.append(Part(path, stored, 0, flat))
            values[key] = flat.view(stored)
    return parts, values


def _compare(held: Held, reader: Reader, head: dict[str, Any], folder: Path) -> None:
    """Raise for whatever does not belong to this model and optimizer."""
    where = f"checkpoint {str(folder)!r}"
    expected = held.shapes()
    stored = {path[1]: reader.shape(path) for path in reader.paths if path[0] == "model"}
    for what, names in (
        ("lacks", expected.keys() - stored.keys()),
        ("has, and this model has not,", stored.keys() - expected.keys()),
    ):
        if names:
            shown = ", ".join(repr(name) for name in sorted(names)[:5])
            raise ValueError(
                f"{where}: it {what} {len(names)} parameters or buffers, among them {shown}; "
                "build the model as it was when the checkpoint was saved"
            )
    for name, shape in expected.items():
        if stored[name] != shape:
            raise ValueError(
                f"{where}: parameter {name!r} has shape {stored[name]}, expected {shape}; build "
                "the model as it was when the checkpoint was saved"
            )
    mine = held.head()
    if head["optimizer"] != mine["optimizer"]:
        raise ValueError(
            f"{where}: it has the state of {head['optimizer']}, expected {mine['optimizer']}; use "
            "the same optimizer, or export() the weights and start with fresh state"
        )
    groups = [set(group["params"]) for group in mine["groups"]]
    others = [set(group["params"]) for group in head["groups"]]
    if groups != others:
        odd = sorted(set().union(*(a ^ b for a, b in zip(groups, others, strict=False))))
        raise ValueError(
            f"{where}: expected {len(groups)} param_groups, got {len(others)}"
            if len(groups) != len(others)
            else f"{where}: parameter {odd[0]!r} is in another param_group than here"
            "; build the optimizer with the same groups"
        )
    missing = head["extra_state"].keys() ^ mine["extra_state"].keys()
    if missing:
        raise ValueError(f"{where}: extra state {min(missing)!r} is on one side only")
    if held.partition == "even":
        _check_elementwise(held, reader, where)


def _check_elementwise(held: Held, reader: Reader, where: str) -> None:
    for name, keys in _state_names(reader).items():
        for key in keys:
            shape = reader.shape(state_path(name, key))
            if shape and shape != held.slots[name].shape:
                raise ValueError(
                    f"{where}: {key!r} of parameter {name!r} has shape {shape}, expected "
                    f"{held.slots[name].shape}; such a state cannot be cut, use partition 'whole'"
                )
