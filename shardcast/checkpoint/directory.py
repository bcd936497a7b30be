"""Directories of checkpoints: commit, verify, choose and delete them.

A checkpoint is written to a directory ``.writing-...``, flushed, and then renamed to ``step-...``.
So a directory with that name is complete. Checksums tell whether it still is::

    step-000000100/
        __0_0.distcp  __1_0.distcp ...   data, one file per rank
        __once_0.distcp                  stored once: groups, extra, per_rank
        .metadata                        DCP's index of chunks
        shardcast.json                   size and SHA-256 of the files above, and facts
        COMMITTED                        SHA-256 of shardcast.json
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcast.checkpoint import storage
from shardcast.checkpoint.dcp import (
    METADATA,
    DamagedCheckpointError,
    Reader,
    Stored,
    UnreadableError,
    fitting,
)
from shardcast.comm import warn_first

FORMAT = 1
READERS = 8  # threads that verify the files of one checkpoint
FACTS = {"step": int, "world_size": int, "partition": str, "optimizer": str, "files": dict}
OPTIONAL = ("digest", "digest_of", "torch", "python")
MANIFEST, MARKER = "shardcast.json", "COMMITTED"
NAME = re.compile(r"step-(\d{9}|[1-9]\d{9,})")  # as folder_of() gives; `step-1` is a user's
EXPORTING = ".exporting-"
WRITING, BACKGROUND, LEAVING, DAMAGED = ".writing-", ".background-", ".leaving-", ".damaged-"


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    Attributes:
        path: folder of the checkpoint.
        step: number of the step after which it was saved.
        world_size: number of ranks that saved it.
        partition: partition of their layout.
        optimizer: class of the optimizer.
        files: size (``bytes``) and ``sha256`` of each file, by name.
        digest: digest of masters and state, if it was saved with one. ``digest_of`` names the forms
            in which they were kept.
        torch, python: versions that wrote it, if recorded.
    """

    path: Path
    step: int
    world_size: int
    partition: str
    optimizer: str
    files: Mapping[str, Mapping[str, Any]]
    digest: str | None = None
    digest_of: str | None = None
    torch: str | None = None
    python: str | None = None

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes."""
        return sum(listed["bytes"] for listed in self.files.values())

    @property
    def tensors(self) -> dict[str, Stored]:
        """The dtype and shape of each stored tensor, keyed as in the files; reads ``.metadata``."""
        reader = Reader(self.path)
        return {reader.paths[path]: stored for path, stored in reader.stored.items()}

    @property
    def trained(self) -> frozenset[str]:
        """The names of the parameters in the optimizer's groups; reads a file."""
        with fitting(self.path):
            groups = Reader(self.path).object(("optimizer", "param_groups"))
            return frozenset(name for group in groups for name in group["params"])

    @property
    def optimizer_steps(self) -> int | None:
        """Largest number of steps of any parameter; ``None`` if the optimizer counts none.

        It differs from :attr:`step` if a framework numbers checkpoints in another way.
        """
        reader = Reader(self.path)
        counts = [path for path in reader.stored if path[::3] == ("optimizer", "step")]
        with fitting(self.path, ValueError, RuntimeError):
            return max((int(reader.tensor(path).max()) for path in counts), default=None)


def absolute(directory: object) -> Path:
    """Return ``directory`` as an absolute path.

    Raises:
        TypeError: ``directory`` is not a path.
    """
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(
            f"directory: expected a path, got {type(directory).__name__}; it comes first: "
            "save(directory, model, optimizer, step=...), load(directory, model, optimizer)"
        )
    return Path(os.path.abspath(directory))


def folder_of(directory: Path, step: int) -> Path:
    """Return the directory of the checkpoint of ``step``."""
    return directory / f"step-{step:09d}"


