"""Shards: one pack's part on this rank, its masters among it.

A low-precision pack has fp32 masters for its own span: 4 bytes per owned element, or 2 where the
published bf16 is the other half. A pack stored in fp32 is its own master: the update writes
straight into it and nothing is cast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from shardcast.memory.slices import slices
from shardcast.plan.layout import Fragment, PackLayout, Slot
from shardcast.plan.precision import MASTER_DTYPE
from shardcast.plan.publishing import publishing_of

FILL = 1 << 16  # masters that are encoded at a time


class Shard:
    """The part of one pack on this rank: masters, gradients and the parameters' parts.

    A class of an option may publish masters in another way: by :meth:`publish`, with what it casts
    (:meth:`rounded`), and with what it notes of it (:meth:`tell`).

    All of it is at :attr:`home`, the device of the pack unless an option says otherwise; readers
    get values on the device of the pack.

    Attributes:
        home: where masters, state and update are.
        master: the own span in full precision; it is the pack's own memory if that is fp32.
        fragments: the parameters' parts in the own span, in pack order.
        given_dtypes: of the parameters, as they were given to ``shard``.
        in_blocks: whether masters are cast behind the update, several together.
        followed: what an epilogue that follows what is published has as its state, by name.
    """

    in_blocks: ClassVar[bool] = False
    followed: Mapping[str, Encoded] = {}
    master: Encoded

    def __init__(self, pack: Pack, config: ShardcastConfig) -> None:
        self.pack, self.home = pack, home_of(pack, config)
        # Masters before model.load_state_dict, and what was published of them.
        self._before_load: dict[Fragment, tuple[Tensor, Tensor]] = {}
        self._lent: Tensor | None = None  # the training's own span, while an average is in the pack
        self.given_dtypes = [param.dtype for param in pack.params]
        self.grads: Gradients | None = None  # None while frozen: neither reduced nor updated
        self.fragments = pack.layout.fragments(pack.own.owner)
        self._codec = master_codec(config, pack.layout.dtype)
        self._row = row_of(config, pack.layout.dtype)

    @property
    def in_place(self) -> bool:
        """Return whether the pack's own span *is* the master."""
        return self.pack.layout.dtype == MASTER_DTYPE

    @property
    def data(self) -> Tensor:
        """The memory of the masters, 1-d fp32; only of a plain codec."""
        return self.master.data

    @property
    def published(self) -> Tensor:
        """The own span of the pack, 1-d, at home; see :meth:`look`."""
        return self.home.published

    @property
    def mean(self) -> Tensor:
        """The mean of the own span, 1-d, at home; it comes until ``home.arrive()`` returns."""
        assert self.grads is not None
        return self.home.mean(self.grads)

    def look(self) -> None:
        """Have in :attr:`published` what a script wrote into the model. May wait for the device.

        Before masters are read, or anything is written here.
        """
        if self._lent is None:
            self.home.look()

    def read(self, part: slice) -> Tensor:
        """Return masters as they are, 1-d fp32; for readers, see :meth:`exact`."""
        self.look()
        return self.home.given(self.master.read(part))

    @property
    def casts(self) -> bool:
        """Return whether the update itself has to cast into the pack.

        Not where masters have a part of what is published in their own memory.
        """
        return self._is_apart

    @property
    def _is_apart(self) -> bool:
        """Return whether masters and what is published of them share no memory."""
        return not self.in_place and not self._codec.has_published

    @property
    def nbytes(self) -> int:
        """The bytes of masters outside of the pack, and of what an option keeps with them."""
        of_masters = 0 if self.in_place else self.master.nbytes
        for kept in self._before_load.values():
            of_masters += sum(tensor.nbytes for tensor in kept)
        return of_masters

    def memory(self) -> Iterator[Tensor]:
        """Give the very tensors that are kept here, that of the pack among them."""
        yield from (self.pack.data, self.pack.own_data, *self.master.pieces)

    def fill(self, source: Tensor) -> None:
        """Take the own span of ``source``: 1-d, the whole pack, fp32."""
        self.home.fill()
        own = source[self.pack.own.start : self.pack.own.stop]
        if self.in_place:
            self.master = self._encoded(self.published)
        elif self._codec.plain and not self.home.is_apart:
            # A clone, so that the source is freed; not where it has nothing else.
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
        """Give each fragment with its number and its model parameter."""
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

        It may be the memory of the masters: do not write into it.
        """
        return self.home.given(self.shown(self.local(fragment.start, fragment.stop)))

    @torch.no_grad()
    def shown(self, part: slice) -> Tensor:
        """Return masters of a part as the model shows them, at home; see :func:`.codecs.shown`.

        1-d fp32. The masters stay as they are: weights that come back with the same bits have them
        back. Waits for no device unless masters are apart.
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
        """Return whether an average is in the pack."""
        return self._lent is not None

    @property
    def _shown(self) -> Tensor:
        """The training's weights: what is published, or was before an average took its place."""
        return self.published if self._lent is None else self._lent

    def _cast_of(self, _part: slice, masters: Tensor) -> Tensor:
        """Return what was published of the masters of a part."""
        return masters.to(self.published.dtype)

    def set_exact(self, fragment: Fragment, values: Tensor) -> None:
        """Overwrite the masters of one fragment; 1-d, any floating dtype, any device."""
        self.look()
        exact = values.to(self.home.device, MASTER_DTYPE)
        part = self.local(fragment.start, fragment.stop)
        if self.casts:
            self.tell(part, self.master.read(part), exact)
        self.master.write(part, exact)
        self._before_load.pop(fragment, None)
        if not self._is_apart:
            self.home.send(part)

    @torch.no_grad()
    def edit(self, fragment: Fragment, changed: Tensor, values: Tensor) -> None:
        """Overwrite some masters of a fragment and publish these; all others keep their bits.

        So does what a script wrote to the others.

        Args:
            changed: 1-d bool: which ones.
            values: 1-d fp32, the masters of the whole fragment.
        """
        self.look()
        part = self.local(fragment.start, fragment.stop)
        changed, values = changed.to(self.home.device), values.to(self.home.device)
        if self.casts:
            old, published = self.master.read(part), self.published[part]
            self.tell(part, old, torch.where(changed, values, old))
            published.copy_(torch.where(changed, values.to(published.dtype), published))
        self.master.edit(part, changed, values)
        self._before_load.pop(fragment, None)
        self.home.send(part)

    @torch.no_grad()
    def publish(self) -> None:
        """Cast the masters into :attr:`published`; ``home.send()`` has them in the pack."""
        self.look()
        for piece in slices(self.published.numel()) if self.casts else ():
            masters = self.master.read(piece)
            self.tell(piece, self.published[piece], masters)
            self.published[piece].copy_(masters)

    def settle(self) -> None:
        """Cast what a script wrote, before a sync without an update, if that casts in blocks."""

    def rounded(self, slot: Slot, values: Tensor) -> Tensor:
        """Return what is published of masters of a slot, or of its part on one rank.

        Args:
            values: 1-d, of any floating dtype.
        """
        return values.to(self.pack.layout.dtype)

    def lend(self) -> None:
        """Free the own span of the pack for an average; readers see the training's weights."""
        self.look()
        self._lent = self.published if self.home.is_apart else self.published.clone()
        self._move(self._lent)

    def take_back(self) -> None:
        """Undo :meth:`lend`, to the very same bits."""
        assert self._lent is not None
        if self._lent is not self.published:
            self._move(self.published.copy_(self._lent))
        self._lent = None
        self.home.send()

    def _move(self, own: Tensor) -> None:
        """Re-point masters that the published span is a part of at other memory."""
        if not self._is_apart:
            self.master.move(own)

    @torch.no_grad()
    def absorb(self, publishes: bool = False) -> None:
        """Make what the model shows the masters, see :func:`.codecs.shown`.

        Only updates do so; readers call :meth:`exact`. Split masters are changed by changing what
        is published, and keep their lower bits. Waits for no device unless masters are apart.

        Args:
            publishes: they are published next, so that what is published now need not be noted.
        """
        self.look()
        self.forget_before_load()
        if not self.casts:
            return
        for part in slices(self.published.numel()):
            masters = self.master.read(part)  # plain ones are the memory itself
            self.tell(part, masters, self.published[part])
            take_shown_(masters, self.published[part])
            self.master.write(part, masters)

    def tell(self, part: slice, before: Tensor, after: Tensor) -> None:
        """Note published values of a part, or masters whose casts they are: nothing here."""

    @torch.no_grad()
    def note_written(self) -> bool:
        """Note values that are not the cast of their masters: a script wrote them.

        Returns whether there are any; waits for the device.
        """
        self.look()
        found = False
        for part in slices(self.published.numel()) if self._is_apart else ():
            last, now = self._cast_of(part, self.master.read(part)), self.published[part]
            if not torch.equal(last.view(torch.int16), now.view(torch.int16)):
                self.tell(part, last, now)
                found = True
        return found

    @torch.no_grad()
    def load(self, fragment: Fragment, values: Tensor) -> None:
        """Take what ``model.load_state_dict`` is about to copy into the model; 1-d, any dtype.

        A value that is the cast of its master says nothing of it, so the master stays. Other values
        are the masters in full precision, but the old ones are kept until the training goes on: an
        evaluation of other weights ends with a load of the old ones. Values of the published dtype
        need neither, where the model itself shows that they are not the cast.
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
        """Let go of the masters before a load: the training goes on from the loaded ones."""
        self._before_load.clear()

    def note_loaded(self, slot: Slot, values: Tensor) -> None:
        """Take ``values``, which a parameter is about to have, for what is published of it."""


def take_moved(shards: Sequence[Shard]) -> None:
    """Take values that a script assigned as ``param.data`` into their packs. Local.

    Raises:
        RuntimeError: names a parameter that has another dtype, device or shape now.
    """
    for shard in shards:
        shard.pack.take_moved()


def shard_of(pack: Pack, config: ShardcastConfig) -> Shard:
    """Return the shard of a pack, which has no masters yet. Local."""
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

    Originals are freed when they are staged, so no more than one pack is held twice.
    Every rank must call it, with equal layouts.
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
    ]  # of ties they may differ
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
    """Warn of copies that were not equal: perhaps they are parts, cut by hand."""
    for slot, own, first in zip(
        pack.layout.slots, pack.views(mine), pack.views(theirs), strict=True
    ):
        if not torch.equal(own, first):
            warn_first(
                f"parameter {slot.name!r} differs between ranks of {' and '.join(dims)}: it was "
                "taken for a copy, and has the first rank's values now. If it is a part of a "
                "bigger one make it a DTensor (DTensor.from_local(..., [Shard(dim)])); if it is a "
                "copy, build the model with one seed"
            )
            return
