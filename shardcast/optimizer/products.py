"""CPUs for which torch has no kernel that multiplies matrices in low precision.

Without AVX-512 torch multiplies bf16 and fp16 by a plain loop, which takes 20 to 150 times as long
as fp32 (pytorch 146508, 118499). The results are right.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable

import torch

from shardcast.messages import warn

_SIZE, _TRIES = 128, 4

told: set[torch.dtype] = set()  # dtypes that nobody is warned of any more in this process


@functools.cache
def slowdown(dtype: torch.dtype) -> float:
    """The time of a product of matrices in ``dtype`` on this CPU over the time in fp32.

    Measured in a few milliseconds, once per process.
    """

    def seconds(dtype: torch.dtype) -> float:
        matrix = torch.ones(_SIZE, _SIZE, dtype=dtype, device="cpu")
        matrix @ matrix  # the first one may prepare a kernel
        times = []
        for _ in range(_TRIES):
            start = time.perf_counter()
            matrix @ matrix
            times.append(time.perf_counter() - start)
        return min(times)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other on a busy machine
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return seconds(dtype) / seconds(torch.float32)
    finally:
        torch.set_num_threads(threads)


def warn_of_slow_products(dtypes: Iterable[torch.dtype]) -> None:
    """Warn, once per process and dtype, that parameters of ``dtypes`` make training slow here."""
    for dtype in set(dtypes) - told:
        told.add(dtype)
        name = str(dtype).removeprefix("torch.")
        warn(
            f"param_dtype: products of matrices in {name} take {slowdown(dtype):.0f} times as "
            "long as in float32 on this CPU, for which torch has no kernel; for trying things "
            "out here pass param_dtype=torch.float32"
        )
