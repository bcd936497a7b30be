"""Signals: each contributes a slice of a step's one all-reduce, so every rank sees a mistake.

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
# Facts that must be equal on all ranks: whether count was called, and Decider.left.
COUNT, LEFT = "optimizer.count", "trained parameters that are no longer in the model"


@dataclass(frozen=True)
class Verdict:
    """The verdict of a signal on one step, 0-dim on the device and equal on all ranks.

    Attributes:
        factor: factor of the gradients before they are clipped.
        skip: skip the step, although its gradients are finite.
    """

    factor: Tensor | None = None
    skip: Tensor | None = None


class Signal:
    """One slice of the control vector, and what its sum means for the step: here nothing.

    In every step and clip by norm, ``decide`` calls the methods of all signals in this order. None
    of them may wait for a device::

        arguments()        compared over all ranks
        local()            summed over the data-parallel ranks, in one all-reduce with the norm
        read(total)        mistakes, as all ranks see them in the sum, and other numbers
        merge(readings)    with model parallelism: combines the readings of its ranks
        scale(reading)
        judge(reading, norm)
        conclude(decision), note(decision): in the step with this decision

    On a CPU :meth:`error` runs on all ranks in the step with the mistake, so it may exchange
    values. On an accelerator each rank calls it alone, one or two steps later, and reports what it
    knows itself.

    Attributes:
        name: name of an option's signal, and of its bytes in ``memory_report()``.
        skips: for each mistake, whether it skips the step.
        adds_up: mistakes of several steps are added up until they are reported; otherwise those of
            the last skipped step are kept.
        takes_loss: the script may pass ``step`` a loss, with which :meth:`take_loss` is called.
        loss: that loss, if the signal takes one.
        agrees_scale: :meth:`scale` needs the reading.
        noted: number of host numbers that :meth:`note` keeps.
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
        """Return arguments of this step by name that must be equal on all ranks."""
        return {}

    def take_loss(self, loss: Any) -> None:
        """Store this rank's loss of the step; ``None`` if the script passed none.

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
        """Return 1-d fp64: for each mistake nonzero if a rank made it, then other numbers.

        Args:
            total: sum of all ranks' parts, in which no two may cancel.
        """
        return total

    def merge(self, readings: Tensor) -> Tensor:
        """Combine readings of model-parallel ranks, of shape (ranks, numbers), into one."""
        return readings.amax(0)

    def scale(self, reading: Tensor | None) -> Tensor | None:
        """Return the factor by which gradients in own spans are too large, 0-dim."""
        return None

    def judge(self, reading: Tensor, norm: Tensor) -> Verdict | None:
        """Return a verdict on the step.

        Args:
            norm: 0-dim fp64, of all gradients, without any scale.
        """
        return None

    def error(self, mistakes: Sequence[float]) -> Exception | None:
        """Return the error that every rank raises for mistakes; ``None`` if it only warned."""
        raise NotImplementedError

    def note(self, decision: Decision) -> None:
        """Update ``numbers``."""

    def reason(self, numbers: Sequence[float]) -> tuple[str, str] | None:
        """Return why this signal skipped the last skipped step, and a remedy, if it did."""
        return None

    def conclude(self, decision: Decision) -> None:
        """End the step."""

    def cleared(self) -> None:
        """Called when a script drops the gradients of the coming step. Local."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists under its own names; waits for the device."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, if it is in ``state``, which has more."""

    def nbytes(self) -> int | None:
        """Return its bytes; ``None``: not reported."""
        return None


def known(value: T, comm: Comm, device: torch.device) -> dict[int, T]:
    """Return each rank's ``value``; on an accelerator, where ranks are not in step, this one's."""
    if _compat.is_host(device):
        return dict(enumerate(comm.exchange(value, device)))
    return {comm.rank: value}


def to_device(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy host numbers to the device, without waiting for it."""
    host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
