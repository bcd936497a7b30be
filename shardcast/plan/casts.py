"""Casts: how the fp32 masters of a parameter become what the model has of it.

Usually to the nearest number of the parameter's dtype, each element by itself, within the update.
An option may have another cast for some parameters, of values that meet in blocks. These have packs
of their own; the whole blocks of a fragment are cast behind the update, at their owner. What is
published of them may travel in fewer bytes than it has, see :class:`Wire`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.plan.layout import Fragment, PackLayout, Span


class Run(NamedTuple):
    """Elements ``[start, stop)`` of a pack that are cast together.

    Attributes:
        width: of the rows that they are in, for casts in which rows meet.
    """

    start: int
    stop: int
    width: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Cast(ABC):
    """The way from masters of a parameter to its published values.

    Attributes:
        name: parameters of different casts share no pack.
    """

    name: str

    @abstractmethod
    def unit(self, shape: tuple[int, ...]) -> int:
        """Return how many elements of a parameter, from its first one, have one owner together."""

    @abstractmethod
    def __call__(self, masters: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return what is published of masters: 1-d, in the dtype of the pack.

        Args:
            masters: 1-d fp32, whole units.
            shape: of the parameter.
        """

    @abstractmethod
    def runs(self, fragments: Sequence[Fragment]) -> Sequence[Run]:
        """Return the ranges that are cast in one call each: whole units, with all fragments."""

    @abstractmethod
    def publish_(self, masters: Tensor, width: int, outputs: Sequence[Tensor]) -> None:
        """Overwrite each of the outputs by the cast of masters; all are 1-d.

        Args:
            masters: of a run; fp32.
            width: of the run.
        """

    @abstractmethod
    def take_written_(self, masters: Tensor, published: Tensor, last: Tensor) -> bool:
        """Have published values be masters where they are not the last ones; all are 1-d.

        Bits decide. Returns whether there may be such values; waits for no device.
        """


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
        """The part of the owner of a span, 1-d."""

    @abstractmethod
    def unpack(self) -> None:
        """Write the values of the other owners into the pack; the parts have come."""


class Wire(ABC):
    """The way in which published values of one pack travel, where that is not as they are.

    All ranks are to have the bits of the owner. Whoever syncs has published the masters before, so
    that every value is one that the cast gives.

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


class Casts(ABC):
    """The casts of one configuration."""

    @abstractmethod
    def of(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Cast | None:
        """The cast of a parameter; ``None`` for the usual one.

        Args:
            shape: of what lies on this rank.
            dtype: in which it is stored.

        Raises:
            ValueError: it is asked for, and the parameter cannot have it; names it.
        """

    @abstractmethod
    def named(self, name: str) -> Cast:
        """The cast of that name."""

    def wire(self, _layout: PackLayout) -> Wire | None:
        """Return how a pack of such a cast travels; ``None``: as it is."""
        return None

    @abstractmethod
    def unmatched(self, names: Iterable[str]) -> list[str]:
        """List patterns that match none of the parameters, as messages."""


def casts_of(config: ShardcastConfig) -> Casts | None:
    """The casts that an option asks for; ``None`` where all are the usual one."""
    asked = (option.casts for option in config.extensions().values() if option.casts is not None)
    return next((casts(config) for casts in asked), None)


def cast_of(config: ShardcastConfig, name: str) -> Cast | None:
    """The cast of a pack, by its name; ``None`` for the usual one."""
    casts = casts_of(config) if name else None
    return None if casts is None else casts.named(name)


def wire_of(config: ShardcastConfig, layout: PackLayout) -> Wire | None:
    """Return how what is published of a pack travels; ``None``: as it is."""
    casts = casts_of(config) if layout.cast else None
    return None if casts is None else casts.wire(layout)
