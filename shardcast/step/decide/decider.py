"""Decide: one small all-reduce says how, and whether, the step is made.

The norm, the non-finite flag, the loss scale and the step's factors are scalars on the device; no
method here waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import ProcessGroups
from shardcast.config import ShardcastConfig
from shardcast.memory.gradients import Gradients
from shardcast.plan.originals import OptimizerList
from shardcast.step.decide.decision import Decision
from shardcast.step.decide.loss_scale import LossScale
from shardcast.step.decide.norm import GradientNorm, product
from shardcast.step.decide.options import OptionCheck
from shardcast.step.decide.presence import Presence
from shardcast.step.decide.refusal import Refusal
from shardcast.step.decide.report import Report, SkipReport
from shardcast.step.decide.signal import LEFT, Signal, Verdict, defining
from shardcast.step.decide.tokens import Tokens
from shardcast.step.reduce.mean import Divisor

Parts = Mapping[Signal, Tensor]


class Decider:
    """The norm, clipping factors, loss scale and the decision to skip, for every step.

    The control vector, the doubles of the one small all-reduce of a step, has the parts of the
    signals: of the norm, which has the powers of each group (of each rank, with norm_type inf: no
    sum gives a maximum) and for each data-parallel rank its first pack that is not finite; of
    presence, options and all others. That is ``8 * (groups + ranks + slots + 9)`` bytes: 11 KB for
    AdamW with 2 groups and 300 parameters on 1,024 ranks, 2.5 KB on 2.

    Args:
        grads: the gradient packs that are reduced; the list may grow.
        device: where the scalars live.
        originals: the optimizers, whose groups it reads.
        divisor: of the mean, which all ranks must have alike.
        history: what this rank did to means since the last step, which all must do alike.

    Attributes:
        refusal: takes errors of this rank alone, which all ranks are to raise.
        loss_scale: ``None`` where the options have none.
        tokens: what a script counts.
        presence: the parameters that a step updates, and how many steps have updated each.
        signals: of the core, then those of the options, in their order.
        check: raises what was wrong with the gradients of this rank.
        left: the trained parameters that are no longer in the model, by name.
    """

    left = ""

    def __init__(
        self,
        grads: Sequence[Gradients],
        process_groups: ProcessGroups,
        config: ShardcastConfig,
        device: torch.device,
        originals: OptimizerList,
        divisor: Divisor,
        history: Mapping[str, Any],
    ) -> None:
        self._history = history
        self._grads, self._process_groups, self._device = grads, process_groups, device
        self._divisor = divisor
        self._clip_value: float | None = None  # of the coming step
        self._norm = GradientNorm(grads, originals, process_groups, config.norm_type, device)
        self.presence = Presence(grads, process_groups, device)
        self.loss_scale = LossScale(config, process_groups, device) if config.scales_loss else None
        self.check: Callable[[], None] = lambda: None
        self.refusal = Refusal(process_groups, device)
        self._options = OptionCheck(
            originals.option_names(),
            lambda: originals.groups,
            self._trained,
            process_groups,
            device,
        )
        self.tokens = Tokens(process_groups, divisor, device)
        options = config.extensions().values()
        self.signals: list[Signal] = [
            self._norm,
            self.refusal,
            self.presence,
            *([] if self.loss_scale is None else [self.loss_scale]),
            self.tokens,
            self._options,
            *(it.signal(config, process_groups, device) for it in options if it.signal),
        ]
        # Finite powers have a finite norm here.
        is_finite = process_groups.model.size == 1 and config.norm_type >= 1
        self._report = Report(self.signals, device, is_finite)
        self.skips = SkipReport(
            self._norm,
            process_groups.dp,
            device,
            self._refuse,
            self._report,
            config.max_skipped_steps,
            self.loss_scale is not None and self.loss_scale.dynamic,
            self.signals,
            process_groups.everyone,
        )
        self.presence.made = self.skips.made
        # Those that define a method: in a step the others cost nothing.
        self._gives, self._reads, self._scales, self._judges, self._concludes = (
            defining(method, self.signals)
            for method in ("arguments", "read", "scale", "judge", "conclude")
        )
        self._takes_loss = [signal for signal in self.signals if signal.takes_loss]

    def signal_of(self, name: str) -> Any:
        """The signal of that name; ``None`` where there is none."""
        return next((signal for signal in self.signals if signal.name == name), None)

    @property
    def takes_loss(self) -> bool:
        """Return whether a loss can be given to a step."""
        return bool(self._takes_loss)

    def _take_loss(self, loss: Any) -> None:
        """Have this rank's loss of the step in the signals that look at it.

        Raises:
            TypeError: none does.
            ValueError: it is not a number.
        """
        if loss is not None and not self._takes_loss:
            raise TypeError(
                "step: expected no loss=, which only a guard that looks at the loss takes: set "
                "guard={'loss': 6.0, 'window': 128} in the configuration"
            )
        for signal in self._takes_loss:
            signal.take_loss(loss)

    @torch.no_grad()
    def decide(
        self,
        max_norm: float | None,
        pending: Decision | None = None,
        loss: float | Tensor | None = None,
        judges: bool = True,
        call: str = "step",
    ) -> Decision:
        """Decide over all ranks' own spans. Every rank must call it, after the reduction.

        Args:
            max_norm: bound of the norm of all groups that have no ``max_grad_norm`` of their own;
                those that have one are clipped by themselves.
            pending: an earlier decision on these gradients: they count as clipped by it, and the
                new factors hold for both.
            loss: of this rank, for a signal that takes it.
            judges: signals judge these gradients, unless they did so for ``pending``.
            call: in which it is made, alike on all ranks.

        Raises:
            TypeError, ValueError: on every rank, for a loss that no signal takes.
            RuntimeError: on every rank, if on one of them the loss was not scaled, or if they
                differ in options of groups. On an accelerator the step is skipped for it, and
                :meth:`SkipReport.poll` raises.
        """
        self.refusal.call = call
        with self.refusal.held():
            self.check()
            if loss is not None or self._takes_loss:
                self._take_loss(loss)
        self._options.given = self._arguments(max_norm)
        self._norm.begin(max_norm, pending)
        own = [signal.local() for signal in self.signals]
        vector = torch.cat(own)
        self._process_groups.dp.all_reduce(vector, "the control vector")
        totals = dict(zip(self.signals, vector.split([*map(Tensor.numel, own)]), strict=True))
        readings = self._readings(totals)
        scale, unscale = self._scale(readings)
        norm = self._norm.total(readings[self._norm], scale)
        report = self._report.of(norm, readings)
        skip = self._report.skips(report, scale is not None)
        if _compat.is_host(self._device):
            self._refuse(self._report.mistakes(report))
        verdicts: Mapping[Signal, Verdict] = {}
        if pending is not None:
            verdicts = pending.verdicts
        elif judges:
            verdicts = self._judged(readings, norm)
        before = unscale if pending is not None else _with_factors(unscale, verdicts)
        norm, factors = self._norm.clip(readings[self._norm], norm, scale, unscale, before)
        declined = _declined(verdicts)
        skip = skip if declined is None else skip | declined
        taken, multiplier, increment = self._report.tally(skip, report)
        return Decision(
            norm=norm,
            skip=skip,
            factors=factors,
            unscale=unscale,
            verdicts=verdicts,
            declined=declined,
            present=self.presence.anywhere(totals[self.presence]),
            taken=taken,
            multiplier=multiplier,
            increment=increment,
        )

    def _readings(self, totals: Parts) -> Parts:
        """Return what each signal reads in its part of the sum, model-parallel ranks included."""
        readings = {**totals}
        for signal in self._reads:
            readings[signal] = signal.read(totals[signal])
        comm = self._process_groups.model
        if comm.size == 1:
            return readings
        row = torch.cat([*readings.values()])
        gathered = row.new_empty(comm.size, row.numel())  # in rank order, the same on all ranks
        comm.all_gather(gathered.view(-1), row, "the decision")
        rows = gathered.split([*map(Tensor.numel, readings.values())], 1)
        return {it: it.merge(row) for it, row in zip(readings, rows, strict=True)}

    def _scale(self, readings: Parts) -> tuple[Tensor | None, Tensor | None]:
        """Return the scale of the gradients in the own spans, and the factor that removes it."""
        scale: Tensor | None = None
        for signal in self._scales:
            scale = product(signal.scale(readings.get(signal)), scale)
        return scale, None if scale is None else (1.0 / scale).float()

    @property
    def meets(self) -> bool:
        """Return whether :meth:`meet` sends anything."""
        return self._process_groups.everyone.size > 1 and _compat.is_host(self._device)

    @torch.no_grad()
    def meet(self, call: str) -> None:
        """Begin a call, beside the steps, that all ranks make; they raise if some make another one.

        By a message of the form of a decision, so that a rank in a step learns of it, too: gloo
        ends the process where ranks bring tensors of different sizes. On an accelerator a step does
        not wait for its decision, and nothing is sent.

        Raises:
            Exception: on every rank, an error that a rank held back, another call, or other weights
                that were loaded.
        """
        if not self.meets:
            return
        self.refusal.call = call
        lengths = [signal.numel() for signal in self.signals]
        vector = torch.zeros(sum(lengths), dtype=torch.float64, device=self._device)
        totals = dict(zip(self.signals, vector.split(lengths), strict=True))
        totals[self.refusal].copy_(self.refusal.local())
        self._process_groups.dp.all_reduce(vector, call)
        if self._process_groups.model.size > 1:
            reading = self._readings(totals)[self.refusal]
        else:
            reading = self.refusal.read(totals[self.refusal])
        if any(mistakes := reading.tolist()):
            raise self.refusal.error(mistakes)

    def _judged(self, readings: Parts, norm: Tensor) -> dict[Signal, Verdict]:
        verdicts = {}
        for signal in self._judges:
            if (verdict := signal.judge(readings[signal], norm)) is not None:
                verdicts[signal] = verdict
        return verdicts

    def _arguments(self, max_norm: float | None) -> dict[str, Any]:
        """Return what a script gave to the step, which ranks must have alike."""
        arguments: dict[str, Any] = {
            "max_norm": max_norm,
            "clip_value": self._clip_value,
            "divisor": self._divisor.given,
        }
        for signal in self._gives:
            arguments.update(signal.arguments())
        arguments |= {LEFT: self.left, **self._history}
        self._clip_value = None
        return arguments

    def _trained(self) -> dict[nn.Parameter, str]:
        """Name the parameters that are reduced."""
        packs = [grads.pack for grads in self._grads]
        slots = [slot.name for pack in packs for slot in pack.layout.slots]
        return dict(zip((param for pack in packs for param in pack.params), slots, strict=True))

    def clip_value(self, limit: float, pending: Decision | None) -> None:
        """Clamp the own spans to ``[-limit, limit]``, loss scale considered.

        Local, but where tokens are counted: then a decision tells how many all ranks have.

        Args:
            pending: the decision by whose factors the gradients are going to be multiplied.
        """
        unscale = None
        if pending is None and any(signal.agrees_scale for signal in self.signals):
            unscale = self.decide(
                None, judges=False, call="clip_grad_value_ of counted tokens"
            ).unscale
        elif pending is None:
            unscale = self._scale({})[1]
        self._clip_value = limit
        self._norm.clamp_(limit, unscale, pending)

    def _refuse(self, mistakes: Sequence[float]) -> None:
        """Raise for mistakes of some ranks, and warn where they train other parameters.

        On a CPU all ranks call it in the same step, and exchange what they know; on an accelerator
        each calls it when it has the numbers, and names its own.
        """
        if not any(mistakes):
            return
        for signal, own in self._report.by_signal(mistakes):
            if any(own) and (error := signal.error(own)) is not None:
                raise error

    def conclude(self, decision: Decision) -> None:
        """Count the step, made or skipped, and adapt the loss scale. Local."""
        self.skips.count(decision)
        for signal in self._concludes:
            signal.conclude(decision)

    def cleared(self) -> None:
        """Called when a script drops the gradients of the coming step; local."""
        for signal in self.signals:
            signal.cleared()

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers; waits for the device."""
        state: dict[str, Any] = {"loss_scale": None, "growth": 0.0, **self.skips.state_dict()}
        for signal in self.signals:
            state.update(signal.state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`."""
        for signal in self.signals:
            signal.load_state_dict(state)
        self.skips.load_state_dict(state)


def _with_factors(unscale: Tensor | None, verdicts: Mapping[Signal, Verdict]) -> Tensor | None:
    for verdict in verdicts.values():
        if verdict.factor is not None:
            unscale = product(unscale, verdict.factor.float())
    return unscale


def _declined(verdicts: Mapping[Signal, Verdict]) -> Tensor | None:
    """Return whether a verdict skips the step, 0-dim."""
    declined: Tensor | None = None
    for verdict in verdicts.values():
        if verdict.skip is not None:
            declined = verdict.skip if declined is None else declined | verdict.skip
    return declined
