"""The loss scale, fixed or dynamic as that of ``torch.amp.GradScaler``, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig
from shardcast.memory.gradients import Gradients

BACKOFF, GROWTH = 0.5, 2.0  # as torch.amp.GradScaler


class LossScale:
    """What the loss is multiplied by.

    Attributes:
        value: 0-dim fp32 on the device.
        dynamic: it grows and backs off.
    """

    def __init__(self, config: ShardcastConfig, device: torch.device) -> None:
        self.dynamic = config.loss_scale in (None, "dynamic")
        first = float(config.loss_scale_init if self.dynamic else config.loss_scale or 1)
        self.value = torch.tensor(first, dtype=torch.float32, device=device)
        self._interval = config.loss_scale_growth_interval
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        self._applied = False  # a loss was scaled since the last step
        self._needed = False  # a backward brought gradients without it

    @staticmethod
    def used_by(config: ShardcastConfig) -> bool:
        """Whether the options ask for a loss scale."""
        if config.loss_scale is None:
            return config.param_dtype == torch.float16
        return config.loss_scale != 1

    def apply(self, loss: Tensor) -> Tensor:
        """``loss`` times the scale."""
        self._applied = True
        return loss * self.value

    def look(self, gradients: Iterable[Gradients], backward: bool, more: bool = False) -> None:
        """Look whether gradients came without a scaled loss, before they are reduced. Local.

        Args:
            backward: one was run since the last reduction.
            more: besides those of the last call.
        """
        if not self._applied:
            backward = backward or self._needed
            self._needed = (more and self._needed) or any(
                is_here and (backward or not grads.holds(position))
                for grads in gradients
                for position, is_here in enumerate(grads.presence())
            )

    @property
    def missing(self) -> bool:
        """Whether this rank has gradients of a loss that was not scaled."""
        return self._needed and not self._applied

    def update(self, overflow: Tensor, ignored: Tensor | None = None) -> None:
        """Grow after enough good steps, back off after an overflow.

        Args:
            overflow: 0-dim bool.
            ignored: 0-dim bool, the step was skipped for another reason, and says nothing.
        """
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
        """Plain numbers; waits for the device."""
        return {"loss_scale": float(self.value), "growth": float(self._growth)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`; a scale that the saved run did not use stays."""
        if state["loss_scale"] is not None:
            self.value.fill_(state["loss_scale"])
            # The saved interval may have been longer; torch grows only where they become equal.
            self._growth.fill_(min(int(state["growth"]), self._interval - 1))


def unscaled_error(ranks: Sequence[int]) -> RuntimeError:
    """What every rank raises where the loss was not scaled on ``ranks``."""
    return RuntimeError(
        "step(): a loss scale is in use but the loss was not scaled on rank"
        f"{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}; call "
        "optimizer.scale_loss(loss).backward() wherever a backward runs, with Accelerate "
        "accelerator.backward(loss)"
    )
