"""The loss scale, fixed or dynamic like ``torch.amp.GradScaler``'s, equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast.comm import ProcessGroups
from shardcast.config import ShardcastConfig
from shardcast.memory.gradients import Gradients
from shardcast.step.decide.decision import Decision
from shardcast.step.decide.signal import Signal, to_device

BACKOFF, GROWTH = 0.5, 2.0  # as in torch.amp.GradScaler


class LossScale(Signal):
    """The factor of the loss. A data-parallel rank that left it out has made a mistake.

    Attributes:
        value: 0-dim fp32 on the device.
        dynamic: it grows and backs off.
    """

    def __init__(
        self, config: ShardcastConfig, process_groups: ProcessGroups, device: torch.device
    ) -> None:
        rank, ranks = process_groups.dp.rank, process_groups.dp.size
        self.skips = (True,) * ranks
        self._parallel_dims = process_groups.parallel_dims
        self._own_rank = to_device([n == rank for n in range(ranks)], torch.float64, device)
        self._nowhere = torch.zeros_like(self._own_rank)
        self.dynamic = config.loss_scale in (None, "dynamic")
        first = float(config.loss_scale_init if self.dynamic else config.loss_scale or 1)
        self.value = torch.tensor(first, dtype=torch.float32, device=device)
        self._interval = config.loss_scale_growth_interval
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        self._applied = False  # a loss was scaled since the last step
        self._needed = False  # a backward produced gradients without it

    def apply(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the scale."""
        self._applied = True
        return loss * self.value

    def look(self, gradients: Iterable[Gradients], backward: bool, more: bool = False) -> None:
        """Check whether gradients came without a scaled loss, before they are reduced. Local.

        Args:
            backward: a backward ran since the last reduction.
            more: check these gradients in addition to the last call's.
        """
        if not self._applied:
            backward = backward or self._needed
            self._needed = (more and self._needed) or any(
                (grad := param.grad) is not None and (backward or not grads.holds(position, grad))
                for grads in gradients
                for position, param in enumerate(grads.pack.params)
            )

    def local(self) -> Tensor:
        """Return, per data-parallel rank, 1 if its gradients come from an unscaled loss."""
        return self._own_rank if self._needed and not self._applied else self._nowhere

    def merge(self, readings: Tensor) -> Tensor:
        """Count a loss as unscaled only if some rank of every stage says so.

        Only the last stage of a pipeline has the loss.
        """
        dims = self._parallel_dims
        by_dim = readings.view(1, *(dims.sizes[dim] for dim in dims.model), -1)
        if dims.pipeline in dims.model:
            by_dim = by_dim.movedim(1 + dims.model.index(dims.pipeline), 0)
        return by_dim.flatten(1, -2).amax(1).amin(0)

    def scale(self, reading: Tensor | None) -> Tensor:
        return self.value

    def error(self, mistakes: Sequence[float]) -> RuntimeError:
        ranks = [rank for rank, missing in enumerate(mistakes) if missing]
        return RuntimeError(
            "step(): a loss scale is in use but the loss was not scaled on rank"
            f"{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}; call "
            "optimizer.scale_loss(loss).backward() for every backward, or with Accelerate "
            "accelerator.backward(loss)"
        )

    def conclude(self, decision: Decision) -> None:
        """Grow after enough good steps; back off after an overflow; ignore declined steps."""
        overflow, ignored = decision.skip, None
        if decision.declined is not None:
            overflow, ignored = overflow & ~decision.declined, overflow & decision.declined
        self._applied = self._needed = False
        if self.dynamic:
            state = self.value, self._growth
            before = [tensor.clone() for tensor in state] if ignored is not None else []
            torch._amp_update_scale_(
                self.value, self._growth, overflow.float(), GROWTH, BACKOFF, self._interval
            )
            for tensor, old in zip(state, before, strict=False):
                tensor.copy_(torch.where(ignored, old, tensor))  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, float | None]:
        """Return plain numbers; waits for the device."""
        return {"loss_scale": float(self.value), "growth": float(self._growth)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; keep a scale that the saved run did not use."""
        if state["loss_scale"] is not None:
            self.value.fill_(state["loss_scale"])
            # The saved interval may have been longer; torch grows only when count and interval are
            # equal.
            self._growth.fill_(min(int(state["growth"]), self._interval - 1))
