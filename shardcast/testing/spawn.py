"""A world of processes: the real thing, on this machine, without ports or launchers."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .record import name_ranks

T = TypeVar("T")

_PATIENCE = 1.0
"""Seconds that the other ranks have to finish as well, once one has failed."""
_GOODBYE = 5.0
"""Seconds that an idle process has to leave its group, or to end."""


class ProcessFailedError(RuntimeError):
    """A rank's process died, or raised something that cannot be sent to another process."""


def spawn(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    timeout: float = 60.0,
    backend: str = "gloo",
) -> list[T]:
    """Run ``fn(group, *args)`` once in each of ``world_size`` new processes.

    The same as one :meth:`SpawnedWorld.run` in a world of its own. Where several tests need
    processes, share a :func:`spawn_world`: starting them takes seconds.
    """
    with SpawnedWorld(world_size, timeout=timeout, backend=backend) as world:
        return world.run(fn, *args)


class SpawnedWorld(contextlib.AbstractContextManager["SpawnedWorld"]):
    """``world_size`` processes that run one function after another; also :func:`spawn_world`.

    For a ``with`` statement or a pytest fixture::

        @pytest.fixture(scope="module")
        def world():
            with spawn_world(2) as world:
                yield world

    Args:
        world_size: number of processes.
        timeout: seconds for a run, start-up included, where the run does not say otherwise.
        backend: of the default process group.
        start_method: of :mod:`multiprocessing`.

    Each run has a new default process group, which meets through a file in a temporary directory;
    the environment (``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``) that a
    launcher would set; and begins with ``torch.manual_seed(rank)``, as in a threaded world. Other
    settings of the process that a function changes stay changed for later runs. Each process uses
    one torch thread.

    The processes start with the first run. After a run that left a rank unfinished they are
    killed, and the next run starts new ones. They are daemons: they end with this process, and
    have no child processes.
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout: float = 60.0,
        backend: str = "gloo",
        start_method: str = "spawn",
    ) -> None:
        if world_size < 1:
            raise ValueError(f"a world needs at least one rank, got {world_size}")
        self.world_size, self.timeout, self.backend = world_size, timeout, backend
        self._start_method = start_method
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, fn: Callable[..., T], *args: object, timeout: float | None = None) -> list[T]:
        """Run ``fn(group, *args)`` in every process; ``group`` is the default process group.

        Args:
            fn: a function that the processes can import: at the top level of a module.
            args: anything that can be pickled; every rank gets its own copy.
            timeout: seconds for this run.

        Returns:
            what the ranks returned, in rank order. Tensors travel by value.

        Raises:
            BaseException: the first exception that any rank raised, with its traceback as a note.
            ProcessFailedError: when a process died, or its exception cannot be pickled.
            TimeoutError: names the ranks that had not finished, with a note where each was.
            TypeError: when ``fn`` or ``args`` cannot be pickled.
        """
        try:
            work = pickle.dumps((fn, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"cannot send {fn} and its arguments to other processes ({error}); "
                "the function must stand at the top level of a module"
            ) from error
        timeout = self.timeout if timeout is None else timeout
        deadline = time.time() + timeout
        healthy = False
        with tempfile.TemporaryDirectory(prefix="shardcast-testing-") as folder:
            task = Task(work, f"{folder}/run", self.backend, deadline)
            try:
                self._start()
                answers = self._ask(task, deadline)
                failure = self._failure(answers, task, timeout)
                healthy = len(answers) == self.world_size and self._leave_group()
            finally:  # also on Ctrl-C and the caller's own time limit
                if not healthy:
                    self._kill()
        if failure is not None:
            raise failure
        return [pickle.loads(answers[rank].value or b"") for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes. A later :meth:`run` starts new ones."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=_GOODBYE)
        self._kill()

    def _start(self) -> None:
        if any(not process.is_alive() for process in self._processes):
            self._kill()
        if self._processes:
            return
        context = multiprocessing.get_context(self._start_method)
        for rank in range(self.world_size):
            ours, child_end = context.Pipe()
            process = context.Process(  # type: ignore[attr-defined]
                target=serve,
                args=(rank, self.world_size, child_end),
                name=f"rank {rank}",
                daemon=True,
            )
            process.start()
            child_end.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _ask(self, message: Task | bool, deadline: float) -> dict[int, Any]:
        """Send a message to all ranks; their answers, in the order in which they came."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has died: seen when its answer is due
                pipe.send(message)
        answers: dict[int, Any] = {}
        while len(answers) < self.world_size:
            due = [rank for rank in range(self.world_size) if rank not in answers]
            sources = [self._pipes[rank] for rank in due]
            sentinels = [self._processes[rank].sentinel for rank in due]
            if not wait([*sources, *sentinels], max(0.0, deadline - time.time())):
                break
            for rank in due:
                if self._pipes[rank].poll() or not self._processes[rank].is_alive():
                    answers[rank] = self._receive(rank)
                    if isinstance(answers[rank], TaskResult) and answers[rank].value is None:
                        deadline = min(deadline, time.time() + _PATIENCE)
        return answers

    def _receive(self, rank: int) -> Any:
        try:
            return self._pipes[rank].recv()
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(timeout=_PATIENCE)
            return TaskResult(
                text=f"the process ended with exit code {process.exitcode}", died=True
            )

    def _leave_group(self) -> bool:
        """Let every rank end its process group; whether all did, and can be used again."""
        answers = self._ask(True, time.time() + _GOODBYE)
        return [answers.get(rank) for rank in range(self.world_size)] == [True] * self.world_size

    def _failure(
        self, answers: dict[int, TaskResult], task: Task, timeout: float
    ) -> BaseException | None:
        """The error of the run, if any: a death first, since it makes the other ranks fail."""
        failed = [rank for rank, answer in answers.items() if answer.value is None]
        unfinished = [rank for rank in range(self.world_size) if rank not in answers]
        if not failed:
            return self._late(unfinished, task, timeout) if unfinished else None
        rank = next((rank for rank in failed if answers[rank].died), failed[0])
        answer = answers[rank]
        error: BaseException
        if answer.error is None:
            error = ProcessFailedError(f"rank {rank} of {self.world_size}: {answer.text}")
        else:
            error = pickle.loads(answer.error)
            error.add_note(f"raised by rank {rank} of {self.world_size}:\n{answer.text}")
        if unfinished:
            error.add_note(f"{name_ranks(unfinished)} had not finished")
        return error

    def _late(self, unfinished: Sequence[int], task: Task, timeout: float) -> TimeoutError:
        have = "has" if len(unfinished) == 1 else "have"
        error = TimeoutError(f"{name_ranks(unfinished)} {have} not finished within {timeout} s")
        time.sleep(0.2)  # they are writing down where they are
        for rank in unfinished:
            stack = Path(f"{task.path}.stack-{rank}")
            text = stack.read_text() if stack.exists() else ""
            error.add_note(f"rank {rank} was in:\n{text}" if text else f"rank {rank}: starting")
        return error

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            process.close()
            pipe.close()
        self._processes, self._pipes = [], []


spawn_world = SpawnedWorld
"""Start processes for many runs: ``with spawn_world(2) as world: world.run(fn)``."""


# -- in the processes -----------------------------------------------------------------------------


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
class TaskResult:
    """The end of a task: the pickled value, or else a text and, if possible, the error."""

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


def _answer(task: Task, rank: int, world_size: int) -> TaskResult:
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
            return TaskResult(value=pickle.dumps(fn(dist.group.WORLD, *args)))
        except BaseException as error:  # SystemExit too: the process serves on
            return TaskResult(error=_pickled(error), text=traceback.format_exc())
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
