"""The place of every element. Pure Python: no storage, no collectives.

A layout is planned from names, shapes, dtypes and groups alone, so all ranks plan the same one,
and any rank's part of a world of thousands can be planned in one process::

    pack 0   | wte.weight      | wpe.weight  | h.0.ln.weight |padding|   one dtype, device,
             |-- slot ---------|-- slot -----|-- slot -------|       |   requires_grad, optimizer
             |---- span, rank 0 ----|---- span, rank 1 ----|- ... ---|   even: W equal spans

             | h.0.fc.weight   | h.2.fc.weight ||h.1.fc.weight |     |   whole: slots sorted by
             |---- span, rank 0 ----------------|- span, rank 1 -----|   owner, one span each

Slots and spans begin at multiples of ``alignment`` bytes. Padding is never a slot's. A pack holds
parameters of several groups of one optimizer, each group's slots (of one owner) next to one
another.
Packing follows MegEngine's ParamPack (by device, dtype, requires_grad and a user key; caps; first
parameters left alone); the flat memory itself is the idea of PaddlePaddle PR 33461.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch

from shardcast.plan.algorithms import Algorithms
from shardcast.plan.parallel_dims import PLAIN, PackGroups

T = TypeVar("T")
SHOWN = 8  # lengths of spans that are shown one by one


class GroupId(NamedTuple):
    """A parameter group: the place of its optimizer, and its own place among that one's groups.

    Groups that are added to any of the optimizers later leave it as it is.
    """

    optimizer: int = 0
    position: int = 0

    def __str__(self) -> str:
        return (
            f"{self.position} of optimizer {self.optimizer}"
            if self.optimizer
            else f"{self.position}"
        )


class PackKey(NamedTuple):
    """The properties that parameters of one pack share; :class:`PackLayout` has most of them.

    Attributes:
        optimizer: the place of their optimizer.
        flags: of their groups, see :attr:`ParamInfo.flags`; of frozen parameters their group.
    """

    device: str
    dtype: torch.dtype
    requires_grad: bool
    optimizer: int
    flags: str
    key: str
    pack_groups: PackGroups
    cast: str = ""


class ParamInfo(NamedTuple):
    """The facts that planning needs of one parameter, in model order.

    ``dtype`` is the storage dtype after the precision policy; ``group`` its optimizer group, and
    ``flags`` the options of that which choose code or state, not numbers; ``key`` the ``repr`` of
    the user's group function; ``device`` a kind, equal on all ranks; ``cost`` what its update costs
    its owner, ``None``: as much as it has elements. Of a DTensor ``shape`` is that of the local
    tensor. ``cast`` names another than the usual cast of masters; ``unit`` elements, counted from
    the first one, have one owner then.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"
    requires_grad: bool = True
    group: GroupId = GroupId()
    key: str = ""
    pack_groups: PackGroups = PackGroups()
    cost: float | None = None
    cast: str = ""
    unit: int = 1
    flags: str = ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def pack_key(self) -> PackKey:
        flags = self.flags if self.requires_grad else f"group {self.group}"
        return PackKey(
            self.device,
            self.dtype,
            self.requires_grad,
            self.group.optimizer,
            flags,
            self.key,
            self.pack_groups,
            self.cast,
        )


class Slot(NamedTuple):
    """One parameter's place in a pack; ``offset`` and ``numel`` in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    group: GroupId = GroupId()

    @property
    def end(self) -> int:
        return self.offset + self.numel


class Span(NamedTuple):
    """The contiguous range ``[start, stop)`` of a pack that rank ``owner`` updates."""

    owner: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Fragment(NamedTuple):
    """The part ``[start, stop)`` (pack elements) of one slot that lies in one rank's span."""

    slot: Slot
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def param_range(self) -> tuple[int, int]:
        """The same range counted from the parameter's first element."""
        return self.start - self.slot.offset, self.stop - self.slot.offset

    @property
    def is_cut(self) -> bool:
        """Return whether another rank has a part of the parameter."""
        return self.numel != self.slot.numel

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape, or that of a flat part of it."""
        return (self.numel,) if self.is_cut else self.slot.shape


@dataclass(frozen=True)
class PackLayout:
    """Slots and spans of one pack; ``numel`` includes padding. One span per rank that cuts it."""

    index: int
    device: str
    dtype: torch.dtype
    requires_grad: bool
    key: str
    numel: int
    slots: tuple[Slot, ...]
    spans: tuple[Span, ...]
    algorithms: Algorithms = Algorithms()
    partition: str = "even"
    pack_groups: PackGroups = PackGroups()
    cast: str = ""

    def __str__(self) -> str:
        more = f" and {len(self.slots) - 1} more" if len(self.slots) > 1 else ""
        return f"pack {self.index} ({self.slots[0].name!r}{more})"

    @property
    def optimizer(self) -> int:
        """The place of the optimizer of its parameters."""
        return self.slots[0].group.optimizer

    @cached_property
    def groups(self) -> tuple[GroupId, ...]:
        """The groups of its parameters, in the order of slots."""
        return tuple(dict.fromkeys(slot.group for slot in self.slots))

    def ranges(self, start: int, stop: int) -> list[tuple[slice, GroupId]]:
        """Cut elements ``[start, stop)`` where the group changes; slices count from ``start``.

        Padding behind a slot is its group's, for it is zero in all that is kept of elements.
        """
        begins = [(start, self.groups[0])]
        for slot in self.slots:
            begin = max(slot.offset, start)
            if begin < min(slot.end, stop) and (len(begins) == 1 or slot.group != begins[-1][1]):
                begins.append((begin, slot.group))
        if len(begins) > 1:  # what is before the first one is padding
            begins[:2] = [(start, begins[1][1])]
        ends = [begin for begin, _ in begins[1:]] + [stop]
        return [
            (slice(begin - start, end - start), group)
            for (begin, group), end in zip(begins, ends, strict=True)
        ]

    @property
    def padding(self) -> int:
        return self.numel - sum(slot.numel for slot in self.slots)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @cached_property  # a step asks for it
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the spans; one for all where they are equal."""
        lengths = tuple(span.numel for span in self.spans)
        return lengths[:1] if len(set(lengths)) == 1 else lengths

    @cached_property
    def owned_spans(self) -> tuple[Span, ...]:
        """The spans that hold a part of a parameter, not padding alone."""
        owners = {owner for owner, _, _ in self.parts()}
        return tuple(span for span in self.spans if span.owner in owners)

    def parts(self) -> Iterator[tuple[int, Slot, int]]:
        """Return the owner, slot and elements of each part of a parameter.

        One walk along spans and slots: ``fragments()`` of each of a thousand ranks takes long.
        """
        position = 0
        for owner, start, stop in self.spans:
            while position < len(self.slots):
                slot = self.slots[position]
                count = min(slot.end, stop) - max(slot.offset, start)
                if count > 0:
                    yield owner, slot, count
                if slot.end > stop:  # the rest of it is the next rank's
                    break
                position += 1

    def fragments(self, rank: int) -> tuple[Fragment, ...]:
        """Return the slots' parts in ``rank``'s span, in pack order; none of them is empty."""
        _, begin, end = self.spans[rank]
        fragments = []
        for slot in self.slots:
            start, stop = max(slot.offset, begin), min(slot.end, end)
            if start < stop:
                fragments.append(Fragment(slot, start, stop))
        return tuple(fragments)


