"""DTensors that are to lie in another way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardcast._compat import dtensor
from shardcast.plan.precision import MASTER_DTYPE


def redistributed(grad: Any, placements: Sequence[Any]) -> Tensor:
    """The local tensor of a DTensor that is to lie in another way, in its own dtype.

    Sums are made in the dtype of masters: torch's own reduction would be in that of the gradient.
    All ranks of its mesh must call it.
    """
    sums = any(placement.is_partial() for placement in grad.placements)
    exact = grad.to(MASTER_DTYPE) if sums else grad
    moved = exact.redistribute(placements=placements).to(grad.dtype)
    return dtensor.arrived(moved.to_local()).contiguous()
