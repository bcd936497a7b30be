"""Shards: one pack's part on this rank, including its masters.

A low-precision pack has fp32 masters for its own span: 4 bytes per owned element, or 2 if the
published bf16 is the other half. An fp32 pack is its own master: the update writes directly to it,
without a cast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import ClassVar

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import ProcessGroups, warn_first
from shardcast.config import ShardcastConfig
from shardcast.memory.codecs import Encoded, master_codec, row_of, shown, take_shown_
from shardcast.memory.gradients import Gradients
from shardcast.memory.home import home_of
from shardcast.memory.pack import Pack
from shardcast.memory.packed_param import note_of
from shardcast.memory.slices import slices
from shardcast.plan.layout import Fragment, PackLayout, Slot
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.plan.publishing import publishing_of

FILL = 1 << 16  # masters that are encoded at a time


class Shard:
    """One pack's part on this rank: masters, gradients and the parameters' parts.

    An option's class may publish masters in another way, by :meth:`publish` and the cast
    :meth:`rounded`.

    Everything is at :attr:`home`, by default the pack's device. Readers get values on the pack's
    device.

    Attributes:
        home: place of masters, state and update.
        master: the own span at full precision; the pack's own memory if that is fp32.
        fragments: the parameters' parts in the own span, in pack order.
        given_dtypes: original dtypes of the parameters.
        in_blocks: whether masters are cast after the update, in blocks.
    """

    in_blocks: ClassVar[bool] = False
    master: Encoded

    def __init__(self, pack: Pack, config: ShardcastConfig) -> None:
        self.pack, self.home = pack, home_of(pack, config)
        # Masters before model.load_state_dict, and their published values.
        self._before_load: dict[Fragment, tuple[Tensor, Tensor]] = {}
        # the trained values of the own span, while an average is in the pack
        self._lent: Tensor | None = None
        self.given_dtypes = [
            # shard() already converted the parameters of a group that is added later.
            param.dtype if (note := note_of(param)) is None else note.dtype
            for param in pack.in_model
        ]
        # None while frozen, when it is neither reduced nor updated
        self.grads: Gradients | None = None
        self.fragments = pack.layout.fragments(pack.own.owner)
        self._codec = master_codec(config, pack.layout.dtype)
        self._row = row_of(config, pack.layout.dtype)

    @property
    def in_place(self) -> bool:
        """Whether the pack's own span *is* the master."""
        return self.pack.layout.dtype == MASTER_DTYPE

    @property
    def data(self) -> Tensor:
        """Memory of the masters, 1-d fp32; only for a plain codec."""
        return self.master.first

    @property
    def published(self) -> Tensor:
        """The own span of the pack, 1-d, at home; see :meth:`look`."""
        return self.home.published

    @property
    def mean(self) -> Tensor:
        """The mean of the own span, 1-d, at home; valid after ``home.arrive()``."""
        assert self.grads is not None
        return self.home.mean(self.grads)

    def look(self) -> None:
        """Update :attr:`published` with values that a script wrote. May wait for the device.

        Call it before masters are read, or anything is written here.
        """
        if self._lent is None:
            self.home.look()

    def read(self, part: slice) -> Tensor:
        """Return masters unchanged, 1-d fp32; readers use :meth:`exact`."""
        self.look()
        return self.home.given(self.master.read(part))

    @property
    def casts(self) -> bool:
        """Whether the update itself must cast into the pack.

        It must not if the masters' own memory contains part of the published values.
        """
        return self._is_apart

    @property
    def _is_apart(self) -> bool:
        """Whether masters and their published values share no memory."""
        return not self.in_place and not self._codec.has_published

    @property
    def nbytes(self) -> int:
        """Bytes of masters outside the pack, and of an option's data for them."""
        of_masters = 0 if self.in_place else self.master.nbytes
        for kept in self._before_load.values():
            of_masters += sum(tensor.nbytes for tensor in kept)
        return of_masters

    def memory(self) -> Iterator[Tensor]:
        """Yield the tensors themselves that are kept here, including the pack's."""
        yield from (self.pack.data, self.pack.own_data, *self.master.pieces)

    def fill(self, source: Tensor) -> None:
        """Load the own span of ``source``: 1-d, the whole pack, fp32."""
        self.home.fill()
        own = source[self.pack.own.start : self.pack.own.stop]
        if self.in_place:
            self.master = self._encoded(self.published)
        elif self._codec.plain and not self.home.is_apart:
            # A clone, so that the source is freed, unless the span is all of it.
            self.master = self._encoded(own if own.numel() == source.numel() else own.clone())
        else:
            self.master = self._encoded(self.published if self._codec.has_published else None)
            for start in range(0, own.numel(), FILL):
                self.master.write(slice(start, start + FILL), own[start : start + FILL])

    def _encoded(self, first: Tensor | None) -> Encoded:
        return Encoded(self._codec, self.pack.own.numel, self._row, self.home.zeros, first=first)

    def local(self, start: int, stop: int) -> slice:
        """Return pack elements ``[start, stop)`` as a slice of the own span."""
        return slice(start - self.pack.own.start, stop - self.pack.own.start)

    def owned(self) -> Iterator[tuple[int, Fragment, nn.Parameter]]:
        """Yield each fragment with its number and its model parameter."""
        params = dict(zip(self.pack.layout.slots, self.pack.in_model, strict=True))
        for number, fragment in enumerate(self.fragments):
            yield number, fragment, params[fragment.slot]

    def present(self, slots: Sequence[bool]) -> list[bool]:
        """Return per fragment whether some rank has a gradient.

        Args:
            slots: the same per slot of the pack; see :class:`Decision`.
        """
        assert self.grads is not None
        return list(compress(slots, self.grads.owned))

    @torch.no_grad()
    def exact(self, fragment: Fragment) -> Tensor:
        """Return the masters of one fragment as the model shows them, for readers; 1-d fp32.

        Waits for the device. The result may be the masters' memory: do not write to it.
        """
        return self.home.given(self.shown(self.local(fragment.start, fragment.stop)))

    @torch.no_grad()
    def shown(self, part: slice) -> Tensor:
        """Return masters of a part as the model shows them, at home; see :func:`.codecs.shown`.

        1-d fp32. The masters do not change, so a weight that returns to its old bits gets its old
        master back. Does not wait for the device unless masters are elsewhere.
        """
        self.look()
        masters = self.master.read(part)
        if not self._is_apart:
            return masters
        now, last = self._shown[part], self._cast_of(part, masters)
        if _compat.is_host(now.device) and _compat.has_bits_of(last, now):  # almost always
            return masters
        return shown(masters, now, last)

    @property
    def is_lent(self) -> bool:
        """Whether an average is in the pack."""
        return self._lent is not None

    @property
    def _shown(self) -> Tensor:
        """The trained weights: the published values, or those before an average replaced them."""
        return self.published if self._lent is None else self._lent

    def _cast_of(self, _part: slice, masters: Tensor) -> Tensor:
        """Return the last published values of a part's masters."""
        return masters.to(self.published.dtype)

    def set_exact(self, fragment: Fragment, values: Tensor) -> None:
        """Overwrite the masters of one fragment; 1-d, any floating dtype, any device."""
        self.look()
        exact = values.to(self.home.device, MASTER_DTYPE)
        part = self.local(fragment.start, fragment.stop)
        self.master.write(part, exact)
        self._before_load.pop(fragment, None)
        if not self._is_apart:
            self.home.send(part)

    @torch.no_grad()
    def edit(self, fragment: Fragment, changed: Tensor, values: Tensor) -> None:
        """Overwrite some masters of a fragment and publish them; all others keep their bits.

        Values that a script wrote to other elements stay, too.

        Args:
            changed: 1-d bool, the elements to overwrite.
            values: 1-d fp32, masters of the whole fragment.
        """
        self.look()
        part = self.local(fragment.start, fragment.stop)
        changed, values = changed.to(self.home.device), values.to(self.home.device)
        if self.casts:
            published = self.published[part]
            published.copy_(torch.where(changed, values.to(published.dtype), published))
        self.master.edit(part, changed, values)
        self._before_load.pop(fragment, None)
        self.home.send(part)

    @torch.no_grad()
    def publish(self) -> None:
        """Cast the masters into :attr:`published`; ``home.send()`` copies them to the pack."""
        self.look()
        for piece in slices(self.published.numel()) if self.casts else ():
            self.published[piece].copy_(self.master.read(piece))

    def settle(self) -> None:
        """Cast values that a script wrote, before a sync without an update, if in blocks."""

    def rounded(self, slot: Slot, values: Tensor) -> Tensor:
        """Return the published values of a slot's masters, or of this rank's part of them.

        Args:
            values: 1-d, any floating dtype.
        """
        return values.to(self.pack.layout.dtype)

    def lend(self) -> None:
        """Free the own span of the pack for an average; readers see the trained weights."""
        self.look()
        self._lent = self.published if self.home.is_apart else self.published.clone()
        self._move(self._lent)

    def take_back(self) -> None:
        """Undo :meth:`lend`, bit for bit."""
        assert self._lent is not None
        if self._lent is not self.published:
            self._move(self.published.copy_(self._lent))
        self._lent = None
        self.home.send()

    def _move(self, own: Tensor) -> None:
        """Re-point split masters at the moved published span."""
        if not self._is_apart:
            self.master.move(own)

    @torch.no_grad()
    def absorb(self, publishes: bool = False) -> None:
        """Turn the values that the model shows into masters, see :func:`.codecs.shown`.

        Only updates do so; readers call :meth:`exact`. Split masters change with the published
        values, and keep their lower bits. Does not wait for the device unless masters are
        elsewhere.

        Args:
            publishes: they are published next, so a class that keeps the last published values
                need not keep the current ones.
        """
        self.look()
        self.forget_before_load()
        if not self.casts:
            return
        for part in slices(self.published.numel()):
            masters = self.master.read(part)  # for plain masters this is the memory itself
            take_shown_(masters, self.published[part])
            self.master.write(part, masters)

    @torch.no_grad()
    def load(self, fragment: Fragment, values: Tensor) -> None:
        """Load values that ``model.load_state_dict`` is about to copy to the model; 1-d, any dtype.

        A value that is the cast of its master carries no more information, so the master stays.
        Other values become masters at full precision. The old masters are kept until training
        continues, because an evaluation of other weights ends with a load of the old ones. Values
        of the published dtype need neither, because the model itself shows that they are not the
        cast.
        """
        part = self.local(fragment.start, fragment.stop)
        self.look()
        old = self._before_load.pop(fragment, None)
        if self.casts and values.dtype == self.published.dtype:
            if old is not None:
                self.set_exact(fragment, old[0])
            return
        masters = self.master.read(part).clone() if old is None else old[0]
        last = self._cast_of(part, masters).clone() if old is None else old[1]
        exact = values.to(self.home.device, MASTER_DTYPE)
        stays = last.to(MASTER_DTYPE).view(torch.int32) == exact.view(torch.int32)
        self.set_exact(fragment, torch.where(stays, masters, exact))
        self._before_load[fragment] = masters, last

    def forget_before_load(self) -> None:
        """Release the masters before a load, because training continues from the loaded ones."""
        self._before_load.clear()

    def note_loaded(self, slot: Slot, values: Tensor) -> None:
        """Treat ``values``, which a parameter is about to get, as its published values."""


