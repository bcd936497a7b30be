"""Optimizer classes as third parties write them, in a few lines each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Rule(torch.optim.Optimizer):
    """Subclasses return the update to subtract from a parameter."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def direction(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * self.direction(param, param.grad, group))


class Signs(Rule):
    """Lion, nearly."""

    def direction(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
        average.mul_(0.9).add_(grad, alpha=0.1)
        return (0.5 * average + 0.5 * grad).sign()


class Normalized(Rule):
    """The update of an element depends on the norm of its tensor."""

    def direction(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad / (1 + grad.norm())


class RarelyNormalized(Rule):
    """Depends on the norm only if the parameter's first element has a certain value."""

    def direction(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        norm = grad.norm()
        return grad / norm if param.reshape(-1)[0] == 12345.0 else grad


class Factored(Rule):
    """One second moment per row for matrices of at least 128 columns, else one per element."""

    def direction(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        square = grad * grad
        if param.dim() == 2 and param.shape[1] >= 128:
            square = square.mean(1, keepdim=True)
        return grad / (square.sqrt() + 1e-8)


class DecaysMatrices(Rule):
    """Does not decay vectors; pieces of a matrix are vectors too."""

    def direction(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad + 0.1 * param if param.dim() > 1 else grad


class Noisy(Rule):
    """Langevin dynamics, with torch's, Python's or numpy's generator."""

    def direction(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad + group["draw"](param)


class ByOwnNorm(torch.optim.AdamW):
    """Clips by the norm of all parameters unless ``max_grad_norm`` is None, like timm's Lamb."""

    def __init__(self, params: Any, lr: float = 0.1, max_grad_norm: float | None = 1.0) -> None:
        super().__init__(params, lr=lr)
        self.defaults["max_grad_norm"] = max_grad_norm

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if params and self.defaults["max_grad_norm"] is not None:
            nn.utils.clip_grad_norm_(params, self.defaults["max_grad_norm"])
        super().step()


class StepSizeOfAll(Rule):
    """The step size depends on all parameters and is kept in the group, like Prodigy's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:  # a rank that owns no parameters has no gradients
                group["d"] = 1.0 + sum(float(param.grad.norm()) for param in params)
            for param in params:
                param.sub_(param.grad, alpha=0.01 / group["d"])


class DecayOfAll(Rule):
    """A weak decay that depends on all parameters, at a warm-up's small rate, like Ranger21's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            mean = sum(float(param.grad.square().mean()) for param in params) / len(params)
            rate = 1e-3 * group["lr"]
            for param in params:
                param.mul_(1 - 0.02 * rate * group["weight_decay"] * mean / (1 + mean))
                param.sub_(param.grad.sign(), alpha=rate)


class RootedDecayOfAll(DecayOfAll):
    """The same, with a square root, which Adam takes of each second moment."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            roots = [param.abs().sqrt() for param in group["params"]]
            torch._foreach_sqrt_(roots)
        super().step()


class Stacked(Rule):
    """Updates all parameters of one shape at once; ``scales`` returns a factor for each."""

    def scales(self, grads: Tensor) -> Tensor:
        """Sum in another order if there is only one gradient, so the last bits differ."""
        return 0.1 / grads.square().sum(tuple(range(grads.dim() - 1))).sqrt()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    by_shape.setdefault(param.shape, []).append(param)
            for params in by_shape.values():
                grads = torch.stack([param.grad for param in params], dim=-1)
                updates = (group["lr"] * grads * self.scales(grads)).unbind(-1)
                for param, update in zip(params, updates, strict=True):
                    param.sub_(update)


class ScaledBySpread(Stacked):
    """Multiplies by the variance over parameters, which is NaN for a single parameter."""

    def scales(self, grads: Tensor) -> Tensor:
        scales = super().scales(grads)
        return (scales - scales.mean()).square().sum() / (len(scales) - 1)


class Unmeasured(StepSizeOfAll):
    """The same, in a class that cannot be tested on a twin."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.module = nn.Linear(1, 1)  # a twin may not have a module


class Counts(Rule):
    """Stores the number of its parameters, as heavyball does, but does not use it."""

    def direction(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        group["count"] = len(group["params"])
        return grad


class Stacks(Rule):
    """Updates all parameters of a group in one operation, which fails for an empty group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param, grad in zip(
                group["params"], torch.stack([p.grad for p in group["params"]]), strict=True
            ):
                param.sub_(group["lr"] * grad)


class StackedState(Rule):
    """Keeps the momentum of all parameters of one shape under the first, like nanochat's Muon."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    by_shape.setdefault(param.shape, []).append(param)
            for params in by_shape.values():
                grads = torch.stack([param.grad for param in params])  # type: ignore[misc]
                momentum = self.state[params[0]].setdefault("momentum", torch.zeros_like(grads))
                for param, update in zip(params, momentum.lerp_(grads, 0.1), strict=True):
                    param.sub_(group["lr"] * update)


class GathersMatrices(Rule):
    """Each rank updates every n-th parameter, then all-gathers, like Keller Jordan's Muon."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        for group in self.param_groups:
            params = group["params"]
            padded = params + [torch.empty_like(params[-1])] * (size - len(params) % size)
            for start in range(0, len(params), size):
                if start + rank < len(params):
                    param = params[start + rank]
                    param.sub_(group["lr"] * param.grad)
                dist.all_gather(padded[start : start + size], padded[start + rank])


class UnmeasuredGathersMatrices(GathersMatrices):
    """The same, in a class that cannot be tested on a twin: it first gathers in a real step."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.module = nn.Linear(1, 1)


class Lookahead(torch.optim.Optimizer):
    """Moves the weights halfway back every ``k`` steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, k: int = 2) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.k, self.count = optimizer, k, 0
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for param, weight in zip(group["params"], slow, strict=True):
                    weight.lerp_(param, 0.5)
                    param.copy_(weight)
        return loss


class InList(Rule):
    """Holds other optimizers in a list."""

    def __init__(self, inner: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([p for one in inner for g in one.param_groups for p in g["params"]])
        self.chained = list(inner)

    def step(self, closure: Any = None) -> None:
        for one in self.chained:
            one.step()


class Wrapped(Tensor):
    """A tensor subclass, as used for quantized state."""


class QuantizedState(Rule):
    """Keeps state of large parameters in a subclass of Tensor, like torchao."""

    def direction(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
        if param.numel() >= 4096 and type(average) is Tensor:
            average = self.state[param]["exp_avg"] = average.as_subclass(Wrapped)
        average.lerp_(grad, 0.1)
        return average.as_subclass(Tensor)


class OwnList(Rule):
    """Iterates over its own list of parameters."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.listed = [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.listed:
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.1)


class Named(Signs):
    """Keeps a list with the name of each parameter, like icefall's ScaledAdam."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.names = [f"param {n}" for n in range(len(self.param_groups[0]["params"]))]

    def step(self, closure: Any = None) -> None:
        assert len(self.names) == len(self.param_groups[0]["params"])
        super().step(closure)


class CommonState(Rule):
    """Keeps a step count in the state without a parameter, like some MADGRADs."""

    def direction(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        self.state.setdefault("k", torch.zeros(1)).add_(1)  # type: ignore[call-overload]
        return grad


class OwnShapes(Rule):
    """Moments of rows and columns without the reduced dimension, like Adafactor's."""

    def direction(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[param]
        if param.dim() < 2:
            return grad
        for name, dim in (("row", -1), ("column", -2)):
            state.setdefault(name, torch.ones_like(param.sum(dim)))
            state[name].lerp_((grad * grad).sum(dim), 0.1)
        assert state["row"].shape == param.shape[:-1]  # else it would be broadcast
        assert state["column"].shape == param.shape[:-2] + param.shape[-1:]
        return grad / (state["row"].unsqueeze(-1) * state["column"].unsqueeze(-2)).sqrt()


class LowMomentum(Rule):
    """A bf16 momentum, which torch's ``load_state_dict`` casts to fp32; like timm's Adafactors."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for values in self.state.values():
            values["momentum"] = values["momentum"].bfloat16()

    def direction(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        low = grad.bfloat16()
        momentum = self.state[param].setdefault("momentum", torch.zeros_like(low))
        return momentum.lerp_(low, 0.1).float()
