"""A DTensor parameter as packs see it: its local tensor.

This rank packs, reduces and updates its own part of a tensor-parallel parameter. The model keeps
the same DTensor object, over a view of the pack. Plain parameters are in packs themselves.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast._compat import dtensor
from shardcast.comm.group import redistributed
from shardcast.memory.stand_in import StandIn, distributed


class LocalParam:
    """The part of a DTensor that packs use: the gradient of ``param``, else its local tensor."""

    def __init__(self, param: nn.Parameter) -> None:
        self.param: Any = param

    @property
    def data(self) -> Tensor:
        return _compat.local_tensor(self.param)

    @data.setter
    def data(self, value: Tensor) -> None:
        dtensor.set_local_tensor(self.param, value)

    @property
    def grad(self) -> Tensor | None:
        """This rank's part of the gradient, with the parameter's placements.

        Along a dimension on which the parameter is replicated, the gradient may be partial
        (``Partial``). It then stays partial, and is summed after the reduction over data-parallel
        ranks, because the two sums commute. Other placements are redistributed in fp32. All ranks
        of the dimension do so, because they run the same backward.
        """
        grad = self.param.grad
        if grad is None or not _compat.is_dtensor(grad):
            return grad
        wanted = tuple(
            placement if target.is_replicate() and placement.is_partial("sum") else target
            for placement, target in zip(grad.placements, self.param.placements, strict=True)
        )
        if wanted != tuple(grad.placements):
            with torch.no_grad():
                self._set_grad(redistributed(grad, wanted), wanted)
            grad = self.param.grad
        local = _compat.local_tensor(grad)
        placement = dtensor.arrived(local)
        if placement is not local:
            self._set_grad(placement, wanted)
        return placement

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.param.grad = None
            return
        grad = self.param.grad  # a partial gradient stays partial, so that autograd can add to it
        known = None if grad is None else getattr(grad, "placements", None)
        self._set_grad(value, known or self.param.placements)

    def _set_grad(self, value: Tensor, placements: Any) -> None:
        grad = dtensor.wrap_local(value, self.param, placements)
        self.param.grad = distributed(grad) if isinstance(value, StandIn) else grad

    def repeats(self, dims: Collection[str]) -> bool:
        """Return whether other ranks along one of ``dims`` have the same, whole gradient."""
        _ = self.grad  # redistributes it if needed
        grad = self.param.grad
        placements = {} if grad is None else dtensor.placements(grad)
        return any(dim in placements and placements[dim].is_replicate() for dim in dims)

    @property
    def requires_grad(self) -> bool:
        return bool(self.param.requires_grad)

    @property
    def grad_dtype(self) -> torch.dtype | None:
        dtype: torch.dtype | None = self.param.grad_dtype
        return dtype

    @grad_dtype.setter
    def grad_dtype(self, value: torch.dtype | None) -> None:
        self.param.grad_dtype = value

    def cast_grad(self, grad_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
        """Cast the gradient to ``dtype``; a partial gradient stays partial."""
        grad, placements = self.grad, getattr(self.param.grad, "placements", None)
        self.param.grad = None
        self.param.grad_dtype = grad_dtype
        if grad is not None:
            self._set_grad(grad.to(dtype), placements or self.param.placements)

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the local tensor: shape, dtype, address."""
        return getattr(self.data, name)