def steps(directory: Path) -> dict[int, Path]:
    """Return the committed checkpoints of a directory, newest first."""
    if not directory.is_dir():
        return {}
    matches = ((NAME.fullmatch(path.name), path) for path in directory.iterdir())
    numbered = [(int(match[1]), path) for match, path in matches if match and path.is_dir()]
    return dict(sorted(numbered, reverse=True))


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is one checkpoint, not a directory of them."""
    files = (MANIFEST, MARKER, METADATA)
    named = NAME.fullmatch(path.name) is not None and not steps(path)
    return named or any((path / name).exists() for name in files)


def file_in(path: Path) -> Path | None:
    """Return ``path`` or the folder above it that is a file; ``None`` if neither is."""
    return next((place for place in (path, *path.parents) if place.is_file()), None)


def new_name(prefix: str, target: Path) -> str:
    """Make a name next to ``target`` that was never used before."""
    return f"{prefix}{target.name}-{uuid.uuid4().hex[:12]}"


def commit(
    writing: Path,
    target: Path,
    sums: Mapping[str, tuple[int, str]],
    facts: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> None:
    """Write the manifest and the marker, flush, and rename the directory.

    Args:
        overwrite: replace a checkpoint of that name, by two renames.

    Raises:
        ValueError: a checkpoint of that name exists with other data.
    """
    sizes = {name: (writing / name).stat().st_size for name in sums if (writing / name).exists()}
    for name, (size, _) in sums.items():
        if sizes.get(name) != size:
            raise RuntimeError(
                f"checkpoint: expected {size} bytes in {name!r}, rank 0 sees {sizes.get(name)}; "
                "the directory must be on a file system that all ranks share"
            )
    listed = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sums.items()}
    if os.path.lexists(target) and not overwrite:
        existing = manifest_of(target)
        # Equal metadata may be pickled in other bytes; all that it says is in the data.
        if _data(listed) != _data(existing.files):
            raise _exists(target)
        shutil.rmtree(writing)
        return
    manifest = {"format": FORMAT, **facts, "files": listed}
    data = json.dumps(manifest, indent=1).encode()
    files = storage.Files()
    _, digest = files.write(writing / MANIFEST, data)
    files.write(writing / MARKER, digest.encode())
    storage.flush(writing)
    if not os.path.lexists(target):
        files.rename(writing, target)
        return
    leaving = target.with_name(new_name(LEAVING, target))
    files.rename(target, leaving)
    files.rename(writing, target)
    delete(leaving)


def manifest_of(folder: Path) -> Manifest:
    """Read the manifest, and check it against the marker and the directory's name.

    Raises:
        DamagedCheckpointError: a file is missing or wrong; names it.
    """
    match = NAME.fullmatch(folder.name)
    for name in (MARKER, MANIFEST):
        if not (folder / name).is_file():
            hint = "" if match else "; if shardcast did not write this, see import_dcp()"
            raise _damaged(folder, name, "is missing" + hint)
    if storage.digest_of(folder / MANIFEST) != (folder / MARKER).read_text("utf-8", "replace"):
        raise _damaged(folder, MANIFEST, f"does not have the checksum in {MARKER!r}")
    try:
        facts: dict[str, Any] = dict(json.loads((folder / MANIFEST).read_bytes()))
    except (ValueError, TypeError) as error:
        raise _damaged(folder, MANIFEST, f"cannot be read: {error}") from error
    if facts.get("format") != FORMAT:
        raise ValueError(
            f"checkpoint {str(folder)!r}: expected format {FORMAT}, got {facts.get('format')}; "
            "load it with the release of shardcast that wrote it"
        )
    for key, kind in FACTS.items():
        if not isinstance(facts.get(key), kind):
            wrong = f"has {facts.get(key)!r} as {key!r}, expected {kind.__name__}"
            raise _damaged(folder, MANIFEST, wrong)
    for name, listed in facts["files"].items():
        if not storage.is_plain_name(name):
            raise _damaged(folder, MANIFEST, f"lists {name!r}, which is no plain file name")
        if not isinstance(listed, dict) or not isinstance(listed.get("bytes"), int):
            raise _damaged(folder, MANIFEST, f"has {listed!r} for {name!r}, no size")
    if METADATA not in facts["files"]:
        raise _damaged(folder, MANIFEST, f"does not list {METADATA!r}")
    if match and int(match[1]) != facts["step"]:
        reason = f"is of step {facts['step']}; the directory was renamed; restore its name"
        raise _damaged(folder, MANIFEST, reason)
    kept = {key: facts[key] for key in (*FACTS, *OPTIONAL) if key in facts}
    return Manifest(folder, **kept)


def _damaged(folder: Path, name: str, wrong: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"checkpoint {str(folder)!r}: file {name!r} {wrong}")


def damage(
    folder: Path, share: int = 0, shares: int = 1, written_since: int | None = None
) -> DamagedCheckpointError | None:
    """Return the damage of a checkpoint, or ``None``; rank ``share`` of ``shares`` reads its part.

    The error names the file and the damage.

    Args:
        written_since: time in nanoseconds; for files last written before it, only the size is
            compared.

    Raises:
        ValueError: the checkpoint is intact, but this version of shardcast, torch or Python cannot
            read it. Taking an older checkpoint instead would lose steps without need.
    """
    try:
        manifest = manifest_of(folder)
        files = manifest.files
        names = sorted(files)[share::shares]
        verify = functools.partial(_verify, folder, files, written_since)
        if written_since is None:
            with ThreadPoolExecutor(READERS) as pool:
                list(pool.map(verify, names))
        else:  # hardly anything is read; and an interpreter that ends starts no threads
            list(map(verify, names))
        if METADATA in names:  # all that it refers to must be in files that have checksums
            for name, size in Reader(folder).sizes.items():
                if name not in files or files[name]["bytes"] < size:
                    reason = f"refers to byte {size} of {name!r}, which {MANIFEST!r} does not list"
                    raise _damaged(folder, METADATA, reason)
    except DamagedCheckpointError as error:
        return error
    except UnreadableError as error:  # though its checksum is right
        raise ValueError(
            f"checkpoint {str(folder)!r}, written by torch {manifest.torch} and Python "
            f"{manifest.python}, is intact, but {error}; load it with the versions that "
            "wrote it, or with a newer release of shardcast"
        ) from error
    except RuntimeError as error:
        return DamagedCheckpointError(f"checkpoint {str(folder)!r}: {error}")
    return None


def _verify(
    folder: Path, files: Mapping[str, Mapping[str, Any]], written_since: int | None, name: str
) -> None:
    path, listed = folder / name, files[name]
    status = path.stat() if path.is_file() else None
    if status is None:
        wrong = "is missing"
    elif status.st_size != listed["bytes"]:
        wrong = f"has {status.st_size} bytes, expected {listed['bytes']}"
    elif written_since is not None and status.st_mtime_ns < written_since:
        return
    elif storage.digest_of(path) != listed.get("sha256"):
        wrong = "has a wrong checksum: its contents changed after they were written"
    else:
        return
    raise _damaged(folder, name, wrong)


def choose(
    path: Path,
    found: Iterable[Path],
    check: Callable[[Path], DamagedCheckpointError | None],
) -> Path | None:
    """Return the named checkpoint, or the newest intact one in it; ``None`` if it has none.

    Args:
        path: a directory of checkpoints, or one checkpoint.
        found: what :func:`steps` has found in the directory, the same on all ranks.
        check: returns the damage of a checkpoint, or ``None``.

    Raises:
        DamagedCheckpointError: the named checkpoint, or every one in the directory, is damaged.
        FileNotFoundError: the named checkpoint does not exist.
        NotADirectoryError: the path is a file, or lies below one.
    """
    named = is_checkpoint(path)
    if file := file_in(path):
        raise NotADirectoryError(
            "directory: expected a directory of checkpoints, or one checkpoint, got the file "
            f"{str(file)!r}; checkpoint.load_plain(model, optimizer, weights) loads files of "
            "torch.save and safetensors"
        )
    if named and not path.exists():
        raise FileNotFoundError(f"directory: there is no {str(path)!r}; check the path")
    return newest_sound([path] if named else found, check, path, named=named)


def newest_sound(
    folders: Iterable[Path],
    check: Callable[[Path], DamagedCheckpointError | None],
    place: Path,
    *,
    named: bool,
) -> Path | None:
    """Return the first of ``folders`` without damage; ``None`` if there are no folders.

    It warns about damaged ones that it skips.

    Args:
        folders: newest first.
        check: returns the damage of a folder, or ``None``.
        place: searched directory, for errors.
        named: a user named the one folder, so its own error is raised.

    Raises:
        DamagedCheckpointError: all folders are damaged.
    """
    reasons: list[str] = []
    for folder in folders:
        error = check(folder)
        if error is None:
            if reasons:
                warn_first(f"falling back to {str(folder)!r}: " + "; ".join(reasons))
            return folder
        if named:
            raise error
        reasons.append(str(error))
    if reasons:
        raise DamagedCheckpointError(
            f"directory {str(place)!r}: no intact checkpoint is left: " + "; ".join(reasons)
        )
    return None


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint whose checksums hold; ``None`` if there is no checkpoint.

    It reads all files of the checkpoint. If the newest one is damaged, it warns and tries the
    previous one.

    Local: any process may call it.

    Args:
        directory: directory of a run, or one checkpoint in it.

    Raises:
        DamagedCheckpointError: every checkpoint is damaged.
    """
    path = absolute(directory)
    return choose(path, steps(path).values(), damage)


