"""Options that ranks must have alike in every step, compared inside the control all-reduce.

Replicas stay equal whatever a rank's learning rate is: every owner trains its spans at its own
rate, and nobody notices. So the options of all groups have a digest, two integers ``d`` below
``2**BITS``, of which the all-reduce brings ``sum(d)`` and ``sum(d * d)``. Doubles add these
exactly, and the ranks hold one value iff ``ranks * sum(d * d) == sum(d)**2`` (Cauchy-Schwarz).
All ranks see a difference together, and only then exchange the values to name it. What each rank
trains (``requires_grad``) has a digest of its own: a difference there is no error.

Values that only an accelerator can read (a tensor ``lr``) are hashed there.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardcast.comm import ProcessGroups
from shardcast.messages import by_rank, warn

BITS = 16  # ranks * sum(d * d) < ranks**2 * 2**32 is an exact int64 for up to 2**15 ranks
MASK = (1 << BITS) - 1
OPTION_DIGESTS = 2  # of BITS each; one more is of requires_grad
ODD = 0x1E3779B97F4A7C15  # multiplies the bits of a double, which are then spread over the product
PLAIN = frozenset({float, int, bool, str, type(None)})
REMEDY = (
    "Every owner would update its part of the model in its own way: give all ranks the same value, "
    "for example average what a scheduler such as ReduceLROnPlateau is given over the ranks first."
)
UNTRAINED = (
    "A rank that does not train a parameter counts as one with a zero gradient; freeze and "
    "unfreeze on all ranks alike"
)

Groups = Sequence[Mapping[str, Any]]


class OnDevice:
    """Stands for a value that the host cannot read without waiting."""

    def __repr__(self) -> str:
        return "a tensor on the device"


ON_DEVICE = OnDevice()


ARGUMENTS = ("max_norm", "clip_value", "divisor")


class StepArguments(NamedTuple):
    """What a script gives to a step besides the options of groups."""

    max_norm: float | None = None
    clip_value: float | None = None
    divisor: float | Tensor | None = None


class OptionCheck:
    """Compares options of the parameter groups, and the arguments of a step.

    Args:
        names: options of the optimizers' classes; other keys of a group are a script's own notes.
    """

    def __init__(
        self, names: Iterable[str], process_groups: ProcessGroups, device: torch.device
    ) -> None:
        self._names = tuple(dict.fromkeys((*names, "max_grad_norm")))
        self._process_groups, self._device = process_groups, device
        self._arguments = StepArguments()
        self._objects: list[Any] = []  # of the last step, and whether they can change in place
        self._trained: list[bool] = []
        self._changing = True
        self._on_device: list[Tensor] = []
        self._uploaded: tuple[tuple[int, ...], Tensor] = ((), torch.empty(0))
        self._warned = False

    def pairs(self, groups: Groups, arguments: StepArguments) -> Tensor:
        """This rank's digests and their squares, 1-d fp64; empty where there is one rank.

        Costs 0.1 microseconds per option and per parameter as long as nothing changes.
        """
        if self._process_groups.everyone.size == 1:
            return torch.empty(0, dtype=torch.float64, device=self._device)
        self._arguments = arguments
        objects = [group.get(name) for group in groups for name in self._names]
        objects += arguments
        trained = [param.requires_grad for group in groups for param in group["params"]]
        # By identity: to compare a tensor with a number would wait for its device.
        same = len(objects) == len(self._objects) and all(map(operator.is_, objects, self._objects))
        if self._changing or not same or trained != self._trained:
            self._objects, self._trained = objects, trained
            self._changing = not all(map(_is_constant, objects))
            self._upload()
        digests = self._uploaded[1]
        if self._on_device:
            values = torch.stack([value.detach().double().reshape(()) for value in self._on_device])
            bits = values.view(torch.int64)
            # The prefix sums tell two values that changed places apart.
            mixed = ((bits ^ (bits >> 2 * BITS)) * ODD).cumsum(0).sum()
            digests = digests.clone()
            digests[0] += mixed >> 3 * BITS
            digests[1] += mixed >> 2 * BITS
            digests &= MASK
        return torch.cat([digests, digests * digests]).double()

    def _upload(self) -> None:
        plain = [_plain(value) for value in self._objects]
        self._on_device = [
            value for value, text in zip(self._objects, plain, strict=True) if text is ON_DEVICE
        ]
        digest = zlib.crc32(repr(plain).encode())
        numbers = (digest >> BITS, digest & MASK, zlib.crc32(bytes(self._trained)) & MASK)
        if numbers != self._uploaded[0]:
            self._uploaded = numbers, to_device(numbers, torch.int64, self._device)

    def differing(self, sums: Tensor) -> Tensor:
        """Whether the ranks differ in options, and in what they train: 1-d bool of two elements.

        Args:
            sums: of :meth:`pairs` over the data-parallel ranks.
        """
        if not sums.numel():
            return torch.zeros(2, dtype=torch.bool, device=self._device)
        digests, squares = sums.long().chunk(2)
        return _two(self._process_groups.dp.size * squares != digests * digests)

    def differing_across(self, sums: Tensor) -> Tensor:
        """The same of model-parallel ranks, a row of sums each: they may train other parameters."""
        differing = _two((sums != sums[0]).any(0)[: sums.shape[1] // 2])
        differing[1:] = False
        return differing

    def report(
        self,
        differing: Sequence[bool],
        groups: Groups,
        names: Mapping[nn.Parameter, str] | None = None,
    ) -> None:
        """Say what differs: raise, or warn once where it is ``requires_grad`` alone.

        Args:
            differing: as :meth:`differing` found; the same on all ranks.
            names: of the parameters; then every rank must call this, and values are exchanged.
                ``None`` where the ranks are not in the same step: those of this rank are named.

        Raises:
            RuntimeError: names options, groups, ranks and values.
        """
        options_differ, training_differs = differing
        if not options_differ and (self._warned or not training_differs):
            return
        facts = dict(self._values(groups))
        untrained = self._untrained(groups, names or {})
        if names is None:
            own = ", ".join(f"{name} {value}" for name, value in facts.items())
            text = (
                f"the ranks differ in options; rank {self._process_groups.everyone.rank} has {own}"
            )
        else:
            text = self._differences(facts, untrained)
        if options_differ:
            raise RuntimeError(f"step: {text}. {REMEDY}")
        self._warned = True
        warn(f"step: {text}. {UNTRAINED}")

    def _differences(self, facts: dict[str, str], untrained: dict[str, str]) -> str:
        """What differs, by rank. Every rank must call it."""
        exchanged = self._process_groups.everyone.exchange(facts, self._device)
        by_replica = self._process_groups.dp.exchange(untrained, self._device)
        texts = []
        for rows, usual in ((exchanged, "None"), (by_replica, "True")):
            for name in dict.fromkeys(name for row in rows for name in row):
                values = [row.get(name, usual) for row in rows]
                if len(set(values)) > 1:
                    texts.append(f"{name} differs ({by_rank(enumerate(values))})")
        return "; ".join(texts) or "options of groups differ"

    def _values(self, groups: Groups) -> Iterator[tuple[str, str]]:
        for number, group in enumerate(groups):
            for name in self._names:
                yield f"{name} of group {number}", repr(_plain(group.get(name)))
        for name, value in zip(ARGUMENTS, self._arguments, strict=True):
            yield name, repr(_plain(value))

    @staticmethod
    def _untrained(groups: Groups, names: Mapping[nn.Parameter, str]) -> dict[str, str]:
        return {
            f"requires_grad of parameter {names.get(param, 'of group ' + str(number))!r}": "False"
            for number, group in enumerate(groups)
            for param in group["params"]
            if not param.requires_grad
        }


def to_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host on the device, without waiting for it."""
    host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _two(differing: Tensor) -> Tensor:
    return torch.stack([differing[:OPTION_DIGESTS].any(), differing[OPTION_DIGESTS:].any()])


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
