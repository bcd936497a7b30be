"""What is counted beside the clock: casts of parameters, bytes on the wire."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LOOPBACK = Path("/proc/net/dev")


class Casts(TorchDispatchMode):
    """Counts conversions of parameters to another floating dtype, one per tensor converted."""

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


def sent() -> int | None:
    """Bytes that the loopback interface has sent so far, or ``None`` where it cannot be read.

    All ranks of the benchmark are on one machine, so this is the sum over them; other programs'
    traffic is in it, so take the least of several steps.
    """
    if not LOOPBACK.exists():
        return None
    for line in LOOPBACK.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return None
