"""Files that survive a power cut and know their checksums.

DCP's writer writes through :class:`Files`. Tests interrupt saves in its methods, at every write,
flush and rename.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from shardcast.comm import warn_first

# Error codes of CIFS, DrvFs and several FUSE mounts, which cannot fsync a directory. All others
# are raised.
CANNOT_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
_told = set[int]()  # devices that were warned about
BUFFER = 1 << 16  # bytes; torch.save makes about 40 writes for a small tensor
WRITTEN = 1 << 23  # bytes that are written and hashed at a time
# pieces of at least this many bytes are hashed by a thread during the write; it costs 0.1 ms
LARGE = 1 << 20


class Files(FileSystem):
    """DCP's file system with new files, which are hashed as they are written, and flushed.

    Until :meth:`flush`, DCP's writes are appended to the same file, because a rank's file is
    written in many plans.
    """

    def __init__(self) -> None:
        self._files: dict[Path, HashingFile] = {}  # closed, except the one being written

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a stream that appends to a file of this object; it cannot be read."""
        path = Path(path)
        file = self._files[path] = HashingFile(path, self._files.get(path))
        try:
            with io.BufferedWriter(file, BUFFER) as stream:
                yield stream
        except Exception:
            if file.error is not None:  # torch's writer would raise another error
                raise file.error from None
            raise

    def write(self, path: Path, data: bytes) -> tuple[int, str]:
        """Write a small file, flush it, and return its size and SHA-256."""
        with self.create_stream(path, "wb") as file:
            file.write(data)
        return self.flush()[path.name]

    def flush(self) -> dict[str, tuple[int, str]]:
        """Flush all files to disk; return sizes and SHA-256 by name."""
        files, self._files = self._files, {}
        for path in files:
            flush(path)
        return {
            path.name: (path.stat().st_size, file.sha256.hexdigest())
            for path, file in files.items()
        }

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file or directory to an unused name, and make that durable.

        If another process takes the name first, this raises: a directory with files is never
        replaced.
        """
        file = self._files.pop(Path(path), None)
        if file is not None:
            self._files[Path(new_path)] = file
        os.replace(path, new_path)
        flush(Path(new_path).parent)


class HashingFile(io.FileIO):
    """A new binary file that hashes the data written to it; it must not exist yet.

    A thread hashes a large piece while the system copies it or the writer waits for the disk.

    Args:
        earlier: this process's earlier writer of the file, to append to.

    Attributes:
        sha256: hash of all data written.
        error: error of the file system during a write.
    """

    def __init__(self, path: Path, earlier: HashingFile | None = None) -> None:
        super().__init__(path, "x" if earlier is None else "a")
        self.sha256: Any = hashlib.sha256() if earlier is None else earlier.sha256
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Append all of ``data``."""
        piece, written = memoryview(data)[:WRITTEN], 0
        hashing = threading.Thread(target=self.sha256.update, args=(piece,), daemon=True)
        try:
            if len(piece) < LARGE:
                hashing.run()
            else:
                hashing.start()
        except RuntimeError:  # a process that exits cannot start threads
            hashing.run()
        try:
            with naming(Path(str(self.name))):
                while written < len(piece):
                    written += super().write(piece[written:])
        except OSError as error:
            self.error = error
            raise
        finally:
            if hashing.ident is not None:
                hashing.join()  # from here on the caller may change the memory
        return written


@contextlib.contextmanager
def appearing(path: Path, prefix: str) -> Iterator[Path]:
    """Yield a temporary path for a file that is complete or absent.

    At the end the file is flushed and renamed to ``path``, which may exist; after an error it is
    removed.

    Args:
        prefix: prefix of the temporary name.
    """
    writing = path.with_name(prefix + path.name)
    try:
        yield writing
        flush(writing)
        os.replace(writing, path)
        flush(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            writing.unlink()
        raise


def make_directory(path: Path) -> None:
    """Make a directory that must not exist yet; create missing parents."""
    missing = [parent for parent in path.parents if not parent.exists()]
    path.mkdir(parents=True)
    for made in (path, *missing):
        flush(made.parent)


def flush(path: Path) -> None:
    """Make the entries of a directory, or the contents of a file, durable.

    On a file system that cannot do this for a directory, warn once and continue.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    except OSError as error:
        if error.errno not in CANNOT_FLUSH or not path.is_dir():
            raise
        device = path.stat().st_dev
        if device not in _told:
            _told.add(device)
            warn_first(
                f"directory: the file system of {str(path)!r} cannot flush a directory "
                f"({error.strerror}): its files are flushed, so checkpoints are complete or absent "
                "if a process is killed, but a power cut soon after a save may lose the names of "
                "that checkpoint and its files; keep the one before it (keep=2 or more)"
            )
    finally:
        os.close(handle)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to errors of the system, because errors of writes lack it."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def is_plain_name(name: object) -> bool:
    """Return whether ``name`` is a file in the current directory, without a path."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not any(character in name for character in "/\\\0")
    )


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
