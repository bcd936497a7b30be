"""A guard against spikes: steps whose norm, or loss, lies far above those before them.

As OLMo-core's SkipStepOptimizer a step is skipped beyond the mean plus so many standard deviations
of a window, here of the accepted steps alone; or it is clipped to that bound, as ZClip does (arXiv
2504.02507). The window is on the device and equal on all ranks, which judge alike without a word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardcast.option_values import GuardFn, GuardRule


class GuardDecision(NamedTuple):
    """What the guard says of one step.

    Attributes:
        is_spike: 0-dim bool.
        values, bounds: 1-d fp64, of each signal: of this step, and beyond which it is a spike;
            infinite where a function knows it.
        factor: 0-dim fp64 that clips the gradients to the bound, or ``None`` where spikes are
            skipped.
    """

    is_spike: Tensor
    values: Tensor
    bounds: Tensor
    factor: Tensor | None


class Guard:
    """Judges steps by a rule over a window of accepted steps, or by a function.

    Attributes:
        signals: names of what is judged.
        takes_loss: a loss can be given to a step; ``needs_loss``: it must be.
    """

    def __init__(self, rule: GuardRule | GuardFn, device: torch.device) -> None:
        self._rule = rule
        self.signals: Sequence[str] = ("norm",)
        self.takes_loss, self.needs_loss = True, False
        sigmas, window = [], 0
        if isinstance(rule, GuardRule):
            by_signal = {"norm": rule.norm, "loss": rule.loss}
            self.signals = [name for name, sigma in by_signal.items() if sigma is not None]
            sigmas = [by_signal[name] for name in self.signals]
            self.takes_loss = self.needs_loss = rule.loss is not None
            window = rule.window
        self._sigmas = torch.tensor(sigmas, dtype=torch.float64, device=device)
        # The newest accepted values, the last one at the end; NaN where there are none yet.
        self._history = self._sigmas.new_full((len(sigmas), window), math.nan)

    @property
    def nbytes(self) -> int:
        """Bytes of the window."""
        return self._history.nbytes

    def judge(self, norm: Tensor, loss: Tensor | None) -> GuardDecision:
        """What becomes of the step; equal on all ranks whose arguments are, and waits for nothing.

        Args:
            norm, loss: 0-dim fp64: of the gradients before clipping, and the mean over ranks.

        Raises:
            RuntimeError: the loss is needed, and there is none.
            TypeError: the function of the configuration returns no 0-dim tensor of bool.
        """
        if not isinstance(self._rule, GuardRule):
            answer: Any = self._rule(norm.float(), None if loss is None else loss.float())
            if not isinstance(answer, Tensor) or answer.dtype != torch.bool or answer.dim():
                raise TypeError(
                    "guard: expected the function to return a 0-dim tensor of bool (True skips the "
                    f"step), such as norm > 10, got {answer!r}"
                )
            values = norm.view(1)
            return GuardDecision(
                answer & norm.isfinite(), values, torch.full_like(values, math.inf), None
            )
        if self.needs_loss and loss is None:
            raise RuntimeError(
                "step: the guard looks at the loss; call step(loss=loss) on every rank, with the "
                "loss that is not scaled, and clip by max_grad_norm in the configuration, not by "
                "clip_grad_norm_, which decides before the loss is known"
            )
        by_signal = {"norm": norm, "loss": loss}
        values = torch.stack([by_signal[name] for name in self.signals])  # type: ignore[misc]
        is_filled = ~self._history[0].isnan()
        count = is_filled.sum()
        mean = self._history.nansum(1) / count
        squares = (self._history - mean[:, None]).square().nansum(1)
        bounds = mean + self._sigmas * (squares / (count - 1)).sqrt()
        # Half a window first, as OLMo-core: a few steps do not tell what is usual.
        is_active = count >= max(2, self._rule.window // 2)
        # Not values > bounds: a loss that is NaN is a spike.
        is_spike = (~(values <= bounds) & is_active).any() & norm.isfinite()
        factor = None
        if self._rule.action == "clip":
            factor = torch.where(is_spike, bounds[0] / norm, 1.0)
            values = torch.where(is_spike, bounds, values)  # what is trained with
        return GuardDecision(is_spike, values, bounds, factor)

    def record(self, verdict: GuardDecision, skip: Tensor) -> None:
        """Take the step into the window, unless it was skipped or a value is not finite."""
        if self._history.numel():
            # One value that is not finite would leave no bound for a whole window.
            is_taken = ~skip & verdict.values.isfinite().all()
            shifted = torch.cat([self._history[:, 1:], verdict.values[:, None]], 1)
            # In place, so that a captured step goes on where the last one ended.
            self._history.copy_(torch.where(is_taken, shifted, self._history))

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, of each signal the accepted values; waits for the device."""
        rows = zip(self.signals, self._history.tolist(), strict=False)
        return {name: [value for value in row if not math.isnan(value)] for name, row in rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`; of another window the newest steps count.

        The window stays empty where the saved run had none of one of the signals.
        """
        if self._history.numel() and all(name in state for name in self.signals):
            window = self._history.shape[1]
            empty = [math.nan] * window
            rows = [state[name] for name in self.signals]
            if "accepted" in state:  # an older form: rings, which have zeros where nothing is yet
                accepted, size = int(state["accepted"]), len(rows[0])
                places = [n % size for n in range(max(0, accepted - size), accepted)]
                places = [at for at in places if all(math.isfinite(row[at]) for row in rows)]
                rows = [[row[at] for at in places] for row in rows]
            rows = [[*empty, *row][-window:] for row in rows]
            self._history.copy_(torch.tensor(rows, dtype=torch.float64))
