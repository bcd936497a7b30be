"""Sync by an all-gather in place: one launch per pack, for spans of equal length."""

from __future__ import annotations

from shardcast.step.sync.strategy import Strategy


class AllGather(Strategy):
    """Sends padding too."""

    def run(self) -> None:
        pack = self.pack
        self._comm.all_gather(pack.data, pack.span(pack.own), pack.layout)

    def start(self) -> None:
        pack = self.pack
        work = self._comm.start_all_gather(pack.data, pack.span(pack.own), pack.layout)
        pack.pending.append(work)
