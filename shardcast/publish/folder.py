"""Changes through a directory: safetensors files, one of each rank for each version.

::

    3f9c2a71-00000012-345.full.0-of-2.safetensors      all elements of rank 0: to begin with
    3f9c2a71-00000012-345.full.1-of-2.safetensors
    3f9c2a71-00000012-345.next.0-of-2.safetensors      the same version, for whoever has the last
    3f9c2a71-00000013-346.next.0-of-2.safetensors      what has changed since 00000012
    NEWEST                                             the run that is written now

A file appears by one rename after it was flushed, so that a file with such a name is complete; a
version is complete when all its parts are there. Nobody locks, and no rank waits for another.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardcast.checkpoint import storage
from shardcast.extensions.changes.patches import Changes, WeightPatch
from shardcast.publish.applying import (
    DamagedChangesError,
    IncompleteChangesError,
    WrongVersionError,
    apply,
    begin_of_run,
)

NAME = re.compile(
    r"(?P<run>[0-9a-f]+)-(?P<number>\d+)-\d+\.(?P<kind>full|next)"
    r"\.(?P<part>\d+)-of-(?P<parts>\d+)\.safetensors"
)
WRITING, NEWEST, HEAD = ".writing-", "NEWEST", "shardcast"
FULL_EVERY = 100  # versions


class Follows(Protocol):
    """An optimizer that knows what has changed: what ``shard(..., changes=True)`` returns."""

    def changes(self, since: str | None = None, weights: str | None = None) -> Changes:
        """See :meth:`shardcast.ShardedOptimizer.changes`."""


class _File(NamedTuple):
    """A file of a part, as its name says."""

    path: Path
    run: str
    number: int
    is_full: bool
    part: int
    parts: int


class FolderSender:
    """Writes what has changed into a directory that all ranks and readers see.

    Args:
        directory: made if it is missing. A later run of the training may go on in it.
        optimizer: of ``shardcast.shard(..., changes=True)``.
        full_every: versions from one to the next that has all elements, for readers that begin or
            are too far behind. Files of before the last but one of these are removed.
        weights: what :meth:`shardcast.ShardedOptimizer.changes` is asked for.

    Attributes:
        values, nbytes: how many values of this rank had changed when it last sent, and bytes of
            them and their indices.
    """

    values = nbytes = 0

    def __init__(
        self,
        directory: str | os.PathLike[str],
        optimizer: Follows,
        full_every: int = FULL_EVERY,
        weights: str | None = None,
    ) -> None:
        if full_every < 1:
            raise ValueError(f"full_every: expected a number of versions >= 1, got {full_every!r}")
        self._directory, self._optimizer, self._weights = Path(directory), optimizer, weights
        self._full_every, self._sent = full_every, 0
        self._version: str | None = None
        self._fulls: list[int] = []  # numbers of the last two
        self._directory.mkdir(parents=True, exist_ok=True)

    @property
    def version(self) -> str | None:
        """The version that was sent last; ``None`` before that."""
        return self._version

    def send(self) -> str:
        """Write what has changed since the last call; the first one writes all elements.

        Every rank must call it, at the same points of the script: after a step, or after several.
        It issues no collective, and returns when this rank's file is safe on the disk.

        Returns:
            the version, equal on all ranks.

        Raises:
            OSError: of the file system. The next call writes all elements.
        """
        due, self._sent = self._sent % self._full_every == 0, self._sent + 1  # equal on all ranks
        changes = self._optimizer.changes(self._version, self._weights)
        self.values, self.nbytes = changes.numel, changes.nbytes
        self._write(changes)
        if due and not changes.is_full:
            full = self._optimizer.changes(None, self._weights)
            self._write(full)
            # Nothing has happened since: who has the one has the other.
            self._write(
                Changes((), full.version, changes.version, full.part, full.parts, full.aliases)
            )
            changes = full
        if changes.is_full:
            self._note_full(changes)
        self._version = changes.version
        return changes.version

    def _note_full(self, full: Changes) -> None:
        """Remove what nobody needs any more; say which run it is."""
        run, number = _run_of(full.version)
        self._fulls = [*self._fulls[-1:], number]
        if full.part == 0 and len(self._fulls) == 1:
            with storage.appearing(self._directory / NEWEST, WRITING) as path:
                path.write_text(run)
        for file in _files(self._directory, (WRITING, "")):
            if file.run == run:
                old = file.part == full.part and file.number < self._fulls[0]
            else:  # of an earlier run, of which readers are by now
                old = full.part == 0 and len(self._fulls) > 1
            if old:
                file.path.unlink(missing_ok=True)

    def _write(self, changes: Changes) -> None:
        kind = "full" if changes.is_full else "next"
        name = f"{changes.version}.{kind}.{changes.part}-of-{changes.parts}.safetensors"
        write_changes(self._directory / name, changes)


class FolderReader:
    """Follows a directory that a :class:`FolderSender` of each rank writes into.

    Args:
        directory: may be empty, or missing yet.
        version: that the reader's model has, if it was kept with it; ``None`` begins with a full
            one.
    """

    def __init__(self, directory: str | os.PathLike[str], version: str | None = None) -> None:
        self._directory, self._version = Path(directory), version

    @property
    def version(self) -> str | None:
        """The version that the model has; ``None`` before a first full version."""
        return self._version

    def update(self, target: nn.Module | Mapping[str, Tensor]) -> str | None:
        """Bring a model to the newest version that is there; see :func:`apply`.

        Local, and waits for nobody: where nothing new is complete yet, nothing happens. Where a
        version on the way is missing or damaged the newest full one behind it is taken.

        Returns:
            the version that the model has now.

        Raises:
            DamagedChangesError: a file is not what was written, and no full version is behind it.
                The versions before it were applied; the model has :attr:`version`.
            WrongModelError: a parameter is missing, or has another shape or dtype.
        """
        failure: Exception | None = None
        ways = self._ways()
        while ways:
            try:
                parts = [read_changes(path) for path in ways[0]]
                self._version = apply(target, parts, self._version)
            except FileNotFoundError:  # removed, because there are newer ones
                ways = self._ways()
            except (DamagedChangesError, IncompleteChangesError, WrongVersionError) as error:
                failure, ways = failure or error, ways[1:]
            else:
                failure, ways = None, self._ways()
        if failure is not None:
            raise failure
        return self._version

    def _ways(self) -> list[list[Path]]:
        """Find what to apply next, as files of all parts: the next version, the newest full one."""
        try:
            newest = (self._directory / NEWEST).read_text()
        except FileNotFoundError:
            return []
        has: tuple[str, int] = _run_of(self._version) if self._version else ("", 0)
        is_of_run = has[0] == newest
        fulls: dict[int, dict[int, _File]] = {}
        following: dict[int, _File] = {}
        for file in _files(self._directory):
            if file.run != newest:
                continue
            if file.is_full:
                fulls.setdefault(file.number, {})[file.part] = file
            # All elements of a rank are what has changed, too.
            if file.number == has[1] + 1 and not (file.is_full and file.part in following):
                following[file.part] = file
        newer = [n for n, files in fulls.items() if _all(files) and not (is_of_run and n <= has[1])]
        ways = [following] if is_of_run and _all(following) else []
        if newer and fulls[max(newer)] not in ways:
            ways.append(fulls[max(newer)])
        return [[file.path for file in files.values()] for files in ways]


def _all(files: Mapping[int, _File]) -> bool:
    """Return whether all parts of a version are there."""
    return bool(files) and len(files) == next(iter(files.values())).parts


def write_changes(path: Path, changes: Changes) -> None:
    """Write one part as a safetensors file, which is there whole or not at all."""
    from safetensors.torch import save_file  # not needed for anything else

    tensors: dict[str, Tensor] = {}
    patches = []
    for number, patch in enumerate(changes):
        tensors[f"{number}.values"] = patch.values.cpu().contiguous()
        fact: dict[str, Any] = {
            "name": patch.name,
            "shape": [*patch.shape],
            "dtype": _name_of(patch.dtype),
        }
        if patch.indices is not None:
            begin = begin_of_run(patch.indices)
            fact["indices"] = _name_of(patch.indices.dtype)
            if begin is not None:  # of full versions, usually
                fact["from"] = begin
            else:
                tensors[f"{number}.indices"] = patch.indices.cpu().contiguous()
        patches.append(fact)
    head = {
        "version": changes.version, "since": changes.since, "part": changes.part,
        "parts": changes.parts, "aliases": dict(changes.aliases), "checksum": changes.checksum,
        "patches": patches,
    }  # fmt: skip
    with storage.appearing(path, WRITING) as writing:
        save_file(tensors, writing, metadata={HEAD: json.dumps(head)})


def read_changes(path: str | os.PathLike[str]) -> Changes:
    """Read one part; whether it is what was sent is seen where it is applied.

    Raises:
        DamagedChangesError: it is no such file.
        FileNotFoundError: there is none.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            head = json.loads(file.metadata()[HEAD])
            patches = [_patch(file, number, fact) for number, fact in enumerate(head["patches"])]
        return Changes(
            tuple(patches), head["version"], head["since"], head["part"], head["parts"],
            head["aliases"], head["checksum"] or "none",
        )  # fmt: skip
    except FileNotFoundError:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise DamagedChangesError(
            f"changes: {str(path)!r} is no file of changes, or is damaged: {error}; nothing of it "
            "was written"
        ) from error


def _patch(file: Any, number: int, fact: Mapping[str, Any]) -> WeightPatch:
    values = file.get_tensor(f"{number}.values")
    indices = None
    if "from" in fact:
        begin, dtype = int(fact["from"]), _dtype_of(fact["indices"])
        indices = torch.arange(begin, begin + values.numel(), dtype=dtype)
    elif "indices" in fact:
        indices = file.get_tensor(f"{number}.indices")
    return WeightPatch(fact["name"], (*fact["shape"],), _dtype_of(fact["dtype"]), values, indices)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype


def _run_of(version: str) -> tuple[str, int]:
    run, number, _ = version.split("-")
    return run, int(number)


def _files(directory: Path, prefixes: Sequence[str] = ("",)) -> Iterator[_File]:
    for name in os.listdir(directory):
        for prefix in prefixes:
            if name.startswith(prefix) and (match := NAME.fullmatch(name[len(prefix) :])):
                yield _File(
                    directory / name, match["run"], int(match["number"]), match["kind"] == "full",
                    int(match["part"]), int(match["parts"]),
                )  # fmt: skip
