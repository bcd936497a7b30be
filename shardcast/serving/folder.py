"""Changes sent through a directory: one safetensors file per rank and version.

::

    3f9c2a71-00000012-345.full.0-of-2.safetensors      all elements of rank 0: a start
    3f9c2a71-00000012-345.full.1-of-2.safetensors
    3f9c2a71-00000012-345.next.0-of-2.safetensors      the same version, for readers of the last one
    3f9c2a71-00000013-346.next.0-of-2.safetensors      changes since 00000012
    NEWEST                                             the run that is written now

A file is flushed and then renamed, so a file with such a name is complete. A version is complete
when all its parts are there. There are no locks, and no rank waits for another.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardcast.checkpoint import storage
from shardcast.checkpoint.directory import WRITING
from shardcast.messages import safetensors
from shardcast.serving.applying import (
    DamagedChangesError,
    IncompleteChangesError,
    WrongVersionError,
    apply,
    begin_of_run,
    check_sum,
    joined,
)
from shardcast.serving.patches import Changes, WeightPatch

NAME = re.compile(
    r"(?P<run>[0-9a-f]+)-(?P<number>\d+)-\d+\.(?P<kind>full|next)"
    r"\.(?P<part>\d+)-of-(?P<parts>\d+)\.safetensors"
)
VERSION = re.compile(r"(?P<run>[0-9a-f]+)-(?P<number>\d+)-\d+")
RUN = re.compile(r"[0-9a-f]+")
NEWEST, HEAD = "NEWEST", "shardcast"
FULL_EVERY = 100  # versions


class _File(NamedTuple):
    """One part's file, described by its name."""

    path: Path
    run: str
    number: int
    is_full: bool
    part: int
    parts: int


class FolderSender:
    """Writer of changes into a directory that all ranks and readers share.

    Args:
        directory: directory for the files, created if missing. A later run may continue in it.
        optimizer: the result of ``shardcast.shard(..., changes=True)``.
        full_every: number of versions from one full version to the next. New readers, and readers
            that are too far behind, start from a full version. Files older than the last two full
            versions are removed.

    Attributes:
        values: number of this rank's values in the last ``send()``.
        nbytes: bytes of these values and their indices.
    """

    values = nbytes = 0

    def __init__(
        self,
        directory: str | os.PathLike[str],
        optimizer: Any,
        full_every: int = FULL_EVERY,
    ) -> None:
        if full_every < 1:
            raise ValueError(f"full_every: expected a number of versions >= 1, got {full_every!r}")
        self._directory, self._optimizer = Path(directory), optimizer
        self._full_every, self._sent = full_every, 0
        self._version: str | None = None
        self._fulls: list[int] = []  # numbers of the last two that were due
        self._is_named = False  # in NEWEST
        self._began = 0  # when its first file was written, by the clock of the disk
        self._directory.mkdir(parents=True, exist_ok=True)

    @property
    def version(self) -> str | None:
        """The last version sent; ``None`` before the first."""
        return self._version

    def send(self) -> str:
        """Write the changes since the last call; the first call writes all elements.

        Every rank must call it at the same points of the script, after one or several steps. It
        issues no collective and returns once this rank's file is on disk.

        Returns:
            The version, equal on all ranks.

        Raises:
            OSError: an error of the file system, on this rank only. The next call writes all of
                this rank's elements, and readers continue from that version.
        """
        # Results number the versions, so all ranks call it alike, even after an error on a disk.
        changes: Changes = self._optimizer.changes(self._version)
        told = changes
        is_due, is_first = self._sent % self._full_every == 0, self._sent == 0
        if is_due and not is_first:
            told = self._optimizer.changes()
        self._sent += 1
        if is_due:
            self._fulls = [*self._fulls[-1:], _run_of(told.version)[1]]
        self.values, self.nbytes = changes.numel, changes.nbytes
        self._write(changes)
        if told is not changes:
            self._write(told)
            # Nothing has happened since: who has the one has the other.
            self._write(
                Changes((), told.version, changes.version, told.part, told.parts, told.aliases)
            )
        self._version = told.version
        if told.part == 0:
            self._name_run(_run_of(told.version)[0])
        if is_due:
            self._remove_old(told)
        return told.version

    def _name_run(self, run: str) -> None:
        """Write this run's name into NEWEST, unless it names a later run."""
        named = _named_run(self._directory)
        stays = named == run or any(file.run == named for file in _files(self._directory))
        if not (self._is_named and stays):
            with storage.appearing(self._directory / NEWEST, WRITING) as path:
                path.write_text(run)
            self._is_named = True

    def _remove_old(self, full: Changes) -> None:
        """Remove files that no reader needs: this rank's, and on the first one other runs' too.

        Of other runs it removes only files that are older than this run, because readers have moved
        on to this run. A later run may have begun while this one still continues.
        """
        run, _ = _run_of(full.version)
        before = self._began if full.part == 0 and len(self._fulls) > 1 else 0
        for file in _files(self._directory, (WRITING, "")):
            if file.run == run:
                old = file.part == full.part and file.number < self._fulls[0]
            else:
                old = _written(file.path) < before
            if old:
                file.path.unlink(missing_ok=True)

    def _write(self, changes: Changes) -> None:
        kind = "full" if changes.is_full else "next"
        name = f"{changes.version}.{kind}.{changes.part}-of-{changes.parts}.safetensors"
        write_changes(self._directory / name, changes)
        self._began = self._began or _written(self._directory / name)


