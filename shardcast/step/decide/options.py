"""Options that must be equal on all ranks in every step, compared in the control all-reduce.

Replicas stay equal even if ranks have different learning rates: every owner updates its spans with
its own rate, and nobody notices. So the options of all groups have a digest, integers ``d`` below
``2**BITS``. The all-reduce sums ``d`` and ``-ranks * d * d``, which doubles add exactly. All ranks
have the same value if and only if the second sum is ``-sum(d)**2`` (Cauchy-Schwarz). All ranks
detect a difference together, and only then exchange the values to name it.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast.comm import Comm, ProcessGroups, warn_first
from shardcast.memory.gradients import Gradients
from shardcast.messages import by_rank
from shardcast.plan.originals import OptimizerList
from shardcast.plan.validate import ON_DEVICE, plain
from shardcast.step.decide.signal import COUNT, LEFT, Signal, known, to_device

BITS = 16  # fewer with more than 1,448 ranks, so that (ranks * d)**2 is an exact double
DIGESTS = 3  # one for requires_grad, where a difference is no error, and two for options
ODD = 0x1E3779B97F4A7C15  # multiplies the bits of a double, to spread them over the product

# The history of a rank's gradients between two steps, which must be equal on all ranks.
BACKWARDS, CLEARS = "synchronized backwards of a step", "clears of their gradients"
FAILED = "synchronized backwards of a step that failed"
DROPPED = "gradients cleared or assigned between two backwards of a step"
EDITED = "edits of gradients after the clip of the step before"
ORDER = "synchronized backwards of other sharded models before this model's own"
HISTORY = BACKWARDS, FAILED, CLEARS, DROPPED, EDITED
NOTHING = {
    **dict.fromkeys((BACKWARDS, FAILED, CLEARS, ORDER), 0),
    DROPPED: "",
    EDITED: False,
}
SHOWN = 3  # largest number of names in a message

REMEDY = (
    "Each owner would update its part of the model differently: give all ranks the same value. "
    "For example, average a metric over the ranks before you pass it to ReduceLROnPlateau."
)
LEFT_REMEDY = (
    "A layer was replaced after shardcast.shard, and the new layer is not trained there: "
    "replace layers before shardcast.shard, or call optimizer.close() on every rank, replace them, "
    "and shard the model with a new optimizer"
)
COUNT_REMEDY = "call it on every rank, in each micro-batch; call count(0) on a rank without a batch"
HISTORY_REMEDY = (
    "The ranks would train on different gradients: make the same calls of backward, zero_grad() "
    "and step() on all ranks, and skip steps only by numbers that are equal on all ranks"
)
ORDER_REMEDY = (
    "Gradients of models of equal shapes were mixed: run the backwards of all models in the same "
    "order on every rank, and call zero_grad() of each before you go on"
)
UNTRAINED = (
    "The gradient of a parameter is zero on the ranks that do not train it; freeze and unfreeze on "
    "all ranks alike"
)
# Remedies by the fact that differs; if several differ, the first one here applies.
REMEDIES = {
    ORDER: ORDER_REMEDY,
    **dict.fromkeys(HISTORY, HISTORY_REMEDY),
    COUNT: COUNT_REMEDY,
    LEFT: LEFT_REMEDY,
}


class OptionCheck(Signal):
    """Compares options of the parameter groups, and the arguments of a step.

    Its mistakes: ranks train different parameters, which skips no step; and, twice, ranks differ in
    options.

    Args:
        originals: the optimizers. Only the options of their classes are compared; other keys of a
            group are a script's own.
        grads: the gradient packs that are reduced; the list may grow.

    Attributes:
        given: arguments of a step besides options of groups, by name.
    """

    skips = (False, True, True)

    def __init__(
        self,
        originals: OptimizerList,
        grads: Sequence[Gradients],
        process_groups: ProcessGroups,
        device: torch.device,
    ) -> None:
        self._originals, self._grads = originals, grads
        self.given: dict[str, Any] = {}
        self._names = tuple(dict.fromkeys((*originals.option_names(), "max_grad_norm")))
        self._process_groups, self._device = process_groups, device
        self._mask = mask_of(process_groups.dp.size)
        self._arguments: Mapping[str, object] = {}
        self._objects: list[Any] = []  # values in the last step
        self._changing = True  # some objects may change in place
        self._trained = b""
        self._on_device: list[Tensor] = []
        self._numbers: tuple[int, ...] = ()
        self._digests = torch.empty(0)  # the digests on the device
        self._pairs = self._paired(torch.zeros(3, dtype=torch.int64, device=device))
        self._warned = False

    def numel(self) -> int:
        return self._pairs.numel() if self._process_groups.everyone.size > 1 else 0

    def local(self) -> Tensor:
        """Return this rank's digests and their squares, 1-d fp64; empty with one rank.

        Costs 0.1 microseconds per option and per parameter while nothing changes.
        """
        if self._process_groups.everyone.size == 1:
            return torch.empty(0, dtype=torch.float64, device=self._device)
        groups, arguments = self._originals.groups, self.given
        self._arguments, self.given = arguments, {}
        objects = [group.get(name) for group in groups for name in self._names]
        objects += arguments.values()
        trained = bytes(param.requires_grad for group in groups for param in group["params"])
        # By identity, because comparing a tensor with a number would wait for its device.
        same = len(objects) == len(self._objects) and all(map(operator.is_, objects, self._objects))
        if self._changing or not same or trained != self._trained:
            self._objects, self._trained = objects, trained
            self._digest()
        if self._on_device:
            digests = self._digests.clone()
            values = torch.stack([value.detach().double().reshape(()) for value in self._on_device])
            bits = values.view(torch.int64)
            # Prefix sums detect two values that swapped places.
            mixed = ((bits ^ (bits >> 2 * BITS)) * ODD).cumsum(0).sum()
            digests[1] += mixed >> 3 * BITS
            digests[2] += mixed >> 2 * BITS
            digests &= self._mask
            return self._paired(digests)
        return self._pairs

    def _paired(self, digests: Tensor) -> Tensor:
        return torch.cat([digests, -self._process_groups.dp.size * digests * digests]).double()

    def _digest(self) -> None:
        values = [plain(value) for value in self._objects]
        self._changing = not all(map(is_constant, self._objects))
        self._on_device = [*_on_device(self._objects)]
        digest = zlib.crc32(repr(values).encode())
        digests = zlib.crc32(self._trained), digest, digest >> BITS
        numbers = tuple(number & self._mask for number in digests)
        if numbers != self._numbers:
            self._numbers, self._digests = numbers, to_device(numbers, torch.int64, self._device)
            self._pairs = self._paired(self._digests)

    def read(self, sums: Tensor) -> Tensor:
        """Return the mistakes, and with model parallelism the sums."""
        if not sums.numel():
            return torch.zeros_like(self._pairs[:DIGESTS])
        digests = sums[:DIGESTS]
        differing = torch.addcmul(sums[DIGESTS:], digests, digests)
        return torch.cat([differing, sums]) if self._process_groups.model.size > 1 else differing

    def merge(self, readings: Tensor) -> Tensor:
        """Add a mistake if model-parallel ranks differ in options; they may train others."""
        differing, sums = readings.split([DIGESTS, readings.shape[1] - DIGESTS], 1)
        mistakes: Tensor = differing.abs().amax(0)
        across = (sums != sums[0])[:, 1:DIGESTS].any().double()
        mistakes[1] = torch.maximum(mistakes[1], across)
        return mistakes

    def error(self, mistakes: Sequence[float]) -> RuntimeError | None:
        """Return an error that names the options that differ, with groups, ranks and values."""
        if not any(mistakes[1:]):
            self._warn_of_training()
            return None
        values = {
            f"{name} of group {number}": repr(plain(group.get(name)))
            for number, group in enumerate(self._originals.groups)
            for name in self._names
        }
        values.update({name: repr(plain(value)) for name, value in self._arguments.items()})
        return error_of(values, self._process_groups.everyone, self._device)

    def _warn_of_training(self) -> None:
        """Warn once about parameters that some ranks do not train. On a CPU all ranks call it."""
        if self._warned:
            return
        self._warned = True
        names = {
            param: slot.name
            for grads in self._grads
            for param, slot in zip(grads.pack.in_model, grads.pack.layout.slots, strict=True)
        }
        untrained = {
            f"requires_grad of parameter {names.get(param, f'of group {number}')!r}": "False"
            for number, group in enumerate(self._originals.groups)
            for param in group["params"]
            if not param.requires_grad
        }
        warn_of_training(untrained, self._process_groups.dp, self._device)


def mask_of(ranks: int) -> int:
    """Return the bits of a digest; ``(ranks * digest) ** 2`` is exact in fp64."""
    return (1 << min(BITS, (53 - 2 * (ranks - 1).bit_length()) // 2)) - 1


def _on_device(value: Any) -> Iterator[Tensor]:
    """Return numbers that :func:`plain` leaves out, including those in tuples such as betas."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _on_device(item)
    elif plain(value) is ON_DEVICE:
        yield value


