"""``guard``: skip or clip spikes, steps whose norm or loss is far above those before them.

A step is skipped if it exceeds the mean of a window by a number of standard deviations, as in
OLMo-core's SkipStepOptimizer; here the window has only accepted steps. Or it is clipped to that
bound, as in ZClip (arXiv 2504.02507). The window is on the device and equal on all ranks, so they
agree without communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardcast.comm import ProcessGroups
from shardcast.config import ShardcastConfig
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.option_values import FINITE, Option, ValidatedOptions, one_of, option, read_mapping
from shardcast.step.decide.decision import Decision
from shardcast.step.decide.signal import Signal, Verdict
from shardcast.step.step_hook import StepHook

GuardFn = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class GuardRule(ValidatedOptions):
    """Limits for the norm and loss of a step, relative to the steps before.

    Attributes:
        window: number of accepted steps that count.
        norm, loss: standard deviations above the mean that make a step a spike; ``None``: not
            checked.
        action: ``skip`` the step, or ``clip`` its norm to the bound.
    """

    window: int = option(None, within=("a window of at least 2 steps", lambda steps: steps >= 2))
    norm: float | None = option(None, within=FINITE)
    loss: float | None = option(None, within=FINITE)
    action: str = option("skip", within=one_of("skip", "clip"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm is None and self.loss is None:
            raise ValueError("expected 'norm' or 'loss', in standard deviations, got neither")
        if self.action == "clip" and self.loss is not None:
            raise ValueError("action: expected 'skip' with 'loss', got 'clip'")


@dataclass(frozen=True)
class GuardVerdict(Verdict):
    """The guard's verdict on one step.

    Attributes:
        factor: 0-dim fp64 that clips the gradients to the bound; ``None``: spikes are skipped.
        is_spike: 0-dim bool.
        values, bounds: 1-d fp64, the checked numbers of this step and the bounds above which they
            are spikes; infinite if a function decides.
    """

    is_spike: Tensor = field(kw_only=True)
    values: Tensor = field(kw_only=True)
    bounds: Tensor = field(kw_only=True)


class Guard(Signal):
    """Judges steps by a rule over a window of accepted steps, or by a function.

    Its numbers: spikes so far, whether the last skipped step was one, its values and bounds.

    Attributes:
        judged: names of the checked values.
        takes_loss: ``step()`` accepts a loss.
    """

    name = "guard"
    skips = ()

    def __init__(self, rule: GuardRule | GuardFn, ranks: int, device: torch.device) -> None:
        self._rule, self._ranks, self._device = rule, ranks, device
        self.judged: Sequence[str] = ("norm",)
        self.takes_loss = True
        sigmas, window = [], 0
        if isinstance(rule, GuardRule):
            by_signal = {"norm": rule.norm, "loss": rule.loss}
            self.judged = [name for name, sigma in by_signal.items() if sigma is not None]
            sigmas = [by_signal[name] for name in self.judged]
            self.takes_loss = rule.loss is not None
            window = rule.window
        self._sigmas = torch.tensor(sigmas, dtype=torch.float64, device=device)
        # The newest accepted values, the latest one last; NaN for values not yet seen.
        self._history = self._sigmas.new_full((len(sigmas), window), math.nan)
        self.noted = 2 + 2 * len(self.judged)
        self.numbers = self._sigmas.new_zeros(self.noted)

    def nbytes(self) -> int:
        """Return the bytes of the window."""
        return self._history.nbytes

    def take_loss(self, loss: object) -> None:
        self.loss = None
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                shape = tuple(loss.shape)
                raise ValueError(
                    f"step: expected loss= a number or a 0-dim tensor, got shape {shape}"
                )
        elif loss is not None and not isinstance(loss, (int, float)):
            kind = type(loss).__name__
            raise ValueError(f"step: expected loss= a number or a 0-dim tensor, got {kind}")
        self.loss = loss

    def arguments(self) -> Mapping[str, Any]:
        return {"loss": self.loss is not None}

    def local(self) -> Tensor:
        """Return this rank's loss: empty if losses are not checked, 0 if none was passed."""
        if not self.takes_loss:
            return self._sigmas.new_empty(0)
        if isinstance(self.loss, Tensor):
            return self.loss.detach().to(self._device, torch.float64).reshape(1)
        return self._sigmas.new_full((1,), 0.0 if self.loss is None else self.loss)

    def read(self, total: Tensor) -> Tensor:
        """Return the mean over ranks."""
        return total / self._ranks

    def merge(self, readings: Tensor) -> Tensor:
        return readings.mean(0)

    def judge(self, reading: Tensor, norm: Tensor) -> GuardVerdict:
        """Decide whether the step is a spike.

        Args:
            reading: mean of the losses, 1-d, if losses are checked.

        Raises:
            RuntimeError: the rule needs a loss and none was passed.
            TypeError: the configured function returned something else than a 0-dim bool tensor.
        """
        loss = None if self.loss is None else reading[0]
        if not isinstance(self._rule, GuardRule):
            answer: object = self._rule(norm.float(), None if loss is None else loss.float())
            if not isinstance(answer, Tensor) or answer.dtype != torch.bool or answer.dim():
                raise TypeError(
                    "guard: expected the function to return a 0-dim tensor of bool (True skips the "
                    f"step), such as norm > 10, got {answer!r}"
                )
            values, is_spike = norm.view(1), answer & norm.isfinite()
            bounds = torch.full_like(values, math.inf)
            return GuardVerdict(skip=is_spike, is_spike=is_spike, values=values, bounds=bounds)
        if "loss" in self.judged and loss is None:
            raise RuntimeError(
                "step: the guard needs the loss; call step(loss=loss) with the unscaled loss on "
                "every rank, and clip with max_grad_norm in the configuration, not with "
                "clip_grad_norm_, which decides before the loss is known"
            )
        by_signal = {"norm": norm, "loss": loss}
        values = torch.stack([by_signal[name] for name in self.judged])  # type: ignore[misc]
        is_filled = ~self._history[0].isnan()
        count = is_filled.sum()
        mean = self._history.nansum(1) / count
        squares = (self._history - mean[:, None]).square().nansum(1)
        bounds = mean + self._sigmas * (squares / (count - 1)).sqrt()
        # Starts after half a window, as in OLMo-core: a few steps do not show what is usual.
        is_active = count >= max(2, self._rule.window // 2)
        # Not values > bounds, so that a NaN loss is a spike.
        is_spike = (~(values <= bounds) & is_active).any() & norm.isfinite()
        factor = None
        if self._rule.action == "clip":
            factor = torch.where(is_spike, bounds[0] / norm, 1.0)
            values = torch.where(is_spike, bounds, values)  # the clipped values are trained with
        skip = is_spike if factor is None else None
        return GuardVerdict(factor, skip, is_spike=is_spike, values=values, bounds=bounds)

    def note(self, decision: Decision) -> None:
        verdict = decision.verdicts.get(self)
        if isinstance(verdict, GuardVerdict):
            spikes, by_guard, spike = self.numbers.split([1, 1, self.noted - 2])
            latest = torch.cat([verdict.values, verdict.bounds])
            spikes += verdict.is_spike
            by_guard.copy_(torch.where(decision.skip, verdict.is_spike, by_guard))
            spike.copy_(torch.where(verdict.is_spike, latest, spike))

    def reason(self, numbers: Sequence[float]) -> tuple[str, str] | None:
        _, by_guard, *spike = numbers
        if not by_guard:
            return None
        count = len(self.judged)
        exceeding = ", ".join(
            f"{name} {value:.4g}" + f" (bound {bound:.4g})" * math.isfinite(bound)
            for name, value, bound in zip(self.judged, spike[:count], spike[count:], strict=True)
        )
        return f"by the guard: {exceeding}", (
            "Lower the learning rate, look at the data of these steps, or widen the guard: "
            "skipped steps do not move its bound."
        )

    def conclude(self, decision: Decision) -> None:
        """Add the step to the window, unless it was skipped or a value is not finite."""
        verdict = decision.verdicts.get(self)
        if self._history.numel() and isinstance(verdict, GuardVerdict):
            # One non-finite value would make the bound useless for a whole window.
            is_taken = ~decision.skip & verdict.values.isfinite().all()
            shifted = torch.cat([self._history[:, 1:], verdict.values[:, None]], 1)
            # In place, so that a captured step continues where the last one ended.
            self._history.copy_(torch.where(is_taken, shifted, self._history))

    def state_dict(self) -> dict[str, object]:
        """Return the number of spikes, and the accepted values of each checked number."""
        rows = zip(self.judged, self._history.tolist(), strict=False)
        window = {name: [value for value in row if not math.isnan(value)] for name, row in rows}
        return {"spikes": float(self.numbers[0]), "guard": window}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned. For another window the newest steps count.

        The window stays empty if the saved run did not check one of the numbers.
        """
        self.numbers[0] = state.get("spikes", 0)
        saved = state.get("guard", {})
        if self._history.numel() and all(name in saved for name in self.judged):
            window = self._history.shape[1]
            rows = [[*[math.nan] * window, *saved[name]][-window:] for name in self.judged]
            self._history.copy_(torch.tensor(rows, dtype=torch.float64))


class Guarded(StepHook):
    """Counters of the guard."""

    name = "guard"

    def __init__(self, optimizer: PackedOptimizer) -> None:
        self._guard: Guard | None = optimizer.decider.signal_of("guard")

    @property
    def guarded_steps(self) -> int:
        """Number of spikes that the ``guard`` skipped or clipped. Waits for the device."""
        return 0 if self._guard is None else int(self._guard.numbers[0])


def _read(name: str, value: object) -> GuardRule | Callable[..., object]:
    if isinstance(value, GuardRule) or callable(value):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name}: expected a mapping such as {{'norm': 6.0, 'window': 128}}, a function (norm, "
            f"loss) -> bool tensor or None, got {value!r} ({type(value).__name__})"
        )
    return read_mapping(GuardRule, value, name)


def _signal(config: ShardcastConfig, process_groups: ProcessGroups, device: torch.device) -> Guard:
    rule: Any = config.guard  # not None, because the option is on
    return Guard(rule, process_groups.dp.size, device)


OPTION = Option(
    help="skip spikes: {norm: 6.0, window: 128} skips a step whose gradient norm exceeds the mean "
    "of the last 128 accepted steps by more than 6 standard deviations; add action: clip to clip "
    "it instead, or loss: 6.0 for the same rule on step(loss=...); or a function of norm and loss; "
    "null: off",
    within=("a mapping or a function", lambda _: True),
    read=_read,
    signal=_signal,
    hook=Guarded,
)
