"""Sync: send the owners' updated spans to all ranks, each pack by its algorithm.

A call runs in order on the compute stream (PaddlePaddle PR 35878: then no other synchronization is
needed), so evaluation and saving always see consistent weights. Nothing overlaps there. So packs
with equal ranks and algorithm are sent in one launch, like the buckets of a bucket group in
Megatron-LM.

``start`` launches each pack separately and returns before the values have arrived; its caller
decides who waits for them. Long updates start with the packs that they have finished, on a stream
of the backend; the call waits for these, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shardcast.comm import Comm, Work
from shardcast.memory.pack import Pack
from shardcast.plan.publishing import Encoded


class Sync:
    """Makes packs equal on all ranks. Calls are collective, in the same order on all ranks.

    Attributes:
        by: syncs after a step instead of a call; an extension sets it.
    """

    by: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.packs: list[Pack] = []  # packs in the order of the sync
        self.started: list[Pack] = []  # packs that wait() must check

    def add(self, pack: Pack) -> None:
        """Sync ``pack``, too. Every rank must add the same packs."""
        if pack.comm.size > 1:
            self.packs.append(pack)

    @property
    def nbytes(self) -> int:
        """Bytes of encoded values in flight."""
        works = [work for pack in self.started for work in pack.pending]
        return sum(work.nbytes for work in works if isinstance(work, EncodedWork))

    def begin(self, packs: Iterable[Pack]) -> None:
        """Start to sync ``packs`` while others are updated; a call syncs the rest.

        Collective: every rank, with the same packs.
        """
        wanted = set(packs)
        for pack in self.packs:
            if pack in wanted:
                # Messages must be waited for at once, so none may be in flight during a forward;
                # see Comm.send_to_all.
                gathers = pack.layout.algorithms.sync == "all_gather"
                work = _launch(gathers, [pack], True)
                # The pack keeps the work: a dropped work cannot be waited for, and the backend
                # keeps its memory alive only while it is in flight.
                pack.pending.append(work)
                self.started.append(pack)

    def __call__(self, encodes: bool = True) -> None:
        """Sync all packs.

        Args:
            encodes: if false, send all values as they are, including those that are no result of a
                cast.
        """
        launches: dict[tuple[Comm, str], list[Pack]] = {}
        begun = set(self.started)
        for pack in self.packs:
            if pack not in begun:
                launches.setdefault((pack.comm, pack.layout.algorithms.sync), []).append(pack)
        works: list[Work | EncodedWork] = []
        for (_, algorithm), packs in launches.items():
            if algorithm == "messages":
                works += [_send(pack, encodes) for pack in packs]
            else:
                work = _launch(algorithm == "all_gather", packs, False, encodes)
                works += [work] * isinstance(work, EncodedWork)
        # for all packs at once, because a broadcast on gloo waits for the previous one
        for work in works:
            work.wait()
        self.wait()

    def start(self) -> None:
        """Launch the sync; ``pack.wait()`` must come before any use of a pack.

        All collectives are launched here, in the order of the packs' first parameters in the model.
        If they were launched at their first use, ranks with different forwards would launch them in
        different orders, and hang.
        """
        self.begin(set(self.packs).difference(self.started))

    def wait(self) -> None:
        """Wait until nothing that was started is in flight. Local."""
        if self.started:
            for pack in self.started:
                pack.wait()
            self.started.clear()


class EncodedWork:
    """Work on encoded packs, which are decoded after the wait."""

    def __init__(self, work: Work, encoded: Sequence[Encoded]) -> None:
        self._work, self._encoded = work, encoded

    @property
    def nbytes(self) -> int:
        """Bytes of the codes."""
        return sum(it.data.nbytes for it in self._encoded)

    def wait(self) -> None:
        """Wait for the work, then decode."""
        self._work.wait()
        for it in self._encoded:
            it.decode()


def _launch(
    gathers: bool, packs: Sequence[Pack], async_op: bool, encodes: bool = True
) -> Work | EncodedWork:
    """Sync ``packs`` of the same ranks in one launch; return the work to wait for.

    Args:
        gathers: use in-place all-gathers, for spans of equal length, including padding. Otherwise
            each owner broadcasts its span, of any length, unless it is only padding.
    """
    comm, about = packs[0].comm, packs[0].layout
    sent = [_sent(pack, encodes) for pack in packs]
    if gathers:
        work = comm.all_gather_all([(it.data, it.own_data) for it in sent], about, async_op)
    else:
        pieces = [
            (span.owner, it.span(span))
            for pack, it in zip(packs, sent, strict=True)
            for span in pack.layout.owned_spans
        ]
        work = comm.broadcast_all(pieces, about, async_op)
    return _decoding(work, sent)


def _send(pack: Pack, encodes: bool) -> Work | EncodedWork:
    """Start to send spans as messages, on gloo, whose broadcasts wait for one another."""
    sent = _sent(pack, encodes)
    pieces = [sent.data[:0]] * pack.comm.size
    for span in pack.layout.owned_spans:
        pieces[span.owner] = sent.span(span)
    return _decoding(pack.comm.send_to_all(pieces, pack.layout), [sent])


def _sent(pack: Pack, encodes: bool) -> Pack | Encoded:
    """Return what is sent: the pack itself, or its encoding."""
    if pack.encoding is None or not encodes:
        return pack
    return pack.encoding.encode(pack.data, pack.comm.rank)


def _decoding(work: Work, sent: Sequence[Pack | Encoded]) -> Work | EncodedWork:
    encoded = [it for it in sent if not isinstance(it, Pack)]
    return EncodedWork(work, encoded) if encoded else work
