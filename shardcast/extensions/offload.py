"""``offload``: masters and state are in host memory, and the CPU updates them.

A step, with one pack after another::

    backward    mean of the own span   device -> host    as it lands; again if one is added
    decide      on the device, where the means are; the host reads the decision
    update      on the host, in the order in which the next forward needs packs
    publish     cast of the own span   host -> device    during the update of the next pack
    sync        to all ranks                             also during that update

4 bytes per owned bf16 parameter cross the bus. The host has a copy of the model's own span. The
device keeps a hash of it (:mod:`shardcast.memory.hashing`), so a span is copied down for the update
only if a script wrote to it: 2 more bytes. The hash detects a change of any single word, and misses
a change of several words with probability ``2**-63``.

Order of copies. The mean is copied down on its own stream, which waits for the stream that made it;
the host waits for the copy before it reads the mean. If the mean is added to or edited during the
copy, it is copied again before it is read. The cast is copied up on the current stream, so that the
collective and all readers of parameters come after it; the host waits for the copy before it writes
there again.

Only means and casts, which cross the bus, are pinned. Memory that torch pins is rounded up to a
power of two bytes; here it is only rounded up to a page.
"""

from __future__ import annotations

import functools
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import warn_first
from shardcast.extensions.any_optimizer import probe
from shardcast.memory.gradients import Gradients
from shardcast.memory.hashing import hasher_of
from shardcast.memory.home import ALL, Home
from shardcast.memory.pack import Pack
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.optimizer.setup import Plan
from shardcast.option_values import Option
from shardcast.plan.originals import ELEMENTWISE
from shardcast.plan.precision import MASTER_DTYPE, grad_dtype
from shardcast.step.decide.decision import Decision
from shardcast.step.step_hook import StepHook
from shardcast.step.update.held import held_of

if TYPE_CHECKING:
    from shardcast.plan.parallel_dims import ParallelDims

HOST = torch.device("cpu")
CGROUP = Path("/sys/fs/cgroup")  # of this container


Wait = Callable[[], object]  # waits until a copy is done


def _done() -> None:
    """Return at once: the copy is done."""


class Copies:
    """Copies between the host and a device without streams, or between the host and itself."""

    def down(self, host: Tensor, values: Tensor) -> Wait:
        """Copy to the host, after the current stream's work, in parallel with later work."""
        host.copy_(values)
        return _done

    def up(self, values: Tensor, host: Tensor) -> Wait:
        """Copy to the device, in the order of the current stream."""
        values.copy_(host)
        return _done

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate host memory for such copies, zeros, 1-d uint8."""
        return torch.zeros(nbytes, dtype=torch.uint8)


class StreamCopies(Copies):
    """Copies of a CUDA device, in parallel with its kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._beside = device, torch.cuda.Stream(device)

    def down(self, host: Tensor, values: Tensor) -> Wait:
        self._beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._beside):
            host.copy_(values, non_blocking=True)
        values.record_stream(self._beside)  # a script may drop it before the copy is done
        wait: Wait = self._beside.record_event().synchronize
        return wait

    def up(self, values: Tensor, host: Tensor) -> Wait:
        values.copy_(host, non_blocking=True)
        wait: Wait = torch.cuda.current_stream(self._device).record_event().synchronize
        return wait

    def allocate(self, nbytes: int) -> Tensor:
        return pinned(nbytes)


class Pages(mmap.mmap):
    """Memory of whole pages, initially zeros, which is unpinned with its last tensor."""

    address: int | None = None

    def __del__(self) -> None:
        if self.address is not None:
            torch.cuda.cudart().cudaHostUnregister(self.address)


def pinned(nbytes: int) -> Tensor:
    """Allocate host memory that a CUDA device can access, zeros, 1-d uint8."""
    if not nbytes:
        return torch.zeros(0, dtype=torch.uint8)
    pages = Pages(-1, nbytes)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    cudart: Any = torch.cuda.cudart()
    if error := int(cudart.cudaHostRegister(memory.data_ptr(), nbytes, 0)):
        raise RuntimeError(
            f"offload: the device could not pin {nbytes} bytes of host memory "
            f"({cudart.cudaGetErrorString(error)}); raise the limit of locked memory "
            "(ulimit -l, or --ulimit memlock=-1 of a container), or leave offload off"
        )
    pages.address = memory.data_ptr()
    return memory


