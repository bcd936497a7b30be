"""The place of every element. Pure Python: no storage, no collectives.

A layout depends only on names, shapes, dtypes and groups. So all ranks plan the same one, and one
process can plan any rank's part of a world of thousands::

    pack 0   | wte.weight      | wpe.weight  | h.0.ln.weight |padding|   one dtype, device,
             |-- slot ---------|-- slot -----|-- slot -------|       |   requires_grad, optimizer
             |---- span, rank 0 ----|---- span, rank 1 ----|- ... ---|   even: W equal spans

             | h.0.fc.weight   | h.2.fc.weight ||h.1.fc.weight |     |   whole: slots sorted by
             |---- span, rank 0 ----------------|- span, rank 1 -----|   owner, one span each

Slots and spans start at multiples of ``alignment`` bytes. Padding belongs to no slot. A pack holds
parameters of several groups of one optimizer; the slots of a group (and owner) are neighbors.

Packing follows MegEngine's ParamPack (by device, dtype, requires_grad and a user key; with size
limits; first parameters left alone). Flat memory is the idea of PaddlePaddle PR 33461.
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
SHOWN = 8  # largest number of span lengths that are printed


class GroupId(NamedTuple):
    """A parameter group: index of its optimizer, and index of the group in that optimizer.

    Groups that are added later to any of the optimizers do not change it.
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
    """Properties that are equal for parameters of one pack; :class:`PackLayout` has most of them.

    Attributes:
        optimizer: index of their optimizer.
        flags: flags of their groups, see :attr:`ParamInfo.flags`; for frozen parameters their
            group.
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
    """The facts that planning needs about one parameter, in model order.

    ``dtype`` is the storage dtype after the precision policy. ``group`` is its optimizer group, and
    ``flags`` are the group's options that choose code or state, not numbers. ``key`` is the
    ``repr`` of the user's group function. ``device`` is a kind, equal on all ranks. ``cost`` is the
    cost of its update; ``None``: its number of elements. For a DTensor, ``shape`` is that of the
    local tensor. ``cast`` names an unusual cast of masters; then each ``unit`` elements, from the
    first one on, have one owner.
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
        """Whether another rank owns a part of the parameter."""
        return self.numel != self.slot.numel

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter, or of a flat part of it."""
        return (self.numel,) if self.is_cut else self.slot.shape


@dataclass(frozen=True)
class PackLayout:
    """Slots and spans of one pack; ``numel`` includes padding. One span per owning rank."""

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
        """Index of its parameters' optimizer."""
        return self.slots[0].group.optimizer

    @cached_property
    def groups(self) -> tuple[GroupId, ...]:
        """Groups of its parameters, in the order of slots."""
        return tuple(dict.fromkeys(slot.group for slot in self.slots))

    def ranges(self, start: int, stop: int) -> list[tuple[slice, GroupId]]:
        """Cut elements ``[start, stop)`` where the group changes; slices count from ``start``.

        Padding after a slot counts to its group, because padding is zero in all per-element values.
        """
        begins = [(start, self.groups[0])]
        for slot in self.slots:
            begin = max(slot.offset, start)
            if begin < min(slot.end, stop) and (len(begins) == 1 or slot.group != begins[-1][1]):
                begins.append((begin, slot.group))
        if len(begins) > 1:  # elements before the first one are padding
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

    @cached_property  # every step reads it
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the spans; a single one if they are equal."""
        lengths = tuple(span.numel for span in self.spans)
        return lengths[:1] if len(set(lengths)) == 1 else lengths

    @cached_property
    def owned_spans(self) -> tuple[Span, ...]:
        """Spans with a part of a parameter, not only padding."""
        owners = {owner for owner, _, _ in self.parts()}
        return tuple(span for span in self.spans if span.owner in owners)

    def parts(self) -> Iterator[tuple[int, Slot, int]]:
        """Return the owner, slot and elements of each part of a parameter.

        It walks once along spans and slots, because ``fragments()`` of a thousand ranks is slow.
        """
        position = 0
        for owner, start, stop in self.spans:
            while position < len(self.slots):
                slot = self.slots[position]
                count = min(slot.end, stop) - max(slot.offset, start)
                if count > 0:
                    yield owner, slot, count
                if slot.end > stop:  # the rest belongs to the next rank
                    break
                position += 1

    def fragments(self, rank: int) -> tuple[Fragment, ...]:
        """Return the parts of slots in ``rank``'s span, in pack order; an empty slot has one."""
        _, begin, end = self.spans[rank]
        fragments = []
        for slot in self.slots:
            start, stop = max(slot.offset, begin), min(slot.end, end)
            is_here = begin < start <= end or start == rank == 0
            if start < stop or (not slot.numel and is_here):
                fragments.append(Fragment(slot, start, stop))
        return tuple(fragments)


def with_values(
    ranges: Sequence[tuple[slice, GroupId]], values: Mapping[GroupId, T]
) -> list[tuple[slice, T]]:
    """Return ranges with their groups' values; neighbors with the same object are joined."""
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
        """The partition; ``mixed`` if it differs between optimizers."""
        kinds = {pack.partition for pack in self.packs}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def numel(self) -> int:
        """Elements of all packs, with padding."""
        return sum(pack.numel for pack in self.packs)

    @property
    def padding(self) -> int:
        return sum(pack.padding for pack in self.packs)

    @property
    def trained(self) -> list[PackLayout]:
        """Packs that are reduced, updated and synced."""
        return [pack for pack in self.packs if pack.requires_grad]

    def slots(self) -> Iterator[tuple[PackLayout, Slot]]:
        for pack in self.packs:
            for slot in pack.slots:
                yield pack, slot

    def lines(self, algorithms: bool = True, expert: str = "") -> list[str]:
        """Return one line per pack and slot, which ranks compare and users print.

        Args:
            expert: replaces names of experts, which may be numbered across ranks.
        """
        lines = [
            f"Layout: {sum(len(p.slots) for p in self.packs)} parameters in {len(self.packs)} "
            f"pack{'s' * (len(self.packs) != 1)}, {self.numel} elements ({self.padding} padding), "
            f"partition {self.partition!r}, world size {self.world_size}"
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
        """Return 32 bytes that identify everything except algorithms, which move no element."""
        return hashlib.sha256("\n".join(self.lines(algorithms=False)).encode()).digest()

    def __repr__(self) -> str:
        return "\n".join(self.lines())