def take_moved(shards: Sequence[Shard]) -> None:
    """Copy values that a script assigned as ``param.data`` into their packs. Local.

    Raises:
        RuntimeError: a parameter now has another dtype, device or shape, or memory whose values
            were overwritten; names it.
    """
    packs = [shard.pack for shard in shards]
    moved = {pack: values for pack in packs if (values := pack.moved())}
    if not moved:
        return
    for pack in packs:
        pack.wait()
    # A script may have swapped two parameters' memory, so all values in packs are copied before the
    # first one is written. Others need no copy.
    memory = [(pack.data.data_ptr(), pack.data.data_ptr() + pack.data.nbytes) for pack in packs]
    for values in moved.values():
        for number, value in values.items():
            storage = value.untyped_storage()
            first, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            if any(first < stop and start < end for start, stop in memory):
                values[number] = value.clone()
    kept = [name for pack, values in moved.items() for name in pack.take(values)]
    # One of several is the last value of a loop's variable: `old = param.data`.
    is_backup = len(kept) >= min(2, sum(map(len, moved.values())))
    if is_backup and not any(pack.has_told for pack in packs):
        packs[0].has_told = True
        warn_first(
            f"parameter {kept[0]!r} got other values by `param.data = values` while the script "
            "keeps its old memory, as in `backup = param.data`; that shows the new values now. "
            "If you need the old ones, keep backup = param.data.clone()",
            "param.data with a backup",
        )


