"""Counts besides time: casts of parameters, collectives, memory, bytes on the wire."""

from __future__ import annotations

import ctypes
import gc
import time
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

LOOPBACK = Path("/proc/net/dev")
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
GLIBC = ctypes.CDLL(None)


class Casts(TorchDispatchMode):
    """Counter of conversions of parameters to another floating dtype, one per tensor."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__()
        local = (getattr(param, "_local_tensor", param.detach()) for param in params)
        self.ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in local if t.numel())
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "_to_copy":
            self.note(result, args[0])
        elif name == "copy_":
            self.note(args[0], args[1])
        elif name == "_foreach_copy_":
            for target, source in zip(args[0], args[1], strict=True):
                self.note(target, source)
        return result

    def note(self, target: Tensor, source: Tensor) -> None:
        if source.is_floating_point() and source.dtype != target.dtype and source.numel():
            place = bisect_right(self.ranges, (source.data_ptr(), 1 << 64)) - 1
            self.count += place >= 0 and source.data_ptr() < self.ranges[place][1]


class Collectives:
    """Counter of this rank's collectives inside the block, from torch's profiler.

    Attributes:
        count: collectives of this rank.
        messages: messages that it sent to one other rank.
    """

    def __enter__(self) -> Collectives:
        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._profile.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._profile.__exit__(*raised)
        calls = {e.key: e.count for e in self._profile.key_averages() if e.key[:6] == "c10d::"}
        del self._profile
        self.messages = calls.pop("c10d::send", 0)
        calls.pop("c10d::recv_", None)  # the other end of a message
        calls.pop("c10d::barrier", None)  # the benchmark's own
        self.count = sum(calls.values())


def in_use() -> int | None:
    """Return the bytes that this process holds from glibc's allocator; ``None`` without glibc.

    All ranks must call it. The difference of two calls is the memory that was allocated in between
    and not freed, to the byte. Every storage counts once, regardless of its views and of the thread
    that frees it, also DDP's buckets, which no Python object holds. Memory that the allocator keeps
    for reuse does not count.
    """
    gc.collect()
    dist.barrier()
    time.sleep(0.05)  # the collectives' threads free their tensors slightly later
    if not hasattr(GLIBC, "mallinfo2"):
        return None
    GLIBC.mallinfo2.restype = _MallInfo
    info = GLIBC.mallinfo2()
    return int(info.uordblks + info.hblkhd)


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2``: bytes mapped separately in ``hblkhd``, in the heaps in ``uordblks``."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


class Growth:
    """Peak growth of this process's resident memory inside the block.

    The allocator first returns memory that it keeps for reuse, so reuse counts as growth.

    Attributes:
        bytes: ``None`` without glibc, or if the kernel does not let a process reset its peak.
    """

    bytes: int | None = None

    def __enter__(self) -> Growth:
        gc.collect()
        try:
            GLIBC.malloc_trim(0)
            RESET.write_text("5")
            self._before = _resident("VmRSS")
        except (AttributeError, OSError):
            self._before = None
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._before is not None:
            self.bytes = _resident("VmHWM") - self._before


def _resident(key: str) -> int:
    lines = STATUS.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def sent() -> int | None:
    """Return the bytes that the loopback interface has sent; ``None`` if it cannot be read.

    All ranks of the benchmark are on one machine, so this is their sum. It includes other programs'
    traffic, so take the minimum of several steps.
    """
    if not LOOPBACK.exists():
        return None
    for line in LOOPBACK.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return None
