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
from shardcast.plan.layout import GroupId, with_values
from shardcast.plan.originals import OptimizerList
from shardcast.step.decide.decision import Arithmetic, Decision, NormParts, Presence
from shardcast.step.decide.loss_scale import LossScale
from shardcast.step.decide.norm import PNorm, clamp_, product
from shardcast.step.decide.options import OptionCheck
from shardcast.step.decide.refusal import Refusal
from shardcast.step.decide.report import Report
from shardcast.step.decide.signal import (
    LEFT,
    Signal,
    Verdict,
    defining,
    to_device,
)
from shardcast.step.decide.skip_report import SkipReport
from shardcast.step.decide.tokens import Tokens
from shardcast.step.reduce.mean import Divisor


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
        history: what this rank did to means since the last step, which all must do alike.

    Attributes:
        refusal: takes errors of this rank alone, which all ranks are to raise.
        loss_scale: ``None`` where the options have none.
        tokens: what a script counts.
        signals: of the core, then those of the options, in their order.
        check: raises what was wrong with the gradients of this rank.
        left: the trained parameters that are no longer in the model, by name.
    """

    left = ""

    def __init__(
        self, grads: Sequence[Gradients], process_groups: ProcessGroups, config: ShardcastConfig,
        device: torch.device, originals: OptimizerList, divisor: Divisor,
        history: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._history = history
        self._grads, self._process_groups, self._device = grads, process_groups, device
        self._originals, self._divisor = originals, divisor
        self._clip_value: float | None = None  # of the coming step
        self.loss_scale = LossScale(config, process_groups, device) if config.scales_loss else None
        self._norm = PNorm(config.norm_type, device)
        self._presence = Presence(grads, process_groups, device)
        self.check: Callable[[], None] = lambda: None
        self.refusal = Refusal(process_groups, device)
        self._options = OptionCheck(
            originals.option_names(), lambda: originals.groups, self._trained, process_groups,
            device,
        )  # fmt: skip
        self.tokens = Tokens(process_groups, divisor, device)
        options = config.extensions().values()
        self.signals: list[Signal] = [
            self.refusal, self._presence,
            *([] if self.loss_scale is None else [self.loss_scale]), self.tokens, self._options,
            *(it.signal(config, process_groups, device) for it in options if it.signal),
        ]  # fmt: skip
        self._parts: tuple[Any, NormParts] | None = None
        # Finite powers have a finite norm here.
        is_finite = process_groups.model.size == 1 and config.norm_type >= 1
        self._report = Report(self.signals, process_groups.dp.size, device, is_finite)
        self.skips = SkipReport(
            grads, process_groups.dp, device, self._refuse, self._report, config.max_skipped_steps,
            self.loss_scale is not None and self.loss_scale.dynamic, self.signals,
            process_groups.everyone,
        )  # fmt: skip
        self._arithmetic = Arithmetic(
            self._norm, self.signals, process_groups, self._report, self.skips
        )
        # Those that define a method: in a step the others cost nothing.
        self._gives, self._judges, self._concludes = (
            defining(method, self.signals) for method in ("arguments", "judge", "conclude")
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
        self, max_norm: float | None, pending: Decision | None = None,
        loss: float | Tensor | None = None, judges: bool = True, call: str = "step",
    ) -> Decision:  # fmt: skip
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
        # For the groups that were sharded: with others this rank has an error that all must know.
        limits: dict[GroupId, Any] = dict.fromkeys(self._originals.sharded)
        for number, owner, group in self._originals.numbered():
            # Some classes have an option of that name.
            if number in limits and "max_grad_norm" not in owner.defaults:
                limits[number] = group.get("max_grad_norm")
        with self.refusal.held():
            self.check()
            if loss is not None or self._takes_loss:
                self._take_loss(loss)
        self._options.given = self._arguments(max_norm)
        parts = self._parts_of(limits, pending)
        powers = self._norm.powers([self._grads[number].own[part] for number, part in parts.of])
        own = [signal.local() for signal in self.signals]
        vector, sizes = self._arithmetic.vector(powers, parts, own)
        self._process_groups.dp.all_reduce(vector, "the control vector")
        verdicts: Mapping[Signal, Verdict] = {}
        agreed = self._arithmetic.agree(vector, sizes)
        if _compat.is_host(self._device):
            self._refuse(self._report.mistakes(agreed.report))
        before: list[Tensor | None] | None = None
        if pending is not None:
            verdicts = pending.verdicts
            before = [pending.factors[group] for group in limits]
        elif judges:
            verdicts = self._judged(agreed.readings, agreed.norm)
            factor = _with_factors(agreed.unscale, verdicts)
            before = None if factor is agreed.unscale else [factor] * len(limits)
        bound, bounds = self._bounds(max_norm, limits)
        present = self._presence.anywhere(agreed.totals[self._presence])
        return self._arithmetic.settle(
            agreed, bound, bounds, before, pending is not None, verdicts, present
        )

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
        sizes = self._arithmetic.sizes(len(self._originals.sharded), lengths)
        vector = torch.zeros(sum(sizes), dtype=torch.float64, device=self._device)
        part = self._arithmetic.parts(vector, sizes).of[self.refusal]
        part.copy_(self.refusal.local())
        self._process_groups.dp.all_reduce(vector, call)
        if self._process_groups.model.size > 1:
            reading = self._arithmetic.agree(vector, sizes).readings[self.refusal]
        else:
            reading = self.refusal.read(part)
        if any(mistakes := reading.tolist()):
            raise self.refusal.error(mistakes)

    def _bounds(
        self, max_norm: float | None, limits: Mapping[GroupId, Any]
    ) -> tuple[Tensor | None, dict[GroupId, Tensor | None]]:
        """Return the bounds of norms on the device: the common one, and that of each group."""
        limit_of_all, *of_groups = (
            None if limit is None else self._norm.on_device(limit)
            for limit in (max_norm, *limits.values())
        )
        return limit_of_all, dict(zip(limits, of_groups, strict=True))

    def _judged(self, readings: Mapping[Signal, Tensor], norm: Tensor) -> dict[Signal, Verdict]:
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

    def _parts_of(self, limits: Mapping[GroupId, Any], pending: Decision | None) -> NormParts:
        """Return the parts of own spans whose norms are taken, each for its group.

        Groups that are clipped together count as the first of them: so a pack, whatever the number
        of its groups, has one part.

        Args:
            limits: the bound that each group has of its own, or ``None``.
            pending: see :meth:`decide`.
        """
        first: dict[Any, GroupId] = {}
        counted_as = {}
        for group, limit in limits.items():
            factor = None if pending is None else pending.factors[group]
            together = group if limit is not None else id(factor)
            counted_as[group] = first.setdefault(together, group)
        key = len(self._grads), tuple(counted_as.values())
        if self._parts is not None and self._parts[0] == key:
            return self._parts[1]
        columns = {group: number for number, group in enumerate(limits)}
        parts, packs = list[tuple[int, slice]](), list[int]()
        mask = list[list[bool]]()
        for number, grads in enumerate(self._grads):
            is_primary = grads.pack.layout.pack_groups.is_primary
            for part, group in with_values(grads.pack.ranges, counted_as):
                parts.append((number, part))
                packs.append(number)
                mask.append(
                    [is_primary and column == columns[group] for column in range(len(limits))]
                )
        are_all = len(limits) == 1 and all(map(all, mask))
        self._parts = (
            key,
            NormParts(
                tuple(parts),
                None if are_all else to_device(mask, torch.bool, self._device),
                to_device(
                    [len(self._grads) - number for number in packs], torch.float64, self._device
                ),
                len(limits),
            ),
        )
        return self._parts[1]

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
            unscale = self._arithmetic.scale({})[1]
        self._clip_value = limit
        for grads in self._grads:
            if pending is None:
                clamp_(grads.own, limit, unscale)
                continue
            for part, factor in with_values(grads.pack.ranges, pending.factors):
                clamp_(grads.own[part], limit, factor)

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