def with_values(
    ranges: Sequence[tuple[slice, GroupId]], values: Mapping[GroupId, T]
) -> list[tuple[slice, T]]:
    """Return ranges with the values of their groups; neighbors with the very same one are one."""
    merged: list[tuple[slice, T]] = []
    for part, group in ranges:
        value = values[group]
        if merged and merged[-1][1] is value:
            merged[-1] = slice(merged[-1][0].start, part.stop), value
        else:
            merged.append((part, value))
    return merged


@dataclass(frozen=True)
class Layout:
    """All packs, slots and spans of a model, optimizer and world size. Equal on all ranks."""

    world_size: int
    packs: tuple[PackLayout, ...]

    @property
    def partition(self) -> str:
        """``mixed`` where optimizers differ in it."""
        kinds = {pack.partition for pack in self.packs}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def numel(self) -> int:
        """The elements of all packs, with padding."""
        return sum(pack.numel for pack in self.packs)

    @property
    def padding(self) -> int:
        return sum(pack.padding for pack in self.packs)

    @property
    def trained(self) -> list[PackLayout]:
        """The packs that are reduced, updated and synced."""
        return [pack for pack in self.packs if pack.requires_grad]

    def owned(self, rank: int) -> int:
        """Return the elements, with padding, whose masters ``rank`` holds; experts aside."""
        every = [pack for pack in self.packs if len(pack.spans) == self.world_size]
        return sum(pack.spans[rank].numel for pack in every)

    def slots(self) -> Iterator[tuple[PackLayout, Slot]]:
        for pack in self.packs:
            for slot in pack.slots:
                yield pack, slot

    def lines(self, algorithms: bool = True, expert: str = "") -> list[str]:
        """One line per pack and slot: what is compared across ranks and printed.

        Args:
            expert: in place of the names of experts, which may be numbered through all ranks.
        """
        lines = [
            f"Layout: {sum(len(p.slots) for p in self.packs)} parameters in {len(self.packs)} "
            f"packs, {self.numel} elements ({self.padding} padding), partition "
            f"{self.partition!r}, world size {self.world_size}"
        ]
        for pack in self.packs:
            dtype = str(pack.dtype).removeprefix("torch.")
            frozen = "" if pack.requires_grad else " frozen"
            key = f" key {pack.key}" if pack.key else ""
            key += f" ({pack.pack_groups})" if str(pack.pack_groups) else ""
            key += f" as {pack.cast}" if pack.cast else ""
            partition = " whole" if pack.partition == "whole" else ""
            sizes = [span.numel for span in pack.spans]
            spans = f"{len(sizes)} x {sizes[0]}" if len(set(sizes)) == 1 else str(sizes)
            if algorithms and len(set(sizes)) > 1 and len(sizes) > SHOWN:
                spans = f"{len(sizes)} of {min(sizes)} to {max(sizes)}"
            how = f", {pack.algorithms}" if algorithms and pack.algorithms.sync else ""
            several = len(pack.groups) > 1
            group = f"{len(pack.groups)} groups" if several else f"group {pack.groups[0]}"
            lines.append(
                f"  pack {pack.index}: {dtype} on {pack.device}, "
                f"{group}{key}{frozen}{partition}, {pack.numel} elements "
                f"({pack.padding} padding), spans {spans}{how}"
            )
            for slot in pack.slots:
                name = expert if expert and pack.pack_groups.shard != PLAIN else slot.name
                own = f", group {slot.group}" if several else ""
                lines.append(f"    {name} {tuple(slot.shape)} @ {slot.offset}{own}")
        return lines

    def digest(self) -> bytes:
        """32 bytes that differ where anything but the algorithms differs: they move no element."""
        return hashlib.sha256("\n".join(self.lines(algorithms=False)).encode()).digest()

    def __repr__(self) -> str:
        return "\n".join(self.lines())
