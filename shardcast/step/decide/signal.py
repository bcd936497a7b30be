"""Signals: parts of the one all-reduce of a step by which a mistake of one rank is everybody's.

A rank that raised by itself would leave the others waiting in their next collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import Comm

if TYPE_CHECKING:
    from shardcast.step.decide.decision import Decision

T = TypeVar("T")
# Facts that ranks must have alike: whether count was called, and what Decider.left names.
COUNT, LEFT = "optimizer.count", "trained parameters that are no longer in the model"


@dataclass(frozen=True)
class Verdict:
    """The verdict of a signal on one step, 0-dim on the device and equal on all ranks.

    Attributes:
        factor: what the gradients are multiplied with, before they are clipped.
        skip: the step is skipped, though its gradients are finite.
    """

    factor: Tensor | None = None
    skip: Tensor | None = None


class Signal:
    """One part of the control vector, and what follows for the step from its sum: here nothing.

    ``decide`` calls the methods of all signals in this order, in every step and in each clip by
    norm, and none of them waits for a device::

        arguments()        compared over all ranks
        local()            summed over the data-parallel ranks, in one all-reduce with the norm
        read(total)        the mistakes that all see in the sum, and what else the signal needs
        merge(readings)    with model parallelism: of the readings of its ranks
        scale(reading)
        judge(reading, norm)
        conclude(decision), note(decision): in the step that was decided

    On a CPU :meth:`error` runs on all ranks in the step with the mistake, so that it may exchange
    values; on an accelerator each rank calls it a step or two later, alone, and tells what it knows
    itself.

    Attributes:
        name: by which an option's signal is found; of its bytes in ``memory_report()``.
        skips: of each mistake, whether it skips the step by itself.
        adds_up: mistakes of several steps are added up until they are told; else those of the last
            skipped step are kept.
        takes_loss: the script may give ``step`` a loss, which :meth:`take_loss` is called with.
        loss: what it was called with, where it takes any.
        agrees_scale: :meth:`scale` needs the reading.
        noted: how many numbers :meth:`note` keeps, for the host.
        numbers: these, 1-d fp64 on the device.
    """

    name = ""
    skips: tuple[bool, ...] = (True,)
    adds_up = True
    takes_loss = agrees_scale = False
    loss: Any = None
    noted = 0
    numbers: Tensor

    def arguments(self) -> Mapping[str, Any]:
        """Return by name what the script gave to this step, which all ranks must have alike."""
        return {}

    def take_loss(self, loss: Any) -> None:
        """Have this rank's loss of the step; ``None`` where the script gave none.

        Raises:
            ValueError: it is not a number.
        """

    def local(self) -> Tensor:
        """Return this rank's part, 1-d fp64 on the device, of equal length on all ranks."""
        raise NotImplementedError

    def numel(self) -> int:
        """Return the length of :meth:`local`."""
        return self.local().numel()

    def read(self, total: Tensor) -> Tensor:
        """Return 1-d fp64: for each mistake not 0 where some rank made it, then other numbers.

        Args:
            total: the sum of all ranks' parts, in which no two may cancel each other.
        """
        return total

    def merge(self, readings: Tensor) -> Tensor:
        """Return the reading of model-parallel ranks, of shape (ranks, numbers), as one."""
        return readings.amax(0)

    def scale(self, reading: Tensor | None) -> Tensor | None:
        """Return by what the gradients in the own spans are too large, 0-dim."""
        return None

    def judge(self, reading: Tensor, norm: Tensor) -> Verdict | None:
        """Return what becomes of the step.

        Args:
            norm: 0-dim fp64, of all gradients, without any scale.
        """
        return None

    def error(self, mistakes: Sequence[float]) -> Exception | None:
        """Return what every rank raises for its mistakes; ``None`` where it was only told."""
        raise NotImplementedError

    def note(self, decision: Decision) -> None:
        """Update ``numbers``."""

    def reason(self, numbers: Sequence[float]) -> tuple[str, str] | None:
        """Return why the last skipped step was skipped, and a remedy, if this signal did it."""
        return None

    def conclude(self, decision: Decision) -> None:
        """End the step."""

    def cleared(self) -> None:
        """Called when a script drops the gradients of the coming step; local."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists under names of its own; waits for the device."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` gave, if it is in ``state``, which has more."""

    def nbytes(self) -> int | None:
        """Return the bytes that it holds; with ``None`` they are not reported."""
        return None


def defining(method: str, signals: Sequence[Signal]) -> list[Signal]:
    """Return the signals that define a method, not only inherit it."""
    default = getattr(Signal, method)
    return [signal for signal in signals if getattr(type(signal), method) != default]


def known(value: T, comm: Comm, device: torch.device) -> dict[int, T]:
    """Return each rank's ``value``; on an accelerator, where ranks come later, this one's."""
    if _compat.is_host(device):
        return dict(enumerate(comm.exchange(value, device)))
    return {comm.rank: value}


def to_device(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Put numbers of the host on the device, without waiting for it."""
    host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
