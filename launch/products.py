"""Matmuls in bf16 and fp16 that compute in fp32, on CPUs for which torch has no fast kernel.

On these CPUs such a matmul takes up to 150 times as long as in fp32. :func:`by_way_of_fp32` casts
the operands to fp32, multiplies, and rounds once. That is the arithmetic of low-precision kernels,
except for the order of their fp32 sums. It applies to all forwards and backwards of a process.

torch says which CPUs these are. Nothing is measured, so a run that continues on the same machine
has the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardcast._compat import has_products
from shardcast.optimizer.setup import told

LOW = (torch.bfloat16, torch.float16)
OPERATORS = (
    *("mm", "mm.out", "addmm", "addmm.out", "bmm", "bmm.out", "baddbmm", "baddbmm.out"),
    *("mv", "mv.out", "addmv", "addmv.out", "dot"),
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)


def why(device: torch.device) -> str:
    """Return a line saying that matmuls run in fp32, or "" if torch's own are used."""
    if device.type != "cpu" or all(map(has_products, LOW)):
        return ""
    return "this CPU has no fast low-precision matmul, so matmuls run in fp32"


@contextmanager
def by_way_of_fp32(device: torch.device) -> Iterator[str]:
    """Run low-precision matmuls of this process in fp32, if the CPU has no kernel for them.

    Yields the line of :func:`why`.
    """
    reason = why(device)
    if not reason:
        yield reason
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name in OPERATORS:
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, _through_fp32(kernel), "CPU", with_keyset=True, allow_override=True)
    warned = told.copy()
    told.update(LOW)  # no warning is due inside the block
    try:
        yield reason
    finally:
        library._destroy()
        told.clear()
        told.update(warned)


def multiplied(group: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function(group, *arguments)`` within :func:`by_way_of_fp32`; for spawned processes."""
    with by_way_of_fp32(torch.device("cpu")):
        return function(group, *arguments)


def _through_fp32(kernel: Any) -> Callable[..., Any]:
    def product(keys: Any, *operands: Any, **options: Any) -> Any:
        low = next((x.dtype for x in operands if isinstance(x, Tensor) and x.dtype in LOW), None)
        if low is None:
            return kernel.call_boxed(keys, *operands, **options)
        wide = [x.float() if isinstance(x, Tensor) and x.dtype == low else x for x in operands]
        out = options.get("out")
        if out is not None:
            kernel.call_boxed(keys, *wide, **{**options, "out": (wide_out := out.float())})
            return out.copy_(wide_out)
        result = kernel.call_boxed(keys, *wide, **options)
        if isinstance(result, Tensor):
            return result.to(low)
        # Attention's sums of exponentials (sequence, head, token) stay in fp32.
        return tuple(x.to(low) if x.dim() == 4 else x for x in result)

    return product
