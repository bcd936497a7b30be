"""The tokens of a step, for the mean over those of all ranks and micro-batches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import warn_first


class TokenCount:
    """What a script counts on this rank for the coming step; waits for no device.

    Attributes:
        counted: something was counted, be it 0.
        expected: the last step was counted.
    """

    counted = expected = False
    _total: float | Tensor = 0.0  # 0-dim fp64 where tokens on the device are counted

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def clear(self) -> None:
        """Forget the counts: their gradients were dropped."""
        self.counted, self._total = False, 0.0

    def conclude(self) -> None:
        """A step used the counts; warn where there are none, unlike in the step before it."""
        if self.expected and not self.counted:
            warn_first(
                "step: no tokens were counted, though they were for the last step, so that this "
                "one is the mean over ranks; call optimizer.count in every micro-batch, again "
                "after zero_grad() and before a second backward (SAM)"
            )
        self.expected = self.counted
        self.clear()

    def add(self, tokens: Any, backwards: int) -> None:
        """Count the tokens of one micro-batch; see :meth:`shardcast.ShardedOptimizer.count`.

        Args:
            backwards: how many of this step came before it.
        """
        if backwards and not self.counted:
            raise RuntimeError(
                "count: called after a backward of this step that was not counted; count each "
                "micro-batch before its backward, or call optimizer.zero_grad() to drop gradients "
                "of another step"
            )
        is_tensor = isinstance(tokens, Tensor) and tokens.dim() == 0
        if is_tensor and not _compat.is_host(tokens.device):
            self._total = tokens.detach().double() + self._total
        else:
            number = tokens.item() if is_tensor else tokens
            is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
            if not is_number or not 0 <= number < math.inf:
                raise ValueError(
                    f"count: expected a number >= 0 or a 0-dim tensor of tokens, got {tokens!r}"
                )
            self._total = self._total + number
        self.counted = True

    def local(self) -> Tensor:
        """This rank's sum, 1-d fp64 of one element on the device."""
        if isinstance(self._total, Tensor):
            return self._total.view(1)
        # Filled by a kernel: a copy from the host would wait, or need pinned memory.
        return torch.full((1,), self._total, dtype=torch.float64, device=self._device)

    def __repr__(self) -> str:
        if not self.counted:
            return "nothing"
        is_number = isinstance(self._total, float)
        return f"{self._total:g}" if is_number else "a tensor on the device"
