"""Act before each file system operation of a save, and at each acknowledgement."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcast.checkpoint import saving, storage
from shardcast.comm import Comm

Reached = Callable[[str, str], None]  # the kind of operation, and the path or call


@contextlib.contextmanager
def at_each_point(reached: Reached) -> Iterator[None]:
    """Call ``reached`` before each operation; it may raise, wait, or kill the process."""
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, reached)
        yield


def watch(patch: pytest.MonkeyPatch, reached: Reached) -> None:
    """Do the same as :func:`at_each_point` until ``patch`` is undone."""
    together = Comm.together

    class Watched(storage.HashingFile):
        def __init__(self, path: Path, earlier: Any = None) -> None:
            if earlier is None:
                reached("create", str(path))
            super().__init__(path, earlier)

        def write(self, data: Any) -> int:
            try:
                reached("write", str(self.name))
            except OSError as error:
                self.error = error
                raise
            return super().write(data)

    def before(kind: str, original: Any, place: int = 0) -> Any:
        @functools.wraps(original)
        def wrapped(*args: Any, **options: Any) -> Any:
            if not options.get("ignore_errors"):
                reached(kind, str(args[place]))
            return original(*args, **options)

        return wrapped

    def acknowledging(comm: Any, fn: Any, device: Any, call: str = "") -> Any:
        def act() -> Any:
            value = fn()
            reached("acknowledge", call)
            return value

        return together(comm, act, device, call)

    patch.setattr(storage, "HashingFile", Watched)
    patch.setattr(storage, "make_directory", before("mkdir", storage.make_directory))
    patch.setattr(os, "fsync", before("flush", os.fsync))
    patch.setattr(storage.Files, "rename", before("rename", storage.Files.rename, place=1))
    patch.setattr(saving.RankSave, "leave", before("leave", saving.RankSave.leave))
    patch.setattr(shutil, "rmtree", before("remove", shutil.rmtree))
    patch.setattr(Comm, "together", acknowledging)


class Counting:
    """Counts points, and acts at one of them."""

    def __init__(self, at: int = -1, act: Callable[[], None] = lambda: None) -> None:
        self.at, self.act = at, act
        self.seen: list[str] = []
        self._lock = threading.Lock()  # ranks are threads, and only one may act

    def __call__(self, point: str, path: str) -> None:
        with self._lock:
            self.seen.append(f"{point} {Path(path).name}")
            acts = len(self.seen) == self.at + 1
        if acts:
            self.act()


def no_space() -> None:
    raise OSError(28, "No space left on device")
