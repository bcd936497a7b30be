"""``optimizer.count``: tokens of a step, for the mean over all ranks' tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import ProcessGroups, warn_first
from shardcast.messages import by_rank
from shardcast.step.decide.decision import Decision
from shardcast.step.decide.options import error_of
from shardcast.step.decide.signal import COUNT, Signal, known
from shardcast.step.reduce.mean import Divisor


class Tokens(Signal):
    """The tokens that a script counts on this rank for the coming step. Does not wait for a device.

    Its part has the number of tokens, 1 if this rank counts, and 1 if it does not. Mistakes: there
    are no tokens, or model-parallel ranks have different numbers; some ranks count and others do
    not.

    Attributes:
        counted: a number was counted, even 0.
        abstains: this rank cannot tell whether it would have counted; it follows the others.
        expected: the last step was counted.
    """

    skips = (True, True)
    counted = abstains = expected = False
    _total: float | Tensor = 0.0  # 0-dim fp64 if tokens on the device are counted

    def __init__(
        self, process_groups: ProcessGroups, divisor: Divisor, device: torch.device
    ) -> None:
        self._process_groups, self._divisor, self._device = process_groups, divisor, device
        self._in_mesh = process_groups.model.size > 1
        self._abstention = torch.zeros(3, dtype=torch.float64, device=device)
        self._none = self._abstention[:1]
        self._yes = self._none + 1.0
        self._no = torch.cat([self._none, self._none, self._yes])

    def clear(self) -> None:
        """Forget the counts, because their gradients were dropped."""
        self.counted = self.abstains = False
        self._total = 0.0

    def abstain(self) -> None:
        """Count nothing on this rank, and divide as the other ranks do."""
        self.clear()
        self.abstains = True

    def conclude(self, decision: Decision) -> None:
        """Called when a step used the counts; warns if there are none, unlike in the last step."""
        if self.expected and not (self.counted or self.abstains):
            warn_first(
                "step: no tokens were counted in this step, unlike the last one, so it uses the "
                "mean over ranks; call optimizer.count in every micro-batch, and again after "
                "zero_grad() and before a second backward (SAM)"
            )
        if self.counted or not self.abstains:
            self.expected = self.counted
        self.clear()

    def add(self, tokens: Any, has_run: bool) -> None:
        """Count the tokens of one micro-batch; see :meth:`shardcast.ShardedOptimizer.count`.

        Args:
            has_run: whether a backward of this step came before it.
        """
        if has_run and not self.counted:
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
        """Return the mistakes, then the totals over all ranks."""
        if self.abstains:  # this rank failed, so it may wait for the device
            self.counted = bool(total[1] > 0)
        # other ranks' tokens are a mistake, and no launch is needed to detect it
        if not self.counted:
            mistakes = total[:2]
            return torch.cat([mistakes, total]) if self._in_mesh else mistakes
        return torch.cat([(~(total[:1] > 0)).double(), total[2:], total])

    def merge(self, readings: Tensor) -> Tensor:
        """Add mistakes if model-parallel ranks have different numbers."""
        none, differ, tokens, *counts = readings.unbind(1)
        differ_in_tokens = (tokens != tokens[0]).any().double()
        across = counts[0].sum() * counts[1].sum()
        mistakes = (
            torch.maximum(none.amax(), differ_in_tokens),
            torch.maximum(differ.amax(), across),
        )
        return torch.stack([*mistakes, tokens[0]])

    def scale(self, reading: Tensor | None) -> Tensor | None:
        """Return tokens per divisor: gradients are divided by ranks, not yet by tokens."""
        if reading is None or not self.counted:
            return None
        return reading[2] / self._divisor.value

    def error(self, mistakes: Sequence[float]) -> RuntimeError:
        everyone = self._process_groups.everyone
        if mistakes[1]:
            facts = {COUNT: repr(self.counted)}
            return error_of(facts, everyone, self._device)
        counts = known(repr(self), everyone, self._device)
        return RuntimeError(
            "optimizer.count: expected more than 0 tokens in a step, and equal counts on "
            f"model-parallel ranks that share a batch, got {by_rank(counts.items())}; skip steps "
            "without tokens, and pass the same count on tensor-parallel ranks and pipeline stages"
        )

    def local(self) -> Tensor:
        if self.abstains:
            return self._abstention
        if not self.counted:
            return self._no
        if isinstance(self._total, Tensor):
            total = self._total.view(1)
        else:  # filled by a kernel, because a copy from the host would wait or need pinned memory
            total = torch.full_like(self._none, self._total)
        return torch.cat([total, self._yes, self._none])

    def __repr__(self) -> str:
        if not self.counted:
            return "nothing"
        is_number = isinstance(self._total, float)
        return f"{self._total:g}" if is_number else "a tensor on the device"
