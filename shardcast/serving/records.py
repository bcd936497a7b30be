"""Records of changes: one bit per element, or a copy of the values of the last answer.

**A bit.** If a parameter has fp32 masters, the last answer's value of every unmarked element is the
cast of its master. So an element is marked whenever that cast changes: in the update's pass that
makes the new cast, and where other code writes masters. Nothing is compared with a snapshot, and no
step reads or writes more than a bit. Values that a script wrote are marked when an answer is
requested, because the published value is then not the cast of its master. A value that changes and
changes back stays marked. If an answer contained written values, no master knows them, so a copy of
that span is kept until an answer contains none.

**A copy.** If the published value *is* the master (fp32 parameters) or a half of it
(``master: split16``), a written value leaves no other trace. Then the last answer's values are
kept, and compared when an answer is requested.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.config import ShardcastConfig
from shardcast.extensions.split_masters import BYTE, word_of, words
from shardcast.memory.codecs import Codec, Encoded, Pieces, row_of
from shardcast.memory.hashing import bits_of
from shardcast.memory.shard import Shard
from shardcast.memory.slices import slices
from shardcast.step.update.epilogues import Epilogue, UpdateValues

if TYPE_CHECKING:
    from shardcast.step.update.rules import Numbers

MARKS = "changes"  # name of the epilogue's state


@dataclass(frozen=True)
class Marks(Codec):
    """A bit for each element, in one word per row; its values are these words."""

    plain = False

    def pieces(self, row: int) -> tuple[tuple[torch.dtype, int], ...]:
        return ((word_of(row), 1),)

    def decode(self, pieces: Pieces) -> Tensor:
        return pieces[0]

    def encode(self, values: Tensor, bits: Tensor | None) -> Pieces:
        return (values,)


@dataclass(frozen=True)
class Nothing(Codec):
    """No memory, for updates that mark nothing."""

    plain = False

    def pieces(self, row: int) -> tuple[tuple[torch.dtype, int], ...]:
        return ()

    def decode(self, pieces: Pieces) -> Tensor:
        return torch.empty(0)

    def encode(self, values: Tensor, bits: Tensor | None) -> Pieces:
        return ()


@dataclass(frozen=True)
class Followed(Epilogue):
    """Marks elements whose published value differs from the earlier cast of their master."""

    follows: ClassVar[bool] = True

    @property
    def state(self) -> tuple[str, ...]:
        return (MARKS,)

    @property
    def codec(self) -> Codec:
        return Marks()

    def apply_(
        self, updated: UpdateValues, state: tuple[Tensor, ...], numbers: Numbers
    ) -> tuple[Tensor, ...]:
        if updated.last_published is not None:
            state[0].bitwise_or_(words(updated.published != updated.last_published))
        return ()


class Changed(ABC):
    """The changes in one own span since the last answer.

    The fused update reports changes through :class:`Followed`. All other code that writes masters
    (from a script's values, a loaded state, or a class that updates by itself) calls :meth:`note`.

    Attributes:
        state: state of :class:`Followed`, by name.
        is_new: there was no answer yet.
    """

    state: dict[str, Encoded]

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.is_new = True

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held; they are counted with the masters."""

    @abstractmethod
    def memory(self) -> Iterator[Tensor]:
        """Yield the tensors themselves that are held."""

    @abstractmethod
    def note(self, part: slice, before: Tensor, after: Tensor) -> None:
        """Note values that are, or will be, published. Local; does not wait for a device.

        Args:
            part: part of the own span; starts with a row, and ends with a row or a parameter.
            before, after: 1-d, in the dtype of the pack; most or all elements may be equal.
        """

    @abstractmethod
    def since(self, start: int, stop: int) -> Tensor:
        """Return which of the elements ``[start, stop)``, which start with a row, have changed.

        Returns:
            Their places, counted from ``start``: 1-d int64, ascending.
        """

    @abstractmethod
    def tell(self, is_written: bool) -> None:
        """Start again: the current published values were part of an answer.

        Args:
            is_written: some of them are not the cast of their master.
        """


class MarkedChanges(Changed):
    """A bit for each element.

    Args:
        in_update: whether the fused update marks; otherwise everything is noted.
    """

    def __init__(self, shard: Shard, row: int, in_update: bool) -> None:
        super().__init__(shard)
        self._row, numel = row, shard.pack.own.numel
        self._marks = Encoded(Marks(), numel, row, shard.home.zeros)
        nothing = Encoded(Nothing(), numel, row, shard.home.zeros)
        self.state = {MARKS: self._marks if in_update else nothing}
        self._told: Tensor | None = None  # a copy of the span, if some of it was written

    @property
    def nbytes(self) -> int:
        return self._marks.nbytes + (0 if self._told is None else self._told.nbytes)

    def memory(self) -> Iterator[Tensor]:
        yield from self._marks.pieces
        if self._told is not None:
            yield self._told

    def note(self, part: slice, before: Tensor, after: Tensor) -> None:
        bits = before.view(torch.int16), after.view(torch.int16)
        if _compat.is_host(before.device) and torch.equal(*bits):  # almost always equal
            return
        changed = bits[0] != bits[1]
        missing = -changed.numel() % self._row
        if missing:
            changed = torch.nn.functional.pad(changed, (0, missing))
        (marks,) = self._marks.parts(part)
        marks.bitwise_or_(words(changed.view(-1, self._row)))

    def since(self, start: int, stop: int) -> Tensor:
        if self._told is not None:
            return _differing(self._told, self._shard.published, start, stop)
        places = []
        for part in slices(stop, start=start):
            (marks,) = self._marks.parts(part)
            octets = marks.view(torch.uint8)
            count = min(self._row, BYTE)  # elements in each group
            lanes = torch.arange(count, dtype=torch.uint8, device=marks.device)
            marked = octets.nonzero().view(-1)  # waits for the device
            number, lane = ((octets[marked][:, None] >> lanes) & 1).nonzero().unbind(1)
            places.append(marked[number] * count + lane + (part.start - start))
        return torch.cat(places)

    def tell(self, is_written: bool) -> None:
        self.is_new = False
        self._told = self._shard.published.clone() if is_written else None
        self._marks.parts(slice(None))[0].zero_()


class ComparedChanges(Changed):
    """A copy of the last answer's values."""

    def __init__(self, shard: Shard, row: int) -> None:
        super().__init__(shard)
        numel = shard.pack.own.numel
        self._told = shard.home.zeros(numel, shard.pack.layout.dtype)
        self.state = {MARKS: Encoded(Nothing(), numel, row, shard.home.zeros)}

    @property
    def nbytes(self) -> int:
        return self._told.nbytes

    def memory(self) -> Iterator[Tensor]:
        yield self._told

    def note(self, part: slice, before: Tensor, after: Tensor) -> None:
        """Do nothing, because all values are compared."""

    def since(self, start: int, stop: int) -> Tensor:
        return _differing(self._told, self._shard.published, start, stop)

    def tell(self, is_written: bool) -> None:
        self.is_new = False
        self._told.copy_(self._shard.published)


def _differing(told: Tensor, published: Tensor, start: int, stop: int) -> Tensor:
    """Return where two spans have different bits; see :meth:`Changed.since`."""
    return (bits_of(told[start:stop]) != bits_of(published[start:stop])).nonzero().view(-1)


def record_of(shard: Shard, config: ShardcastConfig) -> Changed:
    """Return the record of one own span."""
    row = row_of(config, shard.pack.layout.dtype)
    if shard.casts or shard.in_blocks:
        return MarkedChanges(shard, row, in_update=shard.casts)
    return ComparedChanges(shard, row)