def chosen(directory: str | os.PathLike[str]) -> Path:
    """Return the named checkpoint, or the newest of a directory, verified.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DamagedCheckpointError: every checkpoint is damaged.
    """
    newest = latest(directory)
    if newest is None:
        raise FileNotFoundError(
            f"directory: no committed checkpoint in {str(directory)!r}; check the path"
        )
    return newest


def inspect(directory: str | os.PathLike[str]) -> Manifest:
    """Verify a checkpoint, or the newest one of a directory, and return its description.

    Local: any process may call it.

    Args:
        directory: directory of a run, or one checkpoint in it.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DamagedCheckpointError: every checkpoint is damaged.
    """
    return manifest_of(chosen(directory))


def clear_the_way(target: Path, facts: Mapping[str, Any]) -> None:
    """Check that the name is free, or has a checkpoint that may turn out identical.

    A damaged checkpoint of the same step is moved aside.

    Raises:
        ValueError: a sound checkpoint of this step exists, with other ``facts``.
    """
    if not os.path.lexists(target):
        return
    error = damage(target)
    if error is None:
        existing = manifest_of(target)
        if any(getattr(existing, name) != fact for name, fact in facts.items()):
            raise _exists(target)
        return
    aside = target.with_name(new_name(DAMAGED, target))
    warn_first(f"{error}; set aside as {aside.name!r}")
    storage.Files().rename(target, aside)


