"""The only place where interfaces of torch are used that are private or differ between releases.

Each function says what it relies on; ``tests/test_compat.py`` exercises every one of them on the
installed torch, so that a new release that breaks one of them fails there, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.utils.dlpack import from_dlpack


def own_storage(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor over the memory of the contiguous 1-d ``flat``, with a storage object of its own.

    Views of one storage are taken for tied weights by everything that saves models (safetensors,
    ``save_pretrained``, Accelerate keep only the first). A DLPack round trip gives a storage that
    begins and ends with the view and keeps the memory of ``flat`` alive.
    """
    if flat.is_meta:
        return flat.view(shape)
    return from_dlpack(flat).view(shape)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running on this thread ends.

    Uses the engine's ``queue_callback`` as DDP and FSDP2 do; there is no public form of it.
    """
    Variable._execution_engine.queue_callback(callback)


def all_gather_flat(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    """``all_gather_single`` (torch >= 2.13) under either of its names."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, input, group=group, async_op=async_op)


def reduce_scatter_flat(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    """``reduce_scatter_single`` (torch >= 2.13) under either of its names; the sum over ranks."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, input, group=group, async_op=async_op)


def note_step_called(optimizer: torch.optim.Optimizer) -> None:
    """Tell a learning-rate scheduler built on ``optimizer`` that a step was made.

    Schedulers warn when their first ``step()`` comes before the optimizer's; they watch this flag.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]
