"""Homes: where a shard's masters and state are, and are updated.

Usually that is the model's device, and a home does nothing. With ``offload`` it is host memory, and
the home copies the own span in both directions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.option_values import load_extension

if TYPE_CHECKING:
    from shardcast.memory.gradients import Gradients
    from shardcast.memory.pack import Pack

ALL = slice(None)


class Home:
    """The device of the pack.

    Attributes:
        is_apart: whether masters are on another device than the pack.
    """

    is_apart: ClassVar[bool] = False

    def __init__(self, pack: Pack) -> None:
        self.pack = pack

    @property
    def device(self) -> torch.device:
        """Device of masters and state."""
        return torch.device(self.pack.params[0].device)

    @property
    def published(self) -> Tensor:
        """The own span of the pack as the update sees it, 1-d, on :attr:`device`."""
        return self.pack.own_data

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate memory for masters or state, 1-d."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def given(self, values: Tensor) -> Tensor:
        """Return values on the device of the pack, for readers."""
        return values

    def fill(self) -> None:
        """Called when the pack has its values."""

    def look(self) -> None:
        """Copy values that a script wrote to :attr:`published`; nothing else reads it any more."""

    def send(self, part: slice = ALL) -> None:
        """Copy :attr:`published` to the pack, in the order of the device."""

    # -- the mean ---------------------------------------------------------------------------------

    def follow(self, grads: Gradients) -> None:
        """Called when the reduction of the pack's gradients starts."""

    def mean(self, grads: Gradients) -> Tensor:
        """Return the mean of the own span as the update sees it; see :meth:`arrive`."""
        return grads.own

    def arrive(self) -> None:
        """Wait until the mean has arrived, and nothing reads :attr:`published` any more."""


def home_of(pack: Pack, config: ShardcastConfig) -> Home:
    """Return the home of a pack."""
    if "offload" not in config.extensions():
        return Home(pack)
    home: Home = load_extension("offload").HostHome(pack)
    return home
