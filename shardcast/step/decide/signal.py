"""Signals: parts of the one all-reduce of a step by which a mistake of one rank is everybody's.

A rank that raised by itself would leave the others waiting in their next collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import Comm
from shardcast.memory.gradients import Gradients
from shardcast.messages import by_rank
from shardcast.step.decide.options import known

UNREAD = (
    ".grad holds the mean over ranks only where this rank owns the elements, and NaN elsewhere, so "
    "that a norm or factor that a script computes from it (torch.nn.utils.clip_grad_norm_) is NaN. "
    "Clip with optimizer.clip_grad_norm_(max_norm) or max_grad_norm=..., or call "
    "optimizer.gather_gradients() on every rank before .grad is read"
)


class Signal(Protocol):
    """One part of the control vector, and the mistake that all ranks see in its sum.

    :meth:`local` and :meth:`mistake` run in every step and wait for no device. On a CPU
    :meth:`error` runs on all ranks in the step with the mistake, so that it may exchange values;
    on an accelerator each rank calls it a step or two later, alone, and tells what it knows itself.

    Attributes:
        skips: the mistake skips the step by itself; else it only counts in a step that is skipped
            because of gradients that are not finite.
    """

    skips: bool

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

    skips = True

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


class SpoiledGradients:
    """Gradients that a script edited by what it read in ``.grad`` where that is no mean.

    Canaries tell: see :class:`.Gradients`. On an accelerator they are looked at where ``.grad`` was
    edited in a way that torch counts, not through ``.data``. Its two elements are on how many ranks
    there is NaN that was not there, and on how many there are numbers in the place of NaN that are
    not what was there: as after an all-reduce and ``nan_to_num``.

    Args:
        grads: the gradient packs that are reduced; the list may grow.
        comm: all ranks.
    """

    def __init__(self, grads: Sequence[Gradients], comm: Comm, device: torch.device) -> None:
        self._grads, self._comm, self._device = grads, comm, device
        self._zero = torch.zeros(1, dtype=torch.float64, device=device)
        self.nan = Spoiled(self, False, self._zero)
        self.mixed = Spoiled(self, True, self._zero)

    def look(self) -> None:
        """Look at the canaries of this rank."""
        looks = _compat.is_host(self._device)
        spoiled = [grads.spoiled() for grads in self._grads if looks or grads.is_edited]
        seen = [[kind.any() for kind in kinds] for kinds in spoiled if kinds is not None]
        for signal, kind in ((self.nan, 0), (self.mixed, 1)):
            found = [kinds[kind].to(self._device) for kinds in seen]
            signal.here = torch.stack(found).any().double().view(1) if found else self._zero

    def error(self) -> Exception:
        """Names the first parameter of some rank."""
        names = (grads.spoiled_name() for grads in self._grads)
        name = next((name for name in names if name is not None), None)
        if not _compat.is_host(self._device):
            return RuntimeError(f"step: gradients were edited after the backward; {UNREAD}")
        told = known(name, self._comm, self._device)
        first = next((repr(name) for name in told.values() if name), "a parameter")
        return RuntimeError(
            f"step: .grad of {first} was edited after the backward, from elements of which this "
            f"rank has no mean; {UNREAD}"
        )


class Spoiled:
    """One of the two signals of :class:`SpoiledGradients`."""

    def __init__(self, of: SpoiledGradients, skips: bool, here: Tensor) -> None:
        self._of, self.skips, self.here = of, skips, here

    def local(self) -> Tensor:
        """1 where it was seen."""
        return self.here

    def mistake(self, total: Tensor) -> Tensor:
        """On how many ranks."""
        return total

    def error(self) -> Exception:
        """See :meth:`SpoiledGradients.error`."""
        return self._of.error()
