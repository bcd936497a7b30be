"""``save``: all ranks check together, write separately and acknowledge; rank 0 commits.

Ranks describe their files to rank 0 in small files next to the data, which ``save_async`` can use
as well. In collectives these descriptions would reach every rank and grow with the number of ranks.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import pickle
import platform
import re
import shutil
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardcast.checkpoint import directory as folders
from shardcast.checkpoint import storage
from shardcast.checkpoint.access import Model, Snapshot
from shardcast.checkpoint.dcp import ONCE, Reader, Writer, Written
from shardcast.checkpoint.directory import BACKGROUND, LEAVING, WRITING
from shardcast.checkpoint.inventory import Inventory
from shardcast.checkpoint.region import KeyPath, ShardView
from shardcast.checkpoint.unpickling import unpickled
from shardcast.messages import LOG, by_rank, note_speed
from shardcast.plan.precision import MASTER_DTYPE

RESERVE = 1 << 20  # bytes, for metadata and the frames of chunks
LAG = 60.0  # seconds after which a network file system should show what another rank wrote
# directory, step, keep, digest, overwrite
Arguments = tuple[str, int, int | None, bool, bool]
SAID = 4096  # bytes, for the message of a rank that failed
POLL = 0.02  # seconds between two looks
# Targets of background saves, also of those whose optimizer is gone.
threads: weakref.WeakKeyDictionary[threading.Thread, Path] = weakref.WeakKeyDictionary()


def finish(path: Path) -> None:
    """Wait for the own part of running saves into ``path``, a run or a checkpoint. Local."""
    for thread, target in list(threads.items()):
        if path in (target, target.parent):
            thread.join()


def save(
    directory: str | os.PathLike[str],
    model: Model,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    extra: object = None,
    per_rank: object = None,
    keep: int | None = None,
    digest: bool = False,
    overwrite: bool = False,
) -> Path:
    """Save a checkpoint that is complete or absent.

    Call it between steps. Each rank writes its own elements once, in fp32. Extra memory is one
    chunk of one parameter on the host. Masters and moments that are not kept in fp32 also need
    memory for the state of one parameter on the device.

    Collective: every rank of the optimizer's group, with the same arguments. It returns on all
    ranks or raises on all ranks.

    Args:
        directory: directory of one run's checkpoints, on a file system that all ranks share;
            created if it is missing. One job at a time may save into it.
        model: model that was passed to :func:`shardcast.shard`; in a pipeline, the list of stages.
        optimizer: what :func:`shardcast.shard` returned.
        step: number that names the checkpoint. By default an intact checkpoint of the same step is
            not overwritten. Saving identical contents again changes nothing. Saving the checkpoint
            that was just loaded changes nothing either, with any number of ranks and any ``extra``;
            it logs one line at INFO.
        extra: anything else that the run needs (schedulers, position in the data), from rank 0:
            tensors, containers and plain values that ``torch.load(weights_only=True)`` can read.
        per_rank: the same for values that differ between ranks (random generators).
        keep: number of newest intact checkpoints to keep, including this one; older ones are
            deleted. ``None`` keeps all.
        digest: store ``optimizer.digest()``, which ``load`` compares to detect corruption in
            memory or copies. Costs one pass over the rank's state.
        overwrite: replace a checkpoint of the same step once the new one is complete. A process
            that is killed between the two renames leaves neither; older checkpoints stay.

    Returns:
        The checkpoint's directory.

    Raises:
        TypeError: ``directory`` is not a path; it is the first argument.
        ValueError: ``step`` exists with other contents, or an argument cannot be used.
        RuntimeError, OSError: a rank could not write, or ``directory`` is a file or lies below one.
            Nothing was committed.
    """
    began = time.monotonic()
    base = folders.absolute(directory)
    snapshot = Snapshot(model, optimizer)
    arguments = (str(base), step, keep, digest, overwrite)
    job = begin(snapshot, "save", arguments, extra, per_rank)
    if job.is_there:
        return job.target
    named = _naming(job.target)

    def commit() -> None:
        finish(job.target)  # an older state must not be committed after this one
        named(job.commit)(written, began)

    try:
        written = snapshot.together(lambda: named(job.write)(snapshot.views()), "save")
        snapshot.together(commit, "save")
    except Exception:
        job.abandon()  # all ranks have stopped writing
        raise
    snapshot.together(job.retain, "save")
    return job.target


@contextlib.contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Add the name of the missing checkpoint to errors of the system."""
    try:
        yield
    except OSError as error:
        message = f"checkpoint {str(target)!r} is not saved: {error.strerror or error}"
        raise OSError(error.errno or errno.EIO, message, error.filename) from error


