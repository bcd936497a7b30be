"""``optimizer.sleep()``: free the device between steps, for example for a rollout engine.

Masters, state and parameters are copied to host memory or a file, one copy per storage, and their
memory is freed. All objects stay the same: our tensors become empty, and parameters become NaN in
the memory of one element. So nothing can read an old value, and calls that need the optimizer
raise an error that names ``wake()``.

Memory is freed once nothing refers to it. A view that a script holds would refer to old memory
after ``wake()``. So ``sleep()`` checks that each storage is gone; if one is not, it undoes
everything and names the tensor. It cannot see bare addresses: those in a CUDA graph, in another
process, or in a NumPy array of a parameter.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import warn_first
from shardcast.hook import Hook
from shardcast.memory.aliases import tie
from shardcast.memory.shard import Shard, take_moved
from shardcast.messages import SHOWN
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.option_values import Option
from shardcast.step.step_hook import StepHook

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

KINDS = ("parameters", "masters", "state")  # kinds of memory that may stay
# Seconds until memory counts as held by a script: gloo's threads keep a collective's tensors for a
# moment after the wait, and longer if they get no core.
PATIENCE = (0.001, 0.01, 0.1, 0.3)
WAY_OUT = "the optimizer is asleep: call optimizer.wake() on every rank first"


class Sleep(StepHook):
    """Sleeping and waking of one optimizer."""

    name = "asleep"

    def __init__(self, optimizer: PackedOptimizer) -> None:
        self._optimizer = optimizer
        self._memories: list[Memory] = []
        self._stand_ins: list[tuple[Shard, list[StandIn]]] = []
        self._file: IO[bytes] | None = None
        self._doors: list[RemovableHandle] = []
        self._sleeps = False

    def sleep(self, keep: Iterable[str] = (), to: str | os.PathLike[str] | None = None) -> int:
        """Free the memory of masters, state, averages and parameters until :meth:`wake`.

        Call it between steps. Gradients are dropped. Until ``wake()``, parameters read as NaN, and
        a forward, backward, step, state dict, checkpoint or average raises a RuntimeError that
        names ``wake()``. It waits for the device and for a running sync; a background save has its
        own copy. Afterwards parameters have new addresses: capture CUDA graphs again, and pass the
        weights to other processes again.

        Collective: every rank.

        Args:
            keep: what stays on the device, any of ``parameters``, ``masters`` and ``state`` (with
                averages). With ``parameters`` the model can still run forwards. In fp32 the
                parameters are the masters.
            to: directory for one file per rank, which is gone when the process ends. By default the
                memory moves to the host, pinned for a GPU. On a CPU only a directory frees memory.

        Returns:
            The bytes moved on this rank; with ``offload`` only the parameters' bytes.

        Raises:
            RuntimeError: the optimizer sleeps already, an average is in the model, or a tensor of
                the script or a graph still refers to the memory. Raised on every rank.
            TypeError, ValueError, OSError: ``keep`` or ``to`` cannot be used. Raised on every rank.
        """
        optimizer, device, kinds = self._optimizer, self._optimizer.device, set[str]()

        def copied() -> None:
            kinds.update({keep} if isinstance(keep, str) else keep)
            self._check(kinds)
            optimizer.sync.wait()
            take_moved(optimizer.shards)
            for shard in optimizer.shards:
                shard.forget_before_load()
            self._memories = self._found(kinds)
            if to is None:
                for memory in self._memories:
                    memory.copy_out(None)
            else:
                self._write(os.fspath(to))
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        try:
            optimizer.together(copied, "sleep")
        except BaseException:
            if not self._sleeps:
                self._forget()
            raise
        self._drop_gradients()
        self._free(keeps_parameters="parameters" in kinds)
        try:
            optimizer.together(self._refuse_holders, "sleep")
        except BaseException:
            self._restore()
            raise
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return sum(memory.nbytes for memory in self._memories)

    def wake(self) -> int:
        """Restore what :meth:`sleep` moved, bit for bit. Collective: every rank.

        If any rank is short of memory, the optimizer stays asleep and you can call this again.

        Returns:
            The bytes moved on this rank; 0 if it is awake.

        Raises:
            RuntimeError, OSError: a rank is short of memory or cannot read its file. Raised on
                every rank.
        """
        optimizer, storages = self._optimizer, list[torch.UntypedStorage]()
        moved = sum(memory.nbytes for memory in self._memories)
        optimizer.together(lambda: storages.extend(self._allocated()), "wake")
        self._restore(storages)
        return moved

    @contextmanager
    def asleep(
        self, keep: Iterable[str] = (), to: str | os.PathLike[str] | None = None
    ) -> Iterator[None]:
        """Sleep inside a block: ``with optimizer.asleep(): rollouts()``.

        Collective: every rank enters and leaves it, see :meth:`sleep` and :meth:`wake`. After an
        exception, the rank wakes without waiting for the others.
        """
        self.sleep(keep, to)
        try:
            yield
        except BaseException:
            self._restore()
            raise
        self.wake()

    def _write(self, directory: str) -> None:
        """Copy all memory into this rank's unnamed file; an error names the directory."""
        total = sum(memory.nbytes for memory in self._memories)
        try:
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
            for memory in self._memories:
                memory.copy_out(self._file)
            self._file.flush()
        except OSError as error:
            raise OSError(
                error.errno,
                f"sleep: to: a file of {total} bytes could not be written, so the optimizer "
                f"stays awake: {error.strerror or error}",
                error.filename or directory,
            ) from error

    # -- before ----------------------------------------------------------------------------------

    def _check(self, kept: set[str]) -> None:
        optimizer = self._optimizer
        if unknown := kept - {*KINDS}:
            raise ValueError(
                f"keep: expected names among {', '.join(map(repr, KINDS))}, got "
                f"{', '.join(map(repr, sorted(unknown, key=repr)))}"
            )
        if self._sleeps:
            raise RuntimeError(
                "sleep: the optimizer is already asleep; call optimizer.wake() first"
            )
        if optimizer.is_closed:
            raise RuntimeError(
                "sleep: the optimizer was closed and has no masters any more; call sleep() before "
                "close()"
            )
        optimizer.refuse_inside("sleep")
        if optimizer.plain_names is not None:
            raise RuntimeError("sleep: leave `with optimizer.as_plain():` first")

    def _found(self, kept: set[str]) -> list[Memory]:
        """Return the storages to move; the first tensor in a storage gives its kind."""
        optimizer = self._optimizer
        memories: dict[int, Memory | None] = {}
        for kind, label, tensor in self._tensors():
            address = tensor.untyped_storage().data_ptr()
            if not address or tensor.device.type != optimizer.device.type:
                continue
            if address not in memories:
                stays = kind in kept or (optimizer.config.offload and kind != "parameters")
                memories[address] = None if stays else Memory(tensor, label)
            if (memory := memories[address]) is not None:
                memory.add(tensor)
        return [memory for memory in memories.values() if memory is not None]

    def _tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield each tensor that is kept for elements, with its kind and a label."""
        parameters, masters, state = KINDS
        labels = {
            shard: f"of the pack that begins with {shard.pack.layout.slots[0].name!r}"
            for shard in self._optimizer.shards
        }
        for shard, label in labels.items():
            yield parameters, f"{parameters} {label}", shard.pack.data
        for shard, label in labels.items():
            for tensor in shard.memory():
                yield masters, f"{masters} {label}", tensor
        for update in self._optimizer.updates:
            for tensor in update.memory():
                yield state, f"{state}, {tensor.numel()} elements in {tensor.dtype}", tensor

    def _drop_gradients(self) -> None:
        """Clear all gradients, and free their storage."""
        optimizer, reduce = self._optimizer, self._optimizer.reduce
        reduce.cleared()
        optimizer.decider.cleared()
        for shard in optimizer.shards:
            for param in shard.pack.in_model:
                param.grad = None
        reduce.buffers.free()
        for bucket in reduce.buckets.values():
            bucket.grads.free()
        if reduce.last_backward is not None:
            optimizer.decider.tokens.clear()
            reduce.last_backward = None

    # -- meanwhile -------------------------------------------------------------------------------

    def _free(self, keeps_parameters: bool) -> None:
        self._sleeps = True
        optimizer = self._optimizer
        optimizer.hooks.begins.remove(optimizer.reduce.begin)  # no pass for a refused backward
        self._doors += [
            _compat.put_first(param.register_hook(_door("backward")))
            for shard in optimizer.shards
            for param in shard.pack.in_model
            if param.requires_grad
        ]
        modules = {module for stage in optimizer.stages for module in stage.modules()}
        for module in {*modules, *optimizer.called}:
            load = module.register_load_state_dict_pre_hook(Hook(_door("load_state_dict")))
            self._doors.append(_compat.put_first(load))
        if not keeps_parameters:
            for module in {*modules, *optimizer.called}:
                forward, copy = _door("forward"), _door("a copy of the model")
                hook = Hook(forward, copy)
                self._doors += [
                    module.register_forward_pre_hook(hook, prepend=True),
                    module.register_state_dict_pre_hook(Hook(_door("state_dict"))),
                ]
            for shard in optimizer.shards:
                if shard.pack.data.numel():
                    self._stand_ins.append((shard, [*stood_in(shard)]))
            for alias in optimizer.aliases:
                value = torch.full((1,), math.nan, dtype=alias.param.dtype, device=optimizer.device)
                alias.holder[alias.key] = expanded(value, alias.shape)
        for memory in self._memories:
            memory.free()

    def _holders(self) -> list[str]:
        """List the memory that still exists although we have released it."""
        names = [
            f"parameter {stand_in.name!r}"
            for _, stand_ins in self._stand_ins
            for stand_in in stand_ins
            if stand_in.held() is not None
        ]
        return names or [m.label for m in self._memories if m.still_here() is not None]

    def _refuse_holders(self) -> None:
        names = self._holders()
        if names:
            gc.collect()  # frees cycles, such as a traceback's
            names = self._holders()
        for seconds in PATIENCE:
            if not names:
                return
            time.sleep(seconds)
            names = self._holders()
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise RuntimeError(
                f"sleep: memory of {', '.join(names[:SHOWN])}{more} is held by a tensor outside "
                "of the optimizer, which would refer to old memory after wake(); delete it "
                "first (a detached parameter, a kept state_dict, a loss whose backward was not "
                "run), or keep a clone"
            )

    def refuse(self, call: str) -> None:
        if self._sleeps and call != "close":  # close() wakes it
            raise RuntimeError(f"{call}: {WAY_OUT}")

    def before_reduce(self) -> None:
        """Raise RuntimeError for a step or a clip."""
        self.refuse("step, or another call that reduces gradients")

    def nbytes(self) -> int | None:
        """Return the bytes in host memory."""
        if not self._sleeps or self._file is not None:
            return None
        return sum(memory.nbytes for memory in self._memories)

    def close(self) -> None:
        """Wake up without the other ranks."""
        self._restore()

    # -- after -----------------------------------------------------------------------------------

    def _allocated(self) -> list[torch.UntypedStorage]:
        """Allocate all memory and fill it with its values."""
        if self._file is not None:
            self._file.seek(0)
        return [memory.allocate(self._file) for memory in self._memories]

    @torch.no_grad()
    def _restore(self, storages: list[torch.UntypedStorage] | None = None) -> None:
        """Put everything back in place. Local."""
        if not self._sleeps:
            return
        optimizer = self._optimizer
        storages = self._allocated() if storages is None else storages
        for memory, storage in zip(self._memories, storages, strict=True):
            memory.put(storage)
        written = list[str]()
        for shard, stand_ins in self._stand_ins:
            views = shard.pack.views(shard.pack.data)
            for param, view, stand_in in zip(shard.pack.params, views, stand_ins, strict=True):
                if stand_in.is_written(param):
                    written.append(stand_in.name)
                in_use = stand_in.held()  # held by somebody else, so that sleep failed
                param.data = _compat.own_storage(view) if in_use is None else over(in_use, view)
            shard.pack.note_memory()
        if self._stand_ins:
            tie(optimizer.aliases)
        for door in self._doors:
            door.remove()
        self._sleeps = False
        optimizer.hooks.begins.insert(0, optimizer.reduce.begin)
        self._drop_gradients()  # from a backward that was refused
        self._forget()
        if written:
            warn_first(
                f"sleep: {', '.join(map(repr, written[:SHOWN]))} was written while the optimizer "
                "slept; those values are lost, because wake() restored the trained weights"
            )

    def _forget(self) -> None:
        self._memories, self._stand_ins, self._doors = [], [], []
        if self._file is not None:
            with suppress(OSError):  # bytes that a full disk did not take
                self._file.close()
        self._file = None


def _door(call: str) -> Callable[..., None]:
    def refuse(*_args: object) -> None:
        raise RuntimeError(f"{call}: {WAY_OUT}")

    return refuse


OPTION = Option(help="free the memory between steps", hook=Sleep)


MOVED = 1 << 26  # bytes that are copied through host memory to a file at a time


class Place(NamedTuple):
    """The place of a tensor in its storage."""

    tensor: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def put(self, storage: torch.UntypedStorage) -> None:
        """Put the tensor back, into a storage like the old one."""
        tensor = self.tensor
        new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = new.set_(storage, self.offset, self.size, self.stride)


class Memory:
    """One storage, and our tensors in it.

    Attributes:
        label: description for errors.
    """

    def __init__(self, first: Tensor, label: str) -> None:
        self.label, self.nbytes = label, first.untyped_storage().nbytes()
        self._device, self._places = first.device, list[Place]()
        self._host: Tensor | None = None
        self._weak: _compat.WeakStorage | None = None

    def add(self, tensor: Tensor) -> None:
        """Add a tensor of this storage."""
        if not any(tensor is place.tensor for place in self._places):
            offset = int(tensor.storage_offset())
            self._places.append(Place(tensor, tensor.shape, tensor.stride(), offset))
            if (base := _compat.base_of(tensor)) is not None:
                self.add(base)  # a base keeps the memory, too

    def _bytes(self) -> Tensor:
        """Return the whole storage as 1-d bytes."""
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
        """Release the storage; our tensors become empty."""
        self._weak = _compat.WeakStorage(self._places[0].tensor)
        for place in self._places:
            place.tensor.data = torch.empty(0, dtype=place.tensor.dtype, device=self._device)

    def still_here(self) -> torch.UntypedStorage | None:
        """Return the storage if something else still refers to it."""
        return None if self._weak is None else self._weak()

    def allocate(self, file: IO[bytes] | None) -> torch.UntypedStorage:
        """Return memory with the values; the old storage if it still exists."""
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
        """Put all tensors back."""
        for place in self._places:
            place.put(storage)
        self._host = self._weak = None


def _buffer(values: Tensor) -> memoryview:
    """Return the memory of a 1-d host tensor."""
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
    weak: _compat.WeakStorage | None

    def held(self) -> torch.UntypedStorage | None:
        """Return that storage if something else still refers to it."""
        return None if self.weak is None else self.weak()

    def is_written(self, param: nn.Parameter) -> bool:
        """Return whether a script wrote to it, or assigned other memory."""
        if param.numel() == 0:
            return False
        return param.data_ptr() != self.value.data_ptr() or not bool(self.value.isnan())


def expanded(value: Tensor, shape: Iterable[int]) -> Tensor:
    sizes = [*shape]
    return value.view([1] * len(sizes)).expand(sizes)


def stood_in(shard: Shard) -> Iterator[StandIn]:
    """Replace each parameter's memory by NaN."""
    for slot, param in zip(shard.pack.layout.slots, shard.pack.params, strict=True):
        data = param.data
        value = torch.full((1,), math.nan, dtype=data.dtype, device=data.device)
        stand_in = StandIn(slot.name, value, _compat.WeakStorage(data) if slot.numel else None)
        param.data = expanded(value, slot.shape)
        yield stand_in


def over(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """Return a tensor like another one, at the start of a storage."""
    new = torch.empty(0, dtype=like.dtype, device=like.device)
    return new.set_(storage, 0, like.shape, like.stride())
