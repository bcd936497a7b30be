"""The child side of :mod:`.spawn`: one process of a world, which runs what it is sent."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Task:
    """A function to run. ``path`` plus a suffix names the files of this run."""

    work: bytes
    """The pickled ``(fn, args)``: by value, so that no tensor is shared between processes."""
    path: str
    backend: str
    deadline: float
    """In ``time.time()``, which all processes share."""


@dataclass(frozen=True)
class Answer:
    """What became of a task: the pickled value, or else a text and, if possible, the error."""

    value: bytes | None = None
    error: bytes | None = None
    text: str = ""
    died: bool = False


def serve(rank: int, world_size: int, pipe: Connection) -> None:
    """Answer one :class:`Task` after the other, until ``None`` comes or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, who ends us
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    environment = dict(os.environ)
    while True:
        try:
            task = pipe.recv()
            if task is None:
                return
            os.environ.clear()  # launchers and trainers change it
            os.environ.update(environment)
            torch.manual_seed(rank)
            pipe.send(_answer(task, rank, world_size))
            # Only when all ranks have answered: closing the sockets of a rank that finished
            # early could tear a collective from under one that still reads.
            pipe.recv()
            if dist.is_initialized():
                dist.destroy_process_group()
            pipe.send(True)
        except (EOFError, OSError):
            return


def _answer(task: Task, rank: int, world_size: int) -> Answer:
    remaining = task.deadline - time.time()
    with open(f"{task.path}.stack-{rank}", "w") as stack:
        faulthandler.dump_traceback_later(max(remaining, 0.001), file=stack)
        try:
            # The group's own time-out is the later one: the parent knows better who is missing.
            dist.init_process_group(
                task.backend,
                init_method=f"file://{task.path}.store",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=2 * max(remaining, 1.0)),
            )
            fn, args = pickle.loads(task.work)
            return Answer(value=pickle.dumps(fn(dist.group.WORLD, *args)))
        except BaseException as error:  # SystemExit too: the process serves on
            return Answer(error=_pickled(error), text=traceback.format_exc())
        finally:
            faulthandler.cancel_dump_traceback_later()


def _pickled(error: BaseException) -> bytes | None:
    """The error, if it also survives the way back: many exceptions pickle but do not unpickle."""
    try:
        dump = pickle.dumps(error)
        pickle.loads(dump)
    except Exception:
        return None
    return dump
