"""``save_async``: training waits for the copy to host memory, not for the disk.

The thread uses no collectives, which would mix with those of training. Each rank acknowledges by
a small file beside its data; rank 0 waits for all of them, removes them and commits as ``save``
does. A directory being written is called ``.background-...``, so that a ``save`` in between,
which sweeps ``.writing-...``, leaves it alone.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardcast.checkpoint import commit, files, saving
from shardcast.checkpoint.access import Held
from shardcast.checkpoint.dcp import Record
from shardcast.checkpoint.shards import Part

LOG = logging.getLogger("shardcast.checkpoint")
BACKGROUND, ACKNOWLEDGED = ".background-", "acknowledged-"
POLL = 0.02  # seconds between two looks for acknowledgements
_running: weakref.WeakKeyDictionary[Any, Saving] = weakref.WeakKeyDictionary()  # by optimizer


def save_async(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    extra: Any = None,
    per_rank: Any = None,
    keep: int | None = None,
    timeout: float = 1800.0,
) -> Saving:
    """As :func:`~shardcast.checkpoint.save`, but return once the state is copied to the host.

    Every rank of the optimizer's group must call it, between steps. Host memory for this rank's
    part is needed. A ``save_async`` that still runs is waited for first, and its error is raised
    here. A process that ends waits for its part; if a rank is killed, the checkpoint is lost and
    rank 0 logs it after ``timeout`` seconds. Other arguments are those of ``save``.

    Returns:
        The save under way; its ``wait()`` is collective.

    Raises:
        ValueError, RuntimeError, OSError: as ``save``; or the save before failed.
    """
    held = Held(model, optimizer)
    before = _running.pop(optimizer, None)
    if before is not None:
        before.wait()
    arguments = (os.path.abspath(directory), step, keep)
    begun = saving.begin(held, arguments, extra, per_rank, _prepare)
    jobs: list[_Job] = []

    def stage() -> None:
        copies = _Copies(held.rank, list(map(_copied, held.parts())))
        values = copy.deepcopy(begun.values) if held.rank == 0 else {}
        kept = dataclasses.replace(begun, values=values)
        jobs.append(_Job(copies, held.size, kept, keep, timeout))

    held.together(stage, _reached)
    _running[optimizer] = Saving(held, jobs[0])
    return _running[optimizer]


def _reached() -> None:
    files.SYSTEM.reached("acknowledge", "background")


def _prepare(base: Path, target: Path, total: int, step: int) -> str:
    """Room, permission and a fresh directory, on rank 0; what killed runs left is removed."""
    if base.is_dir():
        for path in base.iterdir():
            if path.name.startswith(BACKGROUND):
                files.SYSTEM.remove(path)
    made = saving.prepare(base, target, total, step)
    name = BACKGROUND + made.removeprefix(commit.WRITING)
    files.SYSTEM.rename(base / made, base / name)
    return name


def _copied(part: Part) -> Part:
    return dataclasses.replace(part, flat=part.flat.detach().to("cpu", copy=True))


@dataclasses.dataclass(frozen=True)
class _Copies:
    """Stands for :class:`Held` where parts are written."""

    rank: int
    copies: list[Part]

    def parts(self) -> Iterator[Part]:
        return iter(self.copies)


@dataclasses.dataclass(frozen=True)
class _Job:
    held: _Copies
    size: int
    begun: saving.Begun
    keep: int | None
    timeout: float

    def run(self) -> None:
        rank = self.held.rank
        try:
            records, name, sums = saving.write(self.held, self.begun)
        except Exception as error:
            self._say({"error": f"rank {rank}: {error}"})
            raise
        _reached()
        self._say({"records": list(map(_packed, records)), "name": name, "sums": sums})
        if rank == 0:
            try:
                saving.commit_all(self.begun, self._answers())
            except Exception:
                shutil.rmtree(self.begun.writing, ignore_errors=True)
                raise
            if self.keep is not None:
                commit.retain(self.begun.target.parent, self.begun.facts["step"], self.keep)

    def _say(self, answer: dict[str, Any]) -> None:
        """Under another name first: whoever sees it sees all of it."""
        path = self.begun.writing / f"{ACKNOWLEDGED}{self.held.rank}"
        draft = path.with_suffix(".draft")
        files.SYSTEM.write(draft, json.dumps(answer).encode())
        files.SYSTEM.rename(draft, path)

    def _answers(self) -> list[Any]:
        """What all ranks wrote, in rank order; on rank 0."""
        deadline = time.monotonic() + self.timeout
        found = []
        for rank in range(self.size):
            path = self.begun.writing / f"{ACKNOWLEDGED}{rank}"
            while not path.exists():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"rank {rank} wrote nothing within {self.timeout} seconds")
                time.sleep(POLL)
            answer = json.loads(path.read_bytes())
            if "error" in answer:
                raise RuntimeError(answer["error"])
            path.unlink()
            records = list(map(_unpacked, answer["records"]))
            found.append((records, answer["name"], tuple(answer["sums"])))
        return found


def _packed(record: Record) -> dict[str, Any]:
    dtype = None if record.dtype is None else str(record.dtype).removeprefix("torch.")
    return {**dataclasses.asdict(record), "dtype": dtype}


def _unpacked(values: dict[str, Any]) -> Record:
    dtype = None if values["dtype"] is None else getattr(torch, values["dtype"])
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return Record(**{**plain, "dtype": dtype})


class Saving:
    """A save that is under way, made by :func:`save_async`.

    Attributes:
        path: the checkpoint's directory, once it is committed.
    """

    def __init__(self, held: Held, job: _Job) -> None:
        self.path = job.begun.target
        self._held, self._job = held, job
        self._error: Exception | None = None
        # Not a daemon: the interpreter waits for it before it ends.
        self._thread = threading.Thread(target=self._run, name=f"save {self.path.name}")
        self._thread.start()

    def done(self) -> bool:
        """Whether this rank's part is over, well or not. Local."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait for the commit. Every rank must call it; ``save_async`` calls it on the one before.

        Raises:
            RuntimeError: this checkpoint is lost; on all ranks alike.
        """
        self._held.together(lambda: None, _reached)  # all ranks have begun theirs
        self._held.together(self._outcome, _reached)
        return self.path

    def _outcome(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise RuntimeError(
                f"checkpoint {str(self.path)!r} is lost, its save in the background failed: "
                f"{self._error}"
            ) from self._error

    def _run(self) -> None:
        try:
            self._job.run()
        except Exception as error:
            self._error = error
            LOG.error("checkpoint %r is lost: %s", str(self.path), error)
        finally:
            del self._job  # and with it the copies
