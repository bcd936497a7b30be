"""Publishing: how the fp32 masters of a parameter become the model's values.

Usually the update casts each element to the nearest number of the parameter's dtype. An option may
provide a class of shards that casts differently after the update, in packs of its own, or that
records what was published. Published values may be sent in fewer bytes than they have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.plan.layout import PackLayout, Span


class Encoded(ABC):
    """The bytes of a pack that are sent in one sync, instead of its values.

    Attributes:
        data: a part for each owner, 1-d; filled if this rank is the owner.
        own_data: this rank's part.
    """

    data: Tensor
    own_data: Tensor

    @abstractmethod
    def span(self, span: Span) -> Tensor:
        """Return the part of a span's owner, 1-d."""

    @abstractmethod
    def decode(self) -> None:
        """Write the other owners' values into the pack, once they have arrived."""


class Encoding(ABC):
    """The encoding in which a pack's published values are sent, if not as they are.

    All ranks get the owner's bits. The owner has published the masters before a sync, so every
    value is a result of the cast.

    Attributes:
        nbytes: bytes of each owner's part; equal if the pack is all-gathered.
        size: bytes of all parts.
    """

    nbytes: Sequence[int]
    size: int

    @abstractmethod
    def encode(self, data: Tensor, rank: int) -> Encoded:
        """Encode the current values of ``rank``, which is this rank.

        Args:
            data: values of the whole pack, 1-d.
        """


class Publishing(ABC):
    """How all options of one configuration together publish masters."""

    @abstractmethod
    def cast(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[str, int]:
        """Return the cast of a parameter, and how many consecutive elements must have one owner.

        Parameters with different casts share no pack; ``""`` is the usual cast.

        Args:
            shape: shape of this rank's part.
            dtype: storage dtype.

        Raises:
            ValueError: an option asks for another cast that the parameter cannot have; names it.
        """

    @abstractmethod
    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return patterns that match none of the parameters, as messages."""

    @abstractmethod
    def shard(self, pack: Any) -> Any:
        """Return the :class:`.Shard` of a :class:`.Pack`, without masters yet."""

    @abstractmethod
    def encoding(self, layout: PackLayout) -> Encoding | None:
        """Return a pack's encoding; ``None`` if values are sent as they are."""


def publishing_of(config: ShardcastConfig) -> Publishing | None:
    """Return the publishing that an option provides; ``None`` if none does."""
    for option in config.extensions().values():
        if option.publishing is not None:
            return option.publishing(config)
    return None
