"""F2, sync: the owners' updated spans to everybody.

``broadcast`` sends each owner's span of each pack; ``all_gather`` takes one collective per pack
and needs equal spans. A call runs in the compute stream's order (PaddlePaddle PR 35878: then no
further synchronisation is needed), so evaluation and saving always see coherent weights.
``start`` returns before the values are here; ``overlap`` says who waits for them.
"""

from __future__ import annotations

from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.layout import Span
from shardcast.pack import Pack


class Sync:
    """Makes packs equal on all ranks. Calling it is collective, all ranks in the same order."""

    def __init__(self, comm: Comm, config: ShardcastConfig) -> None:
        self._comm = comm
        self._gather = config.sync == "all_gather"
        self._turns: list[tuple[Pack, Span]] = []
        self.packs: list[Pack] = []  # in the order in which they are synced
        self.started: list[Pack] = []  # those that wait() has to look at

    def add(self, pack: Pack) -> None:
        """Sync ``pack`` too; every rank must add the same packs."""
        self.packs.append(pack)
        # Spans and slots are in the order of their elements: one walk along both.
        slots = iter([slot for slot in pack.layout.slots if slot.numel])
        slot = next(slots, None)
        for span in pack.layout.spans:
            while slot is not None and slot.end <= span.start:
                slot = next(slots, None)
            if slot is not None and slot.offset < span.stop:  # else it is padding alone, or empty
                self._turns.append((pack, span))

    def __call__(self) -> None:
        if self._gather:
            for pack in self.packs:
                self._comm.all_gather(pack.data, pack.span(pack.own))
        else:
            for pack, span in self._turns:
                self._comm.broadcast(pack.span(span), span.owner)

    def start(self) -> None:
        """As a call, but ``pack.wait()`` must come before any use of a pack.

        All collectives are launched here, in the order of a call, which is that of the packs'
        first parameters in the model: were they launched where they are needed, ranks whose
        forwards differ would launch them in different orders, and hang.
        """
        self.wait()
        self.started += self.packs
        # The packs keep the works: a work that is dropped cannot be waited for, and the backend
        # keeps the memory that it uses alive only as long as it is under way.
        if self._gather:
            for pack in self.packs:
                own = pack.span(pack.own)
                pack.pending.append(self._comm.start_all_gather(pack.data, own))
        else:
            for pack, span in self._turns:
                pack.pending.append(self._comm.start_broadcast(pack.span(span), span.owner))

    def wait(self) -> None:
        """Return when nothing that was started is under way. Local."""
        if self.started:
            for pack in self.started:
                pack.wait()
            self.started.clear()
