"""The optimizer that ``prepare`` returns."""

from __future__ import annotations

import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list
from accelerate.utils.operations import convert_to_fp32
from torch import Tensor, nn

from shardcast.comm import warn_first
from shardcast.frameworks import called_on_all_ranks, exact_state
from shardcast.optimizer.sharded import ShardedOptimizer, packed_of

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class PreparedOptimizer(AcceleratedOptimizer):
    """An optimizer that steps and clears gradients only when Accelerate synchronizes them.

    Args:
        optimizer: the sharded optimizer, or a handle of it.
        sharded: the sharded optimizer of this optimizer, or of several together.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sharded: ShardedOptimizer) -> None:
        # No device placement: the state is on its device, and is not copied out and in for it.
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._is_accelerate_prepared = True
        self.sharded = sharded

    def __getattr__(self, name: str) -> Any:
        """Return what only the sharded optimizer has: ``count()``, ``owned()``, ``averaged()``."""
        if name.startswith("_") or name == "sharded":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.sharded, name)

    @property
    def step_was_skipped(self) -> bool:
        """Whether all ranks skipped the last step.

        Reading it waits for the device. A prepared scheduler reads it in every step.
        """
        return bool(self.sharded.last_step_skipped)


class ShardcastOptimizer(PreparedOptimizer):
    """A prepared optimizer; its ``optimizer`` is the :class:`ShardedOptimizer` of ``model``.

    As under Accelerate's autocast, each of ``models`` returns fp32.
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
        self.close: Callable[[], object] = weakref.finalize(self, _close, sharded, handles)
        """Close the sharded optimizer without restoring fp32, and remove the hooks."""

    def step(
        self, closure: Callable[[], float] | None = None, loss: float | Tensor | None = None
    ) -> None:
        """Make a step in the last micro-batch. Collective: every rank.

        Args:
            closure: as in ``torch.optim``.
            loss: the rank's loss, for a ``guard`` on losses; see :meth:`ShardedOptimizer.step`.
        """
        if self.gradient_state.sync_gradients:
            self.sharded.step(closure, loss=loss)

    @property
    def params(self) -> set[nn.Parameter]:
        """The parameters that this optimizer trains."""
        return {param for group in self.param_groups for param in group["params"]}

    def exact_state(self, state: dict[str, Any], model: nn.Module, call: str) -> dict[str, Any]:
        """Return ``state`` of ``model`` in fp32, on rank 0. Collective: every rank.

        If only some ranks call it, it warns and returns ``state`` unchanged.
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
    """One of several optimizers that ``prepared`` steps together.

    ``optimizer`` is its :class:`~shardcast.optimizer.sharded.OptimizerHandle`.
    """

    def __init__(self, prepared: ShardcastOptimizer, handle: torch.optim.Optimizer) -> None:
        super().__init__(handle, prepared.sharded)
        self.prepared = prepared
        self.close = prepared.close


def _outputs_to_fp32(_module: nn.Module, _args: object, output: object) -> object:
    return convert_to_fp32(output)


def _close(sharded: ShardedOptimizer, handles: list[RemovableHandle]) -> None:
    sharded.close(restore=False)
    for handle in handles:
        handle.remove()
