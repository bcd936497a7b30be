"""Muon on whole matrices; matrices of equal shape form one batch.

The arithmetic is that of ``torch.optim.Muon`` (Jordan et al., 2024; "original" learning rates) and
of Moonshot's variant (Liu et al., 2025, arXiv 2502.16982; ``match_rms_adamw``). torch
orthogonalizes one matrix after another. Here each shape is one batched Newton-Schulz iteration, so
the number of kernel calls does not grow with the depth of a model.

Beyond torch's class, a parameter may be a stack of matrices, ``(experts, rows, columns)``, added
with ``add_param_group``. A group may have ``row_splits``: sizes of blocks of rows that are separate
matrices (fused query, key and value projections).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardcast.plan.partition import ELEMENT

if TYPE_CHECKING:
    from shardcast.plan.originals import ParamGroup

# adjustments of learning rates
ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped")
BATCH = 1 << 26  # elements that are orthogonalized at a time, which bounds memory


def update_cost(name: str, shape: Sequence[int], group: ParamGroup) -> float:
    """Return about how many floating-point operations the update of one parameter takes.

    For an m x n matrix, m <= n, each Newton-Schulz iteration multiplies m x n by n x m, m x m by m
    x m and m x m by m x n.

    Raises:
        ValueError: the parameter is not a matrix, or an option of its group does not fit it.
            (torch's class checks only one group.)
    """
    _check(name, shape, group)
    *stack, rows, columns = shape
    products = 0
    for block in group.get("row_splits") or [rows]:
        small, large = sorted((block, columns))
        products += 4 * small * small * large + 2 * small**3
    return ELEMENT * math.prod(shape) + float(group["ns_steps"]) * products * math.prod(stack)


def _check(name: str, shape: Sequence[int], group: ParamGroup) -> None:
    if len(shape) < 2:
        raise ValueError(
            f"optimizer: parameter {name!r} of shape {tuple(shape)} is not a matrix, which Muon "
            "needs; give it to another optimizer, such as AdamW"
        )
    adjust = group.get("adjust_lr_fn")
    if adjust not in ADJUSTMENTS:  # a later torch may have more
        raise ValueError(
            f"adjust_lr_fn: expected one of {ADJUSTMENTS}, got {adjust!r}; scale the lr of the "
            "group instead"
        )
    splits, rows = group.get("row_splits"), shape[-2]
    if splits and (sum(splits) != rows or min(splits) < 1):
        raise ValueError(
            f"row_splits: expected sizes above 0 that add up to the {rows} rows of parameter "
            f"{name!r} of shape {tuple(shape)}, got {list(splits)}; put parameters with other rows "
            "into another group"
        )


@torch.no_grad()
def step_(optimizer: torch.optim.Optimizer) -> None:
    """Step all groups of a ``torch.optim.Muon``, in place; its parameters need gradients."""
    for group in optimizer.param_groups:
        params = [param for param in group["params"] if param.grad is not None]
        if params:
            _step_group(params, optimizer.state, group)


def _step_group(
    params: Sequence[Tensor], state: Mapping[Tensor, dict[str, Any]], group: ParamGroup
) -> None:
    grads = [param.grad for param in params if param.grad is not None]
    buffers = []
    for param in params:
        if "momentum_buffer" not in state[param]:
            state[param]["momentum_buffer"] = torch.zeros_like(param)
        buffers.append(state[param]["momentum_buffer"])
    torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
    updates: Sequence[Tensor] = buffers
    if group["nesterov"]:
        updates = torch._foreach_lerp(grads, buffers, group["momentum"])
    lr = group["lr"]
    torch._foreach_mul_(list(params), 1 - lr * group["weight_decay"])
    by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for param, update in zip(params, updates, strict=True):
        for master, direction in _matrices(param, update, group.get("row_splits")):
            by_shape[master.shape[0], master.shape[1]].append((master, direction))
    for (rows, columns), pairs in by_shape.items():
        rate = lr * rate_factor(group["adjust_lr_fn"], rows, columns)
        many = max(1, BATCH // (rows * columns))
        for start in range(0, len(pairs), many):
            masters, directions = zip(*pairs[start : start + many], strict=True)
            orthogonal = orthogonalize(
                torch.stack(directions), group["ns_coefficients"], group["ns_steps"], group["eps"]
            )
            torch._foreach_add_(
                list(masters), list(orthogonal.to(masters[0].dtype).unbind()), alpha=-rate
            )


def _matrices(
    param: Tensor, update: Tensor, splits: Sequence[int] | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the matrices of a parameter as views, each with its update."""
    *_, rows, columns = param.shape
    sizes = list(splits or [rows])
    stacked = (param.view(-1, rows, columns), update.reshape(-1, rows, columns))
    for matrix, direction in zip(*stacked, strict=True):
        yield from zip(matrix.split(sizes), direction.split(sizes), strict=True)


def rate_factor(adjust: str | None, rows: int, columns: int) -> float:
    """Return the factor of a matrix's learning rate, as in ``torch.optim.Muon``."""
    if adjust is None or adjust == "original":
        return math.sqrt(max(1, rows / columns))
    if adjust == "spectral_unclamped":  # torch >= 2.15
        return math.sqrt(rows / columns)
    return 0.2 * math.sqrt(max(rows, columns))  # match_rms_adamw


def orthogonalize(
    batch: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Return the nearest semi-orthogonal matrices of a ``(k, rows, columns)`` batch, in bf16.

    Uses a quintic Newton-Schulz iteration; singular values end within about (0.7, 1.2).
    """
    a, b, c = coefficients
    tall = batch.shape[1] > batch.shape[2]
    x = batch.bfloat16()
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        mixed = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, mixed, x, beta=a)
    return x.mT if tall else x
