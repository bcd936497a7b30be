"""The update of a flat range of elements, one function per optimizer.

A *rule* holds what an optimizer group does (its flags) and the arithmetic of one step on tensors
of equal shape. The same arithmetic runs in two ways:

* :class:`.windows.Windows`: eagerly on CPU, in place, a cache-sized window at a time. Numbers of
  the step (learning rate, bias corrections) are Python floats, and the operations are those of
  torch's ``_single_tensor_adam`` and ``_single_tensor_sgd``, so that fp32 results equal theirs to
  the bit. An optimizer with ``fused=True`` gets torch's own fused kernel over the same windows.
* :func:`update_`: one function without host decisions, for ``torch.compile`` (one kernel) and for
  accelerators. Numbers are 0-dim tensors, so no other number triggers recompilation; a skipped
  step selects the old values, so that it changes nothing, not even the sign of a zero.

Masters and moments come in the form in which they are kept, and the second function decodes and
encodes them: compiled, fp32 values are in registers only. Traffic in bytes per element (AdamW,
bf16 parameters), of which all but gradient (2, read) and parameter (2, written) are read and
written: 28; with ``moments: bf16`` 20; with ``split16`` too, whose parameter is read, 18.25; with
``split16`` and ``int8`` 14.5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.step.update.operands import Flat

STATE_NAMES: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
}
State = tuple[Tensor, ...]  # of one range, fp32, in the order of ``rule.state``
Numbers = tuple[Any, ...]  # of one step, from ``rule.numbers``
VECTOR = 16  # fp32 elements of the longest vector of a CPU


@dataclass(frozen=True)
class AdamRule:
    """Flags of an Adam or AdamW group; only another combination triggers recompilation."""

    coupled: bool = False  # weight decay is added to the gradient (L2), not taken off the weights
    decays: bool = False
    amsgrad: bool = False
    maximize: bool = False

    @property
    def state(self) -> tuple[str, ...]:
        return STATE_NAMES[torch.optim.Adam][: 3 if self.amsgrad else 2]

    @property
    def edits(self) -> bool:
        """Whether :meth:`apply_` overwrites its gradient."""
        return self.maximize or (self.coupled and self.decays)

    def numbers(self, group: Mapping[str, Any], step: Any) -> Numbers:
        """The numbers of one step; ``step`` is a float, or a 0-dim fp64 tensor."""
        lr, decay = group["lr"], group["weight_decay"]
        beta1, beta2 = group["betas"]
        step_size = -(lr / (1 - beta1**step))
        root = (1 - beta2**step) ** 0.5
        decay = decay if self.coupled else 1 - lr * decay
        return step_size, 1 - beta1, beta2, 1 - beta2, root, group["eps"], decay

    def apply_(
        self, master: Tensor, grad: Tensor, state: State, numbers: Numbers, scratch: Tensor
    ) -> None:
        """Update master and state in place; ``scratch`` is another buffer of their length."""
        step_size, weight1, beta2, weight2, root, eps, decay = numbers
        exp_avg, exp_avg_sq = state[:2]
        if self.maximize:
            grad.neg_()
        if self.decays and self.coupled:
            _add_scaled_(grad, master, decay)
        elif self.decays:
            master.mul_(decay)
        exp_avg.lerp_(grad, weight1)
        _add_product_(exp_avg_sq.mul_(beta2), grad, grad, weight2)
        if self.amsgrad:
            torch.maximum(state[2], exp_avg_sq, out=state[2])
        denominator = torch.sqrt(state[-1], out=scratch).div_(root).add_(eps)
        _add_quotient_(master, exp_avg, denominator, step_size)


@dataclass(frozen=True)
class SGDRule:
    """Flags of an SGD group."""

    momentum: bool = False
    decays: bool = False
    nesterov: bool = False
    maximize: bool = False

    @property
    def state(self) -> tuple[str, ...]:
        return STATE_NAMES[torch.optim.SGD] if self.momentum else ()

    @property
    def edits(self) -> bool:
        """Whether :meth:`apply_` overwrites its gradient."""
        return self.maximize or self.decays or self.nesterov

    def numbers(self, group: Mapping[str, Any], step: Any) -> Numbers:
        """The numbers of one step; ``step`` is a float, or a 0-dim fp64 tensor."""
        return (
            -group["lr"], group["weight_decay"], group["momentum"], 1 - group["dampening"],
            step <= 1,
        )  # fmt: skip

    def apply_(
        self, master: Tensor, grad: Tensor, state: State, numbers: Numbers, scratch: Tensor
    ) -> None:
        """Update master and state in place."""
        negative_lr, decay, momentum, weight, first = numbers
        if self.maximize:
            grad.neg_()
        if self.decays:
            _add_scaled_(grad, master, decay)
        direction = grad
        if self.momentum:
            (buffer,) = state
            if first is True:  # torch starts from the bare gradient
                buffer.copy_(grad)
            else:
                _add_scaled_(buffer.mul_(momentum), grad, weight)
            if isinstance(first, Tensor):
                torch.where(first != 0, grad, buffer, out=buffer)
            direction = buffer
            if self.nesterov:
                _add_scaled_(grad, buffer, momentum)
                direction = grad
        _add_scaled_(master, direction, negative_lr)


class TorchAdamRule(AdamRule):
    """Adam or AdamW by the fused CPU kernel of torch, for groups with ``fused=True``."""

    edits = False

    def numbers(self, group: Mapping[str, Any], step: Any) -> Numbers:
        options = {name: float(group[name]) for name in ("lr", "weight_decay", "eps")}
        beta1, beta2 = map(float, group["betas"])
        return torch.tensor(step, dtype=torch.float32), dict(options, beta1=beta1, beta2=beta2)

    def apply_(
        self, master: Tensor, grad: Tensor, state: State, numbers: Numbers, scratch: Tensor
    ) -> None:
        step, options = numbers
        for exact, param, *moments in _whole_vectors(grad, master, *state):
            _compat.fused_adam_(
                param, exact, moments, step, decoupled=not self.coupled,
                amsgrad=self.amsgrad, maximize=self.maximize, **options,
            )  # fmt: skip


class TorchSGDRule(SGDRule):
    """SGD by the fused CPU kernel of torch, for groups with ``fused=True``."""

    edits = False

    def numbers(self, group: Mapping[str, Any], step: Any) -> Numbers:
        names = ("lr", "weight_decay", "momentum", "dampening")
        return step <= 1, {name: float(group[name]) for name in names}

    def apply_(
        self, master: Tensor, grad: Tensor, state: State, numbers: Numbers, scratch: Tensor
    ) -> None:
        first, options = numbers
        for exact, param, *moments in _whole_vectors(grad, master, *state):
            _compat.fused_sgd_(
                param, exact, moments, is_first_step=first, nesterov=self.nesterov,
                maximize=self.maximize, **options,
            )  # fmt: skip


Rule = AdamRule | SGDRule


def rule_of(
    kind: type[torch.optim.Optimizer], group: Mapping[str, Any], fused: bool = False
) -> Rule:
    """What one parameter group of an Adam, AdamW or SGD optimizer does.

    Args:
        fused: by torch's fused CPU kernel.
    """
    decays, maximize = bool(group["weight_decay"] != 0), bool(group["maximize"])
    if kind is torch.optim.SGD:
        momentum, nesterov = bool(group["momentum"] != 0), bool(group["nesterov"])
        return (TorchSGDRule if fused else SGDRule)(momentum, decays, nesterov, maximize)
    coupled = not group.get("decoupled_weight_decay", kind is torch.optim.AdamW)
    adam = TorchAdamRule if fused else AdamRule
    return adam(coupled, decays, bool(group["amsgrad"]), maximize)


def as_tensors(numbers: Sequence[Any], like: Tensor) -> tuple[Tensor, ...]:
    """Numbers of a step as 0-dim fp32 tensors on the device of ``like``, without waiting for it."""
    zero = torch.zeros_like(like, dtype=torch.float64)
    return tuple((zero + number).float() for number in numbers)


def update_(
    rule: Rule, flat: Flat, numbers: tuple[Tensor, ...], factor: Tensor | None, skip: Tensor
) -> None:
    """Unscale, clip, update and cast one range in place, without asking the device.

    Compiled, it is one kernel: what is decoded and cloned here lives in registers there. A product
    and the sum that it enters may be fused or not: Triton fused them up to 3.9, and no longer does
    from 3.10 on. Nothing relies on either; what decodes and encodes exactly is in integers.

    Args:
        flat: of shape ``(rows, row)`` where a form has one number per row.
        numbers: from :func:`as_tensors`.
        factor: 0-dim fp32 multiplier of the gradient, or ``None`` for 1.
        skip: 0-dim bool; if true nothing changes.
    """
    forms = flat.forms
    exact = flat.grad.to(torch.float32, copy=True)
    if factor is not None:
        exact = exact * factor
    old_master = forms.master.decode(flat.master)
    master = old_master.clone()
    state = tuple(
        form.decode(raw).clone() for form, raw in zip(forms.state, flat.state, strict=True)
    )
    rule.apply_(master, exact, state, numbers, torch.empty_like(master))
    kept = [(flat.master, forms.master.encode(master))]
    drawn: list[Tensor] = []
    for number, (form, raw, values) in enumerate(zip(forms.state, flat.state, state, strict=True)):
        if flat.draw is not None and not drawn:
            drawn += flat.draw.chances(number, values.shape)
        kept.append((raw, form.encode(values, drawn.pop() if drawn else None)))
    if flat.published is not None:
        flat.published.copy_(torch.where(skip, old_master, master))
    for olds, news in kept:
        for old, new in zip(olds, news, strict=True):
            old.copy_(torch.where(skip, old, new))


def _whole_vectors(*operands: Tensor) -> Iterator[Sequence[Tensor]]:
    """Operands of equal length as pieces of whole vectors, the rest as a padded copy.

    torch's fused kernels round what is left after the last whole vector in another way: results
    would depend on where the partition cuts. The first operand is only read.
    """
    numel = operands[0].numel()
    whole = numel - numel % VECTOR
    if whole:
        yield operands if whole == numel else [operand[:whole] for operand in operands]
    if whole < numel:
        padded = [operand.new_zeros(VECTOR) for operand in operands]
        for copy, operand in zip(padded, operands, strict=True):
            copy[: numel - whole] = operand[whole:]
        yield padded
        for copy, operand in zip(padded[1:], operands[1:], strict=True):
            operand[whole:] = copy[: numel - whole]


# torch's scalar arguments are numbers of the host; where ours is a tensor, two operations do
# the same, which a compiler fuses. The order of roundings is that of the scalar form.


def _add_scaled_(out: Tensor, other: Tensor, scale: float | Tensor) -> None:
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
