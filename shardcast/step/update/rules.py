"""Rules: the arithmetic of one optimizer step on tensors of equal shape, one class per optimizer.

A rule holds the flags of a parameter group; :func:`.fusion.update_` applies it. Numbers of the step
(learning rate, bias corrections) come in two kinds:

* Python floats, eagerly on a CPU. The operations are as in torch's ``_single_tensor_adam`` and
  ``_single_tensor_sgd``, so fp32 results are bitwise equal. A group with ``fused=True`` uses
  torch's own fused kernel.
* 0-dim tensors for ``torch.compile``, so that new numbers trigger no recompilation, and for
  accelerators, where the step count is on the device (:class:`.RuleTable`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardcast import _compat

if TYPE_CHECKING:
    from shardcast.plan.originals import ParamGroup

STATE_NAMES: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
}
State = tuple[Tensor, ...]  # state of one range, fp32, in the order of ``rule.state``
Numbers = tuple[Any, ...]  # numbers of a step: floats or 0-dim tensors


class Coefficient(NamedTuple):
    """A number of a step, ``scale * (1 - base**step) ** exponent``; without a base, ``scale``.

    Each field is a float, or a 0-dim tensor if the group's option is one.
    """

    scale: float | Tensor
    base: float | Tensor = 0.0
    exponent: float | Tensor = 0.0


@dataclass(frozen=True)
class AdamRule:
    """The flags of an Adam or AdamW group; only other flags trigger recompilation.

    Attributes:
        options: group options that determine its numbers.
        count: how many numbers there are on the device.
    """

    # weight decay is added to the gradient (L2), not subtracted from the weights
    coupled: bool = False
    decays: bool = False
    amsgrad: bool = False
    maximize: bool = False

    options: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "betas", "eps")
    count: ClassVar[int] = 7

    @property
    def state(self) -> tuple[str, ...]:
        return STATE_NAMES[torch.optim.Adam][: 3 if self.amsgrad else 2]

    @property
    def edits(self) -> bool:
        """Whether :meth:`apply_` overwrites its gradient."""
        return self.maximize or (self.coupled and self.decays)

    def numbers(self, group: ParamGroup, step: float | Tensor) -> Numbers:
        """Return the numbers of one step; ``step`` is a float, or a 0-dim fp64 tensor."""
        lr, decay = group["lr"], group["weight_decay"]
        beta1, beta2 = group["betas"]
        step_size = -(lr / (1 - beta1**step))
        root = (1 - beta2**step) ** 0.5
        decay = decay if self.coupled else 1 - lr * decay
        return step_size, 1 - beta1, beta2, 1 - beta2, root, group["eps"], decay

    def coefficients(self, group: ParamGroup) -> tuple[Coefficient, ...]:
        """Return :meth:`numbers` as coefficients, for :class:`.RuleTable`."""
        step_size, weight1, beta2, weight2, _, eps, decay = self.numbers(group, math.inf)
        return (
            Coefficient(step_size, group["betas"][0], -1.0),
            Coefficient(weight1),
            Coefficient(beta2),
            Coefficient(weight2),
            Coefficient(1.0, beta2, 0.5),
            Coefficient(eps),
            Coefficient(decay),
        )

    def apply_(self, master: Tensor, grad: Tensor, state: State, numbers: Numbers) -> None:
        """Update master and state in place."""
        step_size, weight1, beta2, weight2, root, eps, decay = numbers
        exp_avg, exp_avg_sq = state[:2]
        if self.maximize:
            grad.neg_()
        if self.decays and self.coupled:
            add_scaled_(grad, master, decay)
        elif self.decays:
            master.mul_(decay)
        exp_avg.lerp_(grad, weight1)
        _add_product_(exp_avg_sq.mul_(beta2), grad, grad, weight2)
        if self.amsgrad:
            torch.maximum(state[2], exp_avg_sq, out=state[2])
        denominator = state[-1].sqrt().div_(root).add_(eps)
        _add_quotient_(master, exp_avg, denominator, step_size)


@dataclass(frozen=True)
class NoRule:
    """A rule that changes nothing, for a pass of epilogues alone."""

    options: ClassVar[tuple[str, ...]] = ()
    count: ClassVar[int] = 0
    state: ClassVar[tuple[str, ...]] = ()
    edits: ClassVar[bool] = False

    def numbers(self, _group: ParamGroup, _step: float | Tensor) -> Numbers:
        """Return none."""
        return ()

    def coefficients(self, _group: ParamGroup) -> tuple[Coefficient, ...]:
        """Return none."""
        return ()

    def apply_(self, master: Tensor, grad: Tensor, state: State, numbers: Numbers) -> None:
        """Do nothing; see :meth:`AdamRule.apply_`."""


class TorchAdamRule(AdamRule):
    """The rule of Adam or AdamW by torch's fused CPU kernel, for groups with ``fused=True``."""

    edits = False

    def numbers(self, group: ParamGroup, step: float | Tensor) -> Numbers:
        options = {name: float(group[name]) for name in ("lr", "weight_decay", "eps")}
        beta1, beta2 = map(float, group["betas"])
        return torch.tensor(step, dtype=torch.float32), dict(options, beta1=beta1, beta2=beta2)

    def apply_(self, master: Tensor, grad: Tensor, state: State, numbers: Numbers) -> None:
        step, options = numbers
        first, second, *largest = ([tensor] for tensor in state)
        kernel = _compat.fused_adam_ if self.coupled else _compat.fused_adamw_
        kernel(
            [master],
            [grad],
            first,
            second,
            *(largest or [[]]),
            [step],
            amsgrad=self.amsgrad,
            maximize=self.maximize,
            **options,
        )


