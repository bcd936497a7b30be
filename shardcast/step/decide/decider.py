"""Decide: one small all-reduce determines whether and how a step is made.

The norm, the non-finite flag, the loss scale and the step's factors are scalars on the device. No
method here waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import ProcessGroups
from shardcast.config import ShardcastConfig
from shardcast.plan.originals import OptimizerList
from shardcast.step.decide.decision import Decision
from shardcast.step.decide.loss_scale import LossScale
from shardcast.step.decide.norm import GradientNorm, product
from shardcast.step.decide.options import OptionCheck
from shardcast.step.decide.presence import Presence
from shardcast.step.decide.refusal import Refusal
from shardcast.step.decide.report import Report, SkipReport
from shardcast.step.decide.signal import LEFT, Signal, Verdict
from shardcast.step.decide.tokens import Tokens
from shardcast.step.reduce.reducer import Reducer

Parts = Mapping[Signal, Tensor]


class Decider:
    """The norm, clipping factors, loss scale and skip decision of every step.

    The control vector has the doubles of a step's one small all-reduce. Each signal contributes a
    slice. The norm's slice has the powers of each group (with norm_type inf those of each rank,
    because a sum cannot give a maximum), and for each data-parallel rank its first non-finite pack.
    Then follow presence, options and all other signals. The size is
    ``8 * (groups + ranks + slots + 9)`` bytes: 11 KB for AdamW with 2 groups and 300 parameters on
    1,024 ranks, 2.5 KB on 2.

    Args:
        reduce: reduces the gradients. Its divisor and history must be equal on all ranks.
        device: device of the scalars.
        originals: the optimizers, whose groups it reads.

    Attributes:
        refusal: holds errors of this rank until all ranks raise them.
        loss_scale: ``None`` if the options have none.
        tokens: the tokens that a script counts.
        presence: which parameters a step updates, and how many steps have updated each.
        signals: first the core's, then the options', in their order.
        left: trained parameters that are no longer in the model, by name.
    """

    left = ""

    def __init__(
        self,
        reduce: Reducer,
        process_groups: ProcessGroups,
        config: ShardcastConfig,
        device: torch.device,
        originals: OptimizerList,
    ) -> None:
        self._reduce, self._process_groups, self._device = reduce, process_groups, device
        grads = reduce.grads
        self._clip_value: float | None = None  # bound for the coming step
        self._norm = GradientNorm(grads, originals, process_groups, config.norm_type, device)
        self.presence = Presence(grads, process_groups, device)
        self.loss_scale = LossScale(config, process_groups, device) if config.scales_loss else None
        self.refusal = Refusal(process_groups, device)
        self._options = OptionCheck(originals, grads, process_groups, device)
        self.tokens = Tokens(process_groups, reduce.divisor, device)
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
        self._report = Report(self.signals, device)
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

    def signal_of(self, name: str) -> Any:
        """Return the signal of that name; ``None`` if there is none."""
        return next((signal for signal in self.signals if signal.name == name), None)

    @property
    def takes_loss(self) -> bool:
        """Whether a signal accepts a loss."""
        return any(signal.takes_loss for signal in self.signals)

    def _take_loss(self, loss: Any) -> None:
        """Pass this rank's loss of the step to the signals that use it.

        Raises:
            TypeError: no signal uses it.
            ValueError: it is not a number.
        """
        if loss is not None and not self.takes_loss:
            raise TypeError(
                "step: expected no loss=, because only a guard on the loss uses it: set "
                "guard={'loss': 6.0, 'window': 128} in the configuration"
            )
        for signal in self.signals:
            if signal.takes_loss:
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
        """Decide over all ranks' spans. Collective: every rank, after the reduction.

        Args:
            max_norm: bound of the norm of all groups without their own ``max_grad_norm``; the
                others are clipped separately.
            pending: an earlier decision on these gradients. They count as clipped by it, and the
                new factors include its factors.
            loss: this rank's loss, for a signal that uses it.
            judges: let signals judge these gradients, unless they did so for ``pending``.
            call: the caller, equal on all ranks.

        Raises:
            TypeError, ValueError: on every rank: no signal uses the loss.
            RuntimeError: on every rank: a rank did not scale its loss, or ranks differ in options
                of groups. On an accelerator the step is skipped instead, and
                :meth:`SkipReport.poll` raises later.
        """
        self.refusal.call = call
        with self.refusal.held():
            self._reduce.check()
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
        skip = self._report.skips(report)
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
        """Return each signal's reading of its slice of the sum, across model-parallel ranks."""
        readings = {signal: signal.read(total) for signal, total in totals.items()}
        comm = self._process_groups.model
        if comm.size == 1:
            return readings
        row = torch.cat([*readings.values()])
        gathered = row.new_empty(comm.size, row.numel())  # in rank order, equal on all ranks
        comm.all_gather(gathered.view(-1), row, "the decision")
        rows = gathered.split([*map(Tensor.numel, readings.values())], 1)
        return {it: it.merge(row) for it, row in zip(readings, rows, strict=True)}

    def _scale(self, readings: Parts) -> tuple[Tensor | None, Tensor | None]:
        """Return the scale of the gradients in own spans, and the factor that removes it."""
        scale: Tensor | None = None
        for signal in self.signals:
            scale = product(signal.scale(readings.get(signal)), scale)
        return scale, None if scale is None else (1.0 / scale).float()

    @property
    def meets(self) -> bool:
        """Whether :meth:`meet` communicates."""
        return self._process_groups.everyone.size > 1 and _compat.is_host(self._device)

    @torch.no_grad()
    def meet(self, call: str) -> None:
        """Begin a collective call other than a step; all ranks raise if some make another call.

        It sends a message in the form of a decision, so that a rank in a step learns of it, too:
        gloo ends the process if ranks bring tensors of different sizes. On an accelerator a step
        does not wait for its decision, so nothing is sent.

        Raises:
            Exception: on every rank: an error that a rank held back, a different call, or different
                loaded weights.
        """
        self._reduce.complete()
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
        self.refusal.loads.clear()  # equal on all ranks; sleep() takes their memory

    def _judged(self, readings: Parts, norm: Tensor) -> dict[Signal, Verdict]:
        verdicts = {}
        for signal in self.signals:
            if (verdict := signal.judge(readings[signal], norm)) is not None:
                verdicts[signal] = verdict
        return verdicts

    def _arguments(self, max_norm: float | None) -> dict[str, object]:
        """Return arguments of the step that must be equal on all ranks."""
        arguments: dict[str, Any] = {
            "max_norm": max_norm,
            "clip_value": self._clip_value,
            "divisor": self._reduce.divisor.given,
        }
        for signal in self.signals:
            arguments.update(signal.arguments())
        arguments |= {LEFT: self.left, **self._reduce.history}
        self._clip_value = None
        return arguments

    def clip_value(self, limit: float, pending: Decision | None) -> None:
        """Clamp this rank's spans to ``[-limit, limit]``, in units without loss scale.

        Local, unless tokens are counted: then a decision sums them over all ranks.

        Args:
            pending: the decision whose factors will multiply the gradients.
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
        """Raise for mistakes of some ranks; warn if ranks train different parameters.

        On a CPU all ranks call it in the same step and exchange their facts. On an accelerator each
        rank calls it when it has the numbers, and reports its own facts.
        """
        if not any(mistakes):
            return
        for signal, own in self._report.by_signal(mistakes):
            if any(own) and (error := signal.error(own)) is not None:
                raise error

    def conclude(self, decision: Decision) -> None:
        """Count the step, made or skipped, and adapt the loss scale. Local."""
        self.skips.count(decision)
        for signal in self.signals:
            signal.conclude(decision)

    def cleared(self) -> None:
        """Called when a script drops the gradients of the coming step. Local."""
        for signal in self.signals:
            signal.cleared()

    def state_dict(self) -> dict[str, object]:
        """Return plain numbers; waits for the device."""
        state: dict[str, Any] = {"loss_scale": None, "growth": 0.0, **self.skips.state_dict()}
        for signal in self.signals:
            state.update(signal.state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
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
