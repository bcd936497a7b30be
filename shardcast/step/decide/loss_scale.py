"""The loss scale, fixed or dynamic as that of ``torch.amp.GradScaler``, the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast.config import ShardcastConfig

BACKOFF, GROWTH = 0.5, 2.0  # as torch.amp.GradScaler


class LossScale:
    """What the loss is multiplied by.

    Attributes:
        value: 0-dim fp32 on the device, ``None`` where no scale is in use.
        dynamic: it grows and backs off.
        applied: a loss was scaled since the last step.
        wanted: it had to be, for a backward brought gradients.
    """

    def __init__(self, config: ShardcastConfig, device: torch.device) -> None:
        wanted = None if config.loss_scale == 1 else config.loss_scale
        if config.loss_scale is None and config.param_dtype == torch.float16:
            wanted = "dynamic"
        self.dynamic = wanted == "dynamic"
        self.applied = self.wanted = False
        first = config.loss_scale_init if self.dynamic else wanted
        self.value: Tensor | None = None
        if first is not None:
            self.value = torch.tensor(float(first), dtype=torch.float32, device=device)
        self._interval = config.loss_scale_growth_interval
        self._growth = torch.zeros((), dtype=torch.int32, device=device)

    def apply(self, loss: Tensor) -> Tensor:
        """``loss`` times the scale; the same tensor where no scale is in use."""
        self.applied = True
        return loss if self.value is None else loss * self.value

    def inverse(self) -> Tensor | None:
        """By what gradients are unscaled, 0-dim; ``None`` for 1."""
        return None if self.value is None else 1.0 / self.value

    @property
    def missing(self) -> bool:
        """Whether this rank has gradients of a loss that was not scaled."""
        return self.value is not None and self.wanted and not self.applied

    def update(self, skip: Tensor) -> None:
        """A step was made: grow after enough good ones, back off after a skipped one."""
        self.applied = self.wanted = False
        if self.dynamic:
            assert self.value is not None
            torch._amp_update_scale_(
                self.value, self._growth, skip.float(), GROWTH, BACKOFF, self._interval
            )

    def state_dict(self) -> dict[str, float | None]:
        """Plain numbers, ``None`` for a scale that is not in use; waits for the device."""
        scale = None if self.value is None else float(self.value)
        return {"loss_scale": scale, "growth": float(self._growth)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`; a scale that the saved run did not use stays."""
        if self.value is not None and state["loss_scale"] is not None:
            self.value.fill_(state["loss_scale"])
            self._growth.fill_(int(state["growth"]))


def unscaled_error(ranks: Sequence[int]) -> RuntimeError:
    """What every rank raises where the loss was not scaled on ``ranks``."""
    return RuntimeError(
        "step(): a loss scale is in use but the loss was not scaled on rank"
        f"{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}; call "
        "optimizer.scale_loss(loss).backward() wherever a backward runs, with Accelerate "
        "accelerator.backward(loss)"
    )
