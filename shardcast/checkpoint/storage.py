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
from collections.abc import Callable, Iterator
from functools import partial
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
BESIDE = 1 << 26  # a thread flushes a file during the write, each time after this many bytes


class Files(FileSystem):
    """DCP's file system with new files, which are hashed as they are written, and flushed.

    Until :meth:`flush`, DCP's writes are appended to the same file, because a rank's file is
    written in many plans.

    Args:
        hashed: whether SHA-256 is needed; otherwise :meth:`flush` returns empty ones.
    """

    def __init__(self, hashed: bool = True) -> None:
        self._hashed = hashed
        self._files: dict[Path, HashingFile] = {}  # closed, except the one being written
        self._of_others: list[Flushing] = []

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a stream that appends to a file of this object; it cannot be read."""
        path = Path(path)
        file = self._files[path] = HashingFile(path, self._files.get(path))
        if not self._hashed:
            file.sha256 = None
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

    def begin_flush(self, path: Path) -> None:
        """Start to flush a file that other code wrote; :meth:`flush` waits for it."""
        self._of_others.append(Flushing(path))
        self._of_others[-1].start()

    def flush(self) -> dict[str, tuple[int, str]]:
        """Flush all files to disk; return sizes and SHA-256 by name."""
        files, self._files = self._files, {}
        for flushing in self._of_others:
            flushing.end()
        for path, file in files.items():
            file.wait()
            flush(path)
        sums = {
            path: file.sha256.hexdigest() if file.sha256 else "" for path, file in files.items()
        }
        return {path.name: (path.stat().st_size, digest) for path, digest in sums.items()}

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file or directory to an unused name, and make that durable.

        If another process takes the name first, this raises: a directory with files is never
        replaced.
        """
        file = self._files.pop(Path(path), None)
        if file is not None:
            file.wait()  # it is flushed by its current name
            self._files[Path(new_path)] = file
        os.replace(path, new_path)
        flush(Path(new_path).parent)


class HashingFile(io.FileIO):
    """A new binary file that hashes the data written to it; it must not exist yet.

    A thread hashes a large piece while the system copies it or the writer waits for the disk. A
    thread also flushes a long file while it is written, so that the final flush has little left to
    do.

    Args:
        earlier: this process's earlier writer of the file, to append to.

    Attributes:
        sha256: hash of all data written; may be set to ``None``.
        error: error of the file system during a write.
    """

    def __init__(self, path: Path, earlier: HashingFile | None = None) -> None:
        super().__init__(path, "x" if earlier is None else "a")
        self.sha256: Any = hashlib.sha256() if earlier is None else earlier.sha256
        self.error: OSError | None = None
        self._flushing: Flushing | None = None if earlier is None else earlier._flushing
        # bytes flushed when the thread ends
        self._flushed: int = 0 if earlier is None else earlier._flushed

    def write(self, data: Any) -> int:
        """Append all of ``data``."""
        piece, written = memoryview(data)[:WRITTEN], 0
        hashing = Beside("hash", lambda: self.sha256 and self.sha256.update(piece))
        if len(piece) < LARGE:
            hashing.run()
        else:
            hashing.start()
        try:
            with naming(Path(str(self.name))):
                while written < len(piece):
                    written += super().write(piece[written:])
            self._flush_beside(self.tell())
        except OSError as error:
            self.error = error
            raise
        finally:
            hashing.end()  # from here on the caller may change the memory
        return written

    def _flush_beside(self, written: int) -> None:
        busy = self._flushing is not None and self._flushing.is_alive()
        if not busy and written - self._flushed >= BESIDE:
            self.wait()
            self._flushing, self._flushed = Flushing(Path(str(self.name))), written
            self._flushing.start()

    def wait(self) -> None:
        """Wait for a flush in progress.

        Raises:
            OSError: it failed. The system reports that only once, and not to later flushes.
        """
        if self._flushing is not None:
            self._flushing.end()


class Beside(threading.Thread):
    """Runs ``act`` on another thread."""

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        super().__init__(name=name, daemon=True)
        self._act = act
        self._error: Exception | None = None

    def start(self) -> None:
        """Start it. A process that exits cannot start threads, and runs it here."""
        try:
            super().start()
        except RuntimeError:
            self.run()

    def run(self) -> None:
        """Run it, and keep its error."""
        try:
            self._act()
        except Exception as error:
            self._error = error

    def end(self) -> None:
        """Wait for the end; raise its error."""
        if self.ident is not None:
            self.join()
        if self._error is not None:
            raise self._error


class Flushing(Beside):
    """Flushes the contents of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"flush {path.name}", partial(flush, path))


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
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