@functools.cache
def copies_of(device: torch.device) -> Copies:
    """Return the copies of a device, the same for all packs."""
    return StreamCopies(device) if device.type == "cuda" else Copies()


class HostHome(Home):
    """Host memory for a pack.

    Attributes:
        is_current: nobody writes to the model or the mean, as within a step, so that
            :meth:`look` and :meth:`mean` need not check.
    """

    is_apart: ClassVar[bool] = True
    is_current = False

    def __init__(self, pack: Pack) -> None:
        super().__init__(pack)
        device = super().device
        self._copies, self._hash = copies_of(device), hasher_of(device)
        self._published = torch.empty(0)
        # Hash of the pack when the host had the same values; not set during set-up.
        self._sent: Tensor | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)  # of means
        self._came: tuple[weakref.ref[Tensor], object] | None = None  # mean of the last copy
        self._down: Wait = _done
        self._up: Wait = _done

    @property
    def device(self) -> torch.device:
        return HOST

    @property
    def published(self) -> Tensor:
        return self._published

    @property
    def nbytes(self) -> int:
        """Bytes on the host that cross the bus."""
        return self._published.nbytes + self._memory.nbytes

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def given(self, values: Tensor) -> Tensor:
        return values.to(self.pack.data.device, copy=True)

    # -- what is published ------------------------------------------------------------------------

    def fill(self) -> None:
        own = self.pack.own_data
        self._published = self._copies.allocate(own.nbytes).view(own.dtype)
        self._copies.down(self._published, own)()

    def hash(self) -> Tensor:
        """Return the hash of the model's own span, 0-dim, on the device."""
        return self._hash(self.pack.own_data)

    def differs(self) -> Tensor:
        """Return whether a script may have written to it, 0-dim bool, on the device."""
        hash = self.hash()
        return torch.ones_like(hash).bool() if self._sent is None else hash != self._sent

    def take(self) -> None:
        """Copy the model's values to the host; waits for the device."""
        self._up()
        self._copies.down(self._published, self.pack.own_data)()
        self._sent = self.hash()

    def look(self) -> None:
        if self.is_current:
            return
        self._up()
        if self._published.numel() and bool(self.differs()):
            self.take()

    def send(self, part: slice = ALL) -> None:
        if self._published.numel():
            self._up = self._copies.up(self.pack.own_data[part], self._published[part])
            self._sent = self.hash()

    # -- the mean ---------------------------------------------------------------------------------

    def follow(self, grads: Gradients) -> None:
        grads.has_come = self.bring

    def bring(self, grads: Gradients) -> None:
        """Start to copy the mean to the host."""
        own = grads.own
        if self._memory.nbytes < own.nbytes:
            self._down()
            self._memory = self._copies.allocate(own.nbytes)
        self._down = self._copies.down(self._on_host(own), own)
        self._came = weakref.ref(own), self._state(grads)

    def mean(self, grads: Gradients) -> Tensor:
        own = grads.own
        if not self.is_current and not self._has(grads):
            self.bring(grads)
        return self._on_host(own)

    def _on_host(self, own: Tensor) -> Tensor:
        return self._memory[: own.nbytes].view(own.dtype)

    def _has(self, grads: Gradients) -> bool:
        """Return whether the mean is on its way to the host as it is now."""
        came = self._came
        return came is not None and came[0]() is grads.own and bool(came[1] == self._state(grads))

    def _state(self, grads: Gradients) -> Tensor | int:
        """Return what an edit of the mean changes.

        On a lone rank ``.grad`` shows the mean itself, and an edit through ``.grad.data`` makes no
        new version. Its hash then costs a pass, and the comparison waits for the device.
        """
        return self._hash(grads.own) if grads.alone else grads.own._version

    def arrive(self) -> None:
        self._down()
        self._up()

    def used(self) -> None:
        """Note that a step has used the mean."""
        self._came, self.is_current = None, False


