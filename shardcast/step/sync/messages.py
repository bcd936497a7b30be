"""Sync by messages from rank to rank: on gloo, whose broadcasts wait for one another."""

from __future__ import annotations

from shardcast.comm import Works
from shardcast.step.sync.broadcast import Broadcast


class Messages(Broadcast):
    """Those of all packs are under way at once; started ones are broadcasts.

    A message must be waited for at once (see :meth:`Comm.send_to_all`), so none can be left under
    way beside a forward.
    """

    def run(self) -> Works:  # type: ignore[override]
        nothing = self.pack.data[:0]
        pieces = [nothing] * self._comm.size
        for owner, piece in self._pieces():
            pieces[owner] = piece
        return self._comm.send_to_all(pieces, self.pack.layout)
