"""Sync: the owners' updated spans to everybody, each pack by its algorithm.

A call runs in the compute stream's order (PaddlePaddle PR 35878: then no further synchronisation is
needed), so evaluation and saving always see coherent weights. ``start`` returns before the values
are here; ``overlap`` says who waits for them. Updates that take long begin with the packs that they
are done with, on a stream of the backend, and the call waits for these too.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardcast.memory.pack import Pack
from shardcast.step.sync.ways import WAYS, Way


class Sync:
    """Makes packs equal on all ranks. Calling it is collective, all ranks in the same order."""

    def __init__(self) -> None:
        self._ways: dict[Pack, Way] = {}  # in the order in which packs are synced
        self.started: list[Pack] = []  # those that wait() has to look at

    @property
    def packs(self) -> list[Pack]:
        """What is synced, in order."""
        return list(self._ways)

    def add(self, pack: Pack) -> None:
        """Sync ``pack`` too; every rank must add the same packs."""
        if pack.comm.size > 1:
            self._ways[pack] = WAYS[pack.layout.algorithms.sync](pack)

    def begin(self, packs: Iterable[Pack]) -> None:
        """Start those of ``packs`` alone, while others are updated; a call syncs the rest.

        Every rank must call it, with the same packs.
        """
        wanted = set(packs)
        for pack, way in self._ways.items():
            if pack in wanted:
                work = way(True)
                # The pack keeps it: a work that is dropped cannot be waited for, and the backend
                # keeps the memory that it uses alive only as long as it is under way.
                if work is not None:
                    pack.pending.append(work)
                self.started.append(pack)

    def __call__(self) -> None:
        begun = set(self.started)
        works = [way(False) for pack, way in self._ways.items() if pack not in begun]
        for work in works:  # of all packs at once: a broadcast on gloo waits for the one before
            if work is not None:
                work.wait()
        self.wait()

    def start(self) -> None:
        """As a call, but ``pack.wait()`` must come before any use of a pack.

        All collectives are launched here, in the order of a call, which is that of the packs'
        first parameters in the model: were they launched where they are needed, ranks whose
        forwards differ would launch them in different orders, and hang.
        """
        self.begin(set(self.packs).difference(self.started))

    def wait(self) -> None:
        """Return when nothing that was started is under way. Local."""
        if self.started:
            for pack in self.started:
                pack.wait()
            self.started.clear()
