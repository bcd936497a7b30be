"""Publishing: how the fp32 masters of a parameter become what the model has of it.

Usually each element is cast to the nearest number of the parameter's dtype, within the update.
Options may have a class of shards that casts otherwise behind the update, in packs of their own,
or keeps what was published. What is published may travel in fewer bytes than it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.plan.layout import PackLayout, Span


class Parcel(ABC):
    """The bytes of a pack that travel in one sync, in place of its values.

    Attributes:
        data: a part of each owner, 1-d; it is filled where this rank is the owner.
        own_data: that part.
    """

    data: Tensor
    own_data: Tensor

    @abstractmethod
    def span(self, span: Span) -> Tensor:
        """Return the part of the owner of a span, 1-d."""

    @abstractmethod
    def unpack(self) -> None:
        """Write the values of the other owners into the pack; the parts have come."""


class Wire(ABC):
    """The way in which published values of one pack travel, where that is not as they are.

    All ranks get the bits of the owner, who has published the masters before a sync, so that every
    value is one that the cast gives.

    Attributes:
        nbytes: of the part of each owner; equal where the pack is gathered.
        size: bytes of a parcel.
    """

    nbytes: Sequence[int]
    size: int

    @abstractmethod
    def parcel(self, data: Tensor, rank: int) -> Parcel:
        """Return the parcel of the present values of ``rank``, which is here.

        Args:
            data: of the whole pack, 1-d.
        """


class Publishing(ABC):
    """The way in which all options of one configuration together publish masters."""

    @abstractmethod
    def cast(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[str, int]:
        """Return the cast of a parameter, and how many of its elements have one owner together.

        Parameters of different casts share no pack; ``""`` is the usual one.

        Args:
            shape: of what lies on this rank.
            dtype: in which it is stored.

        Raises:
            ValueError: another cast is asked for, and the parameter cannot have it; names it.
        """

    @abstractmethod
    def unmatched(self, names: Iterable[str]) -> list[str]:
        """List patterns that match none of the parameters, as messages."""

    @abstractmethod
    def shard(self, pack: Any) -> Any:
        """Return the :class:`.Shard` of a :class:`.Pack`, which has no masters yet."""

    @abstractmethod
    def wire(self, layout: PackLayout) -> Wire | None:
        """Return how a pack travels; ``None``: as it is."""


def publishing_of(config: ShardcastConfig) -> Publishing | None:
    """Return what options say of publishing; ``None`` where none does."""
    for option in config.extensions().values():
        if option.publishing is not None:
            return option.publishing(config)
    return None
