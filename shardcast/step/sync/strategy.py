"""Sync: what all ways to make a pack equal on all ranks have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

from shardcast.comm import Works
from shardcast.memory.pack import Pack


class Strategy(ABC):
    """One pack, and how its owners' spans reach everybody. All ranks call it in the same order."""

    def __init__(self, pack: Pack) -> None:
        self.pack, self._comm = pack, pack.comm

    @abstractmethod
    def run(self) -> Works | None:
        """Sync it in the order of the current stream, as if it were done when this returns.

        Returns:
            What the call that syncs all packs must wait for before it returns, on backends
            without streams.
        """

    @abstractmethod
    def start(self) -> None:
        """Launch it only; the pack has the works, to be waited for before any use of it."""
