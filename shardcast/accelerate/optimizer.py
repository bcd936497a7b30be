"""What ``prepare`` returns for an optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils.operations import convert_to_fp32
from torch import nn

from shardcast.optimizer.sharded import ShardedOptimizer


class ShardcastOptimizer(AcceleratedOptimizer):
    """Steps and forgets gradients only where gradients are synchronised, as Accelerate's own does.

    ``optimizer`` is the :class:`ShardedOptimizer` of ``model``. While it is there, what each of
    ``models`` returns is fp32, as under Accelerate's autocast.
    """

    def __init__(
        self, sharded: ShardedOptimizer, model: nn.Module, models: Sequence[nn.Module]
    ) -> None:
        # No device placement: the state is on its device, and is not copied out and in for it.
        super().__init__(sharded, device_placement=False, scaler=None)
        self._is_accelerate_prepared = True
        self.model = model
        handles = []
        if sharded.config.param_dtype != torch.float32:
            handles = [it.register_forward_hook(_outputs_to_fp32) for it in models]
        self.close: Callable[[], Any] = weakref.finalize(self, _close, sharded, handles)

    @property
    def params(self) -> set[nn.Parameter]:
        """The model's parameters that it trains."""
        return {param for group in self.param_groups for param in group["params"]}

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, on all ranks, for a non-finite gradient.

        Reading it waits for the device; a prepared scheduler reads it in every step.
        """
        norm = self.optimizer.grad_norm
        return norm is not None and not bool(norm.isfinite())


class ShardcastHandle(AcceleratedOptimizer):
    """Stands for one of several optimizers that ``prepared`` steps together.

    ``optimizer`` is its :class:`~shardcast.optimizer.original.OptimizerHandle`.
    """

    def __init__(self, prepared: ShardcastOptimizer, handle: torch.optim.Optimizer) -> None:
        super().__init__(handle, device_placement=False, scaler=None)
        self._is_accelerate_prepared = True
        self.prepared = prepared
        self.close = prepared.close

    @property
    def step_was_skipped(self) -> bool:
        """As :attr:`ShardcastOptimizer.step_was_skipped`, of all of them."""
        return self.prepared.step_was_skipped


def _outputs_to_fp32(_module: nn.Module, _args: Any, output: Any) -> Any:
    return convert_to_fp32(output)


def _close(sharded: ShardedOptimizer, handles: list[Any]) -> None:
    sharded.close()
    for handle in handles:
        handle.remove()
