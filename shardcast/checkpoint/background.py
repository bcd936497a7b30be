"""``save_async``: training waits for the copy to host memory, not for the disk.

The thread uses no collectives. Rank 0 waits for the messages that the other ranks leave next to
their data, then commits like ``save``. ``dcp.async_save`` instead gathers plans in collectives on
its thread. That needs a CPU backend in the group, interferes with the collectives of training, and
makes all ranks wait for one that failed. A directory being written is called ``.background-...``,
so that a ``save`` in between leaves it alone.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from pathlib import Path

import torch

from shardcast.checkpoint import saving
from shardcast.checkpoint.access import Model, Snapshot
from shardcast.checkpoint.directory import absolute
from shardcast.checkpoint.region import ShardView
from shardcast.comm import Comm
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.optimizer.sharded import ShardedOptimizer, packed_of

LOG = logging.getLogger("shardcast.checkpoint")


def save_async(
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
    timeout: float = 1800.0,
) -> Saving:
    """Save in the background: return once the state is copied to the host.

    Call it between steps. It needs host memory for this rank's part, and first waits for an earlier
    ``save_async``. If a save fails, rank 0 logs it and its ``wait()`` raises; other checkpoints are
    unaffected. A process that ends waits for its part.

    Collective: every rank of the optimizer's group, with the same arguments.

    Args:
        directory, model, optimizer, step, extra, per_rank, keep, digest, overwrite: see
            :func:`save`.
        timeout: seconds after which rank 0 gives up and logs that the checkpoint is lost, if a rank
            was killed.

    Returns:
        The save in progress; its ``wait()`` is collective.

    Raises:
        ValueError, RuntimeError, OSError: see :func:`save`.
    """
    base = absolute(directory)
    snapshot = Snapshot(model, optimizer)
    snapshot.together(lambda: None, "save_async")  # before an earlier save's calls
    assert isinstance(optimizer, ShardedOptimizer)  # the snapshot has checked it
    packed = packed_of(optimizer)
    earlier: Saving | None = packed.saving
    if earlier is not None:
        end(earlier, "save_async")
    # Of any optimizer, because this save removes folders that seem to be left over. Every rank has
    # begun its part of those by now.
    saving.finish(base)
    arguments = (str(base), step, keep, digest, overwrite)
    job = saving.begin(snapshot, "save_async", arguments, extra, per_rank, timeout)

    def copied() -> list[ShardView]:
        if job.is_there:
            return []
        job.look()  # else rank 0 would wait for the others for ever
        job.reserve()
        return list(map(_copied, snapshot.views()))

    try:
        views = snapshot.together(copied, "save_async")
        running = Saving(packed, snapshot.comm, snapshot.device, job, views)
    except Exception:
        job.abandon()
        raise
    packed.saving = running
    return running


def _copied(view: ShardView) -> ShardView:
    return dataclasses.replace(view, flat=view.flat.detach().to("cpu", copy=True))


class Saving:
    """A running save of :func:`save_async`. It keeps masters and state in memory until ``wait()``.

    Attributes:
        path: the checkpoint's directory, which exists once it is committed.
    """

    def __init__(
        self,
        packed: PackedOptimizer,
        comm: Comm,
        device: torch.device,
        job: saving.RankSave,
        views: list[ShardView],
    ) -> None:
        self.path = job.target
        # Held for the first wait(), in which all ranks must meet: whether it is still in memory
        # depends on each rank's garbage collector.
        self._packed: PackedOptimizer | None = packed
        self._comm, self._device = comm, device
        self._error: Exception | None = None
        self._awaited = False
        # Not a daemon: the interpreter waits for it before it ends.
        self._thread = threading.Thread(
            target=self._run, args=(job, views), name=f"save {self.path.name}"
        )
        self._thread.start()
        saving.threads[self._thread] = self.path

    def done(self) -> bool:
        """Whether this rank's part has ended, successfully or not. Local."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait for the commit, and return the checkpoint's directory.

        Collective: every rank.

        Raises:
            RuntimeError: this checkpoint is lost. Raised on every rank.
        """
        self._awaited = True
        call = "wait of save_async"
        if self._packed is not None:
            self._packed.together(lambda: None, call)
            self._packed = None
        for error in end(self, call):  # rank 0, which hears of all the others, comes first
            if error is not None:
                raise RuntimeError(
                    f"checkpoint {str(self.path)!r} is lost, because its background save failed: "
                    f"{error}"
                ) from self._error
        return self.path

    def _run(self, job: saving.RankSave, views: list[ShardView]) -> None:
        if job.is_there:
            return
        began = time.monotonic()
        try:
            try:
                written = job.write(views)
            except Exception as error:
                if job.rank != 0:
                    job.leave({"error": str(error)})  # rank 0 logs it
                raise
            finally:
                views.clear()
            job.commit(written, began)
        except Exception as error:
            self._error = error
            job.abandon()
            if job.rank == 0 and not self._awaited:
                LOG.error("checkpoint %r is lost: %s", str(self.path), error)
        else:
            job.retain()


def end(save: Saving, call: str) -> list[str | None]:
    """Return the error of each rank, once all have ended. Collective: every rank.

    All ranks must have met in ``call`` before, because a rank's part may take long.
    """

    def outcome() -> str | None:
        save._thread.join()
        return None if save._error is None else str(save._error)

    return save._comm.collect(outcome, save._device, call)