@dataclass(frozen=True)
class RankSave:
    """One rank's share of a save that all ranks have agreed on.

    Attributes:
        writing: new directory to write into.
        target: its name after the commit.
        own: this rank's ``per_rank`` and all state that is not tensors, as ``torch.save`` bytes.
        once: values that are stored once, by path.
        facts: plain facts of the manifest.
        timeout: seconds in which rank 0 must see the files of all ranks.
        overwrite: replace ``target`` if it exists.
        is_there: ``target`` is the loaded checkpoint; there is nothing to write.
    """

    rank: int
    writing: Path
    target: Path
    own: bytes
    once: dict[KeyPath, Any]
    facts: dict[str, Any]
    keep: int | None
    timeout: float
    overwrite: bool = False
    is_there: bool = False

    def look(self) -> None:
        """Raise RuntimeError if this rank does not see the directory that rank 0 made."""
        if not self.writing.is_dir():
            raise RuntimeError(
                f"directory: rank 0 made {str(self.writing)!r}, but rank {self.rank} does not see "
                "it; the directory must be on a file system that all ranks share"
            )

    def write(self, views: Iterable[ShardView]) -> Written:
        """Write this rank's file, then a message to rank 0 that describes it."""
        self.look()
        written = Writer(self.writing, self.rank).write(views)
        if self.rank != 0:
            self.leave({"written": written, "own": self.own})
        return written

    def reserve(self) -> None:
        """Reserve disk space for an error message that :meth:`leave` may have to write.

        All ranks call it before any of them writes, because a full disk has no space left.
        """
        if self.rank != 0:
            self._draft(bytes(SAID))

    def leave(self, message: dict[str, Any]) -> None:
        """Write a message to rank 0, which sees all of it or none; an ``error`` ends the save."""
        if "error" in message:
            message = {"error": message["error"].encode()[: SAID // 2].decode(errors="ignore")}
        try:
            self._draft(pickle.dumps(message))
        except OSError:
            if "error" not in message:
                raise
            os.truncate(self._draft_path, 0)  # a full disk has room for an empty file
        os.replace(self._draft_path, self._message(self.rank))

    def _draft(self, data: bytes) -> None:
        """Overwrite the draft of this rank's message, which keeps its disk space."""
        with open(os.open(self._draft_path, os.O_RDWR | os.O_CREAT, 0o666), "wb") as file:
            file.write(data)
            file.truncate()

    @property
    def _draft_path(self) -> Path:
        return self._message(self.rank).with_suffix(".draft")

    def commit(self, written: Written, began: float) -> None:
        """Commit what all ranks wrote, on rank 0; elsewhere do nothing.

        Args:
            began: start of the save on the monotonic clock.

        Raises:
            RuntimeError: a rank failed, or wrote nothing in time.
        """
        if self.rank != 0:
            return
        deadline = time.monotonic() + self.timeout
        messages: list[dict[str, Any]] = [{"written": written, "own": self.own}]
        messages += [self._receive(rank, deadline) for rank in range(1, self.facts["world_size"])]
        per_rank, objects, extra_state = list[Any](), dict[str, Any](), dict[str, Any]()
        for message in messages:
            own = torch.load(io.BytesIO(message["own"]), map_location="cpu", weights_only=True)
            per_rank.append(own[0])
            objects.update(own[1])
            extra_state.update(own[2])
        head = {**self.once["shardcast",], "objects": objects, "extra_state": extra_state}
        once = {**self.once, ("per_rank",): per_rank, ("shardcast",): head}
        writer = Writer(self.writing, ONCE)
        files = [*(message["written"] for message in messages), writer.write(once.items())]
        sums = writer.write_metadata(files)
        Reader(self.writing)  # what load would refuse is an error now, not after a week
        for file in files:
            sums |= file.sums
        folders.commit(self.writing, self.target, sums, self.facts, overwrite=self.overwrite)
        note_speed(f"saved {str(self.target)!r}", sum(size for size, _ in sums.values()), began)

    def retain(self) -> None:
        """Delete all but the ``keep`` newest checkpoints, on rank 0."""
        if self.rank == 0 and self.keep is not None:
            folders.retain(self.target.parent, self.facts["step"], self.keep)

    def abandon(self) -> None:
        """Delete the files of a failed save, on rank 0."""
        if self.rank == 0:
            shutil.rmtree(self.writing, ignore_errors=True)

    def _message(self, rank: int) -> Path:
        return self.writing / f"acknowledged-{rank}"

    def _receive(self, rank: int, deadline: float) -> dict[str, Any]:
        path = self._message(rank)
        while not path.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {rank} wrote nothing within {self.timeout} seconds that rank 0 can see; "
                    "the directory must be on a file system that all ranks share"
                )
            time.sleep(POLL)
        data = path.read_bytes()
        path.unlink()
        message: dict[str, Any] = {"error": "it could not write, nor say why; is the disk full?"}
        if data:
            message = unpickled(data)
        if "error" in message:
            raise RuntimeError(f"rank {rank}: {message['error']}")
        return message


def begin(
    snapshot: Snapshot,
    call: str,
    arguments: Arguments,
    extra: object,
    per_rank: object,
    timeout: float = LAG,
) -> RankSave:
    """Check the save on all ranks, and make a new directory. Collective: every rank.

    Args:
        call: ``"save"`` or ``"save_async"``.
        arguments: arguments that must be equal on all ranks.
    """
    directory, step, keep, digest, overwrite = arguments
    base = Path(directory)
    snapshot.meet(call)

    def checked() -> tuple[dict[str, Any], Any, io.BytesIO]:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step: expected a whole number >= 0, got {step!r}")
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep: expected None or a whole number >= 1, got {keep!r}")
        if file := folders.file_in(base):
            raise NotADirectoryError(
                "directory: expected the folder of one run, in which each checkpoint is a folder, "
                f"got the file {str(file)!r}; pass the path of a folder, which may be new"
            )
        head, _ = _copied("the optimizer's param_groups", snapshot.head())
        own = {
            "per_rank": per_rank,
            "the optimizer's state": snapshot.objects(),
            "what get_extra_state() of a module returned": snapshot.extra_state(),
        }
        for what, value in own.items():
            _copied(what, value)
        return head, _copied("extra", extra)[0], _copied("per_rank", tuple(own.values()))[1]

    head, extra, own = snapshot.together(checked, call)
    arguments_by_rank = snapshot.collect(lambda: arguments, call)
    if any(passed != arguments for passed in arguments_by_rank):
        raise ValueError(
            "save: the ranks gave different arguments (directory, step, keep, digest, overwrite): "
            + by_rank(enumerate(arguments_by_rank))
        )

    target = folders.folder_of(base, step)
    facts: dict[str, Any] = {
        "step": step,
        "world_size": snapshot.comm.size,
        "partition": snapshot.partition,
        "optimizer": head["optimizer"],
    }

    is_as_loaded = not overwrite and snapshot.is_as_loaded(target)

    def prepare() -> str | None:  # None: the checkpoint is there
        if snapshot.comm.rank != 0:
            return ""
        if is_as_loaded and os.path.lexists(target) and folders.damage(target) is None:
            return None
        with _naming(target):
            if not overwrite:
                folders.clear_the_way(target, facts)
            return _prepare(base, target, snapshot.inventory, call == "save_async")

    name = snapshot.collect(prepare, call)[0]
    if name is None and snapshot.comm.rank == 0:
        LOG.info("%s: %r was just loaded and is unchanged; nothing is written", call, str(target))
    writing = base / (name or "")
    once = {
        ("optimizer", "param_groups"): head.pop("groups"),
        ("extra",): extra,
        ("shardcast",): head,
    }
    facts |= {"torch": torch.__version__, "python": platform.python_version()}
    if digest:
        facts |= {"digest": snapshot.digest(), "digest_of": snapshot.forms()}
    rank = snapshot.comm.rank
    return RankSave(
        rank, writing, target, own.getvalue(), once, facts, keep, timeout, overwrite, name is None
    )


def _copied(what: str, value: object) -> tuple[Any, io.BytesIO]:
    """Copy plain values to the host and return their bytes; raise if they cannot be read back."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=True), stream
    except Exception as error:
        named = re.search(r"GLOBAL (\S+)", str(error))  # torch says much about one class
        raise ValueError(
            f"{what}: expected tensors, containers and plain values, got "
            f"{named[1] if named else 'something'} that torch.load(weights_only=True) refuses; "
            "give its state_dict() or plain values instead"
        ) from error


def _prepare(base: Path, target: Path, inventory: Inventory, background: bool) -> str:
    """Make a new directory with enough space on rank 0, and remove remains of killed runs."""
    if not base.exists():
        storage.make_directory(base)
    # A save leaves the files of a running background save alone.
    folders.sweep(base, WRITING, LEAVING, *([BACKGROUND] if background else []))
    masters = sum(math.prod(inventory.shapes[name]) for name in inventory.trained)
    free, needed = shutil.disk_usage(base).free, masters * MASTER_DTYPE.itemsize + RESERVE
    if free < needed:
        raise RuntimeError(
            f"directory: expected at least {needed} bytes free in {str(base)!r}, got {free}; "
            "free space or lower keep="
        )
    name = folders.new_name(BACKGROUND if background else WRITING, target)
    storage.make_directory(base / name)
    return name
