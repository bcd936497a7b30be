"""Shards that publish masters otherwise than by a cast of each element within the update.

**In blocks.** The owner casts parameters with a form after the update. It keeps the last published
values, 2 bytes per owned element: a written element cannot be detected from its master alone,
because its whole block would be cast differently with it.

**Followed.** With ``changes`` a shard keeps the published values of the last answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import ClassVar

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.memory.codecs import shown
from shardcast.memory.hashing import bits_of
from shardcast.memory.pack import Pack
from shardcast.memory.shard import Shard
from shardcast.memory.slices import slices
from shardcast.plan.layout import Fragment, PackLayout, Slot
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.plan.publishing import Encoding, Publishing
from shardcast.serving.encoding import FormEncoding, runs_of
from shardcast.serving.forms import FORMS
from shardcast.serving.kernels import Kernels

ROUNDED = 1 << 20  # values that are cast at a time


class BlockShard(Shard):
    """A shard whose masters are published in a form."""

    in_blocks: ClassVar[bool] = True

    def __init__(self, pack: Pack, config: ShardcastConfig) -> None:
        super().__init__(pack, config)
        self._form = FORMS[pack.layout.cast]
        self._kernels = Kernels(self._form, config)
        fragments = ((it.slot, it.start, it.stop) for it in self.fragments)
        self._runs = runs_of(self._form, None, fragments)
        self._last = self.home.zeros(pack.own.numel, pack.layout.dtype)

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
        for slot in self.pack.layout.slots:
            part = slice(slot.offset, slot.end)
            self.pack.data[part] = self.rounded(slot, source[part])
        self._last.copy_(self.pack.own_data)
        super().fill(source)

    @torch.no_grad()
    def publish(self) -> None:
        self.look()
        for run in self._runs:
            part = self.local(run.start, run.stop)
            rows = self.published[part].view(1, -1, run.width)
            self._kernels.round(self.master.read(part).view(1, -1, run.width), rows)
        self._last.copy_(self.published)

    @torch.no_grad()
    def edit(self, fragment: Fragment, changed: Tensor, values: Tensor) -> None:
        """See :meth:`.Shard.edit`; a block with an edited value is cast again.

        Values that a script wrote in such a block become masters.
        """
        self.look()
        part = self.local(fragment.start, fragment.stop)
        changed, values = changed.to(self.home.device), values.to(self.home.device)
        last, published = self._last[part], self.published[part]
        before = shown(self.master.read(part), published, last)
        after = torch.where(changed, values, before)
        old, new = (self.rounded(fragment.slot, masters) for masters in (before, after))
        anew = changed | (old.view(torch.int16) != new.view(torch.int16))
        for kept in (published, last):
            kept.copy_(torch.where(anew, new, kept))
        self.master.edit(part, anew, after)
        self._before_load.pop(fragment, None)
        self.home.send(part)

    def settle(self) -> None:
        """Cast values that a script wrote, before a sync without an update, for the encoding."""
        self.absorb(publishes=True)
        self.publish()
        self.home.send()

    def rounded(self, slot: Slot, values: Tensor) -> Tensor:
        published = torch.empty(values.shape, dtype=self.pack.layout.dtype, device=values.device)
        unit = self._form.unit(slot.shape)
        step = max(1, ROUNDED // unit) * unit
        for start in range(0, values.numel(), step):
            part = slice(start, start + step)
            rows = values[part].to(MASTER_DTYPE).view(-1, unit // self._form.block_rows)
            published[part] = self._form.round(rows).view(-1)
        return published

    def _cast_of(self, part: slice, _masters: Tensor) -> Tensor:
        return self._last[part]

    @torch.no_grad()
    def absorb(self, publishes: bool = False) -> None:
        self.look()
        self.forget_before_load()
        written = False
        for part in slices(self.published.numel()):
            masters = self.master.read(part)
            if self._kernels.take_written(masters, self.published[part], self._last[part]):
                self.master.write(part, masters)
                written = True
        if written and not publishes:
            self._last.copy_(self.published)

    def note_loaded(self, slot: Slot, values: Tensor) -> None:
        for fragment in self.fragments:
            if fragment.slot == slot:
                part = self.local(fragment.start, fragment.stop)
                loaded = values.reshape(-1)[slice(*fragment.param_range)].to(self._last.device)
                self._last[part].copy_(loaded)


class FollowedShard(Shard):
    """A shard that knows which published values have changed since the last answer.

    It keeps a copy of them. So a change counts wherever it comes from: an update, a script, a load.
    """

    def __init__(self, pack: Pack, config: ShardcastConfig) -> None:
        super().__init__(pack, config)
        self._told = self.home.zeros(pack.own.numel, pack.layout.dtype)
        self._is_new = True  # there was no answer yet

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._told.nbytes

    def memory(self) -> Iterator[Tensor]:
        yield from super().memory()
        yield self._told

    def changed(self, part: slice) -> Tensor:
        """Return the changed elements of a part of the own span, as places within it, ascending."""
        now = bits_of(self.published[part])
        if self._is_new:
            return torch.arange(now.numel(), device=now.device)
        return (bits_of(self._told[part]) != now).nonzero().view(-1)  # waits for the device

    def note_told(self) -> None:
        """Start again: the current published values were part of an answer."""
        self._is_new = False
        self._told.copy_(self.published)


class FollowedBlockShard(FollowedShard, BlockShard):
    """A followed shard whose masters are published in a form."""


class Serving(Publishing):
    """The classes of shards of one configuration, and their encodings."""

    def __init__(self, config: ShardcastConfig) -> None:
        self._config = config
        self._patterns = {} if config.published is None else config.published.patterns()

    def cast(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[str, int]:
        names = [form for form, patterns in self._patterns.items() if _matches(patterns, name)]
        if not names:
            return "", 1
        if len(names) > 1:
            raise ValueError(
                f"published: {name!r} matches patterns of {' and '.join(names)}; give it one form"
            )
        form = FORMS[names[0]]
        if len(shape) not in (2, 3):  # three dimensions are a stack of experts
            if not any(fnmatchcase(name, pattern) for pattern in self._patterns[names[0]]):
                return "", 1  # a vector in a module whose name matches
            raise ValueError(
                f"published: {name!r} has the shape {shape}, expected a matrix, or a stack of "
                f"them, for {form.name}; let patterns end with .weight"
            )
        if dtype != torch.bfloat16:
            raise ValueError(
                f"published: {name!r} is kept in {dtype}, expected bf16 for {form.name}; leave it "
                "out of keep_fp32, or of the patterns"
            )
        *_, rows, columns = shape
        if rows % form.block_rows or columns % form.block_columns or not rows or not columns:
            raise ValueError(
                f"published: {name!r} has {rows} x {columns} elements on a rank, expected "
                f"multiples of {form.block_rows} x {form.block_columns} for {form.name}; choose "
                "other dimensions, or leave it out of the patterns"
            )
        return form.name, form.unit(shape)

    def shard(self, pack: Pack) -> Shard:
        kinds = {
            (False, False): Shard,
            (True, False): BlockShard,
            (False, True): FollowedShard,
            (True, True): FollowedBlockShard,
        }
        return kinds[bool(pack.layout.cast), self._config.changes](pack, self._config)

    def encoding(self, layout: PackLayout) -> Encoding | None:
        if not layout.cast or self._config.published.wire == "bf16":
            return None
        return FormEncoding(FORMS[layout.cast], layout, self._config)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        params = [*names]
        return [
            f"published: the pattern {pattern!r} of {form} matches no parameter of the optimizer; "
            "patterns are matched against names as in model.named_parameters()"
            for form, patterns in self._patterns.items()
            for pattern in patterns
            if not any(_matches((pattern,), name) for name in params)
        ]


def _matches(patterns: Iterable[str], name: str) -> bool:
    module = name.rpartition(".")[0]
    return any(fnmatchcase(name, each) or fnmatchcase(module, each) for each in patterns)
