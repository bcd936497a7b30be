"""A model whose gradients the test chooses, so that the answers are known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor


class Bag(nn.Module):
    """Named parameters of zeros; the loss gives each one the gradient passed to `forward`."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def place(self, mesh: DeviceMesh, **placements: Any) -> None:
        for name, placement in placements.items():
            param = distribute_tensor(getattr(self, name).data, mesh, [placement])
            self.register_parameter(name, nn.Parameter(param))

    def forward(self, grads: dict[str, Tensor], partial: Iterable[str] = ()) -> Tensor:
        """Return the sum of parameter times gradient; a DTensor counts with its local part."""
        total = torch.zeros(())
        for name, grad in grads.items():
            param = getattr(self, name)
            if isinstance(param, DTensor):
                kinds = [Partial()] if name in partial else None
                param = param.to_local(grad_placements=kinds)
            total = total + (param * grad).sum()
        return total
