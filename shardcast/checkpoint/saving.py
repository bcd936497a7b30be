"""``save``: check together, write apart, acknowledge together, commit on rank 0."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from shardcast.checkpoint import commit, files
from shardcast.checkpoint.access import Held
from shardcast.checkpoint.dcp import (
    METADATA,
    Record,
    data_file,
    metadata_of,
    write_object,
    write_part,
)
from shardcast.checkpoint.shards import Part

RESERVE = 1 << 20  # bytes, for metadata and the frames of chunks


class Writer(Protocol):
    """Whose parts are written: :class:`Held`, or copies of them."""

    @property
    def rank(self) -> int:
        """Which rank writes them."""

    def parts(self) -> Iterator[Part]:
        """What this rank stores."""


def save(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    extra: Any = None,
    per_rank: Any = None,
    keep: int | None = None,
) -> Path:
    """Save a checkpoint that is either committed whole or not there at all.

    Every rank of the optimizer's group must call it with the same arguments, between steps; it
    returns on all of them, or raises on all of them. Each rank writes what it owns, once, in fp32
    however it is kept; extra memory is one chunk of one parameter, on the host, and for what is
    not kept in fp32 on the device the state of one parameter there.

    Args:
        directory: holds the checkpoints of one run, on a file system that all ranks share; made
            if need be. One job at a time may save into it.
        step: names the checkpoint; a sound one of the same step is never overwritten.
        extra: what else the run needs, rank 0's counts: tensors, containers and plain values, as
            ``torch.load(weights_only=True)`` reads them (schedulers, position in the data).
        per_rank: the same for values that differ, such as the state of random generators.
        keep: delete older checkpoints but the newest ``keep``, this one included.

    Returns:
        The checkpoint's directory.

    Raises:
        ValueError: ``step`` exists, or an argument cannot be used.
        RuntimeError, OSError: a rank could not write; nothing was committed.
    """
    held = Held(model, optimizer)
    begun = begin(held, (os.path.abspath(directory), step, keep), extra, per_rank, prepare)
    _transact(held, begun)
    if keep is not None:
        held.together(
            lambda: commit.retain(begun.target.parent, step, keep) if held.rank == 0 else None,
            _point("retained"),
        )
    return begun.target


@dataclass(frozen=True)
class Begun:
    """A save that all ranks have agreed on.

    Attributes:
        writing: the fresh directory to write into.
        target: what it will be called once it is committed.
        values: what is stored once, by path.
        facts: the plain facts of the commit marker.
    """

    writing: Path
    target: Path
    values: dict[Any, Any]
    facts: dict[str, Any]


def begin(
    held: Held,
    arguments: tuple[str, int, int | None],
    extra: Any,
    per_rank: Any,
    make: Callable[[Path, Path, int, int], str],
) -> Begun:
    """Check together what is to be saved, and make a fresh directory. Collective.

    Args:
        arguments: directory, step and keep.
        make: called on rank 0 with base, target, bytes and step; the name of the directory.
    """
    directory, step, _ = arguments
    base = Path(directory)
    head, everyone = _agree(held, arguments, extra, per_rank)
    target = commit.folder_of(base, step)
    total = sum(theirs[1] for theirs in everyone)
    found = held.together(
        lambda: make(base, target, total, step) if held.rank == 0 else "", _point("prepare")
    )
    values = {
        ("optimizer", "param_groups"): head.pop("groups"),
        ("extra",): extra,
        ("per_rank",): [theirs[2] for theirs in everyone],
        ("shardcast",): {**head, "objects": _merged([theirs[3] for theirs in everyone])},
    }
    facts = {
        "step": step,
        "world_size": held.size,
        "partition": held.partition,
        "optimizer": head["optimizer"],
        "torch": torch.__version__,
    }
    return Begun(base / found[0], target, values, facts)


def _agree(
    held: Held, arguments: tuple[str, int, int | None], extra: Any, per_rank: Any
) -> tuple[dict[str, Any], list[Any]]:
    """The head; each rank's arguments, bytes, ``per_rank`` and objects. All have been checked."""
    heads: list[dict[str, Any]] = []

    def check() -> tuple[Any, int, Any, dict[str, Any]]:
        held.check_model()
        _check_arguments(arguments)
        heads.append(held.head())
        objects = held.objects()
        for what, value in {
            "extra": extra,
            "per_rank": per_rank,
            "the optimizer's param_groups": heads[0]["groups"],
            "the optimizer's state": objects,
            "what get_extra_state() of a module returned": heads[0]["extra_state"],
        }.items():
            _check_plain(what, value)
        return arguments, sum(part.nbytes for part in held.parts()), per_rank, objects

    everyone = held.together(check, _point("check"))
    if any(theirs[0] != everyone[0][0] for theirs in everyone):
        raise ValueError(
            "save: the ranks give other arguments (directory, step, keep): "
            + "; ".join(f"rank {rank}: {theirs[0]}" for rank, theirs in enumerate(everyone))
        )
    return heads[0], everyone