class FolderReader:
    """Reader of changes from a directory that each rank's :class:`FolderSender` writes into.

    Args:
        directory: directory of the sender; may still be empty or missing.
        version: version of the reader's model, if you saved it. ``None`` starts from a full
            version.

    Raises:
        ValueError: ``version`` is not a version.
    """

    def __init__(self, directory: str | os.PathLike[str], version: str | None = None) -> None:
        if version is not None:
            _run_of(version)
        self._directory, self._version = Path(directory), version

    @property
    def version(self) -> str | None:
        """The model's version; ``None`` before a first full version."""
        return self._version

    def update(self, target: nn.Module | Mapping[str, Tensor]) -> str | None:
        """Bring a model to the newest complete version; see :func:`apply`.

        It does nothing if there is no new complete version. If a part is missing or damaged, it
        skips to a later full version. Local; it waits for nothing.

        Returns:
            The version that the model has now.

        Raises:
            DamagedChangesError: a file is damaged and no later full version exists. All versions
                before it were applied, and :attr:`version` says which one the model has.
            WrongModelError: a parameter is missing, or has another shape or dtype.
        """
        failure: Exception | None = None
        spoiled: set[Path] = set()
        while (way := self._way(spoiled)) is not None:
            try:
                parts = [joined([read_changes(path) for path in chain]) for chain in way]
                self._version = apply(target, parts, self._version)
            except FileNotFoundError:  # removed, because there are newer ones
                spoiled.update(path for chain in way for path in chain if not path.exists())
            except (DamagedChangesError, IncompleteChangesError, WrongVersionError) as error:
                failure = failure or error
                spoiled.update(_spoiled([path for chain in way for path in chain]))
            else:
                failure = None
        if failure is not None:
            raise failure
        return self._version

    def _way(self, spoiled: Container[Path]) -> list[list[Path]] | None:
        """Return the files to apply next, in order, for each part.

        They lead to the next version, or to the newest version whose parts are all full. If a rank
        could not write its part of the next version, they lead to the first version that every part
        can reach.

        Args:
            spoiled: unusable files.
        """
        try:
            files = [file for file in _files(self._directory) if file.path not in spoiled]
        except FileNotFoundError:
            return None
        run, last = _newest_run(self._directory, files), 0
        if self._version is not None and _run_of(self._version)[0] == run:
            last = _run_of(self._version)[1]
        fulls: dict[int, dict[int, Path]] = {}
        nexts: dict[int, dict[int, Path]] = {}
        parts = 0
        for file in files:
            if file.run == run and file.number > last:
                of_kind = fulls if file.is_full else nexts
                of_kind.setdefault(file.number, {})[file.part] = file.path
                parts = file.parts
        numbers = sorted({*fulls, *nexts})
        complete = [number for number in fulls if len(fulls[number]) == parts]
        # A full part of a rank also has all of its changes.
        following = {**fulls.get(last + 1, {}), **nexts.get(last + 1, {})}
        if last and len(following) == parts > 0:
            return [[path] for path in following.values()]
        if complete:
            return [[path] for path in fulls[max(complete)].values()]
        chains: dict[int, list[Path]] = {part: [] for part in range(parts) if last}
        reached = last
        for number in numbers:
            for part in range(parts):
                if part in fulls.get(number, {}):
                    chains[part] = [fulls[number][part]]
                elif number == reached + 1 and part in nexts.get(number, {}) and part in chains:
                    chains[part] = [*chains[part], nexts[number][part]]
                else:
                    chains.pop(part, None)
            reached = number
            if len(chains) == parts:
                return [*chains.values()]
        return None


def _spoiled(paths: Sequence[Path]) -> Sequence[Path]:
    """Return the files that are to blame when files cannot be applied."""
    return (
        [path for path in paths if not _is_sound(path)]
        or [path for path in paths if ".next." in path.name]
        or paths
    )


def _is_sound(path: Path) -> bool:
    try:
        check_sum(read_changes(path))
    except (DamagedChangesError, FileNotFoundError):
        return False
    return True


