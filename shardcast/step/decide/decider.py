"""Decide: one small all-reduce says how, and whether, the step is made.

The norm, the non-finite flag, the loss scale and the step's factors are scalars on the device; no
method here waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import ProcessGroups
from shardcast.config import ShardcastConfig
from shardcast.memory.gradients import Gradients
from shardcast.option_values import load_extension
from shardcast.plan.layout import GroupId
from shardcast.plan.originals import OptimizerList
from shardcast.step.decide.decision import Decision, Presence
from shardcast.step.decide.loss_scale import LossScale
from shardcast.step.decide.norm import PNorm, clamp_, clip_factors
from shardcast.step.decide.options import OptionCheck
from shardcast.step.decide.signal import (
    LEFT,
    Later,
    Refusal,
    Reserved,
    Signal,
    Verdict,
    to_device,
)
from shardcast.step.decide.skip_report import SkipReport
from shardcast.step.reduce.mean import Divisor
from shardcast.step.reduce.micro_batches import MicroBatches


class Decider:
    """The norm, clipping factors, loss scale and the decision to skip, for every step.

    The control vector, the doubles of the one small all-reduce of a step, has the powers of the
    norm of each group (of each rank, with norm_type inf: no sum gives a maximum), for each
    data-parallel rank its first pack that is not finite, and the parts of the signals. That is
    ``8 * (groups + ranks + slots + 9)`` bytes: 11 KB for AdamW with 2 groups and 300 parameters on
    1,024 ranks, 2.5 KB on 2.

    Args:
        grads: the gradient packs that are reduced; the list may grow.
        device: where the scalars live.
        originals: the optimizers, whose groups it reads.
        divisor: of the mean, which all ranks must have alike.
        micro_batches: of a step, where these have an order.
        history: what this rank did to means since the last step, which all must do alike.

    Attributes:
        refusal: takes errors of this rank alone, which all ranks are to raise.
        loss_scale: ``None`` where the options have none.
        tokens: what a script counts.
        signals: of the core, then those of the options, in their order.
        left: the trained parameters that are no longer in the model, by name.
    """

    left = ""

    def __init__(
        self, grads: Sequence[Gradients], process_groups: ProcessGroups, config: ShardcastConfig,
        device: torch.device, originals: OptimizerList, divisor: Divisor,
        micro_batches: MicroBatches | None, history: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._history = history
        self._grads, self._process_groups, self._device = grads, process_groups, device
        self._originals, self._divisor = originals, divisor
        self._clip_value: float | None = None  # of the coming step
        self.loss_scale = LossScale(config, process_groups, device) if config.scales_loss else None
        self._micro_batches, self._alignment = micro_batches, config.alignment
        norm = PNorm if micro_batches is None else micro_batches.norm
        self._norm: PNorm = norm(config.norm_type, device)
        self._one_each = torch.ones(2, dtype=torch.float64, device=device)
        self._presence = Presence(grads, process_groups, device)
        self.refusal = Refusal(process_groups.everyone, device)
        self._options = OptionCheck(
            originals.option_names(), lambda: originals.groups, self._trained, process_groups,
            device,
        )  # fmt: skip
        self.tokens = Reserved(process_groups, divisor, device)
        options = config.extensions().values()
        self.signals: list[Signal] = [
            self._presence, self.refusal,
            *([] if self.loss_scale is None else [self.loss_scale]), self._options, self.tokens,
            *(it.signal(config, process_groups, device) for it in options if it.signal),
            *(Later(name, mistakes, device) for name, (_, mistakes) in config.later().items()),
        ]  # fmt: skip
        self._index()
        skips = sorted((it for signal in self.signals for it in signal.skips), reverse=True)
        ranks = process_groups.dp.size
        self._skipping = slice(3, 3 + ranks + sum(skips))  # packs and mistakes that skip a step
        # A report skips a step if this product is not 0: with a norm that is not finite it is NaN.
        skips_if = [0.0, 0.0, 0.0, *[0.0] * ranks, *map(float, skips)]
        self._skips_if = to_device(skips_if, torch.float64, device)
        # Finite powers have a finite norm here; a loss scale of 0 has not.
        self._norm_is_finite = process_groups.model.size == 1 and config.norm_type >= 1
        self._members: Tensor | None = None  # of which group each pack is, (packs, groups), bool
        self._members_shape = (0, 0)
        self.skips = SkipReport(
            grads, process_groups.dp, device, self._refuse, len(skips), config.max_skipped_steps,
            self.loss_scale is not None and self.loss_scale.dynamic, self.signals,
            process_groups.everyone,
        )  # fmt: skip

    def _index(self) -> None:
        """Note which signals define a method: in a step the others cost nothing."""

        def defining(method: str) -> list[int]:
            default = getattr(Signal, method)
            return [n for n, it in enumerate(self.signals) if getattr(type(it), method) != default]

        self._gives, self._reads = defining("arguments"), defining("read")
        self._scales, self._judges = defining("scale"), defining("judge")
        self._concludes = defining("conclude")
        self._takes_loss = [signal for signal in self.signals if signal.takes_loss]
        # Of which reading each part of the mistakes in a report is: those that skip a step first.
        self._mistakes = [*_mistakes(self.signals, True), *_mistakes(self.signals, False)]

    def counting(self) -> Any:
        """The signal of counted tokens, which takes its place when a script counts some."""
        if type(self.tokens) is Reserved:
            module = load_extension("tokens")
            tokens = module.TokenCount(self._process_groups, self._divisor, self._device)
            self.replace(self.tokens, tokens)
            self.tokens = tokens
        return self.tokens

    def replace(self, reserved: Signal, signal: Signal) -> None:
        """Have a signal in the place that was reserved for it; its sums are as long, or empty."""
        assert signal.skips == reserved.skips, "a report has as many mistakes as were reserved"
        self.signals[self.signals.index(reserved)] = signal
        self._index()

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
        self, max_norm: float | None, pending: Decision | None = None,
        loss: float | Tensor | None = None, judges: bool = True,
    ) -> Decision:  # fmt: skip
        """Decide over all ranks' own spans. Every rank must call it, after the reduction.

        Args:
            max_norm: bound of the norm of all groups that have no ``max_grad_norm`` of their own;
                those that have one are clipped by themselves.
            pending: an earlier decision on these gradients: they count as clipped by it, and the
                new factors hold for both.
            loss: of this rank, for a signal that takes it.
            judges: signals judge these gradients, unless they did so for ``pending``.

        Raises:
            TypeError, ValueError: on every rank, for a loss that no signal takes.
            RuntimeError: on every rank, if on one of them the loss was not scaled, or if they
                differ in options of groups. On an accelerator the step is skipped for it, and
                :meth:`SkipReport.poll` raises.
        """
        # For the groups that were sharded: with others this rank has an error that all must know.
        limits: dict[GroupId, Any] = dict.fromkeys(self._originals.sharded)
        for number, owner, group in self._originals.numbered():
            # Some classes have an option of that name.
            if number in limits and "max_grad_norm" not in owner.defaults:
                limits[number] = group.get("max_grad_norm")
        if loss is not None or self._takes_loss:
            with self.refusal.held():
                self._take_loss(loss)
        self._options.given = self._arguments(max_norm)
        pack_powers = self._pack_powers()
        parts = [
            self._group_powers([*limits], pack_powers),
            self.skips.first_nonfinite(pack_powers),
            *(signal.local() for signal in self.signals),
        ]
        vector = torch.cat(parts)
        self._process_groups.dp.all_reduce(vector, "the control vector")
        group_powers, first_nonfinite, *totals = vector.split([part.numel() for part in parts])
        powers = self._norm.agreed(group_powers, self._process_groups.dp.size)
        readings = [*totals]
        for place in self._reads:
            readings[place] = self.signals[place].read(totals[place])
        if self._process_groups.model.size > 1:
            powers, readings = self._merged(powers, readings)
        mistakes = [readings[place][part] for place, part in self._mistakes]
        scale, unscale = self._scale(readings)
        norm = bounded = self._norm.root(powers, scale)  # bounded: what max_norm is a bound of
        report = torch.cat([norm.view(1), self._one_each, first_nonfinite, *mistakes])
        if _compat.is_host(self._device):
            self._refuse(report[3 + self._process_groups.dp.size :].tolist())
        if self._norm_is_finite and scale is None:
            skip = report[self._skipping].any()
        else:
            skip = (report * self._skips_if).any()
        verdicts: Mapping[Signal, Verdict] = {} if pending is None else pending.verdicts
        factors: dict[GroupId, Tensor | None] = dict.fromkeys(limits, unscale)
        if pending is not None:
            factors.update(pending.factors)
        elif judges:
            verdicts = self._judged(readings, norm)
            factors = dict.fromkeys(limits, _with_factors(unscale, verdicts))
        if pending is not None or any(factor is not unscale for factor in factors.values()):
            powers = self._norm.multiplied(powers, list(factors.values()), scale)
            bounded = self._norm.root(powers, scale)
        declined = _declined(verdicts)
        skip = skip if declined is None else skip | declined
        clips = clip_factors(self._norm, powers, scale, max_norm, list(limits.values()), bounded)
        return Decision(
            norm=norm if pending is None else bounded,
            skip=skip,
            factors={
                number: _product(factor, clip)
                for (number, factor), clip in zip(factors.items(), clips, strict=True)
            },
            unscale=unscale,
            verdicts=verdicts,
            declined=declined,
            present=self._presence.anywhere(totals[0]),
            report=report[1:],
            weights=self.skips.weights(skip),
        )

    def _judged(self, readings: Sequence[Tensor], norm: Tensor) -> dict[Signal, Verdict]:
        verdicts = {}
        for number in self._judges:
            signal = self.signals[number]
            if (verdict := signal.judge(readings[number], norm)) is not None:
                verdicts[signal] = verdict
        return verdicts

    def _arguments(self, max_norm: float | None) -> dict[str, Any]:
        """Return what a script gave to the step, which ranks must have alike."""
        arguments: dict[str, Any] = {
            "max_norm": max_norm,
            "clip_value": self._clip_value,
            "divisor": self._divisor.given,
        }
        for number in self._gives:
            arguments.update(self.signals[number].arguments())
        arguments |= {LEFT: self.left, **self._history}
        if self._micro_batches is not None:
            arguments["micro_batches"] = self._micro_batches.count
        self._clip_value = None
        return arguments

    def _scale(self, readings: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
        """Return the scale of the gradients in the own spans, and the factor that removes it."""
        scale: Tensor | None = None
        for number in self._scales:
            scale = _product(self.signals[number].scale(readings[number]), scale)
        return scale, None if scale is None else (1.0 / scale).float()

    def _merged(self, powers: Tensor, readings: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Merge powers per group and readings of model-parallel ranks, by a small all-gather."""
        comm, parts = self._process_groups.model, [powers, *readings]
        row = torch.cat(parts)
        gathered = row.new_empty(comm.size, row.numel())  # in rank order, the same on all ranks
        comm.all_gather(gathered.view(-1), row, "the decision")
        all_powers, *rows = gathered.split([part.numel() for part in parts], 1)
        merged = [s.merge(row) for s, row in zip(self.signals, rows, strict=True)]
        return self._norm.merge(all_powers), merged

    def _trained(self) -> dict[nn.Parameter, str]:
        """Name the parameters that are reduced."""
        packs = [grads.pack for grads in self._grads]
        slots = [slot.name for pack in packs for slot in pack.layout.slots]
        return dict(zip((param for pack in packs for param in pack.params), slots, strict=True))

    def _pack_powers(self) -> Tensor:
        """Return the power of the own span of each pack, see :class:`PNorm`."""
        rows = [self._alignment // grads.pack.layout.dtype.itemsize for grads in self._grads]
        return self._norm.powers([grads.own for grads in self._grads], rows)

    def _group_powers(self, groups: Sequence[GroupId], powers: Tensor) -> Tensor:
        """Return this rank's :attr:`ControlVector.powers`, of the ``powers`` of its packs.

        Of a copy that counts elsewhere it matters only whether it is finite.
        """
        if self._members_shape != (len(powers), len(groups)):
            self._members_shape = len(powers), len(groups)
            layouts = [grads.pack.layout for grads in self._grads]
            in_groups = [
                [pack.pack_groups.is_primary and pack.group == group for group in groups]
                for pack in layouts
            ]
            self._members = None
            if len(groups) > 1 or not all(map(all, in_groups)):
                members = to_device(in_groups, torch.bool, self._device)
                self._members = members.view(-1, len(groups), *[1] * (powers.dim() - 1))
        if not len(powers):
            own = powers.new_zeros(len(groups), *powers.shape[1:], dtype=torch.float64)
        elif self._members is None:
            own = self._norm.merge(powers)
        else:
            by_group = powers[:, None]
            counts = self._members | ~by_group.isfinite()
            own = self._norm.merge(torch.where(counts, by_group, 0.0))
        if not self._norm.is_maximum:
            return own.view(-1)
        by_rank = own.new_zeros(self._process_groups.dp.size, len(groups))
        by_rank[self._process_groups.dp.rank] = own
        return by_rank.view(-1)

    def clip_value(self, limit: float, pending: Decision | None) -> None:
        """Clamp the own spans to ``[-limit, limit]``, loss scale considered.

        Local, but where tokens are counted: then a decision tells how many all ranks have.

        Args:
            pending: the decision by whose factors the gradients are going to be multiplied.
        """
        unscale = None
        if pending is None and any(signal.agrees_scale for signal in self.signals):
            unscale = self.decide(None, judges=False).unscale
        elif pending is None:
            unscale = self._scale([None] * len(self.signals))[1]
        self._clip_value = limit
        for grads in self._grads:
            group = grads.pack.layout.group
            clamp_(grads.own, limit, unscale if pending is None else pending.factors[group])

    def _refuse(self, mistakes: Sequence[float]) -> None:
        """Raise for mistakes of some ranks, and warn where they train other parameters.

        On a CPU all ranks call it in the same step, and exchange what they know; on an accelerator
        each calls it when it has the numbers, and names its own.
        """
        if not any(mistakes):
            return
        numbers, by_signal = iter(mistakes), [[0.0] * len(it.skips) for it in self.signals]
        for place, part in self._mistakes:
            by_signal[place][part] = islice(numbers, part.stop - part.start)
        for signal, own in zip(self.signals, by_signal, strict=True):
            if any(own) and (error := signal.error(own)) is not None:
                raise error

    def conclude(self, decision: Decision) -> None:
        """Count the step, made or skipped, and adapt the loss scale. Local."""
        self.skips.count(decision)
        for number in self._concludes:
            self.signals[number].conclude(decision)

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers; waits for the device."""
        state: dict[str, Any] = {"loss_scale": None, "growth": 0.0, **self.skips.state_dict()}
        for signal in self.signals:
            state.update(signal.state_dict())
        if self._micro_batches is not None:
            state["micro_batches"] = self._micro_batches.total
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`."""
        for signal in self.signals:
            signal.load_state_dict(state)
        self.skips.load_state_dict(state)
        if self._micro_batches is not None:
            self._micro_batches.load(state.get("micro_batches", 0))


def _mistakes(signals: Sequence[Signal], skips: bool) -> Iterator[tuple[int, slice]]:
    """Give the mistakes of readings that skip a step, or that do not, in runs."""
    for place, signal in enumerate(signals):
        for does_skip, run in groupby(range(len(signal.skips)), key=signal.skips.__getitem__):
            first, *others = run
            if does_skip == skips:
                yield place, slice(first, first + 1 + len(others))


def _product(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first * second


def _with_factors(unscale: Tensor | None, verdicts: Mapping[Signal, Verdict]) -> Tensor | None:
    for verdict in verdicts.values():
        if verdict.factor is not None:
            unscale = _product(unscale, verdict.factor.float())
    return unscale


def _declined(verdicts: Mapping[Signal, Verdict]) -> Tensor | None:
    """Return whether a verdict skips the step, 0-dim."""
    declined: Tensor | None = None
    for verdict in verdicts.values():
        if verdict.skip is not None:
            declined = verdict.skip if declined is None else declined | verdict.skip
    return declined
