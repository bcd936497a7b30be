"""``optimizer.count``: tokens of a step, for the mean over those of all ranks and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import warn_first
from shardcast.messages import by_rank
from shardcast.step.decide.decision import Decision
from shardcast.step.decide.signal import Reserved, known


class TokenCount(Reserved):
    """The tokens that a script counts on this rank for the coming step; waits for no device.

    Attributes:
        counted: something was counted, be it 0.
        expected: the last step was counted.
    """

    counted = expected = False
    _total: float | Tensor = 0.0  # 0-dim fp64 where tokens on the device are counted

    def clear(self) -> None:
        """Forget the counts: their gradients were dropped."""
        self.counted = False
        self._total = 0.0

    def conclude(self, decision: Decision) -> None:
        """A step used the counts; warn where there are none, unlike in the step before it."""
        if not (self.expected or self.counted):
            return
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

    @property
    def agrees_scale(self) -> bool:  # type: ignore[override]
        return self.counted

    def read(self, total: Tensor) -> Tensor:
        """Return whether there are none, and how many there are over all ranks."""
        return torch.cat([(~(total > 0)).double(), total]) if self.counted else super().read(total)

    def scale(self, reading: Tensor | None) -> Tensor | None:
        """The gradients are sums over a number of ranks, not over tokens."""
        if reading is None or not self.counted:
            return None
        return reading[1] / self._divisor.value

    def error(self, mistakes: Sequence[float]) -> RuntimeError:
        counts = known(repr(self), self._process_groups.everyone, self._device)
        return RuntimeError(
            "optimizer.count: expected more than 0 tokens in a step, and one number on all "
            f"model-parallel ranks of a data-parallel one, got {by_rank(counts.items())}; skip "
            "steps without tokens, and give tensor-parallel ranks and pipeline stages one "
            "number"
        )

    def local(self) -> Tensor:
        """This rank's sum, 1-d fp64 of one element on the device."""
        if not self.counted:
            return self._zeros[:1]
        if isinstance(self._total, Tensor):
            return self._total.view(1)
        # Filled by a kernel: a copy from the host would wait, or need pinned memory.
        return torch.full((1,), self._total, dtype=torch.float64, device=self._device)

    def __repr__(self) -> str:
        if not self.counted:
            return "nothing"
        is_number = isinstance(self._total, float)
        return f"{self._total:g}" if is_number else "a tensor on the device"
