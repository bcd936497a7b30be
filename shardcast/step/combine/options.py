"""Options that ranks must have alike in every step, compared inside the control all-reduce.

Replicas stay equal whatever a rank's learning rate is: every owner trains its spans at its own
rate, and nobody notices. So each option (of all groups) and each group (with all options) has a
digest, an integer ``d`` below ``2**BITS``, of which the all-reduce brings ``sum(d)`` and
``sum(d * d)``. Doubles add these exactly, and the ranks hold one value iff
``ranks * sum(d * d) == sum(d)**2`` (Cauchy-Schwarz): four doubles say which option of which group
differs, on every rank, whatever their number, and nothing is exchanged as long as all is well.

Values that only an accelerator can read (a tensor ``lr``) are hashed there.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardcast.comm import Comm
from shardcast.messages import warn

BITS = 16  # ranks * sum(d * d) < ranks**2 * 2**32 is an exact int64 for up to 2**15 ranks
MASK = (1 << BITS) - 1
ODD = 0x1E3779B97F4A7C15  # multiplies the bits of a double, which are then spread over the product
TRAINED = "requires_grad"
BOUNDS, DIVISOR = ("max_norm", "clip_value"), "divisor"  # given to clips, and to the mean
LOOSE = (*BOUNDS, DIVISOR)  # of no group
PLAIN = frozenset({float, int, bool, str, type(None)})
SHOWN = 8  # ranks that are listed of those with one value
REMEDY = (
    "Every owner would update its part of the model in its own way: give all ranks the same value, "
    "for example average what a scheduler such as ReduceLROnPlateau is given over the ranks first."
)

Groups = Sequence[Mapping[str, Any]]
Place = tuple[str, int | None]  # an option and its group


class OnDevice:
    """Stands for a value that the host cannot read without waiting."""

    def __repr__(self) -> str:
        return "a tensor on the device"


ON_DEVICE = OnDevice()


class _Group:
    """What was hashed of a group last time, and a number for each value."""

    def __init__(self, size: int) -> None:
        self.objects: list[Any] = []
        self.changing = True  # there are tensors among them, whose values are not the object's
        self.values: list[Any] = [ON_DEVICE] * size
        self.hashes = [0] * size

    def unchanged(self, objects: Sequence[Any], flags: tuple[bool, ...]) -> bool:
        """By identity: to compare a tensor with a number would wait for its device."""
        return (
            not self.changing
            and all(map(operator.is_, objects, self.objects))
            and flags == self.values[0]
        )


class Options:
    """Options of the parameter groups of one optimizer, of its clips, and of the mean.

    Args:
        defaults: names of the options of the optimizer's class; others are a script's own notes.
        comm: the data-parallel ranks, which train the same parameters.
        everyone: all ranks, if there are more.
    """

    def __init__(
        self,
        defaults: Iterable[str],
        comm: Comm,
        device: torch.device,
        everyone: Comm | None = None,
    ) -> None:
        self._comm, self._device, self._everyone = comm, device, everyone or comm
        self._own = tuple(dict.fromkeys((*defaults, "max_grad_norm")))
        self._names = (TRAINED, *self._own, *LOOSE)
        self._known: list[_Group] = []
        self._digests: list[int] = []  # per name, then per group
        self._loose: list[Any] = [None] * len(LOOSE)
        self._warned = False
        # On the device: the digests that were sent last, and where those of tensors are added.
        self._sent: tuple[tuple[int, ...], Tensor] = ((), torch.empty(0))
        self._places: tuple[tuple[int, ...], Tensor] = ((), torch.empty(0))

    def pairs(
        self,
        groups: Groups,
        max_norm: float | None = None,
        clip_value: float | None = None,
        divisor: float | Tensor | None = None,
    ) -> Tensor:
        """This rank's digests and their squares, 1-d fp64; empty where there is one rank.

        Costs a microsecond per group, and 0.1 per parameter, as long as nothing changes.
        """
        if self._everyone.size == 1:
            return torch.empty(0, dtype=torch.float64, device=self._device)
        if len(self._known) != len(groups):
            self._known = [_Group(len(self._own) + 1) for _ in groups]
            self._digests = [0] * (len(self._names) + len(groups))
            self._loose = [None] * len(LOOSE)
        for number, (known, group) in enumerate(zip(self._known, groups, strict=True)):
            objects, flags = list(map(group.get, self._own)), _trained(group)
            if not known.unchanged(objects, flags):
                known.objects = objects
                known.changing = not all(map(_is_constant, objects))
                self._update(known, number, [flags, *map(_plain, objects)])
        self._update_loose((max_norm, clip_value, _plain(divisor)))
        return self._on_device(divisor)

    def differing(self, sums: Tensor) -> Tensor:
        """Per option, then per group, whether ranks differ in it; 1-d bool.

        Args:
            sums: of :meth:`pairs` over all ranks.
        """
        one, two = sums.long().chunk(2) if len(sums) else (sums, sums)
        return torch.ne(self._comm.size * two, one * one)

    def across(self, rows: Tensor) -> Tensor:
        """Per option, then per group, whether rows of sums of :meth:`pairs` differ in it.

        Each row is of the ranks of one stage, which differ in what they train.
        """
        digests = rows[:, : rows.shape[1] // 2]
        differ = (digests != digests[0]).any(0)
        differ[:1] = False  # of TRAINED
        options, groups = differ[: len(self._names)], differ[len(self._names) :]
        return torch.cat([options, options.any().expand_as(groups)])

    def _update(self, known: _Group, number: int, values: list[Any]) -> None:
        """Move the digests by what is new; half of a hash is in that of the option, or group."""
        at = len(self._names) + number
        for place, (before, now) in enumerate(zip(known.values, values, strict=True)):
            if before is not now and before != now:
                old, new = known.hashes[place], _hash(number, place, now)
                known.hashes[place] = new
                self._digests[place] = (self._digests[place] + (new >> BITS) - (old >> BITS)) & MASK
                self._digests[at] = (self._digests[at] + new - old) & MASK
        known.values = values

    def _update_loose(self, values: Sequence[Any]) -> None:
        first = len(self._names) - len(LOOSE)
        for place, (before, now) in enumerate(zip(self._loose, values, strict=True), first):
            if before != now:
                self._loose[place - first] = now
                self._digests[place] = _hash(0, place, now) & MASK

    def _on_device(self, divisor: Any) -> Tensor:
        last = len(self._names) - 1
        tensors: list[tuple[int, int | None, Any]] = [
            (place, number, known.objects[place - 1])  # TRAINED is no object
            for number, known in enumerate(self._known)
            if known.changing
            for place, value in enumerate(known.values)
            if value is ON_DEVICE
        ]
        if self._loose[-1] is ON_DEVICE:
            tensors.append((last, None, divisor))
        numbers = tuple(self._digests)
        if self._sent[0] != numbers:
            self._sent = (numbers, to_device(numbers, torch.int64, self._device))
        digests = self._sent[1]
        if tensors:
            places = (*(place for place, _, _ in tensors),
                      *(last if n is None else last + 1 + n for _, n, _ in tensors))  # fmt: skip
            if self._places[0] != places:
                self._places = (places, to_device(places, torch.int64, self._device))
            values = torch.stack([tensor.detach().double().reshape(()) for *_, tensor in tensors])
            bits = values.view(torch.int64)
            bits = (bits ^ (bits >> 2 * BITS)) * ODD
            hashes = torch.cat([bits >> 2 * BITS, bits >> 3 * BITS])
            digests = digests.index_add(0, self._places[1], hashes) & MASK
        return torch.cat([digests, digests * digests]).double()

    def refused(self, differing: Tensor) -> Tensor:
        """Whether the step cannot be made, 0-dim bool; see :meth:`report`."""
        options, groups = differing[: len(self._names)], differing[len(self._names) :]
        return options[1:].any() | (groups.any() & ~options[:1].any())

    def report(
        self,
        differing: Sequence[bool],
        groups: Groups,
        names: Mapping[nn.Parameter, str] | None = None,
    ) -> None:
        """Say what differs: raise, or warn once where it is ``requires_grad`` alone.

        A parameter that some ranks do not train is one without a gradient there, which counts as
        zero; everything else would be updated in different ways.

        Args:
            names: of the parameters; then every rank must call this, and the values of all ranks
                are told. ``None`` where the ranks are not in the same step: those of this one.

        Raises:
            RuntimeError: names options, groups and values.
        """
        found = self._found(differing, len(groups))
        harmless = bool(found) and all(name == TRAINED for name, _ in found)
        if not any(differing) or (harmless and self._warned):
            return
        here = names is None
        told = self._told_here(found, groups) if here else self._told(found, groups, names or {})
        if harmless:
            self._warned = True
            warn(
                f"step: {told}. A rank that does not train a parameter counts as one with a zero "
                "gradient; freeze and unfreeze on all ranks alike"
            )
        else:
            raise RuntimeError(f"step: {told}. {REMEDY}")

    def _told(
        self, found: Sequence[Place], groups: Groups, names: Mapping[nn.Parameter, str]
    ) -> str:
        mine = [self._value(name, number, groups) for name, number in found]
        same_params = self._comm.exchange(mine, self._device)
        everyone = same_params
        if self._everyone is not self._comm:
            everyone = self._everyone.exchange(mine, self._device)
        told = []
        for position, (name, number) in enumerate(found):
            ranks = same_params if name == TRAINED else everyone
            values = [theirs[position] for theirs in ranks]
            what = _what(name, number)
            if name == TRAINED:
                what, values = _first_param(what, values, groups[number or 0], names)
            if len({repr(value) for value in values}) > 1:  # else only another option differs
                told.append(f"{what} is {_by_rank(values)}")
        return "; ".join(told) or "options of groups differ between ranks"

    def _told_here(self, found: Sequence[Place], groups: Groups) -> str:
        told = []
        for name, number in found:
            value = self._value(name, number, groups)
            if name == TRAINED:
                value = f"True for {sum(value)} of {len(value)} parameters"
            told.append(f"{_what(name, number)}, which is {value} here")
        return (
            f"the ranks differ in {'; '.join(told) or 'options of groups'} (rank "
            f"{self._comm.rank}; the other ranks report theirs)"
        )

    def _found(self, differing: Sequence[bool], groups: int) -> list[Place]:
        """Names and group numbers of what differs; what is loose has no group."""
        names = [name for name, wrong in zip(self._names, differing, strict=False) if wrong]
        numbers = [n for n in range(groups) if differing[len(self._names) + n]]
        return [
            (name, number) for name in names for number in ([None] if name in LOOSE else numbers)
        ]

    def _value(self, name: str, number: int | None, groups: Groups) -> Any:
        if number is None:
            return self._loose[LOOSE.index(name)]
        if name == TRAINED:
            return _trained(groups[number])
        return _plain(groups[number].get(name))


def to_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host on the device, without waiting for it."""
    host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _trained(group: Mapping[str, Any]) -> tuple[bool, ...]:
    return tuple([param.requires_grad for param in group["params"]])


