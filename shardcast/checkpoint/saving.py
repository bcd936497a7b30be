"""``save``: check together, write apart, acknowledge together, commit on rank 0.

What rank 0 has to know of the others' files, and what is theirs in the part that is stored once,
goes through files next to the data, which ``save_async`` can use as well: sent in collectives it
would be on every rank, and grow with their number.
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
import time
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


def save(
    directory: str | os.PathLike[str],
    model: Model,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    extra: Any = None,
    per_rank: Any = None,
    keep: int | None = None,
    digest: bool = False,
    overwrite: bool = False,
) -> Path:
    """Save a checkpoint that is either committed whole or not there at all.

    Call it between steps. Each rank writes its own elements once, in fp32. Extra memory is one
    chunk of one parameter on the host; masters and moments that are not kept in fp32 also take
    the state of one parameter on the device.

    Collective: every rank of the optimizer's group, with the same arguments; it returns on all
    ranks, or raises on all.

    Args:
        directory: directory of one run's checkpoints, on a file system that all ranks share;
            created if it is missing. One job at a time may save into it.
        model: model that was passed to :func:`shardcast.shard`; the stages of a pipeline rank.
        optimizer: what :func:`shardcast.shard` returned.
        step: number that names the checkpoint. A sound one of the same step is not overwritten
            by default. Saving identical contents again changes nothing, and neither does saving the
            checkpoint that was just loaded, on any number of ranks and whatever ``extra`` is; the
            latter logs one line at INFO.
        extra: anything else that the run needs (schedulers, position in the data), of rank 0:
            tensors, containers and plain values that ``torch.load(weights_only=True)`` reads.
        per_rank: the same for values that differ between ranks (random generators).
        keep: number of newest sound checkpoints to keep, this one included; older ones are
            deleted. ``None`` keeps all.
        digest: store ``optimizer.digest()``, which ``load`` compares, to find bits that memory or
            a copy lost; costs a pass over the own state.
        overwrite: replace a checkpoint of the same step once the new one is complete. A process
            that is killed between the two renames leaves neither; older checkpoints stay.

    Returns:
        The checkpoint's directory.

    Raises:
        TypeError: ``directory`` is no path; it comes first.
        ValueError: ``step`` exists with other contents, or an argument cannot be used.
        RuntimeError, OSError: a rank could not write; nothing was committed.
    """
    began = time.monotonic()
    base = folders.absolute(directory)
    snapshot = Snapshot(model, optimizer)
    arguments = (str(base), step, keep, digest, overwrite)
    job = begin(snapshot, "save", arguments, extra, per_rank)
    if job.is_there:
        return job.target
    named = _naming(job.target)
    try:
        written = snapshot.together(lambda: named(job.write)(snapshot.views()), "save")
        snapshot.together(lambda: named(job.commit)(written, began), "save")
    except Exception:
        job.abandon()  # all ranks have stopped writing
        raise
    snapshot.together(job.retain, "save")
    return job.target


@contextlib.contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Errors of the system say which checkpoint is not there now."""
    try:
        yield
    except OSError as error:
        message = f"checkpoint {str(target)!r} is not saved: {error.strerror or error}"
        raise OSError(error.errno or errno.EIO, message, error.filename) from error


@dataclass(frozen=True)
class RankSave:
    """One rank's share of a save that all ranks have agreed on.

    Attributes:
        writing: the fresh directory to write into.
        target: what it will be called once it is committed.
        own: this rank's ``per_rank``, and the state of the optimizer and of modules that is no
            tensor, as ``torch.save`` writes them.
        once: what is stored once, by path.
        facts: the plain facts of the manifest.
        timeout: seconds in which rank 0 must see what the others have written.
        overwrite: replace ``target`` if it exists.
        is_there: ``target`` is what was loaded; there is nothing to write.
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
        """Raise a RuntimeError if this rank does not see the directory that rank 0 made."""
        if not self.writing.is_dir():
            raise RuntimeError(
                f"directory: rank 0 made {str(self.writing)!r}, but rank {self.rank} does not see "
                "it; the directory must be on a file system that all ranks share"
            )

    def write(self, views: Iterable[ShardView]) -> Written:
        """Write this rank's file, then leave a message for rank 0 with what is in it."""
        self.look()
        written = Writer(self.writing, self.rank).write(views)
        if self.rank != 0:
            self.leave({"written": written, "own": self.own})
        return written

    def reserve(self) -> None:
        """Take room in the directory for an error that :meth:`leave` may have to leave.

        To be called on all ranks before any of them writes: a full disk has none left.
        """
        if self.rank != 0:
            self._draft(bytes(SAID))

    def leave(self, message: dict[str, Any]) -> None:
        """Leave a message for rank 0, which sees all of it or none; an ``error`` ends the save."""
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
        """Write over the draft of this rank's message, which keeps the room that it has."""
        with open(os.open(self._draft_path, os.O_RDWR | os.O_CREAT, 0o666), "wb") as file:
            file.write(data)
            file.truncate()

    @property
    def _draft_path(self) -> Path:
        return self._message(self.rank).with_suffix(".draft")

    def commit(self, written: Written, began: float) -> None:
        """Commit what all ranks wrote, on rank 0; elsewhere do nothing.

        Args:
            began: when the save did, on the monotonic clock.

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
        """Delete older checkpoints, as ``keep`` says, on rank 0."""
        if self.rank == 0 and self.keep is not None:
            folders.retain(self.target.parent, self.facts["step"], self.keep)

    def abandon(self) -> None:
        """Delete what was written of a save that failed, on rank 0."""
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
    extra: Any,
    per_rank: Any,
    timeout: float = LAG,
) -> RankSave:
    """Check together what is to be saved, and make a fresh directory. Collective.

    Args:
        call: ``"save"`` or ``"save_async"``.
        arguments: equal on all ranks.
    """
    directory, step, keep, digest, overwrite = arguments
    base = Path(directory)
    snapshot.meet(call)

    def checked() -> tuple[dict[str, Any], Any, io.BytesIO]:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step: expected a whole number >= 0, got {step!r}")
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep: expected None or a whole number >= 1, got {keep!r}")
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
        facts |= snapshot.digest()
    rank = snapshot.comm.rank
    return RankSave(
        rank, writing, target, own.getvalue(), once, facts, keep, timeout, overwrite, name is None
    )


def _copied(what: str, value: Any) -> tuple[Any, io.BytesIO]:
    """A copy of plain values on the host, and its file; refuse what could not be read back."""
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
    """Room and a fresh directory, on rank 0; what killed runs left is removed."""
    if not base.exists():
        storage.make_directory(base)
    # A save leaves alone what one in the background is writing meanwhile.
    folders.sweep(base, WRITING, LEAVING, *([BACKGROUND] if background else []))
    folders.sweep_exports(base)
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
