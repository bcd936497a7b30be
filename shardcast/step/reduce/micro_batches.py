"""Reduce: micro-batches whose gradients are added in an order of their own, not as they come.

An option gives such an object in place of none, see :class:`shardcast.option_values.Option`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from shardcast.comm import Buffers
from shardcast.memory.gradients import Gradients
from shardcast.memory.pack import Pack

if TYPE_CHECKING:
    from shardcast.step.reduce.reducer import Reducer


class MicroBatches(Protocol):
    """The micro-batches of a step on this rank, and how far it has come among them.

    Attributes:
        total: in a step, over all ranks; 0 as long as it is not known.
        current: the one that the running backward is of, or the next one.
        begun: gradients of it have come.
        numbered: the script says which one each is.
        spare: buffers of messages.
    """

    total: int
    current: int
    begun: bool
    numbered: bool
    spare: Buffers

    @property
    def last(self) -> bool:
        """Return whether the current one is known to be this rank's last one of the step."""

    @property
    def count(self) -> str:
        """Return how many there were in this step, which all ranks must have alike."""

    def storage(self, pack: Pack, dtype: torch.dtype, wire: torch.dtype) -> Gradients:
        """Return the storage of one more pack, whose gradients are sent as ``wire``."""

    def watch(self, model: nn.Module, reducer: Reducer) -> Any:
        """Notice ``model.zero_grad()`` until ``remove()`` of what is returned."""

    def norm(self, norm_type: float, device: torch.device) -> Any:
        """Return the :class:`.PNorm` whose value does not depend on how spans are cut."""

    def divides(self, total: int) -> bool:
        """Return whether steps divide by their number where a framework knows of ``total``.

        Raises:
            RuntimeError: there are more or less of them than that.
        """

    def agree(self, device: torch.device) -> None:
        """Count those of the first step, of all ranks. Collective."""

    def reset(self) -> None:
        """Begin a step."""

    def load(self, total: int) -> None:
        """Take the ``total`` of a checkpoint."""

    def begin(self) -> None:
        """Learn that a gradient of the current one comes; RuntimeError where none is left."""

    def choose(self, index: int) -> None:
        """Have what comes be of this one; see :meth:`shardcast.ShardedOptimizer.micro_batch`."""

    def end(self) -> None:
        """Learn that the current one has all its gradients."""
