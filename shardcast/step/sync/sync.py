"""Sync: the owners' updated spans to everybody, each pack by its algorithm.

A call runs in the compute stream's order (PaddlePaddle PR 35878: then no further synchronization is
needed), so evaluation and saving always see coherent weights. Nothing overlaps there, so packs that
share ranks and algorithm make one launch, as the buckets of a bucket group do in Megatron-LM.

``start`` launches every pack alone and returns before the values are here; who called it says who
waits for them. Updates that take long begin with the packs that they are done with, on a stream of
the backend, and the call waits for these too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shardcast.comm import Comm, Work
from shardcast.memory.pack import Pack
from shardcast.plan.publishing import Parcel


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

    @property
    def nbytes(self) -> int:
        """Bytes of parcels that are under way."""
        works = [work for pack in self.started for work in pack.pending]
        return sum(work.nbytes for work in works if isinstance(work, Delivery))

    def begin(self, packs: Iterable[Pack]) -> None:
        """Start those of ``packs`` alone, while others are updated; a call syncs the rest.

        Every rank must call it, with the same packs.
        """
        wanted = set(packs)
        for pack in self.packs:
            if pack in wanted:
                # Messages must be waited for at once, so none are left under way during a forward:
                # see Comm.send_to_all.
                gathers = pack.layout.algorithms.sync == "all_gather"
                work = _launch(gathers, [pack], True)
                # The pack keeps it: a work that is dropped cannot be waited for, and the backend
                # keeps the memory that it uses alive only as long as it is under way.
                pack.pending.append(work)
                self.started.append(pack)

    def __call__(self, by_wire: bool = True) -> None:
        """Sync all packs.

        Args:
            by_wire: without it all values travel as they are, also those that no cast gives.
        """
        launches: dict[tuple[Comm, str], list[Pack]] = {}
        begun = set(self.started)
        for pack in self.packs:
            if pack not in begun:
                launches.setdefault((pack.comm, pack.layout.algorithms.sync), []).append(pack)
        works: list[Work | Delivery] = []
        for (_, algorithm), packs in launches.items():
            if algorithm == "messages":
                works += [_send(pack, by_wire) for pack in packs]
            else:
                work = _launch(algorithm == "all_gather", packs, False, by_wire)
                works += [work] * isinstance(work, Delivery)
        for work in works:  # of all packs at once: a broadcast on gloo waits for the one before
            work.wait()
        self.wait()

    def start(self) -> None:
        """Sync as a call does, but ``pack.wait()`` must come before any use of a pack.

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


class Delivery:
    """The work that brings parcels, which are unpacked once it was waited for."""

    def __init__(self, work: Work, parcels: Sequence[Parcel]) -> None:
        self._work, self._parcels = work, parcels

    @property
    def nbytes(self) -> int:
        """Bytes of the parcels."""
        return sum(parcel.data.nbytes for parcel in self._parcels)

    def wait(self) -> None:
        """Wait for the work, then unpack."""
        self._work.wait()
        for parcel in self._parcels:
            parcel.unpack()


def _launch(
    gathers: bool, packs: Sequence[Pack], async_op: bool, by_wire: bool = True
) -> Work | Delivery:
    """Sync ``packs`` of the same ranks in one launch; gives the work, which is to be waited for.

    Args:
        gathers: in place, by all-gathers, for spans of equal length, padding included. Else each
            owner broadcasts its span, of any length; those that are padding alone are left out.
    """
    comm, about = packs[0].comm, packs[0].layout
    sent = [_sent(pack, by_wire) for pack in packs]
    if gathers:
        work = comm.all_gather_all([(it.data, it.own_data) for it in sent], about, async_op)
    else:
        pieces = [
            (span.owner, it.span(span))
            for pack, it in zip(packs, sent, strict=True)
            for span in pack.layout.owned_spans
        ]
        work = comm.broadcast_all(pieces, about, async_op)
    return _delivered(work, sent)


def _send(pack: Pack, by_wire: bool) -> Work | Delivery:
    """Start to send the spans as messages, on gloo, whose broadcasts wait for one another."""
    sent = _sent(pack, by_wire)
    pieces = [sent.data[:0]] * pack.comm.size
    for span in pack.layout.owned_spans:
        pieces[span.owner] = sent.span(span)
    return _delivered(pack.comm.send_to_all(pieces, pack.layout), [sent])


def _sent(pack: Pack, by_wire: bool) -> Pack | Parcel:
    """Return what travels: a pack itself, or a parcel in its place."""
    return pack if pack.wire is None or not by_wire else pack.wire.parcel(pack.data, pack.comm.rank)


def _delivered(work: Work, sent: Sequence[Pack | Parcel]) -> Work | Delivery:
    parcels = [it for it in sent if not isinstance(it, Pack)]
    return Delivery(work, parcels) if parcels else work