def _transact(held: Held, begun: Begun) -> None:
    """Write on every rank, then commit on rank 0; all or nothing."""
    try:
        written = held.together(lambda: write(held, begun), _point("written"))
        held.together(
            lambda: commit_all(begun, written) if held.rank == 0 else None, _point("committed")
        )
    except Exception:
        if held.rank == 0:  # all ranks have stopped writing
            shutil.rmtree(begun.writing, ignore_errors=True)
        raise


def _point(name: str) -> Any:
    return lambda: files.SYSTEM.reached("acknowledge", name)


def _merged(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for theirs in objects for name, value in theirs.items()}


def _check_arguments(arguments: tuple[str, int, int | None]) -> None:
    directory, step, keep = arguments
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step: expected a whole number >= 0, got {step!r}")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep: expected None or a whole number >= 1, got {keep!r}")
    path = Path(directory)
    while not path.exists():
        path = path.parent
    if not path.is_dir():
        raise ValueError(f"directory: {str(path)!r} is a file; give a directory")
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"directory: {str(path)!r} cannot be written to; change its mode")


def _check_plain(what: str, value: Any) -> None:
    """Refuse now what could not be read back."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except Exception as error:
        named = re.search(r"GLOBAL (\S+)", str(error))  # torch says much about one class
        raise ValueError(
            f"{what}: expected tensors, containers and plain values, got "
            f"{named[1] if named else 'something'} that torch.load(weights_only=True) refuses; "
            "give its state_dict() or plain values instead"
        ) from error


def prepare(base: Path, target: Path, total: int, step: int) -> str:
    """Room, permission and a fresh directory, on rank 0."""
    if not base.exists():
        files.SYSTEM.make_directory(base)
    commit.sweep(base)
    commit.clear_the_way(target)
    free = shutil.disk_usage(base).free
    if free < total + RESERVE:
        raise RuntimeError(
            f"directory: expected {total + RESERVE} bytes free in {str(base)!r}, got {free}; "
            "free space or lower keep="
        )
    name = commit.new_name(step)
    files.SYSTEM.make_directory(base / name)
    return name


def write(held: Writer, begun: Begun) -> Any:
    """This rank's file; its chunks, size and checksum."""
    name, records = data_file(held.rank), list[Record]()
    with files.SYSTEM.create(begun.writing / name) as file:
        for part in held.parts():
            records += write_part(file, name, part)
        if held.rank == 0:
            for path, value in begun.values.items():
                records.append(write_object(file, name, path, value))
    return records, name, (file.size, file.digest)


def commit_all(begun: Begun, written: list[Any]) -> None:
    """Commit what all ranks wrote; on rank 0."""
    sums = {name: found for _, name, found in written}
    data = metadata_of(record for records, _, _ in written for record in records)
    sums[METADATA] = files.SYSTEM.write(begun.writing / METADATA, data)
    commit.commit(begun.writing, begun.target, sums, begun.facts)
