"""Homes: where the masters and the state of a shard are, and are updated.

Usually that is the device of the model, and a home has nothing to do. Option ``offload`` keeps them
in host memory: its home has a copy of the own span there, in both directions.
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
        is_apart: whether masters are elsewhere than the pack.
    """

    is_apart: ClassVar[bool] = False

    def __init__(self, pack: Pack) -> None:
        self.pack = pack

    @property
    def device(self) -> torch.device:
        """The device of masters and state."""
        return torch.device(self.pack.params[0].device)

    @property
    def published(self) -> Tensor:
        """The own span of the pack as the update sees it, 1-d, on :attr:`device`."""
        return self.pack.own_data

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate memory for masters or state, 1-d."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def given(self, values: Tensor) -> Tensor:
        """Return values on the device of the pack, for whoever reads them."""
        return values

    def fill(self) -> None:
        """Called when the pack has its values."""

    def look(self) -> None:
        """Have in :attr:`published` what a script wrote; nobody reads it there any more."""

    def send(self, part: slice = ALL) -> None:
        """Have in the pack what is in :attr:`published`, in the order of the device."""

    # -- the mean ---------------------------------------------------------------------------------

    def follow(self, grads: Gradients) -> None:
        """Called when the gradients of the pack begin to be reduced."""

    def mean(self, grads: Gradients) -> Tensor:
        """Return the mean of the own span as the update sees it; see :meth:`arrive`."""
        return grads.own

    def keeps_mean(self, grads: Gradients) -> bool:
        """Return whether the next step has the mean in the same memory."""
        return grads.stays

    def arrive(self) -> None:
        """Return when the mean has come, and nobody reads :attr:`published` any more."""


def home_of(pack: Pack, config: ShardcastConfig) -> Home:
    """Return the home of a pack."""
    if "offload" not in config.extensions():
        return Home(pack)
    home: Home = load_extension("offload").HostHome(pack)
    return home
