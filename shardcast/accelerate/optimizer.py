"""The optimizer that ``prepare`` returns."""

from __future__ import annotations

import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list
from accelerate.utils.operations import convert_to_fp32
from torch import Tensor, nn

from shardcast.comm import warn_first
from shardcast.frameworks import called_on_all_ranks, exact_state
from shardcast.optimizer.doors import Part, Values
from shardcast.optimizer.sharded import ShardedOptimizer, packed_of


class PreparedOptimizer(AcceleratedOptimizer):
    """Steps and forgets gradients only where gradients are synchronized, as Accelerate's own does.

    Args:
        optimizer: what it steps.
        sharded: the one that does so, of this optimizer alone or of several together.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sharded: ShardedOptimizer) -> None:
        # No device placement: the state is on its device, and is not copied out and in for it.
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._is_accelerate_prepared = True
        self.sharded = sharded

    def averaged(self, name: str) -> AbstractContextManager[None]:
        """Have an average in the model, as ShardedOptimizer does; on every rank."""
        entered: AbstractContextManager[None] = self.sharded.averaged(name)
        return entered

    def owned(self) -> AbstractContextManager[list[Part]]:
        """Edit the elements that this rank owns, as ShardedOptimizer does; on every rank."""
        entered: AbstractContextManager[list[Part]] = self.sharded.owned()
        return entered

    def whole(self, *wanted: str | nn.Parameter) -> AbstractContextManager[dict[str, Values]]:
        """Edit whole parameters, as ShardedOptimizer does; on every rank."""
        entered: AbstractContextManager[dict[str, Values]] = self.sharded.whole(*wanted)
        return entered

    def metrics(self, patterns: str | Mapping[str, str] = "*") -> dict[str, dict[str, Tensor]]:
        """Do as ShardedOptimizer; ``accelerator.log(shardcast.metrics.flat(...))`` takes them."""
        metrics: dict[str, dict[str, Tensor]] = self.sharded.metrics(patterns)
        return metrics

    def count(self, tokens: float | Tensor) -> None:
        """Do as ShardedOptimizer; the loss is then not divided by the accumulation steps.

        Of several optimizers that are sharded together call it of one.
        """
        self.sharded.count(tokens)

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last step was skipped, on all ranks.

        Reading it waits for the device; a prepared scheduler reads it in every step.
        """
        return bool(self.sharded.last_step_skipped)


class ShardcastOptimizer(PreparedOptimizer):
    """The :class:`ShardedOptimizer` of ``model``, which is its ``optimizer``.

    While it is there, what each of ``models`` returns is fp32, as under Accelerate's autocast.
    """

    def __init__(
        self, sharded: ShardedOptimizer, model: nn.Module, models: Sequence[nn.Module]
    ) -> None:
        super().__init__(sharded, sharded)
        self.model, self._models = model, list(models)
        # Calls are numbered from each step on, so that a call on some ranks is soon forgotten; in
        # the store of the processes an earlier optimizer may have left its calls.
        self._calls: Counter[int] = Counter()
        self._name = broadcast_object_list([uuid.uuid4().hex])[0]
        handles = []
        if sharded.config.param_dtype != torch.float32:
            handles = [model.register_forward_hook(_outputs_to_fp32) for model in models]
        self.close: Callable[[], Any] = weakref.finalize(self, _close, sharded, handles)
        """Close the sharded optimizer without restoring fp32, and remove the hooks."""

    def step(self, closure: Any = None, loss: float | Tensor | None = None) -> None:
        """Do as Accelerate's; ``loss`` is for a ``guard``, see :meth:`ShardedOptimizer.step`."""
        if self.gradient_state.sync_gradients:
            self.sharded.step(closure, loss=loss)

    @property
    def params(self) -> set[nn.Parameter]:
        """The model's parameters that it trains."""
        return {param for group in self.param_groups for param in group["params"]}

    def exact_state(self, state: dict[str, Any], model: nn.Module, call: str) -> dict[str, Any]:
        """The ``state`` of ``model``, one of ``models``, in fp32 on rank 0. Every rank calls it.

        Where only some do, a warning and ``state`` as it is.
        """
        if self.sharded.config.param_dtype == torch.float32:
            return state
        step = packed_of(self.sharded).comm.steps
        self._calls[step] += 1
        if not called_on_all_ranks(f"{call}/{self._name}/{step}/{self._calls[step]}"):
            warn_first(
                f"{call} was not called on all ranks, so the fp32 masters could not be gathered: "
                f"parameters are saved in {self.sharded.config.param_dtype}. Call it on every "
                "rank (rank 0 writes), or set accelerator.save_masters = False"
            )
            return state
        prefix = f"{self._models.index(model)}." if len(self._models) > 1 else ""
        return exact_state(state, self.sharded, prefix)


class ShardcastHandle(PreparedOptimizer):
    """Stands for one of several optimizers that ``prepared`` steps together.

    ``optimizer`` is its :class:`~shardcast.optimizer.sharded.OptimizerHandle`.
    """

    def __init__(self, prepared: ShardcastOptimizer, handle: torch.optim.Optimizer) -> None:
        super().__init__(handle, prepared.sharded)
        self.prepared = prepared
        self.close = prepared.close


def _outputs_to_fp32(_module: nn.Module, _args: Any, output: Any) -> Any:
    return convert_to_fp32(output)


def _close(sharded: ShardedOptimizer, handles: list[Any]) -> None:
    sharded.close(restore=False)
    for handle in handles:
        handle.remove()
