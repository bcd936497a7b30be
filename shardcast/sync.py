"""F2, sync: the owners' updated spans to everybody, on the current stream.

``broadcast`` sends each owner's span of each pack; ``all_gather`` takes one collective per pack
and needs equal spans. Both run in the compute stream's order (PaddlePaddle PR 35878: then no
further synchronisation is needed), so evaluation and saving always see coherent weights.
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
        self._packs: list[Pack] = []
        self._turns: list[tuple[Pack, Span]] = []

    def add(self, pack: Pack) -> None:
        """Sync ``pack`` too; every rank must add the same packs."""
        self._packs.append(pack)
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
            for pack in self._packs:
                self._comm.all_gather(pack.data, pack.span(pack.own))
        else:
            for pack, span in self._turns:
                self._comm.broadcast(pack.span(span), span.owner)
