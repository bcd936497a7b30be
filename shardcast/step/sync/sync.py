"""Sync: the owners' updated spans to everybody, each pack by its algorithm.

A call runs in the compute stream's order (PaddlePaddle PR 35878: then no further synchronisation is
needed), so evaluation and saving always see coherent weights. Nothing overlaps there, so packs that
share ranks and algorithm make one launch, as the buckets of a bucket group do in Megatron-LM.

``start`` launches every pack alone and returns before the values are here; who called it says who
waits for them. Updates that take long begin with the packs that they are done with, on a stream of
the backend, and the call waits for these too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from shardcast.comm import Comm, Work
from shardcast.memory.pack import Pack


class Sync:
    """Makes packs equal on all ranks. Calling it is collective, all ranks in the same order.

    Attributes:
        by: syncs after a step in place of a call; an extension sets it.
    """

    by: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.packs: list[Pack] = []  # in the order in which they are synced
        self.started: list[Pack] = []  # those that wait() has to look at

    def add(self, pack: Pack) -> None:
        """Sync ``pack`` too; every rank must add the same packs."""
        if pack.comm.size > 1:
            self.packs.append(pack)

    def begin(self, packs: Iterable[Pack]) -> None:
        """Start those of ``packs`` alone, while others are updated; a call syncs the rest.

        Every rank must call it, with the same packs.
        """
        wanted = set(packs)
        for pack in self.packs:
            if pack in wanted:
                # Messages must be waited for at once, so none are left under way beside a forward:
                # see Comm.send_to_all.
                work = _launch(pack.layout.algorithms.sync == "all_gather", [pack], True)
                # The pack keeps it: a work that is dropped cannot be waited for, and the backend
                # keeps the memory that it uses alive only as long as it is under way.
                pack.pending.append(work)
                self.started.append(pack)

    def __call__(self) -> None:
        launches: dict[tuple[Comm, str], list[Pack]] = {}
        begun = set(self.started)
        for pack in self.packs:
            if pack not in begun:
                launches.setdefault((pack.comm, pack.layout.algorithms.sync), []).append(pack)
        works: list[Work] = []
        for (_, algorithm), packs in launches.items():
            if algorithm == "messages":
                works += [
                    pack.comm.send_to_all(_spans_by_rank(pack), pack.layout) for pack in packs
                ]
            else:
                _launch(algorithm == "all_gather", packs, False)
        for work in works:  # of all packs at once: a broadcast on gloo waits for the one before
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


def _launch(gathers: bool, packs: Sequence[Pack], async_op: bool) -> Work:
    """Sync ``packs`` of the same ranks in one launch; gives the work, if only started.

    Args:
        gathers: in place, by all-gathers, for spans of equal length, padding included. Else each
            owner broadcasts its span, of any length; those that are padding alone are left out.
    """
    comm, about = packs[0].comm, packs[0].layout
    if gathers:
        pairs = [(pack.data, pack.own_data) for pack in packs]
        return comm.all_gather_all(pairs, about, async_op)
    pieces = [(span.owner, pack.span(span)) for pack in packs for span in pack.layout.owned_spans]
    return comm.broadcast_all(pieces, about, async_op)


def _spans_by_rank(pack: Pack) -> list[Tensor]:
    """The spans to be sent by each rank, on gloo, whose broadcasts wait for one another."""
    pieces = [pack.data[:0]] * pack.comm.size
    for span in pack.layout.owned_spans:
        pieces[span.owner] = pack.span(span)
    return pieces
