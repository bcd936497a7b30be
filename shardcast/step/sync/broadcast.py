"""Sync by broadcasts: each owner sends its span, all owners of a pack in one launch."""

from __future__ import annotations

from torch import Tensor

from shardcast.memory.pack import Pack
from shardcast.step.sync.strategy import Strategy


class Broadcast(Strategy):
    """Spans of any length; those that are padding alone stay at home."""

    def __init__(self, pack: Pack) -> None:
        super().__init__(pack)
        self._spans = pack.layout.owned_spans()

    def run(self) -> None:
        if self._spans:
            self._comm.broadcast_all(self._pieces(), self.pack.layout)

    def start(self) -> None:
        if self._spans:
            work = self._comm.start_broadcast_all(self._pieces(), self.pack.layout)
            self.pack.pending.append(work)

    def _pieces(self) -> list[tuple[int, Tensor]]:
        """What each owner sends, in the order of ranks."""
        return [(span.owner, self.pack.span(span)) for span in self._spans]
