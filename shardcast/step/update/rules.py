"""The update of a flat range of elements, one function per optimizer.

A *rule* holds what an optimizer group does (its flags) and the arithmetic of one step on 1-d
tensors of equal length. The same arithmetic runs in two ways:

* :func:`update_in_chunks_`: eagerly on CPU, in place, a cache-sized chunk at a time, with two
  scratch buffers of that size. Numbers of the step (learning rate, bias corrections) are
  Python floats, and the operations are those of torch's ``_single_tensor_adam`` and
  ``_single_tensor_sgd``, so that fp32 results equal theirs to the bit. An optimizer with
  ``fused=True`` gets torch's own fused kernel over the same chunks.
* :func:`update_`: one function without host decisions, for ``torch.compile`` (one kernel) and for
  accelerators. Numbers are 0-dim tensors, so no other number compiles anew; a skipped step
  selects the old values, so that it changes nothing, not even the sign of a zero.

Traffic per element (AdamW, bf16): read gradient 2 bytes, read and write master and moments 24,
write parameter 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardcast import _compat

STATE_NAMES: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
}
VECTOR = 16  # fp32 elements of the longest vector of a CPU


class Flat(NamedTuple):
    """The operands of one range: 1-d tensors of equal length.

    Attributes:
        master: fp32, overwritten.
        grad: any floating dtype, read only.
        state: fp32, in the order of ``rule.state``, overwritten.
        published: the low-precision parameter elements, overwritten by the cast of the new
            masters; ``None`` where the master itself is the parameter.
    """

    master: Tensor
    grad: Tensor
    state: tuple[Tensor, ...]
    published: Tensor | None

    def alone(self) -> Flat:
        """The same memory, not known as views: a compiled graph would be bound to their bases."""
        published = None if self.published is None else self.published.data
        return Flat(
            self.master.data, self.grad.data, tuple(flat.data for flat in self.state), published
        )

    def chunks(self, size: int) -> Iterator[Flat]:
        """The same cut into pieces of ``size`` elements, in order."""
        published = None if self.published is None else self.published.split(size)
        states = [flat.split(size) for flat in self.state]
        for number, (master, grad) in enumerate(
            zip(self.master.split(size), self.grad.split(size), strict=True)
        ):
            state = tuple(pieces[number] for pieces in states)
            yield Flat(master, grad, state, None if published is None else published[number])


@dataclass(frozen=True)
class AdamRule:
    """Flags of an Adam or AdamW group; only another combination of them compiles anew."""

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

    def numbers(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        """The numbers of one step; ``step`` is a float, or a 0-dim fp64 tensor."""
        lr, decay = group["lr"], group["weight_decay"]
        beta1, beta2 = group["betas"]
        step_size = -(lr / (1 - beta1**step))
        root = (1 - beta2**step) ** 0.5
        decay = decay if self.coupled else 1 - lr * decay
        return step_size, 1 - beta1, beta2, 1 - beta2, root, group["eps"], decay

    def apply_(
        self,
        master: Tensor,
        grad: Tensor,
        state: tuple[Tensor, ...],
        numbers: tuple[Any, ...],
        scratch: Tensor,
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

    def numbers(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        """The numbers of one step; ``step`` is a float, or a 0-dim fp64 tensor."""
        return (
            -group["lr"], group["weight_decay"], group["momentum"], 1 - group["dampening"],
            step <= 1,
        )  # fmt: skip

    def apply_(
        self,
        master: Tensor,
        grad: Tensor,
        state: tuple[Tensor, ...],
        numbers: tuple[Any, ...],
        scratch: Tensor,
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


@dataclass(frozen=True)
class TorchAdamRule:
    """Adam or AdamW by the fused CPU kernel of torch, for groups with ``fused=True``."""

    coupled: bool
    amsgrad: bool
    maximize: bool
    edits = False

    @property
    def state(self) -> tuple[str, ...]:
        return STATE_NAMES[torch.optim.Adam][: 3 if self.amsgrad else 2]

    def numbers(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        """The numbers of one step; ``step`` is a float."""
        options = {name: float(group[name]) for name in ("lr", "weight_decay", "eps")}
        beta1, beta2 = group["betas"]
        return torch.tensor(step, dtype=torch.float32), {
            **options,
            "beta1": float(beta1),
            "beta2": float(beta2),
        }

    def apply_(
        self,
        master: Tensor,
        grad: Tensor,
        state: tuple[Tensor, ...],
        numbers: tuple[Any, ...],
        scratch: Tensor,
    ) -> None:
        """Update master and state in place."""
        step, options = numbers
        for exact, param, *moments in _whole_vectors(grad, master, *state):
            _compat.fused_adam_(
                param, exact, moments, step, decoupled=not self.coupled,
                amsgrad=self.amsgrad, maximize=self.maximize, **options,
            )  # fmt: skip


@dataclass(frozen=True)
class TorchSGDRule:
    """SGD by the fused CPU kernel of torch, for groups with ``fused=True``."""

    momentum: bool
    nesterov: bool
    maximize: bool
    edits = False

    @property
    def state(self) -> tuple[str, ...]:
        return STATE_NAMES[torch.optim.SGD] if self.momentum else ()

    def numbers(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        """The numbers of one step; ``step`` is a float."""
        names = ("lr", "weight_decay", "momentum", "dampening")
        return step <= 1, {name: float(group[name]) for name in names}

    def apply_(
        self,
        master: Tensor,
        grad: Tensor,
        state: tuple[Tensor, ...],
        numbers: tuple[Any, ...],
        scratch: Tensor,
    ) -> None:
        """Update master and state in place."""
        first, options = numbers
        for exact, param, *moments in _whole_vectors(grad, master, *state):
            _compat.fused_sgd_(
                param, exact, moments, is_first_step=first, nesterov=self.nesterov,
                maximize=self.maximize, **options,
            )  # fmt: skip


Rule = AdamRule | SGDRule | TorchAdamRule | TorchSGDRule


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
        if fused:
            return TorchSGDRule(momentum, nesterov, maximize)
        return SGDRule(momentum, decays, nesterov, maximize)
    coupled = not group.get("decoupled_weight_decay", kind is torch.optim.AdamW)
    if fused:
        return TorchAdamRule(coupled, bool(group["amsgrad"]), maximize)
    return AdamRule(coupled, decays, bool(group["amsgrad"]), maximize)


def as_tensors(numbers: Sequence[Any], like: Tensor) -> tuple[Tensor, ...]:
    """Numbers of a step as 0-dim fp32 tensors on the device of ``like``, without waiting for it."""
    zero = torch.zeros_like(like, dtype=torch.float64)
    return tuple((zero + number).float() for number in numbers)


def update_in_chunks_(
    rule: Rule,
    flat: Flat,
    numbers: tuple[Any, ...],
    factor: Tensor | None,
    scratch: Sequence[Tensor],
) -> None:
    """Unscale, clip, update and cast one range in place, as many elements at a time as scratch has.

    Args:
        numbers: from ``rule.numbers``, of a step as a float.
        factor: 0-dim fp32 multiplier of the gradient, or ``None`` for 1.
        scratch: two 1-d fp32 buffers of equal length, contents undefined.
    """
    size = scratch[0].numel()
    private = rule.edits or flat.grad.dtype != torch.float32
    for piece in flat.chunks(size):
        exact, spare = (buffer[: piece.master.numel()] for buffer in scratch)
        if private:
            exact.copy_(piece.grad)
            if factor is not None:
                exact.mul_(factor)
        elif factor is not None:
            torch.mul(piece.grad, factor, out=exact)
        else:
            exact = piece.grad
        rule.apply_(piece.master, exact, piece.state, numbers, spare)
        if piece.published is not None:
            piece.published.copy_(piece.master)


def update_(
    rule: Rule, flat: Flat, numbers: tuple[Tensor, ...], factor: Tensor | None, skip: Tensor
) -> None:
    """Unscale, clip, update and cast one range in place, without asking the device.

    Compiled, it is one kernel: what is cloned here lives in registers there.

    Args:
        numbers: from :func:`as_tensors`.
        factor: 0-dim fp32 multiplier of the gradient, or ``None`` for 1.
        skip: 0-dim bool; if true nothing changes.
    """
    master, grad, state, published = flat
    exact = grad.to(torch.float32, copy=True)
    if factor is not None:
        exact = exact * factor
    new_master, new_state = master.clone(), tuple(old.clone() for old in state)
    rule.apply_(new_master, exact, new_state, numbers, torch.empty_like(master))
    master.copy_(torch.where(skip, master, new_master))
    for old, new in zip(state, new_state, strict=True):
        old.copy_(torch.where(skip, old, new))
    if published is not None:
        published.copy_(master)


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


# torch's scalar arguments are numbers of the host; where ours is a tensor, the same is said in
# two operations, which a compiler fuses. The order of roundings is that of the scalar form.


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
