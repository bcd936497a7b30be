"""Signals: parts of the one all-reduce of a step by which a mistake of one rank is everybody's.

A rank that raised by itself would leave the others waiting in their next collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from shardcast.comm import Comm
from shardcast.messages import by_rank
from shardcast.step.decide.options import known


class Signal(Protocol):
    """One part of the control vector, and the mistake that all ranks see in its sum.

    :meth:`local` and :meth:`mistake` run in every step and wait for no device. On a CPU
    :meth:`error` runs on all ranks in the step with the mistake, so that it may exchange values;
    on an accelerator each rank calls it a step or two later, alone, and tells what it knows itself.
    The mistake skips the step.
    """

    def local(self) -> Tensor:
        """Return this rank's part, 1-d fp64 on the device, of equal length on all ranks."""

    def mistake(self, total: Tensor) -> Tensor:
        """Return 1-d of one element, not 0 where some rank made the mistake.

        Args:
            total: the sum of all ranks' parts, in which no two may cancel each other.
        """

    def error(self) -> Exception:
        """Return what every rank raises."""


class Refusal:
    """An error of this rank alone, inside a call that all ranks make."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self._zero = torch.zeros(1, dtype=torch.float64, device=device)
        self._error: Exception | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold an error of a user's mistake back until all ranks know of it."""
        try:
            yield
        except (RuntimeError, TypeError, ValueError) as error:
            if self._comm.size == 1:
                raise
            self._error = error

    def local(self) -> Tensor:
        """1 if there is an error."""
        return self._zero if self._error is None else self._zero + 1.0

    def mistake(self, total: Tensor) -> Tensor:
        """How many ranks have one."""
        return total

    def error(self) -> Exception:
        """This rank's own error, else those of the others."""
        error, self._error = self._error, None
        texts = known(None if error is None else str(error), self._comm, self._device)
        if error is not None:
            return error
        told = [(rank, text) for rank, text in texts.items() if text is not None]
        return RuntimeError(f"step: {by_rank(told) or 'another rank raised an error, see there'}")
