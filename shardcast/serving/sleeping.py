"""Memory that sleeps: storages with all tensors of ours in them, and stand-ins of parameters."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from shardcast._compat import storages
from shardcast.memory.shard import Shard

MOVED = 1 << 26  # bytes that go through host memory into a file at a time


class Place(NamedTuple):
    """The place of a tensor in its storage."""

    tensor: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def put(self, storage: torch.UntypedStorage) -> None:
        """Have the tensor there again, in a storage like the old one."""
        tensor = self.tensor
        new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = new.set_(storage, self.offset, self.size, self.stride)


class Memory:
    """One storage, and the tensors of ours that lie in it.

    Attributes:
        label: says what it is, for errors.
    """

    def __init__(self, first: Tensor, label: str) -> None:
        self.label, self.nbytes = label, first.untyped_storage().nbytes()
        self._device, self._places = first.device, list[Place]()
        self._host: Tensor | None = None
        self._weak: storages.WeakStorage | None = None

    def add(self, tensor: Tensor) -> None:
        """Have one more tensor in it."""
        if not any(tensor is place.tensor for place in self._places):
            offset = int(tensor.storage_offset())
            self._places.append(Place(tensor, tensor.shape, tensor.stride(), offset))
            if (base := storages.base_of(tensor)) is not None:
                self.add(base)  # which keeps the memory, too

    def _bytes(self) -> Tensor:
        """All of it, 1-d."""
        storage = self._places[0].tensor.untyped_storage()
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def copy_out(self, file: IO[bytes] | None) -> None:
        """Copy it to the host, or write it into ``file``."""
        values = self._bytes()
        if file is None:
            pins = self._device.type == "cuda"
            self._host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=pins)
            self._host.copy_(values, non_blocking=True)
            return
        for piece in values.split(MOVED):
            file.write(_buffer(piece.cpu()))

    def free(self) -> None:
        """Let go of it; tensors of ours become empty."""
        self._weak = storages.WeakStorage(self._places[0].tensor)
        for place in self._places:
            place.tensor.data = torch.empty(0, dtype=place.tensor.dtype, device=self._device)

    def still_here(self) -> torch.UntypedStorage | None:
        """The storage, if somebody else has it."""
        return None if self._weak is None else self._weak()

    def allocate(self, file: IO[bytes] | None) -> torch.UntypedStorage:
        """Memory with the values, the old one where it is still here."""
        if (storage := self.still_here()) is not None:
            if file is not None:
                file.seek(self.nbytes, os.SEEK_CUR)
            return storage
        values = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        if file is None:
            assert self._host is not None
            values.copy_(self._host, non_blocking=True)
            return values.untyped_storage()
        for piece in values.split(MOVED):
            on_host = piece if piece.device.type == "cpu" else torch.empty_like(piece, device="cpu")
            if file.readinto(_buffer(on_host)) != len(piece):  # type: ignore[attr-defined]
                raise OSError("wake: the file of a sleeping optimizer is shorter than it was")
            if on_host is not piece:
                piece.copy_(on_host)
        return values.untyped_storage()

    def put(self, storage: torch.UntypedStorage) -> None:
        """Have all tensors there again."""
        for place in self._places:
            place.put(storage)
        self._host = self._weak = None


def _buffer(values: Tensor) -> memoryview:
    """The memory of a 1-d tensor of the host."""
    array = (ctypes.c_char * values.numel()).from_address(values.data_ptr())
    return memoryview(array).cast("B")


class StandIn(NamedTuple):
    """The stand-in for a sleeping parameter: NaN.

    Attributes:
        value: its one element, 1-d.
        weak: the storage that the parameter had; ``None`` without elements.
    """

    name: str
    value: Tensor
    weak: storages.WeakStorage | None

    def held(self) -> torch.UntypedStorage | None:
        """Return that storage, if somebody else has it."""
        return None if self.weak is None else self.weak()

    def is_written(self, param: Any) -> bool:
        """Return whether a script wrote to it, or assigned other memory."""
        if param.numel() == 0:
            return False
        return param.data_ptr() != self.value.data_ptr() or not bool(self.value.isnan())


def expanded(value: Tensor, shape: Iterable[int]) -> Tensor:
    sizes = [*shape]
    return value.view([1] * len(sizes)).expand(sizes)


def stood_in(shard: Shard) -> Iterator[StandIn]:
    """Have NaN in the place of each parameter."""
    for slot, param in zip(shard.pack.layout.slots, shard.pack.params, strict=True):
        data = param.data
        value = torch.full((1,), math.nan, dtype=data.dtype, device=data.device)
        stand_in = StandIn(slot.name, value, storages.WeakStorage(data) if slot.numel else None)
        param.data = expanded(value, slot.shape)
        yield stand_in


def over(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """A tensor like another one at the beginning of a storage."""
    new = torch.empty(0, dtype=like.dtype, device=like.device)
    return new.set_(storage, 0, like.shape, like.stride())
