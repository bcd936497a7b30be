"""Weights that a script writes between two steps: clamps, renorms, loads, switched averages.

Version counters of the parameters count every write that autograd can see. Packs have storages of
their own, so our updates do not count. What was written becomes the owner's master before the next
update, where it is not the cast of that master already: other elements keep their full precision.

A write through ``param.data`` is not counted. To find it, packs are compared with the cast of
their masters: in the first steps, after a forward that trains nothing (an average is usually
switched in to be evaluated), and now and then. In all other steps the first elements of each
parameter are, which finds a layer that is initialised anew or a model that is rolled back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from shardcast.memory.pack import Pack
from shardcast.memory.shard import Shard

FIRST = 16  # steps that are all compared
PERIOD = 127  # a prime: meets a script that writes in every sixth step
PIECE = 1 << 20  # elements that are compared at once: six bytes of memory for each
SAMPLE = 8  # elements of each parameter in other steps
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_WORD = torch.int64


class Samples(NamedTuple):
    """Views of the first elements of parameters in the own spans, and of their masters.

    Attributes:
        positions: of each element among those of all packs, counted from 1, fp64.
    """

    published: list[Tensor]
    masters: list[Tensor]
    positions: Tensor


class WeightEdits:
    """Notices writes to the parameters of some packs. Local.

    Args:
        shards: those of all packs; the list may grow.

    Attributes:
        steps: made so far.
        due: compare in the next one.
    """

    def __init__(self, shards: Sequence[Shard], device: torch.device) -> None:
        self._shards = shards
        self._marks: dict[Pack, list[int]] = {}
        self.steps = 0
        self._first = torch.zeros((), dtype=torch.float64, device=device)
        self._samples: dict[torch.dtype, Samples] = {}
        self._sampled: list[Shard] = []
        self.due = False

    def note(self) -> None:
        """What was written until now is our own, or taken."""
        self._marks = {shard.pack: shard.pack.marks for shard in self._shards}

    def edited(self) -> list[Shard]:
        """Shards of packs that were written to since :meth:`note`.

        Raises:
            RuntimeError: names a parameter that has another dtype, device or shape now.
        """
        edited = [shard for shard in self._shards if shard.pack.marks != self._marks[shard.pack]]
        for shard in edited:
            shard.pack.take_moved()
        return edited

    def take(self) -> None:
        """Make what was written the masters."""
        edited = self.edited()
        for shard in edited:
            shard.absorb()
        if edited:
            self.note()

    def unseen(self) -> Tensor:
        """Above 0 if there are writes that no counter saw, fp64, 1-d; compares all in some steps.

        Call it after :meth:`take`. Waits for no device.
        """
        self.steps += 1
        due = self.due or self.steps <= FIRST or self.steps % PERIOD == 0
        self.due = False
        if self._first.is_cuda and torch.cuda.is_current_stream_capturing():
            return self._first.view(1)
        if not due:
            self._compare_samples()
            return self._first.view(1)
        for begin, shard in self._compared():
            begin += shard.pack.own.start
            for start in range(0, shard.published.numel(), PIECE):
                edited = shard.edited(slice(start, start + PIECE))
                position = begin + start + edited.view(torch.uint8).argmax()
                self._first = torch.where(edited.any(), position.double(), self._first)
        return self._first.view(1)

    def _compared(self) -> Iterator[tuple[int, Shard]]:
        """Shards whose masters may differ from what is published, and where their packs begin."""
        begins = accumulate((shard.pack.layout.numel for shard in self._shards), initial=1)
        for begin, shard in zip(begins, self._shards, strict=False):
            # A pack that is frozen is never written over.
            if shard.casts and shard.grads is not None and shard.published.numel():
                yield begin, shard

    def _compare_samples(self) -> None:
        shards = [shard for _, shard in self._compared()]
        if shards != self._sampled:
            self._sampled = shards
            self._samples = self._sample()
        for dtype, samples in self._samples.items():  # packs that are cast have 16 bits
            cast = torch.cat(samples.masters).to(dtype).view(torch.int16)
            edited = torch.cat(samples.published).view(torch.int16) != cast
            self._first = torch.maximum(self._first, (samples.positions * edited).amax())

    def close(self) -> None:
        """Hold no memory of packs any more."""
        self._samples, self._sampled = {}, []

    def _sample(self) -> dict[torch.dtype, Samples]:
        """By dtype of the packs; of masters that are fp32 on the device alone."""
        device = self._first.device
        views: dict[torch.dtype, list[tuple[Tensor, Tensor, int]]] = {}
        for begin, shard in self._compared():
            for fragment in shard.fragments if shard.is_plain else ():
                if not fragment.numel:
                    continue
                stop = min(fragment.start + SAMPLE, fragment.stop)
                part = shard.local(fragment.start, stop)
                views.setdefault(shard.published.dtype, []).append(
                    (shard.published[part], shard.data[part], begin + fragment.start)
                )
        return {
            dtype: Samples(
                [published for published, _, _ in of_dtype],
                [master for _, master, _ in of_dtype],
                torch.cat(
                    [
                        torch.arange(begin, begin + len(master), dtype=torch.float64, device=device)
                        for _, master, begin in of_dtype
                    ]
                ),
            )
            for dtype, of_dtype in views.items()
        }

    def first_name(self) -> str | None:
        """The parameter in which :meth:`unseen` found a write; waits for the device. Forgets it."""
        position = int(self._first.item()) - 1
        self._first.zero_()
        for shard in self._shards if position >= 0 else ():
            if position < shard.pack.layout.numel:
                return next(s.name for s in shard.pack.layout.slots if position < s.end)
            position -= shard.pack.layout.numel
        return None


def unseen_error(names: Sequence[str | None]) -> RuntimeError:
    """What every rank raises where some found a write that no counter saw."""
    name = next((repr(name) for name in names if name), "on another rank, which names it,")
    return RuntimeError(
        f"step: parameter {name} was written through .data, which shardcast cannot see, so that "
        "its fp32 master would undo it: write `with torch.no_grad(): param.copy_(...)`, without "
        ".data, or call optimizer.resync_masters() after the write"
    )


def checksum(tensor: Tensor) -> Tensor:
    """A sum over the bits of a dense tensor, 0-dim int64; the order of words does not count.

    It tells of writes that torch does not count. Waits for no device, and copies no tensor that is
    contiguous.
    """
    flat = tensor.detach().reshape(-1)
    size = flat.element_size()
    if size >= _WORD.itemsize:
        return flat.view(_WORD).sum()
    per_word = _WORD.itemsize // size
    # A sum of smaller integers would copy them to int64 first.
    whole = 0 if flat.storage_offset() % per_word else flat.numel() // per_word * per_word
    return flat[:whole].view(_WORD).sum() + flat[whole:].view(_INTEGERS[size]).sum()
