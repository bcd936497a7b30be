"""A world of real processes on this machine, without ports or launchers."""

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
"""Seconds in which the other ranks must finish after one has failed."""
_GOODBYE = 5.0
"""Seconds in which an idle process must leave its group, or end."""


class ProcessFailedError(RuntimeError):
    """A rank's process died, or raised an error that cannot be sent to another process."""


def spawn(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    timeout: float = 60.0,
    backend: str = "gloo",
) -> list[T]:
    """Run ``fn(group, *args)`` once in each of ``world_size`` new processes.

    This is one :meth:`SpawnedWorld.run` in a new world. Processes take seconds to start, so if
    several tests need them, share a :func:`spawn_world`.
    """
    with SpawnedWorld(world_size, timeout=timeout, backend=backend) as world:
        return world.run(fn, *args)


class SpawnedWorld(contextlib.AbstractContextManager["SpawnedWorld"]):
    """``world_size`` processes that run one function after another; alias :func:`spawn_world`.

    Use it in a ``with`` statement or a pytest fixture::

        @pytest.fixture(scope="module")
        def world():
            with spawn_world(2) as world:
                yield world

    Each run has a new default process group, which meets through a file in a temporary directory.
    It has the environment that a launcher would set (``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``,
    ``LOCAL_WORLD_SIZE``), and starts with ``torch.manual_seed(rank)``, as in a threaded world.
    Other settings that a function changes in a process stay changed for later runs. Each process
    uses one torch thread.

    The processes start with the first run. If a run leaves a rank unfinished, they are killed, and
    the next run starts new ones. They are daemons: they end with this process and have no child
    processes.

    Args:
        world_size: number of processes.
        timeout: seconds for a run, including start-up, unless the run sets its own.
        backend: backend of the default process group.
        start_method: start method of :mod:`multiprocessing`.
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
            fn: a function that the processes can import, at the top level of a module.
            args: picklable arguments; every rank gets its own copy.
            timeout: seconds for this run.

        Returns:
            The ranks' results in rank order. Tensors are sent by value.

        Raises:
            BaseException: the first exception of any rank, with its traceback as a note.
            ProcessFailedError: a process died, or its exception cannot be pickled.
            TimeoutError: names the ranks that did not finish, with a note on where each was.
            TypeError: ``fn`` or ``args`` cannot be pickled.
        """
        try:
            work = pickle.dumps((fn, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"cannot send {fn} and its arguments to other processes ({error}); "
                "define the function at the top level of a module"
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
            finally:  # also after Ctrl-C or the caller's own time limit
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
        """Send a message to all ranks; yield their answers in the order of arrival."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the process died; detected when its answer is due
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
                text=f"the process ended with exit code {process.exitcode}; its own output says "
                "why. If that is about starting a new process, call spawn() or spawn_world() under "
                'if __name__ == "__main__":',
                died=True,
            )

    def _leave_group(self) -> bool:
        """Let every rank destroy its process group; return whether all did and are reusable."""
        answers = self._ask(True, time.time() + _GOODBYE)
        return [answers.get(rank) for rank in range(self.world_size)] == [True] * self.world_size

    def _failure(
        self, answers: dict[int, TaskResult], task: Task, timeout: float
    ) -> BaseException | None:
        """Return the error of the run, if any; a death first, because it makes other ranks fail."""
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
        time.sleep(0.2)  # let them write down where they are
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
    """A function to run; files of this run are named ``path`` plus a suffix."""

    work: bytes
    """The pickled ``(fn, args)``, by value, so that processes share no tensor."""
    path: str
    backend: str
    deadline: float
    """In ``time.time()``, which all processes share."""


@dataclass(frozen=True)
class TaskResult:
    """The end of a task: the pickled result, or else a text and, if possible, the error."""

    value: bytes | None = None
    error: bytes | None = None
    text: str = ""
    died: bool = False


def serve(rank: int, world_size: int, pipe: Connection) -> None:
    """Run one :class:`Task` after another, until ``None`` comes or the parent is gone."""
    # only the parent handles Ctrl-C, and ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
            os.environ.clear()  # because launchers and trainers change it
            os.environ.update(environment)
            torch.manual_seed(rank)
            pipe.send(_answer(task, rank, world_size))
            # Only after all ranks have answered: closing a finished rank's sockets could break a
            # collective that another rank still reads.
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
            # The group's own timeout is longer, because the parent knows better which rank is
            # missing.
            dist.init_process_group(
                task.backend,
                init_method=f"file://{task.path}.store",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=2 * max(remaining, 1.0)),
            )
            fn, args = pickle.loads(task.work)
            return TaskResult(value=pickle.dumps(fn(dist.group.WORLD, *args)))
        except BaseException as error:  # including SystemExit: the process stays in service
            return TaskResult(error=_pickled(error), text=traceback.format_exc())
        finally:
            faulthandler.cancel_dump_traceback_later()


def _pickled(error: BaseException) -> bytes | None:
    """Return the error if it also unpickles, which many picklable exceptions do not."""
    try:
        dump = pickle.dumps(error)
        pickle.loads(dump)
    except Exception:
        return None
    return dump