@dataclass(frozen=True)
class SGDRule:
    """The flags of an SGD group."""

    momentum: bool = False
    decays: bool = False
    nesterov: bool = False
    maximize: bool = False

    options: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "momentum", "dampening")
    count: ClassVar[int] = 5

    @property
    def state(self) -> tuple[str, ...]:
        return STATE_NAMES[torch.optim.SGD] if self.momentum else ()

    @property
    def edits(self) -> bool:
        """Whether :meth:`apply_` overwrites its gradient."""
        return self.maximize or self.decays or self.nesterov

    def numbers(self, group: ParamGroup, step: float | Tensor) -> Numbers:
        """Return the numbers of one step; ``step`` is a float, or a 0-dim fp64 tensor."""
        return (
            -group["lr"],
            group["weight_decay"],
            group["momentum"],
            1 - group["dampening"],
            step <= 1,
        )

    def coefficients(self, group: ParamGroup) -> tuple[Coefficient, ...]:
        """Return :meth:`numbers` as coefficients, for :class:`.RuleTable`."""
        *constants, _ = self.numbers(group, math.inf)
        # 1 in the first step and else 0: (-1)**-1022 is 1, (-3)**-1022 is 0.
        return (*map(Coefficient, constants), Coefficient(1.0, 2.0, -1022.0))

    def apply_(self, master: Tensor, grad: Tensor, state: State, numbers: Numbers) -> None:
        """Update master and state in place."""
        negative_lr, decay, momentum, weight, first = numbers
        if self.maximize:
            grad.neg_()
        if self.decays:
            add_scaled_(grad, master, decay)
        direction = grad
        if self.momentum:
            (buffer,) = state
            if first is True:  # torch's first buffer is the gradient itself
                buffer.copy_(grad)
            else:
                add_scaled_(buffer.mul_(momentum), grad, weight)
            if isinstance(first, Tensor):
                torch.where(first != 0, grad, buffer, out=buffer)
            direction = buffer
            if self.nesterov:
                add_scaled_(grad, buffer, momentum)
                direction = grad
        add_scaled_(master, direction, negative_lr)


class TorchSGDRule(SGDRule):
    """The rule of SGD by torch's fused CPU kernel, for groups with ``fused=True``."""

    edits = False

    def numbers(self, group: ParamGroup, step: float | Tensor) -> Numbers:
        names = ("lr", "weight_decay", "momentum", "dampening")
        return step <= 1, {name: float(group[name]) for name in names}

    def apply_(self, master: Tensor, grad: Tensor, state: State, numbers: Numbers) -> None:
        first, options = numbers
        _compat.fused_sgd_(
            [master],
            [grad],
            list(state),
            is_first_step=first,
            nesterov=self.nesterov,
            maximize=self.maximize,
            **options,
        )


Rule: TypeAlias = AdamRule | SGDRule | NoRule


def rule_of(
    kind: type[torch.optim.Optimizer], group: ParamGroup, fused: bool = False
) -> AdamRule | SGDRule:
    """Return the rule of a parameter group of an Adam, AdamW or SGD optimizer.

    Args:
        fused: use torch's fused CPU kernel.
    """
    decays, maximize = bool(group["weight_decay"] != 0), bool(group["maximize"])
    if kind is torch.optim.SGD:
        momentum, nesterov = bool(group["momentum"] != 0), bool(group["nesterov"])
        return _sgd_rule(fused, momentum, decays, nesterov, maximize)
    coupled = not group.get("decoupled_weight_decay", kind is torch.optim.AdamW)
    return _adam_rule(fused, coupled, decays, bool(group["amsgrad"]), maximize)


@functools.cache
def decaying(rule: AdamRule | SGDRule) -> AdamRule | SGDRule:
    """Return the rule with weight decay, which may be 0."""
    return dataclasses.replace(rule, decays=True)


@functools.cache  # one object per combination of flags, because rules are compared in every step
def _adam_rule(fused: bool, *flags: bool) -> AdamRule:
    return (TorchAdamRule if fused else AdamRule)(*flags)


@functools.cache
def _sgd_rule(fused: bool, *flags: bool) -> SGDRule:
    return (TorchSGDRule if fused else SGDRule)(*flags)


def as_tensors(numbers: Sequence[float | Tensor], like: Tensor) -> tuple[Tensor, ...]:
    """Return numbers as 0-dim fp32 tensors on ``like``'s device, without waiting for it."""
    zero = torch.zeros_like(like, dtype=torch.float64)
    return tuple((zero + number).float() for number in numbers)


# torch's scalar arguments are host numbers. For a tensor, two operations do the same, and a
# compiler fuses them. The order of roundings is that of the scalar form.


def add_scaled_(out: Tensor, other: Tensor, scale: float | Tensor) -> None:
    if isinstance(scale, Tensor):
        out.add_(other * scale)
    else:
        out.add_(other, alpha=scale)


def _add_product_(out: Tensor, left: Tensor, right: Tensor, scale: float | Tensor) -> None:
    if isinstance(scale, Tensor):
        out.add_(left * scale * right)
    else:
        out.addcmul_(left, right, value=scale)


def _add_quotient_(out: Tensor, over: Tensor, under: Tensor, scale: float | Tensor) -> None:
    if isinstance(scale, Tensor):
        out.add_(over * scale / under)
    else:
        out.addcdiv_(over, under, value=scale)
