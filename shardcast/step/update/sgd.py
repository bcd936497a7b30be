"""The rules of SGD: by the operations of torch's ``_single_tensor_sgd``, or by its fused kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.step.update.rules import STATE_NAMES, State, Term, add_scaled_


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
        """Return whether :meth:`apply_` overwrites its gradient."""
        return self.maximize or self.decays or self.nesterov

    def numbers(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        """Return the numbers of one step; ``step`` is a float, or a 0-dim fp64 tensor."""
        return (
            -group["lr"], group["weight_decay"], group["momentum"], 1 - group["dampening"],
            step <= 1,
        )  # fmt: skip

    def terms(self, group: Mapping[str, Any]) -> tuple[Term, ...]:
        """Return :meth:`numbers` for :class:`.StepNumbers`."""
        *constants, _ = self.numbers(group, math.inf)
        # Whether it is the first step: (-1)**-1022 is 1, (-3)**-1022 is 0.
        return (*map(Term, constants), Term(1.0, 2.0, -1022.0))

    def apply_(self, master: Tensor, grad: Tensor, state: State, numbers: tuple[Any, ...]) -> None:
        """Update master and state in place."""
        negative_lr, decay, momentum, weight, first = numbers
        if self.maximize:
            grad.neg_()
        if self.decays:
            add_scaled_(grad, master, decay)
        direction = grad
        if self.momentum:
            (buffer,) = state
            if first is True:  # torch starts from the bare gradient
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

    def numbers(self, group: Mapping[str, Any], step: Any) -> tuple[Any, ...]:
        names = ("lr", "weight_decay", "momentum", "dampening")
        return step <= 1, {name: float(group[name]) for name in names}

    def apply_(self, master: Tensor, grad: Tensor, state: State, numbers: tuple[Any, ...]) -> None:
        first, options = numbers
        _compat.fused_sgd_(
            [master], [grad], list(state), is_first_step=first, nesterov=self.nesterov,
            maximize=self.maximize, **options,
        )  # fmt: skip