def is_constant(value: object) -> bool:
    """Return whether the same object must have the same value in the next step."""
    if type(value) is tuple:
        return all(map(is_constant, value))
    return not isinstance(value, (Tensor, list))


def error_of(values: Mapping[str, str], comm: Comm, device: torch.device) -> RuntimeError:
    """Return the error for options that differ, with groups, ranks and values.

    On a CPU all ranks of ``comm`` call it and exchange their ``values``, by name.
    """
    text = _differences(known(values, comm, device), "None")
    remedies = (remedy for fact, remedy in REMEDIES.items() if fact in text)
    remedy = next(remedies, REMEDY)
    if not text:  # only this rank's values are known
        shown = ", ".join(f"{name} {value}" for name, value in values.items())
        text = f"the ranks differ in options; rank {comm.rank} has {shown}"
    return RuntimeError(f"step: {text}. {remedy}")


def warn_of_training(untrained: Mapping[str, str], comm: Comm, device: torch.device) -> None:
    """Warn about parameters that only some ranks train; called like :func:`error_of`."""
    text = _differences(known(untrained, comm, device), "True")
    warn_first(f"step: {text or 'the ranks train different parameters'}. {UNTRAINED}", UNTRAINED)


def _differences(values_by_rank: Mapping[int, Mapping[str, str]], usual: str) -> str:
    """List names whose values differ, with values by rank; ``usual`` if a rank has none."""
    texts = []
    for name in dict.fromkeys(name for values in values_by_rank.values() for name in values):
        facts = [(rank, values.get(name, usual)) for rank, values in values_by_rank.items()]
        if len({value for _, value in facts}) > 1:
            texts.append(f"{name} differs ({by_rank(facts)})")
    return "; ".join(texts)


def listed(names: Sequence[str]) -> str:
    """List the first names, and how many more; any difference changes the text."""
    if len(names) <= SHOWN:
        return ", ".join(names)
    rest = names[SHOWN:]
    return f"{', '.join(names[:SHOWN])} and {len(rest)} more ({zlib.crc32(repr(rest).encode()):x})"
