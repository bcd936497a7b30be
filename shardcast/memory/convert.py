"""Convert a module to another dtype without holding both copies (PaddlePaddle PR 36862).

``module.to(dtype)`` fails if the device has no room for another copy of its largest tensor, and
cannot keep modules in fp32. Here each tensor is converted separately, through host memory if the
device is full.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.config import ShardcastConfig
from shardcast.plan.precision import Precision
from shardcast.plan.validate import check_matched

GRANULE = 256  # bytes to which allocators round up
RESERVE = 1.2  # times the bytes needed, because the allocator may have to split a larger block


@torch.no_grad()
def convert_(
    module: nn.Module,
    dtype: torch.dtype | str,
    device: torch.device | str | None = None,
    *,
    keep_fp32: Any = (),
) -> nn.Module:
    """Convert parameters, gradients and buffers to ``dtype``, in place, tensor by tensor. Local.

    Parameters keep their identity, so optimizers, ties and hooks stay valid. It needs extra memory
    for the converted copy of the largest tensor; if that does not fit, it casts on the host.
    Integer, boolean and complex tensors keep their dtype and move to ``device``.

    Args:
        module: module to convert.
        dtype: bf16, fp16 or fp32.
        device: target device; ``None`` leaves each tensor on its own device.
        keep_fp32: modules that stay in fp32, like the option of :class:`ShardcastConfig`.

    Raises:
        ValueError: ``dtype`` is another one, or a pattern matches nothing.
    """
    config = ShardcastConfig(
        param_dtype=dtype,  # type: ignore[arg-type]
        keep_fp32=keep_fp32,
        cast_buffers=True,
        convert_rest=True,
    )
    precision = Precision(module, config)
    check_matched(precision.unmatched)
    target = None if device is None else torch.device(device)
    for param in _compat.parameters(module):
        grad, param.grad = param.grad, None
        wanted = precision.storage_dtype(param)
        for tensor in (param, grad):
            if tensor is not None:
                convert_tensor_(tensor, wanted, target)
        param.grad = grad
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            converted = buffer.detach()
            convert_tensor_(converted, precision.buffer_dtype(owner, buffer), target)
            owner._buffers[name] = converted
    return module


def free_bytes(device: torch.device) -> float:
    """Return the bytes that can be allocated on ``device`` now; unlimited for the host."""
    if device.type != "cuda":
        return math.inf
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def convert_tensor_(tensor: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> None:
    """Convert ``tensor`` to another dtype or device; the object stays the same."""
    device = tensor.device if device is None else device
    if tensor.dtype == dtype and tensor.device == device:
        return
    need = math.ceil(tensor.numel() * dtype.itemsize / GRANULE) * GRANULE * RESERVE
    if tensor.is_meta or free_bytes(device) >= need:
        tensor.data = tensor.data.to(device, dtype)
        return
    host = tensor.data.cpu()
    tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # frees the copy there
    tensor.data = host.to(dtype).to(device)
