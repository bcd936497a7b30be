"""Sync: the owners' updated spans to everybody.

``broadcast`` sends each owner's span of each pack; ``all_gather`` takes one collective per pack
and needs equal spans. A call runs in the compute stream's order (PaddlePaddle PR 35878: then no
further synchronisation is needed), so evaluation and saving always see coherent weights.
``start`` returns before the values are here; ``overlap`` says who waits for them.
"""

from __future__ import annotations

from torch import Tensor

from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.memory.pack import Pack


class Sync:
    """Makes packs equal on all ranks. Calling it is collective, all ranks in the same order."""

    def __init__(self, comm: Comm, config: ShardcastConfig) -> None:
        self._comm = comm
        self._gather = config.sync == "all_gather"
        self._bounds: list[list[tuple[int, int]]] = []  # per pack and owner, what is broadcast
        self.packs: list[Pack] = []  # in the order in which they are synced
        self.started: list[Pack] = []  # those that wait() has to look at

    def add(self, pack: Pack) -> None:
        """Sync ``pack`` too; every rank must add the same packs."""
        self.packs.append(pack)
        bounds = []
        # Spans and slots are in the order of their elements: one walk along both.
        slots = iter([slot for slot in pack.layout.slots if slot.numel])
        slot = next(slots, None)
        for span in pack.layout.spans:
            while slot is not None and slot.end <= span.start:
                slot = next(slots, None)
            padding = slot is None or slot.offset >= span.stop  # alone, or nothing
            bounds.append((span.start, span.start if padding else span.stop))
        self._bounds.append(bounds)

    def __call__(self) -> None:
        works = []
        for pack, bounds in zip(self.packs, self._bounds, strict=True):
            if self._gather:
                self._comm.all_gather(pack.data, pack.span(pack.own))
            elif self._comm.sends_messages(pack.data.device):
                works.append(self._comm.send_to_all(_pieces(pack, bounds)))
            else:
                for owner, piece in enumerate(_pieces(pack, bounds)):
                    if piece.numel():
                        self._comm.broadcast(piece, owner)
        for work in works:  # of all packs at once: a broadcast on gloo waits for the one before
            work.wait()

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
        for pack, bounds in zip(self.packs, self._bounds, strict=True):
            if self._gather:
                own = pack.span(pack.own)
                pack.pending.append(self._comm.start_all_gather(pack.data, own))
                continue
            for owner, piece in enumerate(_pieces(pack, bounds)):
                if piece.numel():
                    pack.pending.append(self._comm.start_broadcast(piece, owner))

    def wait(self) -> None:
        """Return when nothing that was started is under way. Local."""
        if self.started:
            for pack in self.started:
                pack.wait()
            self.started.clear()


def _pieces(pack: Pack, bounds: list[tuple[int, int]]) -> list[Tensor]:
    """What each owner broadcasts, in the order of ranks."""
    return [pack.data[start:stop] for start, stop in bounds]