def _data(files: Mapping[str, Any]) -> dict[str, object]:
    return {name: listed for name, listed in files.items() if name != METADATA}


def _exists(target: Path) -> ValueError:
    return ValueError(
        f"step: checkpoint {str(target)!r} exists already, with other contents, and is not "
        "overwritten by default; pass overwrite=True, or save under another step"
    )


def sweep(directory: Path, *prefixes: str) -> None:
    """Delete the remains of interrupted saves and deletions; failures only warn."""
    for path in directory.iterdir():
        if path.name.startswith(prefixes):
            delete(path)


def retain(directory: Path, step: int, keep: int) -> None:
    """Delete all but the newest ``keep`` sound checkpoints up to ``step``.

    Newer ones stay, and so do damaged ones in between. It reads only files that were written after
    their checkpoint was committed.
    """
    older = [path for number, path in steps(directory).items() if number < step]
    sound = 0
    while older and sound < keep - 1:
        sound += _is_as_committed(older.pop(0))
    for path in older:
        leaving = path.with_name(new_name(LEAVING, path))
        try:
            storage.Files().rename(path, leaving)  # first of all no checkpoint any more
        except OSError as error:
            warn_first(f"keep: {str(path)!r} could not be deleted: {error}")
            continue
        delete(leaving)


def _is_as_committed(folder: Path) -> bool:
    try:
        return damage(folder, written_since=(folder / MARKER).stat().st_mtime_ns) is None
    except (OSError, ValueError):  # no marker, or of another release
        return False


def delete(path: Path) -> None:
    """Delete a directory; a failure only warns."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        warn_first(f"{str(path)!r} could not be deleted: {error}")
