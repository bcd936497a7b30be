"""The baseline: fp32 weights and moments on every rank, DDP and autocast."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Baseline:
    """A torch optimizer with the methods of a `ShardedOptimizer` that the training loop calls."""

    skipped_steps = 0  # bf16 autocast has no loss scale, so nothing is ever skipped

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float | None
    ) -> None:
        self.optimizer = optimizer
        self.max_grad_norm = math.inf if max_grad_norm is None else max_grad_norm
        self.grad_norm: Tensor | None = None
        self._gradient_bytes = 0
        self.model = model
        if dist.is_initialized():
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def no_sync(self) -> AbstractContextManager[None]:
        wrapped = isinstance(self.model, DistributedDataParallel)
        return self.model.no_sync() if wrapped else nullcontext()

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss

    def memory_report(self) -> dict[str, int]:
        """Return the bytes that this rank holds, by kind; gradients are those of the last step."""
        state = [value for state in self.optimizer.state.values() for value in state.values()]
        return {
            "parameters": sum(param.nbytes for param in self.model.parameters()),
            "gradients": self._gradient_bytes,
            "masters": 0,
            "state": sum(value.nbytes for value in state if value.dim()),
        }

    def step(self) -> None:
        grads = [param.grad for param in self.model.parameters()]
        self._gradient_bytes = sum(grad.nbytes for grad in grads if grad is not None)
        self.grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
