"""Decide: one small all-reduce says how, and whether, the step is made.

The norm, the non-finite flag, the loss scale and the step's factors are scalars on the device; no
method here waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat
from shardcast.comm import ProcessGroups
from shardcast.config import ShardcastConfig
from shardcast.memory.gradients import Gradients
from shardcast.messages import by_rank
from shardcast.plan.layout import GroupId
from shardcast.plan.originals import OptimizerList
from shardcast.step.decide.decision import ControlVector, Decision, Presence
from shardcast.step.decide.exact_norm import ExactNorm
from shardcast.step.decide.guard import Guard, GuardDecision
from shardcast.step.decide.loss_scale import LossScale, unscaled_error
from shardcast.step.decide.norm import PNorm, clamp_, clip_factors
from shardcast.step.decide.options import COUNT, LEFT, OptionCheck, known, to_device
from shardcast.step.decide.signal import Refusal, Signal
from shardcast.step.decide.skip_report import SkipReport
from shardcast.step.decide.tokens import TokenCount
from shardcast.step.reduce.mean import Divisor
from shardcast.step.reduce.tree import MicroBatches

MISTAKES = 4  # in Decision.report, before those of each rank


class Decider:
    """Global norm, clipping factors, loss scale and the decision to skip, for every step.

    Args:
        grads: the gradient packs that are reduced; the list may grow.
        device: where the scalars live.
        originals: the optimizers, whose groups it reads.
        divisor: of the mean, which all ranks must have alike.
        micro_batches: of a step, if it is to be reproducible.
        history: what this rank did to means since the last step, which all must do alike.

    Attributes:
        refusal: takes errors of this rank alone, which all ranks are to raise.
        loss_scale, guard: ``None`` where the options have none.
        left: the trained parameters that are no longer in the model, by name.
    """

    left = ""

    def __init__(
        self, grads: Sequence[Gradients], process_groups: ProcessGroups, config: ShardcastConfig,
        device: torch.device, originals: OptimizerList, divisor: Divisor,
        micro_batches: MicroBatches | None, history: Mapping[str, int],
    ) -> None:  # fmt: skip
        self._history = history
        self._grads, self._process_groups, self._device = grads, process_groups, device
        self._originals, self._divisor = originals, divisor
        self._clip_value: float | None = None  # of the coming step
        self.tokens = divisor.tokens = TokenCount(device)
        self.guard = None if config.guard is None else Guard(config.guard, device)
        self.loss_scale = LossScale(config, device) if LossScale.used_by(config) else None
        self._micro_batches, self._alignment = micro_batches, config.alignment
        exact = micro_batches is not None and config.norm_type == 2.0
        self._norm = ExactNorm(device) if exact else PNorm(config.norm_type, device)
        rank, ranks = process_groups.dp.rank, process_groups.dp.size
        self._own_rank = to_device([n == rank for n in range(ranks)], torch.float64, device)
        self._nowhere = torch.zeros_like(self._own_rank)
        self._zero = self._own_rank.new_zeros(1)
        self._one_each = self._own_rank.new_ones(2)
        self._presence = Presence(grads, process_groups, device)
        self.refusal = Refusal(process_groups.everyone, device)
        self._signals: tuple[Signal, ...] = self._presence, self.refusal
        mistakes = MISTAKES + ranks + len(self._signals)
        # A report skips a step if this product is not 0: with a norm that is not finite it is NaN,
        # and mistakes but the first one count.
        skips_if = [0.0, 0.0, 0.0, *[0.0] * ranks, 0.0, *[1.0] * (mistakes - 1)]
        self._skips_if = to_device(skips_if, torch.float64, device)
        self._members: Tensor | None = None  # of which group each pack is, (packs, groups), bool
        self._members_shape = (0, 0)
        self._options = OptionCheck(originals.option_names(), process_groups, device)
        self.skips = SkipReport(
            grads, process_groups.dp, device, self._refuse, mistakes, config.max_skipped_steps,
            self.loss_scale is not None and self.loss_scale.dynamic,
            () if self.guard is None else self.guard.signals, process_groups.everyone,
        )  # fmt: skip

    @torch.no_grad()
    def decide(
        self,
        max_norm: float | None,
        pending: Decision | None = None,
        loss: float | Tensor | None = None,
        judges: bool = True,
    ) -> Decision:
        """The decision over all ranks' own spans. Every rank must call it, after the reduction.

        Args:
            max_norm: bound of the norm of all groups that have no ``max_grad_norm`` of their own;
                those that have one are clipped by themselves.
            pending: an earlier decision on these gradients: they count as clipped by it, and the
                new factors hold for both.
            loss: of this rank, for a guard that takes it.
            judges: the guard looks at these gradients, unless it did so for ``pending``.

        Raises:
            TypeError: there is a loss that no guard takes.
            RuntimeError: on every rank, if on one of them the loss was not scaled, or if they
                differ in options of groups. On an accelerator the step is skipped for it, and
                :meth:`SkipReport.poll` raises.
        """
        # Of the groups that were sharded: with others this rank has an error that all must know.
        limits: dict[GroupId, Any] = dict.fromkeys(self._originals.sharded)
        for number, owner, group in self._originals.numbered():
            # Some classes have an option of that name.
            if number in limits and "max_grad_norm" not in owner.defaults:
                limits[number] = group.get("max_grad_norm")
        own_loss, wrong = self._loss(loss)
        arguments = self._arguments(max_norm, str(wrong) if wrong else loss is not None)
        pack_powers = self._pack_powers()
        is_unscaled = self.loss_scale is not None and self.loss_scale.missing
        control = ControlVector.summed(
            self._process_groups.dp,
            [signal.local() for signal in self._signals],
            self._group_powers([*limits], pack_powers),
            self.skips.first_nonfinite(pack_powers),
            self._own_rank if is_unscaled else self._nowhere,
            self._options.pairs(self._originals.groups, arguments),
            self.tokens.local() if self.tokens.counted else self._zero,
            own_loss,
        )
        powers, mistakes, mean_loss = self._agree(control)
        if wrong is not None and not mistakes[0][1:3].any():  # on all ranks; else they differ
            raise wrong
        scale, unscale = self._scale(control.tokens)
        norm = bounded = self._norm.root(powers, scale)  # bounded: what max_norm is a bound of
        report = torch.cat([norm.view(1), self._one_each, control.first_nonfinite, *mistakes])
        if _compat.is_host(self._device):
            self._refuse(report[3 + self._process_groups.dp.size :].tolist())
        skip = (report * self._skips_if).any()
        verdict: GuardDecision | None = None
        factors: dict[GroupId, Tensor | None] = dict.fromkeys(limits, unscale)
        if pending is not None:
            verdict = pending.verdict
            factors.update(pending.factors)
        elif self.guard is not None and judges:
            verdict = self.guard.judge(norm, None if loss is None else mean_loss[0])
            if verdict.factor is not None:
                factors = dict.fromkeys(limits, _product(unscale, verdict.factor.float()))
        if pending is not None or (verdict is not None and verdict.factor is not None):
            powers = self._norm.multiplied(powers, list(factors.values()), scale)
            bounded = self._norm.root(powers, scale)
        if verdict is not None and verdict.factor is None:
            skip = skip | verdict.is_spike
        clips = clip_factors(self._norm, powers, scale, max_norm, list(limits.values()), bounded)
        return Decision(
            norm=norm if pending is None else bounded,
            skip=skip,
            factors={
                number: _product(factor, clip)
                for (number, factor), clip in zip(factors.items(), clips, strict=True)
            },
            unscale=unscale,
            verdict=verdict,
            present=self._presence.anywhere(control.signals[0]),
            report=report[1:],
        )

    def _arguments(self, max_norm: float | None, loss: str | bool) -> dict[str, Any]:
        """What a script gave to the step, which ranks must have alike."""
        arguments: dict[str, Any] = {
            "max_norm": max_norm,
            "clip_value": self._clip_value,
            "divisor": self._divisor.given,
            COUNT: self.tokens.counted,
            LEFT: self.left,
            "loss": loss,
            **self._history,
        }
        if self._micro_batches is not None:
            arguments["micro_batches"] = self._micro_batches.count
        self._clip_value = None
        return arguments

    def _loss(self, loss: float | Tensor | None) -> tuple[Tensor, Exception | None]:
        """This rank's loss for the guard, 1-d; empty where there is none that takes it.

        With what is wrong with it: every rank has to join the all-reduce first.
        """
        takes = self.guard is not None and self.guard.takes_loss
        nothing = self._zero[: int(takes)]
        if loss is None:
            return nothing, None
        if not takes:
            return nothing, TypeError(
                "step: expected no loss=, which only a guard that looks at the loss takes: set "
                "guard={'loss': 6.0, 'window': 128} in the configuration"
            )
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss.detach().to(self._device, torch.float64).reshape(1), None
        if isinstance(loss, (int, float)):
            return self._zero.new_full((1,), loss), None
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        return nothing, ValueError(f"step: expected loss= a number or a 0-dim tensor, got {what}")

    def _scale(self, tokens: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """By what the gradients in the own spans are too large, and the factor that removes it.

        Args:
            tokens: of all ranks, 1-d, if they are counted: then these gradients are sums over a
                number of ranks, not over tokens.
        """
        scale = None if self.loss_scale is None else self.loss_scale.value
        if not self.tokens.counted:
            return scale, None if scale is None else 1.0 / scale
        by_tokens = tokens[0] / self._divisor.value
        scale = by_tokens if scale is None else by_tokens * scale
        return scale, (1.0 / scale).float()

    def _agree(self, control: ControlVector) -> tuple[Tensor, list[Tensor], Tensor]:
        """Powers per group, mistakes in pieces, and the mean loss if any, over all ranks.

        Model-parallel ranks, which hold other parameters, have one small all-gather more.
        Mistakes are 1-d fp64, 0 for none, and of one sign, so that none cancels another: whether
        ranks differ in what they train (which skips no step), twice whether in options, whether
        there are no tokens or another number of them on other model-parallel ranks, and per
        data-parallel rank whether its loss was not scaled.
        """
        powers = self._norm.agreed(control.powers, self._process_groups.dp.size)
        differing = self._options.differing(control.options)
        comm, parallel_dims = self._process_groups.model, self._process_groups.parallel_dims
        has_no_tokens = (~(control.tokens > 0)).double() if self.tokens.counted else self._zero
        flags = [differing, has_no_tokens]
        signals = [s.mistake(t) for s, t in zip(self._signals, control.signals, strict=True)]
        loss = control.loss / self._process_groups.dp.size if len(control.loss) else control.loss
        if comm.size == 1:
            return powers, [*flags, control.unscaled, *signals], loss
        parts = [
            powers, control.options, torch.cat(flags), control.tokens, loss, control.unscaled,
            torch.cat(signals).double(),
        ]  # fmt: skip
        row = torch.cat(parts)
        gathered = row.new_empty(comm.size, row.numel())  # in rank order, the same on all ranks
        comm.all_gather(gathered.view(-1), row, "the decision")
        all_powers, options, all_flags, tokens, losses, unscaled, of_signals = gathered.split(
            [part.numel() for part in parts], 1
        )
        flag = all_flags.abs().amax(0)
        flag[1] = torch.maximum(flag[1], self._options.differing_across(options).double())
        flag[3] = torch.maximum(flag[3], (tokens != tokens[0]).any().double())
        # Only the last stage of a pipeline has the loss to be scaled: a loss is unscaled where
        # some rank of every stage says so.
        by_dim = unscaled.view(1, *(parallel_dims.sizes[dim] for dim in parallel_dims.model), -1)
        if parallel_dims.pipeline in parallel_dims.model:
            by_dim = by_dim.movedim(1 + parallel_dims.model.index(parallel_dims.pipeline), 0)
        unscaled = by_dim.flatten(1, -2).amax(1).amin(0)
        mistakes = [flag, unscaled, of_signals.amax(0)]
        return self._norm.merge(all_powers), mistakes, losses.mean(0)

    def _pack_powers(self) -> Tensor:
        """The power of the own span of each pack, see :class:`PNorm`."""
        rows = [self._alignment // grads.pack.layout.dtype.itemsize for grads in self._grads]
        return self._norm.powers([grads.own for grads in self._grads], rows)

    def _group_powers(self, groups: Sequence[GroupId], powers: Tensor) -> Tensor:
        """This rank's part of :attr:`ControlVector.powers`, of the ``powers`` of its packs.

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
        if pending is None and self.tokens.counted:  # on other ranks: pairs with their next one
            unscale = self.decide(None, judges=False).unscale
        elif pending is None:
            unscale = self._scale(self._zero)[1]
        self._clip_value = limit
        for grads in self._grads:
            group = grads.pack.layout.group
            clamp_(grads.own, limit, unscale if pending is None else pending.factors[group])

    def _refuse(self, mistakes: Sequence[float]) -> None:
        """Raise for mistakes of some ranks, and warn where they train other parameters.

        On a CPU all ranks call it in the same step, and exchange what they know; on an accelerator
        each calls it when it has the numbers, and names its own.
        """
        training_differs, *options_differ, wrong_tokens = mistakes[:MISTAKES]
        everyone, groups = self._process_groups.everyone, self._originals.groups
        of_signals = mistakes[MISTAKES + self._process_groups.dp.size :]
        for signal, mistake in zip(self._signals, of_signals, strict=True):
            if mistake:
                raise signal.error()
        if training_differs:
            packs = [grads.pack for grads in self._grads]
            slots = [slot.name for pack in packs for slot in pack.layout.slots]
            params = [param for pack in packs for param in pack.params]
            self._options.warn_of_training(groups, dict(zip(params, slots, strict=True)))
        unscaled = mistakes[MISTAKES : MISTAKES + self._process_groups.dp.size]
        if ranks := [rank for rank, missing in enumerate(unscaled) if missing]:
            raise unscaled_error(ranks)
        if any(options_differ):
            raise self._options.error(groups)
        if wrong_tokens:
            counts = known(repr(self.tokens), everyone, self._device)
            raise RuntimeError(
                "optimizer.count: expected more than 0 tokens in a step, and one number on all "
                f"model-parallel ranks of a data-parallel one, got {by_rank(counts.items())}; skip "
                "steps without tokens, and give tensor-parallel ranks and pipeline stages one "
                "number"
            )

    def conclude(self, decision: Decision) -> None:
        """Count the step, made or skipped, and adapt the loss scale. Local."""
        if self.tokens.counted or self.tokens.expected:
            self.tokens.conclude()
        self.skips.count(decision)
        overflow, spike, verdict = decision.skip, None, decision.verdict
        if self.guard is not None and verdict is not None:
            self.guard.record(verdict, decision.skip)
            overflow, spike = overflow & ~verdict.is_spike, overflow & verdict.is_spike
        if self.loss_scale is not None:
            self.loss_scale.update(overflow, spike)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; waits for the device."""
        state: dict[str, Any] = {"loss_scale": None, "growth": 0.0, **self.skips.state_dict()}
        if self.loss_scale is not None:
            state.update(self.loss_scale.state_dict())
        if self._micro_batches is not None:
            state["micro_batches"] = self._micro_batches.total
        return state if self.guard is None else {**state, "guard": self.guard.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state)
        self.skips.load_state_dict(state)
        if self._micro_batches is not None:
            self._micro_batches.load(state.get("micro_batches", 0))
        if self.guard is not None and "guard" in state:
            self.guard.load_state_dict(state["guard"])


def _product(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first * second
