"""F0: the update of a flat range of elements, one pure function per optimizer.

Each takes 1-d slices of equal length and writes master, state and the low-precision parameter in
one pass: read gradient 2 bytes, read and write master and moments 24, write parameter 2 (AdamW,
bf16). The same function runs eagerly over cache-sized chunks or compiled into one kernel.

The sequence of operations is torch's ``_single_tensor_adam`` / ``_single_tensor_sgd``, so that
results equal theirs to the bit in fp32. All that depends on the step (bias corrections, learning
rate, factor, skip) comes as 0-dim tensors: no host synchronisation, no recompilation. A skipped
step selects the old values, so that it changes nothing, not even the sign of a zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STATE_NAMES: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
}


@dataclass(frozen=True)
class AdamRule:
    """Constants of an Adam or AdamW group; a change of one of them compiles anew."""

    beta1: float
    beta2: float
    eps: float
    coupled_decay: float  # L2: added to the gradient; 0 for AdamW
    amsgrad: bool
    maximize: bool

    @property
    def state(self) -> tuple[str, ...]:
        return STATE_NAMES[torch.optim.Adam][: 3 if self.amsgrad else 2]

    def coefficients(self, group: Mapping[str, Any], step: Tensor) -> tuple[Tensor, ...]:
        """0-dim fp64: negative step size, root of bias correction 2, decay factor of the master."""
        t = step.double()
        lr = group["lr"]
        step_size = -lr / (1 - self.beta1**t)
        root = (1 - self.beta2**t).sqrt()
        decay = 0.0 if self.coupled_decay else group["weight_decay"]
        return step_size, root, torch.ones_like(t) - lr * decay

    def apply(
        self,
        master: Tensor,
        grad: Tensor,
        state: tuple[Tensor, ...],
        coefficients: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """New master and state, out of place."""
        step_size, root, decay = coefficients
        if self.maximize:
            grad = -grad
        if self.coupled_decay:
            grad = grad.add(master, alpha=self.coupled_decay)
        new = master * decay
        exp_avg = torch.lerp(state[0], grad, 1 - self.beta1)
        exp_avg_sq = (state[1] * self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        if self.amsgrad:
            largest = torch.maximum(state[2], exp_avg_sq)
            denominator = (largest.sqrt() / root).add_(self.eps)
            return (
                new.add_((exp_avg * step_size).div_(denominator)),
                exp_avg,
                exp_avg_sq,
                largest,
            )
        denominator = (exp_avg_sq.sqrt() / root).add_(self.eps)
        return new.add_((exp_avg * step_size).div_(denominator)), exp_avg, exp_avg_sq


@dataclass(frozen=True)
class SGDRule:
    """Constants of an SGD group."""

    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool

    @property
    def state(self) -> tuple[str, ...]:
        return STATE_NAMES[torch.optim.SGD] if self.momentum else ()

    def coefficients(self, group: Mapping[str, Any], step: Tensor) -> tuple[Tensor, ...]:
        """0-dim: learning rate with minus sign (fp32), whether this is the first step (bool)."""
        return torch.zeros_like(step) - group["lr"], step <= 1

    def apply(
        self,
        master: Tensor,
        grad: Tensor,
        state: tuple[Tensor, ...],
        coefficients: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """New master and state, out of place."""
        negative_lr, first = coefficients
        if self.maximize:
            grad = -grad
        if self.weight_decay:
            grad = grad.add(master, alpha=self.weight_decay)
        if not self.momentum:
            return (torch.addcmul(master, grad, negative_lr),)
        buffer = (state[0] * self.momentum).add_(grad, alpha=1 - self.dampening)
        if self.dampening:
            buffer = torch.where(first, grad, buffer)  # torch starts from the bare gradient
        direction = grad.add(buffer, alpha=self.momentum) if self.nesterov else buffer
        return torch.addcmul(master, direction, negative_lr), buffer


Rule = AdamRule | SGDRule


def rule_of(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> Rule:
    """The constants of one parameter group of an Adam, AdamW or SGD optimizer."""
    if kind is torch.optim.SGD:
        return SGDRule(
            float(group["momentum"]), float(group["dampening"]), float(group["weight_decay"]),
            group["nesterov"], group["maximize"],
        )  # fmt: skip
    decoupled = group.get("decoupled_weight_decay", kind is torch.optim.AdamW)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return AdamRule(
        beta1, beta2, float(group["eps"]), 0.0 if decoupled else float(group["weight_decay"]),
        group["amsgrad"], group["maximize"],
    )  # fmt: skip


def update_(
    rule: Rule,
    master: Tensor,
    grad: Tensor,
    state: tuple[Tensor, ...],
    published: Tensor | None,
    coefficients: tuple[Tensor, ...],
    factor: Tensor | None,
    skip: Tensor,
) -> None:
    """Unscale, clip, update and cast one flat range in place.

    Args:
        master, state: fp32, 1-d; overwritten.
        grad: any floating dtype, same length; read only.
        published: the low-precision parameter elements, overwritten by the cast of the new
            masters; ``None`` where the master itself is the parameter.
        coefficients: from ``rule.coefficients``.
        factor: 0-dim fp32 multiplier of the gradient, or ``None`` for 1.
        skip: 0-dim bool; if true nothing changes.
    """
    exact = grad.to(torch.float32)
    if factor is not None:
        exact = exact * factor
    new_master, *new_state = rule.apply(master, exact, state, coefficients)
    torch.where(skip, master, new_master, out=master)
    for old, new in zip(state, new_state, strict=True):
        torch.where(skip, old, new, out=old)
    if published is not None:
        published.copy_(master)
