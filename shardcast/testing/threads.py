"""A world of threads: real values, strict checks, injected faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from ._compat import keep_device_guard, separate_process_groups
from .faults import CollectiveMismatchError, Fault, RankLeftError
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
    faults: Sequence[Fault] = (),
    poison: bool = True,
) -> list[T]:
    """Run ``fn(group, *args)`` as each rank of a new :class:`ThreadedWorld`.

    With the sizes of a mesh, such as ``{"dp": 2, "tp": 2}``, it is ``fn(mesh, *args)``.

    Returns:
        what the ranks returned, in rank order.
    """
    world = ThreadedWorld(world_size, timeout=timeout, poison=poison)
    return world.run(fn, *args, faults=faults)


class ThreadedWorld:
    """``world_size`` ranks as threads of this process, with real values and strict checks.

    Args:
        world_size: number of ranks, or a mesh: the sizes of its dimensions by name, outer first.
        timeout: seconds that a rank may take from one collective to the next; of the processor,
            while it computes, so that none is late on a busy machine.
        poison: fill the outputs of ``async_op=True`` collectives with NaN (integers: all bits
            set) until somebody waits for them.

    **Matching.** The ``n``-th collective of each rank is the same one: equal op, dtype, shape,
    source or destination and reduce op; in an all-to-all, what rank ``i`` sends to ``j`` has the
    shape that ``j`` expects from ``i``. The first call that differs raises
    :class:`CollectiveMismatchError` on every rank, with what each of them called.

    **Values.** Reductions go through the ranks' tensors in rank order, in the tensor's dtype,
    rounding after each step; AVG divides the sum by ``world_size`` at the end.

    **Asynchronous collectives.** A launch never blocks and takes a copy of what it sends.
    ``wait()`` blocks until all ranks have launched; the outputs are written there and only there.
    Writing to an input or an output in between raises :class:`BufferHazardError` in ``wait()``,
    and so does, at the end, never having waited.

    **Turns.** One rank runs at a time, until it has to wait in a collective; the next ready one
    follows, in rank order. So runs repeat exactly, and each rank has its own state of torch's CPU
    random generator, which begins as after ``torch.manual_seed(rank)``; the caller's stays as it
    was. A rank must not wait for another one by any other means than collectives.

    **Ranks that leave.** When a rank returns or raises, the ranks that wait for it, now or later,
    raise :class:`RankLeftError` at once. :meth:`run` raises the exception that came first.

    **Meshes.** With ``{"dp": 2, "tp": 2}`` each rank gets a ``DeviceMesh`` in place of a group, and
    is a rank of a default process group of its own: ``init_device_mesh``, ``new_group``,
    ``parallelize_module``, DTensors and functional collectives work as in a process. All of the
    above holds in each group; faults and turns count a rank's collectives in all of them. Ranks
    that wait for each other in different groups raise :class:`CollectiveMismatchError` at once.

    **Messages** from one rank to another (``send``, ``irecv``) arrive in order for each tag; who
    sends does not wait. They are in no log, and no fault counts them. One that nobody has received
    at the end raises :class:`CollectiveMismatchError`.

    CPU tensors only: on accelerators, backward passes of all ranks share one thread, which a
    waiting rank would block. Threads begin with gradients enabled, whatever the caller has set.
    """

    groups: list[StrictGroup]
    """The process group of each rank. They stay the same from run to run; with a mesh, the default
    one of the latest run."""

    def __init__(self, world_size: Shape, *, timeout: float = 30.0, poison: bool = True) -> None:
        self.world_size, self.timeout, self.poison = ranks_of(world_size), timeout, poison
        self.mesh = dict(world_size) if isinstance(world_size, Mapping) else None
        everyone = range(self.world_size)
        self.groups = [StrictGroup(rank, everyone, poison=poison) for rank in everyone]
        self._stuck: tuple[int, ...] = ()

    @property
    def logs(self) -> list[list[Collective]]:
        """The calls of each rank in the latest run, in all groups, whether or not it succeeded."""
        return [list(group.rank_log) for group in self.groups]

    def run(self, fn: Callable[..., T], *args: object, faults: Sequence[Fault] = ()) -> list[T]:
        """Run ``fn(group, *args)`` once per rank; ``group.rank()`` tells which one.

        In a world with a mesh it is ``fn(mesh, *args)``, and ``mesh.get_rank()``.

        Returns:
            what the ranks returned, in rank order.

        Raises:
            BaseException: the first exception of any rank, itself, with a note of the rank.
                What the others raised only because that one left does not count.
            RendezvousTimeoutError: when some rank takes longer than ``timeout``.
            ValueError: after a run in which an injected fault was never reached, because such
                a test tests nothing.
        """
        if self._stuck:
            raise RuntimeError(f"ranks {self._stuck} of an earlier run have not finished")
        for fault in faults:
            if not 0 <= fault.rank < self.world_size or fault.at < 0:
                raise ValueError(f"{fault} never happens in a world of {self.world_size}")
        run = ThreadedRun(self.world_size, self.timeout, faults)
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
        if run.unreached and run.failure is None:
            counts = {fault: run.attempts[fault.rank] for fault in run.unreached}
            names = ", ".join(f"{fault} (rank made {n})" for fault, n in counts.items())
            raise ValueError(f"never reached: {names}")
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
            except BaseException as raised:  # whatever it is, run() raises it again
                error = raised
            run.leave(rank, error)

        for group in self.groups:
            group.begin(run)
        # Daemons, so that a rank that never comes back does not keep the interpreter alive.
        threads = [
            threading.Thread(target=live, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        try:
            run.watch()
        except BaseException:  # the caller's time limit, or Ctrl-C
            run.interrupt()
            raise
        finally:
            self._stuck = tuple(r for r in range(self.world_size) if r not in run.left)
        for rank, thread in enumerate(threads):
            if rank not in self._stuck:
                thread.join()

    @contextmanager
    def _groups_of(self, run: ThreadedRun, rank: int) -> Iterator[Any]:
        """The group of ``rank``, or its mesh; whose groups end with it."""
        groups = [self.groups[rank]]

        def make(key: str, ranks: tuple[int, ...]) -> StrictGroup:
            if key != DEFAULT:
                groups.append(StrictGroup(rank, ranks, poison=self.poison, key=key))
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
        if first in mismatches:  # the same everywhere, but who raised last knows most
            first = max(mismatches, key=lambda r: len(mismatches[r].calls))
        raised = errors[first]
        raised.add_note(f"raised by rank {first} of a threaded world of {self.world_size}")
        for rank in range(self.world_size):
            if rank in self._stuck:
                raised.add_note(f"rank {rank} has not finished")
            elif rank != first and rank in errors:
                raised.add_note(f"rank {rank} raised {type(errors[rank]).__name__}")
        raise raised
