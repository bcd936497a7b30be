"""``latest`` and ``inspect``: checkpoints seen from outside, without model or ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shardcast.checkpoint import commit
from shardcast.checkpoint.commit import DamagedCheckpointError
from shardcast.checkpoint.dcp import Reader


@dataclass(frozen=True)
class Stored:
    """One stored tensor: shape, dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Info:
    """What a checkpoint says of itself. ``tensors`` are keyed as in the files."""

    path: Path
    step: int
    world_size: int
    partition: str
    optimizer: str
    nbytes: int
    files: tuple[str, ...]
    tensors: Mapping[str, Stored]


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint whose files have their checksums; ``None`` if there is none at all.

    Local: any process may call it; it reads all files of the checkpoint. Where the newest one is
    damaged it warns, says why, and looks at the one before.

    Raises:
        DamagedCheckpointError: there are checkpoints, and none is sound.
    """
    return commit.newest(Path(os.path.abspath(directory)), damage)


def damage(folder: Path) -> DamagedCheckpointError | None:
    """What is wrong with a checkpoint, if anything."""
    try:
        commit.verify(folder)
    except DamagedCheckpointError as error:
        return error
    return None


def chosen(directory: str | os.PathLike[str]) -> Path:
    """The named checkpoint, or the newest of a directory, verified.

    Raises:
        FileNotFoundError: there is none.
        DamagedCheckpointError: none is sound.
    """
    path: Path | None = Path(os.path.abspath(directory))
    assert path is not None
    if commit.is_checkpoint(path):
        commit.verify(path)
        return path
    path = latest(path)
    if path is None:
        raise FileNotFoundError(
            f"directory: no committed checkpoint in {str(directory)!r}; check the path"
        )
    return path


def inspect(directory: str | os.PathLike[str]) -> Info:
    """Facts about the newest checkpoint of a directory, or the one that is named, verified.

    Local: any process may call it.

    Raises:
        FileNotFoundError: there is none.
        DamagedCheckpointError: none is sound.
    """
    path = chosen(directory)
    manifest, reader = commit.manifest_of(path), Reader(path)
    shapes = {key: (reader.shape(where), where) for where, key in reader.paths.items()}
    return Info(
        path,
        manifest["step"],
        manifest["world_size"],
        manifest["partition"],
        manifest["optimizer"],
        sum(entry["bytes"] for entry in manifest["files"].values()),
        tuple(sorted(manifest["files"])),
        {
            key: Stored(shape, reader.dtype(where))
            for key, (shape, where) in shapes.items()
            if shape is not None
        },
    )