def _is_constant(value: Any) -> bool:
    """Whether the same object has the same value in the next step."""
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return not isinstance(value, (Tensor, list))


def _plain(value: Any) -> Any:
    """What can be compared and hashed without waiting; tensors of the host by their value."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        if value.numel() != 1:
            return None
        return value.item() if value.device.type == "cpu" else ON_DEVICE
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return value if isinstance(value, (bool, int, float, str)) else None


def _hash(number: int, place: int, value: Any) -> int:
    if value is ON_DEVICE:
        return 0
    text = f"{number} {place} {value!r}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def _what(name: str, number: int | None) -> str:
    if number is None:
        return f"the bound of the clip ({name})" if name in BOUNDS else name
    return f"{name} of group {number}"


def _first_param(
    what: str, values: list[Any], group: Mapping[str, Any], names: Mapping[nn.Parameter, str]
) -> tuple[str, list[Any]]:
    """The first parameter of a group in whose flag ranks differ, and the flags."""
    for position, flags in enumerate(zip(*values, strict=True)):
        if len(set(flags)) > 1:
            name = names.get(group["params"][position], f"number {position}")
            return f"{what}, parameter {name!r},", list(flags)
    return what, [True] * len(values)


def _by_rank(values: Sequence[Any]) -> str:
    """``1e-3 on rank 0, 5e-4 on rank 1``; of many ranks with one value the first are listed."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(repr(value), []).append(rank)
    told = []
    for value, those in ranks.items():
        listed = ", ".join(map(str, those[:SHOWN])) + ", ..." * (len(those) > SHOWN)
        told.append(f"{value} on rank{'s' * (len(those) > 1)} {listed}")
    return "; ".join(told)