class Offload(StepHook):
    """The homes of one optimizer, in a step."""

    name = "offload"

    def __init__(self, optimizer: PackedOptimizer) -> None:
        self._optimizer = optimizer
        device = optimizer.device
        if device.type == "cuda" and torch.get_num_threads() == 1:
            warn_first(
                "offload: each rank updates its masters with one CPU thread; set "
                "OMP_NUM_THREADS to the host's cores divided by its ranks"
            )

    def before_update(self, decision: Decision) -> None:
        """Copy values that the update reads to the host; waits for the device."""
        if _compat.is_capturing(self._optimizer.device):
            raise RuntimeError(
                "offload: a step cannot be captured in a CUDA graph, since the host updates the "
                "masters; capture forward and backward alone, or leave offload off"
            )
        trained = {}
        for shard in self._optimizer.shards:
            if isinstance(shard.home, HostHome) and shard.grads is not None:
                trained[shard] = shard.home
        for shard in trained:
            _ = shard.mean  # copies it down, unless that is done
        differ = [home.differs() for home in trained.values()]
        written = torch.stack(differ).tolist() if differ else []
        for home, is_written in zip(trained.values(), written, strict=True):
            if is_written:
                home.take()
            home.is_current = True

    def after_update(self, decision: Decision) -> None:
        for shard in self._optimizer.shards:
            if isinstance(shard.home, HostHome):
                shard.home.used()

    def nbytes(self) -> int:
        """Return the bytes on the host that cross the bus."""
        homes = (shard.home for shard in self._optimizer.shards)
        return sum(home.nbytes for home in homes if isinstance(home, HostHome))


def _fits(plan: Plan, _parallel_dims: ParallelDims) -> None:
    """Raise for classes that a host updates too slowly, and hosts with too little memory."""
    for optimizer in plan.originals.optimizers:
        if not (plan.config.elementwise or probe.is_elementwise(optimizer)):
            raise ValueError(
                f"offload: expected an elementwise optimizer, got {type(optimizer).__name__}: "
                "updating a whole matrix can take seconds on a CPU; use AdamW or "
                "another elementwise class, pass elementwise=True if this one is elementwise, "
                "or leave offload off"
            )
    for number, _, group in plan.originals.numbered():
        if group.get("capturable"):
            raise ValueError(
                f"capturable: expected False with offload, got {group['capturable']!r} in group "
                f"{number}: the host updates the masters, so a step cannot be captured in a "
                "CUDA graph; build the optimizer without it, or leave offload off"
            )
    if any(param.is_meta for param in plan.params.values()):  # this is an estimate
        return
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed, available = ranks * needed_bytes(plan), available_bytes()
    if available is not None and needed > available:
        raise ValueError(
            f"offload: expected {needed / 1e9:.2f} GB of host memory for masters, state and copies "
            f"of {ranks} ranks of this node, got {available / 1e9:.2f} GB; use moments='bf16' or "
            "'int8', master='split16', more nodes, or leave offload off"
        )


def needed_bytes(plan: Plan) -> int:
    """Return the bytes of host memory that the fullest rank needs for new packs.

    The state of third-party classes is not known in advance, so it is not counted.
    """
    config = plan.config.replace(offload=False)
    sums = config.accumulate == "sharded"
    owned: Counter[int] = Counter()
    for pack in plan.new:
        trained: Counter[int] = Counter()
        for owner, _, count in pack.parts() if pack.requires_grad else ():
            trained[owner] += count
        group = pack.groups[0]
        is_known = type(plan.originals.owner(group)) in ELEMENTWISE
        mean = MASTER_DTYPE if sums else grad_dtype(pack.dtype, config)
        for owner, start, stop in pack.spans:
            of_state = trained[owner] if is_known else 0
            numel = stop - start
            held = held_of(plan.originals, config, pack.dtype, group, pack.cast, numel, of_state)
            owned[owner] += sum(held) + numel * pack.dtype.itemsize
            owned[owner] += numel * mean.itemsize * pack.requires_grad
    return max(owned.values(), default=0)


def available_bytes() -> int | None:
    """Return the free bytes of this host or container; ``None`` if unknown."""
    found = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        found.append(1024 * int(line.split()[1]))
    with suppress(OSError, ValueError):  # "max" is not a number
        limit, used = (int((CGROUP / f"memory.{of}").read_text()) for of in ("max", "current"))
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        # Files that were read count as used, but the kernel drops them when memory is needed.
        cached = (int(line.split()[1]) for line in lines if "active_file " in line)
        found.append(limit - used + sum(cached))
    return min(found, default=None)


OPTION = Option(
    help="keep masters and moments in host memory and update them on the CPU; for elementwise "
    "optimizers",
    hook=Offload,
    fits=_fits,
)