def _named_run(directory: Path) -> str | None:
    """Return the run that NEWEST names; ``None`` if NEWEST is missing or damaged."""
    try:
        text = (directory / NEWEST).read_bytes().decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
    return text if RUN.fullmatch(text) else None


def _newest_run(directory: Path, files: Sequence[_File]) -> str | None:
    """Return the run that NEWEST names, or else the run of the newest file."""
    named = _named_run(directory)
    if not files or any(file.run == named for file in files):
        return named
    return max(files, key=lambda file: _written(file.path)).run


def _written(path: Path) -> int:
    """Return when a file was written, in nanoseconds; 0 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def write_changes(path: Path, changes: Changes) -> None:
    """Write one part as a safetensors file that is complete or absent."""
    save_file = safetensors().torch.save_file
    tensors: dict[str, Tensor] = {}
    patches = []
    for number, patch in enumerate(changes):
        tensors[f"{number}.values"] = patch.values.cpu().contiguous()
        fact: dict[str, Any] = {
            "name": patch.name,
            "shape": [*patch.shape],
            "dtype": _name_of(patch.dtype),
            "indices": _name_of(patch.indices.dtype),
        }
        begin = begin_of_run(patch.indices)
        if begin is not None:  # of full versions, usually
            fact["from"] = begin
        else:
            tensors[f"{number}.indices"] = patch.indices.cpu().contiguous()
        patches.append(fact)
    head = {
        "version": changes.version,
        "since": changes.since,
        "part": changes.part,
        "parts": changes.parts,
        "aliases": dict(changes.aliases),
        "checksum": changes.checksum,
        "patches": patches,
    }
    with storage.appearing(path, WRITING) as writing:
        save_file(tensors, writing, metadata={HEAD: json.dumps(head)})


def read_changes(path: str | os.PathLike[str]) -> Changes:
    """Read one part; its checksum is checked when it is applied.

    Raises:
        DamagedChangesError: it is not a file of changes.
        FileNotFoundError: the file does not exist.
    """
    package = safetensors()
    try:
        with package.safe_open(path, framework="pt") as file:
            head = json.loads(file.metadata()[HEAD])
            _check_head(head)
            patches = [_patch(file, number, fact) for number, fact in enumerate(head["patches"])]
        return Changes(
            tuple(patches),
            head["version"],
            head["since"],
            head["part"],
            head["parts"],
            head["aliases"],
            head["checksum"] or "none",
        )
    except FileNotFoundError:
        raise
    except (
        package.SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OSError,
        OverflowError,
        RecursionError,
    ) as error:
        raise DamagedChangesError(
            f"changes: {str(path)!r} is not a file of changes, or is damaged: {error}; nothing "
            "of it was written"
        ) from error


def _check_head(head: Any) -> None:
    """Raise ValueError for facts that no sender writes, even if their checksum is right."""
    aliases, since, patches = head["aliases"], head["since"], head["patches"]
    shapes = [fact["shape"] for fact in patches]
    texts = [head["version"], *([] if since is None else [since]), head["checksum"]]
    texts += [fact["name"] for fact in patches]
    counts = [head["part"], head["parts"], *itertools.chain(*shapes)]
    right = (
        (all(isinstance(text, str) for text in texts), "texts"),
        (all(type(count) is int and 0 <= count < 1 << 63 for count in counts), "counts"),
        (head["part"] < head["parts"], "a part of its parts"),
        (all(isinstance(shape, list) for shape in shapes), "shapes as lists"),
        (
            isinstance(aliases, dict) and all(isinstance(it, str) for it in aliases.values()),
            "names",
        ),
    )
    if wrong := [what for is_so, what in right if not is_so]:
        raise ValueError(f"expected {wrong[0]}")


def _patch(file: Any, number: int, fact: Mapping[str, Any]) -> WeightPatch:
    values = file.get_tensor(f"{number}.values")
    if "from" in fact:
        begin, dtype = int(fact["from"]), _dtype_of(fact["indices"])
        indices = torch.arange(begin, begin + values.numel(), dtype=dtype)
    else:
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
    if (match := VERSION.fullmatch(version)) is None:
        raise ValueError(
            f"version: expected one that a reader or sender had, RUN-NUMBER-STEP, got {version!r}"
        )
    return match["run"], int(match["number"])


def _files(directory: Path, prefixes: Sequence[str] = ("",)) -> Iterator[_File]:
    for name in os.listdir(directory):
        for prefix in prefixes:
            if name.startswith(prefix) and (match := NAME.fullmatch(name[len(prefix) :])):
                yield _File(
                    directory / name,
                    match["run"],
                    int(match["number"]),
                    match["kind"] == "full",
                    int(match["part"]),
                    int(match["parts"]),
                )
