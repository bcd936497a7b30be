"""Records: what an option keeps of each element that a rank owns, of what is published of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from shardcast.memory.codecs import Encoded


class Record(ABC):
    """The record of an option on one own span, made by :attr:`.Option.record` with its shard.

    In the fused update an :class:`.Epilogue` sees what changes. Everywhere else, where a script's
    values become masters, a state is loaded, or a class has updated by itself, it is told.

    Attributes:
        state: what the epilogue of the same option has as its state, by name.
    """

    state: dict[str, Encoded]

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes that are held; they are counted with those of masters."""

    @abstractmethod
    def memory(self) -> Iterator[Tensor]:
        """Give the very tensors that are held."""

    @abstractmethod
    def note(self, part: slice, before: Tensor, after: Tensor) -> None:
        """Hear of values that are published, or are about to be. Local; waits for no device.

        Args:
            part: of the own span; begins with a row, and ends with one or with a parameter.
            before, after: 1-d, in the dtype of the pack; most elements, or all, may be equal.
        """
