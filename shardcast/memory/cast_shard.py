"""Shards of packs whose masters are cast in blocks, see :mod:`shardcast.plan.casts`.

The cast is made behind the update. What was published last is kept, 2 bytes per owned element: an
element that a script wrote cannot be told by its master alone, since with it its whole block would
be cast in another way.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.memory.codecs import shown
from shardcast.memory.pack import Pack
from shardcast.memory.shard import PIECE, Shard
from shardcast.plan.casts import Cast
from shardcast.plan.layout import Fragment, Slot


class CastShard(Shard):
    """A shard whose masters ``cast`` makes what is published of."""

    def __init__(self, pack: Pack, cast: Cast, config: ShardcastConfig) -> None:
        super().__init__(pack, config)
        self._cast, self._runs = cast, cast.runs(self.fragments)
        self._last = torch.empty(
            pack.own.numel, dtype=pack.layout.dtype, device=pack.params[0].device
        )

    @property
    def casts(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._last.nbytes

    def memory(self) -> Iterator[Tensor]:
        yield from super().memory()
        yield self._last

    def fill(self, source: Tensor) -> None:
        self._last.copy_(self.published)
        super().fill(source)

    @torch.no_grad()
    def publish(self) -> None:
        for run in self._runs:
            part = self.local(run.start, run.stop)
            # A record is to see both of what was published last and of what is now.
            both = (self.published[part], self._last[part])
            outputs = both if self.record is None else both[:1]
            self._cast.publish_(self.master.read(part), run.width, outputs)
        if self.record is not None:
            self._note_published()

    @torch.no_grad()
    def edit(self, fragment: Fragment, changed: Tensor, values: Tensor) -> None:
        """See :meth:`Shard.edit`; values that meet an edited one in a block are cast anew with it.

        What a script wrote in such a block becomes the master.
        """
        part = self.local(fragment.start, fragment.stop)
        last, published = self._last[part], self.published[part]
        before = shown(self.master.read(part), published, last)
        after = torch.where(changed, values, before)
        old, new = (self.rounded(fragment, masters) for masters in (before, after))
        anew = changed | (old.view(torch.int16) != new.view(torch.int16))
        self.tell(part, last, torch.where(anew, new, last))
        for kept in (published, last):
            kept.copy_(torch.where(anew, new, kept))
        self.master.edit(part, anew, after)
        self._before_load.pop(fragment, None)

    def settle(self) -> None:
        """Cast what a script wrote, before a sync without an update; see :class:`.casts.Wire`."""
        self.absorb(publishes=True)
        self.publish()

    def _note_published(self) -> None:
        self.tell(slice(None), self._last, self.published)
        self._last.copy_(self.published)

    def _cast_of(self, part: slice, _masters: Tensor) -> Tensor:
        return self._last[part]

    @torch.no_grad()
    def absorb(self, publishes: bool = False) -> None:
        self.forget_before_load()
        written = False
        for start in range(0, self.published.numel(), PIECE):
            part = slice(start, start + PIECE)
            masters = self.master.read(part)
            if self._cast.take_written_(masters, self.published[part], self._last[part]):
                self.master.write(part, masters)
                written = True
        if written and not (publishes and self.record is None):
            self._note_published()

    def note_loaded(self, slot: Slot, values: Tensor) -> None:
        for fragment in self.fragments:
            if fragment.slot == slot:
                part = self.local(fragment.start, fragment.stop)
                loaded = values.reshape(-1)[slice(*fragment.param_range)].to(self._last.device)
                self.tell(part, self._last[part], loaded)
                self._last[part].copy_(loaded)
