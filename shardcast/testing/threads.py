"""A world of threads: real values, strict checks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch

from ._compat import keep_device_guard, separate_process_groups
from .faults import CollectiveMismatchError, RankLeftError
from .mesh import Shape, rank_of_mesh, ranks_of
from .record import Collective
from .rendezvous import ThreadedRun
from .strict import DEFAULT, StrictGroup

T = TypeVar("T")


def threaded_world(
    world_size: Shape,
    fn: Callable[..., T],
    *args: object,
    timeout: float = 30.0,
) -> list[T]:
    """Run ``fn(group, *args)`` as each rank of a new :class:`ThreadedWorld`.

    If you pass mesh sizes, such as ``{"dp": 2, "tp": 2}``, it runs ``fn(mesh, *args)``.

    Returns:
        The ranks' results, in rank order.
    """
    return ThreadedWorld(world_size, timeout=timeout).run(fn, *args)


class ThreadedWorld:
    """``world_size`` ranks as threads of this process, with real values and strict checks.

    Args:
        world_size: number of ranks; or mesh sizes by name, outer dimension first.
        timeout: seconds that a rank may take between two collectives; processor time while it
            computes, so that a busy machine makes no rank late.

    **Matching.** The ``n``-th collective of each rank must be the same: equal op, dtype, shape,
    source or destination and reduce op. In an all-to-all, rank ``i`` must send to ``j`` the shape
    that ``j`` expects from ``i``. The first call that differs raises
    :class:`CollectiveMismatchError` on every rank, with each rank's call.

    **Values.** Reductions process the ranks' tensors in rank order, in the tensor's dtype, rounding
    after each step; AVG divides the sum by ``world_size`` at the end.

    **Asynchronous collectives.** A launch never blocks, and copies its inputs. ``wait()`` blocks
    until all ranks have launched; only then are outputs written. If an input or output is written
    in between, ``wait()`` raises :class:`BufferHazardError`. If nobody waits, the end of the run
    raises it. Until somebody waits, outputs are NaN (integers: all bits set).

    **Turns.** One rank runs at a time, until it must wait in a collective. Then the next ready rank
    runs, in rank order. So runs repeat exactly. Each rank has its own state of torch's CPU random
    generator, which starts as after ``torch.manual_seed(rank)``; the caller's does not change. A
    rank must wait for others only in collectives.

    **Ranks that leave.** If a rank returns or raises, ranks that wait for it, now or later, raise
    :class:`RankLeftError` at once. :meth:`run` raises the first exception.

    **Meshes.** With ``{"dp": 2, "tp": 2}`` each rank gets a ``DeviceMesh`` instead of a group, and
    is a rank of its own default process group. ``init_device_mesh``, ``new_group``,
    ``parallelize_module``, DTensors and functional collectives work as in a process. Everything
    above holds in each group. Ranks that wait for each other in different groups raise
    :class:`CollectiveMismatchError` at once.

    **Messages** from one rank to another (``send``, ``irecv``) arrive in order for each tag, and
    the sender does not wait. They are not logged. A message that was not received at the end
    raises :class:`CollectiveMismatchError`.

    It supports only CPU tensors: on accelerators the backwards of all ranks share one thread, which
    a waiting rank would block. Threads start with gradients enabled.
    """

    groups: list[StrictGroup]
    """Process group of each rank, the same in all runs; with a mesh, the default group of
    the latest run."""

    def __init__(self, world_size: Shape, *, timeout: float = 30.0) -> None:
        self.world_size, self.timeout = ranks_of(world_size), timeout
        self.mesh = dict(world_size) if isinstance(world_size, Mapping) else None
        everyone = range(self.world_size)
        self.groups = [StrictGroup(rank, everyone) for rank in everyone]
        self._stuck: tuple[int, ...] = ()

    @property
    def logs(self) -> list[list[Collective]]:
        """Collectives of each rank in the latest run, in all groups, even if it failed."""
        return [list(group.rank_log) for group in self.groups]

    def run(self, fn: Callable[..., T], *args: object) -> list[T]:
        """Run ``fn(group, *args)`` once per rank; ``group.rank()`` returns the rank.

        In a world with a mesh, run ``fn(mesh, *args)``; ``mesh.get_rank()`` returns the rank.

        Returns:
            The ranks' results, in rank order.

        Raises:
            BaseException: the first exception of any rank, with a note of the rank. Errors that
                other ranks raise because that one left do not count.
            RendezvousTimeoutError: a rank took longer than ``timeout``.
        """
        if self._stuck:
            raise RuntimeError(f"ranks {self._stuck} of an earlier run have not finished")
        run = ThreadedRun(self.world_size, self.timeout)
        results: dict[int, T] = {}
        random_state = torch.get_rng_state()
        keep_device_guard()
        try:
            with nullcontext() if self.mesh is None else separate_process_groups():
                self._run_threads(run, fn, args, results)
        finally:
            torch.set_rng_state(random_state)
        self._raise_first(run)
        if run.failure is None:
            run.check_received()
        return [results[rank] for rank in range(self.world_size)]

    def _run_threads(
        self,
        run: ThreadedRun,
        fn: Callable[..., T],
        args: tuple[object, ...],
        results: dict[int, T],
    ) -> None:
        def live(rank: int) -> None:
            error: BaseException | None = None
            run.take_turn(rank)
            try:
                with self._groups_of(run, rank) as groups:
                    results[rank] = fn(groups, *args)
            except BaseException as raised:  # run() raises any exception again
                error = raised
            run.leave(rank, error)

        for group in self.groups:
            group.begin(run)
        # Daemons, so that a rank that never returns does not keep the interpreter alive.
        threads = [
            threading.Thread(target=live, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        try:
            run.watch()
        except BaseException:  # for example Ctrl-C or the caller's time limit
            run.interrupt()
            raise
        finally:
            self._stuck = tuple(r for r in range(self.world_size) if r not in run.left)
        for rank, thread in enumerate(threads):
            if rank not in self._stuck:
                thread.join()

    @contextmanager
    def _groups_of(self, run: ThreadedRun, rank: int) -> Iterator[object]:
        """Yield the group of ``rank``, or its mesh, whose groups end with the block."""
        groups = [self.groups[rank]]

        def make(key: str, ranks: tuple[int, ...]) -> StrictGroup:
            if key != DEFAULT:
                groups.append(StrictGroup(rank, ranks, key))
                groups[-1].begin(run, groups[0].rank_log)
            return groups[-1]

        try:
            if self.mesh is None:
                yield groups[0]
            else:
                groups[0].rank_log = []
                with rank_of_mesh(self.mesh, rank, make) as mesh:
                    yield mesh
            if run.failure is None:
                for group in groups:
                    group.check_all_waited_for()
        finally:
            for group in groups:
                group.run = None

    def _raise_first(self, run: ThreadedRun) -> None:
        errors = {rank: error for rank, error in run.left.items() if error is not None}
        if not errors:
            if self._stuck and run.failure is not None:
                raise run.failure()
            return
        primary = [r for r, error in errors.items() if not isinstance(error, RankLeftError)]
        first = (primary or list(errors))[0]
        mismatches = {r: e for r, e in errors.items() if isinstance(e, CollectiveMismatchError)}
        if first in mismatches:  # the same on all ranks, but the last one knows most
            first = max(mismatches, key=lambda r: len(mismatches[r].calls))
        raised = errors[first]
        raised.add_note(f"raised by rank {first} of a threaded world of {self.world_size}")
        for rank in range(self.world_size):
            if rank in self._stuck:
                raised.add_note(f"rank {rank} has not finished")
            elif rank != first and rank in errors:
                raised.add_note(f"rank {rank} raised {type(errors[rank]).__name__}")
        raise raised
