"""The thin layer between checkpoints and the file system: every change on disk goes through it.

Each method calls :meth:`Files.reached` first, which does nothing here. Tests put an object in
place of :data:`SYSTEM` whose ``reached`` raises or kills the process, so that a save is cut off
at every single write, flush, rename and acknowledgement.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch


class Files:
    """Plain files and directories, with the flushes that make them survive a power cut."""

    def reached(self, point: str, path: str) -> None:
        """Called before each operation ``point`` on ``path``; for tests."""

    def make_directory(self, path: Path) -> None:
        """Make a directory that must not exist yet; parents are made, existing ones kept."""
        self.reached("mkdir", str(path))
        missing = [parent for parent in path.parents if not parent.exists()]
        path.mkdir(parents=True)
        for made in (path, *missing):
            self.flush_directory(made.parent)

    def create(self, path: Path) -> HashingFile:
        """A new file to write to, hashed as it is written; it must not exist yet."""
        self.reached("create", str(path))
        return HashingFile(self, path)

    def write(self, path: Path, data: bytes) -> tuple[int, str]:
        """Write a small file and flush it; its size and SHA-256."""
        with self.create(path) as file:
            file.write(data)
        return file.size, file.digest

    def tell(self, path: Path, data: bytes) -> None:
        """Write a small file for another rank, which sees all of it or none; it is not flushed."""
        self.reached("tell", str(path))
        draft = path.with_suffix(".draft")
        draft.write_bytes(data)
        os.replace(draft, path)

    def flush_directory(self, path: Path) -> None:
        """Make the entries of a directory durable."""
        self.reached("flush", str(path))
        handle = os.open(path, os.O_RDONLY)
        try:
            with naming(path):
                os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a directory to a name that is free, and make that durable.

        A race for the name is lost with an error: a directory with files is never replaced.
        """
        self.reached("rename", str(source))
        os.replace(source, target)
        self.flush_directory(target.parent)

    def remove(self, path: Path) -> None:
        """Delete a directory and what is in it."""
        self.reached("remove", str(path))
        shutil.rmtree(path)


class HashingFile(io.RawIOBase):
    """A new binary file whose size and SHA-256 are known once it is closed.

    Leaving the ``with`` block flushes it to the disk, unless there was an error.
    """

    def __init__(self, files: Files, path: Path) -> None:
        self._files, self._path = files, path
        self._file = open(path, "xb")  # noqa: SIM115, closed by close()
        self._hash = hashlib.sha256()
        self.size = 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Append ``data``."""
        view = memoryview(data).cast("B")
        try:
            with naming(self._path):
                self._files.reached("write", str(self._path))
                self._file.write(view)
        except OSError as error:
            self._error = error
            raise
        self._hash.update(view)
        self.size += len(view)
        return len(view)

    def save(self, value: Any) -> None:
        """Append ``torch.save(value)``.

        Raises:
            OSError: as the file system said it; torch's writer would say something else.
        """
        try:
            torch.save(value, cast(IO[bytes], self))
        except Exception:
            if self._error is not None:
                raise self._error from None
            raise

    def tell(self) -> int:
        """Bytes written so far."""
        return self.size

    @property
    def digest(self) -> str:
        """SHA-256 of all that was written."""
        return self._hash.hexdigest()

    def close(self) -> None:
        """Close without flushing to the disk."""
        if not self.closed:
            self._file.close()
        super().close()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        with naming(self._path):  # what could not be flushed fails once more when it is closed
            try:
                if error is None:
                    self._files.reached("flush", str(self._path))
                    self._file.flush()
                    os.fsync(self._file.fileno())
            finally:
                self.close()


SYSTEM = Files()
"""The layer in use."""


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have errors of the system say which file they are about; those of writes do not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def is_plain_name(name: Any) -> bool:
    """Whether ``name`` is that of a file in the directory at hand, and leads nowhere else."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not any(character in name for character in "/\\\0")
    )


def check_writable(path: Path, parameter: str) -> None:
    """Raise if nothing can be written to the directory ``path``, or be made above it.

    Raises:
        ValueError: it is a file, or a link to nowhere.
        OSError: writing is not permitted.
    """
    while not path.exists():
        if path.is_symlink():
            raise ValueError(
                f"{parameter}: {str(path)!r} is a link to {os.readlink(path)!r}, which does not "
                "exist; make that directory or remove the link"
            )
        path = path.parent
    if not path.is_dir():
        raise ValueError(f"{parameter}: {str(path)!r} is a file; give a directory")
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise OSError(
            errno.EROFS,
            f"{parameter}: the file system is mounted read-only; give a directory on another one",
            str(path),
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"{parameter}: {str(path)!r} cannot be written to; change its mode")


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