def shard_of(pack: Pack, config: ShardcastConfig) -> Shard:
    """Return the shard of a pack, without masters yet. Local."""
    publishing = publishing_of(config)
    shard: Shard = Shard(pack, config) if publishing is None else publishing.shard(pack)
    return shard


def build_shard(
    layout: PackLayout,
    params: list[nn.Parameter],
    process_groups: ProcessGroups,
    config: ShardcastConfig,
) -> Shard:
    """Make a pack and its shard: stage in fp32, broadcast from rank 0, keep, cast, free.

    Originals are freed after staging, so only one pack is held twice. Collective: every rank, with
    equal layouts.
    """
    pack_groups = layout.pack_groups
    comm = process_groups.comm(pack_groups.shard)
    pack = Pack(layout, params, comm)
    if (publishing := publishing_of(config)) is not None:
        pack.encoding = publishing.encoding(layout)
    shard = shard_of(pack, config)
    if process_groups.everyone.size == 1 and layout.dtype == MASTER_DTYPE:
        pack.fill()
        shard.fill(pack.data)
        return shard
    device = pack.params[0].device
    staged = torch.zeros(layout.numel, dtype=MASTER_DTYPE, device=device)
    with torch.no_grad():
        torch._foreach_copy_(pack.views(staged), pack.locals)
    nothing = torch.empty(0, dtype=layout.dtype, device=device)
    for param in pack.params:
        param.data = nothing
    dims = [
        name for name in pack_groups.replicate if name in process_groups.parallel_dims.model
    ]  # these may differ for ties
    own = staged.clone() if dims else staged
    for comm in process_groups.comms(dims):
        comm.broadcast(staged, 0)
    if dims:
        _warn_of_parts(pack, own, staged, dims)
    ties = [name for name in pack_groups.replicate if name not in dims]
    for comm in (*process_groups.comms(ties), process_groups.data_parallel(pack_groups)):
        comm.broadcast(staged, 0)
    pack.fill(staged)
    shard.fill(staged)
    return shard


def _warn_of_parts(pack: Pack, mine: Tensor, theirs: Tensor, dims: Sequence[str]) -> None:
    """Warn about copies that were not equal: they may be parts, sharded by hand."""
    for slot, own, first in zip(
        pack.layout.slots, pack.views(mine), pack.views(theirs), strict=True
    ):
        if not torch.equal(own, first):
            warn_first(
                f"parameter {slot.name!r} differs between ranks of {' and '.join(dims)}: it was "
                "treated as a copy and now has the first rank's values. If it is a shard of a "
                "larger parameter, make it a DTensor (DTensor.from_local(..., [Shard(dim)])); "
                "if it is a copy, use the same seed on all ranks"
            )
            return
