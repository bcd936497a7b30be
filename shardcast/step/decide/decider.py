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
from shardcast.memory.weight_edits import WeightEdits, unseen_error
from shardcast.messages import by_rank
from shardcast.plan.layout import GroupId
from shardcast.plan.originals import Originals
from shardcast.step.decide.decision import ControlVector, Decision, Presence
from shardcast.step.decide.exact_norm import ExactNorm
from shardcast.step.decide.guard import Guard, Verdict
from shardcast.step.decide.loss_scale import LossScale, unscaled_error
from shardcast.step.decide.norm import PNorm, clamp_, clip_factors
from shardcast.step.decide.options import COUNT, OptionCheck, to_device
from shardcast.step.decide.skip_report import MISTAKES, SkipReport
from shardcast.step.decide.tokens import TokenCount
from shardcast.step.reduce.mean import Divisor
from shardcast.step.reduce.tree import MicroBatches


class Decider:
    """Global norm, clipping factors, loss scale and the decision to skip, for every step.

    Args:
        grads: the gradient packs that are reduced; the list may grow.
        device: where the scalars live.
        originals: the optimizers, whose groups it reads.
        divisor: of the mean, which all ranks must have alike.
        edits: of weights, of which all ranks must know those that no counter saw.
        micro_batches: of a step, if it is to be reproducible.
    """

    def __init__(
        self, grads: Sequence[Gradients], process_groups: ProcessGroups, config: ShardcastConfig,
        device: torch.device, originals: Originals, divisor: Divisor, edits: WeightEdits,
        micro_batches: MicroBatches | None,
    ) -> None:  # fmt: skip
        self._grads, self._process_groups, self._device = grads, process_groups, device
        self._originals, self._divisor, self._edits = originals, divisor, edits
        self._clip_value: float | None = None  # of the coming step
        self.tokens = TokenCount(device)
        self.guard = None if config.guard is None else Guard(config.guard, device)
        self.loss_scale = LossScale(config, device)
        self._micro_batches, self._alignment = micro_batches, config.alignment
        exact = micro_batches is not None and config.norm_type == 2.0
        self._norm = ExactNorm(device) if exact else PNorm(config.norm_type, device)
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._none = self._zero.view(1)
        self._nowhere = self._zero.new_zeros(process_groups.dp.size)
        self._one_each = self._zero.new_ones(2)
        # A report skips a step if this product is not 0: with a norm that is not finite it is NaN,
        # and mistakes but the first one count.
        ranks = process_groups.dp.size
        skips_if = [0.0, 0.0, 0.0, *[0.0] * ranks, 0.0, *[1.0] * (MISTAKES - 1 + ranks)]
        self._skips_if = to_device(skips_if, torch.float64, device)
        self._is_primary = torch.empty(0)  # whether each pack counts here
        self._members = torch.empty(0)  # of which group each pack is, (packs, groups), bool
        self._presence = Presence(grads, process_groups, device)
        self._options = OptionCheck(originals.option_names(), process_groups, device)
        self.skips = SkipReport(
            grads, process_groups.dp, device, self._refuse, config.max_skipped_steps,
            self.loss_scale.dynamic, () if self.guard is None else self.guard.signals,
        )  # fmt: skip

    def before_reduce(self, backward: bool) -> None:
        """Look at the gradients that are here, before they are taken for means. Local.

        Args:
            backward: one was run since the last reduction.
        """
        scale = self.loss_scale
        if scale.value is not None and not scale.applied:
            backward = backward or scale.wanted
            scale.wanted = any(
                is_here and (backward or not grads.holds(position))
                for grads in self._grads
                for position, is_here in enumerate(grads.presence())
            )

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
            RuntimeError: on every rank, if on one of them the loss was not scaled or weights were
                written unseen, or if they differ in options of groups. On an accelerator the step
                is skipped for it, and :meth:`SkipReport.poll` raises.
        """
        limits = {
            # Some classes have an option of that name.
            number: None if "max_grad_norm" in owner.defaults else group.get("max_grad_norm")
            for number, owner, group in self._originals.numbered()
        }
        scale, unscale, missing = self.loss_scale.value, None, False
        if scale is not None:
            unscale, missing = self.loss_scale.inverse(), self.loss_scale.missing
        if missing and self._process_groups.everyone.size == 1:
            raise unscaled_error([0])
        local = self._presence.local()
        pack_powers = self._pack_powers()
        pack_totals = pack_powers if pack_powers.dim() == 1 else pack_powers.sum(1)
        arguments: dict[str, Any] = {
            "max_norm": max_norm,
            "clip_value": self._clip_value,
            "divisor": self._divisor.given,
            COUNT: self.tokens.counted,
            "loss": loss is not None,
        }
        if self._micro_batches is not None:
            arguments["micro_batches"] = self._micro_batches.count
        self._clip_value = None
        control = ControlVector.summed(
            self._process_groups.dp,
            [self._group_powers([*limits], pack_powers)],
            self._at_own_rank(self.skips.first_nonfinite(pack_totals)),
            self._at_own_rank(float(missing)),
            [self._presence.counts(local)],
            [self._presence.copies()],
            [self._options.pairs(self._originals.groups, arguments)],
            [self._edits.unseen()],
            [self.tokens.local() if self.tokens.counted else self._none],
            self._loss(loss),
        )
        powers, mistakes, mean_loss = self._agree(control)
        if self.tokens.counted:
            # Gradients in the own spans are sums over a number of ranks, not over tokens: what
            # they are too large by is a scale like that of the loss.
            by_tokens = control.tokens[0] / (self._divisor.value * self._divisor.micro_batches)
            scale = by_tokens if scale is None else by_tokens * scale
            unscale = (1.0 / scale).float()
        norm = self._norm.root(powers, scale)
        norm_and_report = torch.cat(
            [norm.view(1), self._one_each, control.first_nonfinite, *mistakes]
        )
        if _compat.is_host(self._device):
            self._refuse(norm_and_report[3 + self._process_groups.dp.size :].tolist())
        skip = (norm_and_report * self._skips_if).any()
        factors: dict[GroupId, Tensor | None] = dict.fromkeys(limits, unscale)
        verdict: Verdict | None = None
        bounded = norm  # what max_norm is a bound of
        if self.guard is not None and judges and pending is None:
            verdict = self.guard.judge(norm, None if loss is None else mean_loss[0])
            if verdict.factor is not None:
                factors = dict.fromkeys(limits, _product(unscale, verdict.factor.float()))
                powers = self._norm.multiplied(powers, list(factors.values()), scale)
                bounded = self._norm.root(powers, scale)
        if pending is not None:
            verdict = pending.verdict
            factors.update(pending.factors)
            powers = self._norm.multiplied(powers, list(factors.values()), scale)
            norm = bounded = self._norm.root(powers, scale)
        if verdict is not None and verdict.factor is None:
            skip = skip | verdict.is_spike
        clips = clip_factors(self._norm, powers, scale, max_norm, list(limits.values()), bounded)
        return Decision(
            norm=norm,
            skip=skip,
            factors={
                number: _product(factor, clip)
                for (number, factor), clip in zip(factors.items(), clips, strict=True)
            },
            unscale=unscale,
            verdict=verdict,
            present=self._presence.anywhere(local, control),
            report=norm_and_report[1:],
        )

    def _agree(self, control: ControlVector) -> tuple[Tensor, list[Tensor], Tensor]:
        """Powers per group, mistakes in pieces, and the mean loss if any, over all ranks.

        Model-parallel ranks, which hold other parameters, have one small all-gather more.
        Mistakes are 1-d fp64, 0 for none: whether ranks differ in what they train (which skips no
        step), twice whether in options, whether there are unseen writes, whether there are no
        tokens or another number of them on other model-parallel ranks, and per data-parallel rank
        whether its loss was not scaled.
        """
        powers = self._norm.agreed(control.powers, self._process_groups.dp.size)
        differing = self._options.differing(control.options)
        comm, parallel_dims = self._process_groups.model, self._process_groups.parallel_dims
        no_tokens = self.tokens.missing(control.tokens) if self.tokens.counted else self._none
        flags = [differing, control.unseen, no_tokens]
        loss = control.loss / self._process_groups.dp.size if len(control.loss) else control.loss
        if comm.size == 1:
            return powers, [*flags, control.unscaled], loss
        parts = [powers, control.options, torch.cat(flags), control.tokens, loss, control.unscaled]
        row = torch.cat(parts)
        gathered = row.new_empty(comm.size, row.numel())  # in rank order, the same on all ranks
        comm.all_gather(gathered.view(-1), row, "the decision")
        all_powers, options, all_flags, tokens, losses, unscaled = gathered.split(
            [part.numel() for part in parts], 1
        )
        flag = all_flags.abs().amax(0)
        flag[1] = torch.maximum(flag[1], self._options.differing_across(options).double())
        flag[4] = torch.maximum(flag[4], (tokens != tokens[0]).any().double())
        # Only the last stage of a pipeline has the loss to be scaled: a loss is unscaled where
        # some rank of every stage says so.
        by_dim = unscaled.view(1, *(parallel_dims.sizes[dim] for dim in parallel_dims.model), -1)
        if parallel_dims.pipeline in parallel_dims.model:
            by_dim = by_dim.movedim(1 + parallel_dims.model.index(parallel_dims.pipeline), 0)
        unscaled = by_dim.flatten(1, -2).amax(1).amin(0)
        return self._norm.merge(all_powers), [flag, unscaled], losses.mean(0)

    def _refuse(self, mistakes: Sequence[float]) -> None:
        """Raise for mistakes of some ranks, and warn where they train other parameters.

        On a CPU all ranks call it in the same step, and exchange what they know; on an accelerator
        each calls it when it has the numbers, and names its own.
        """
        training_differs, *options_differ, unseen, wrong_tokens = mistakes[:MISTAKES]
        unscaled = mistakes[MISTAKES:]
        together, groups = _compat.is_host(self._device), self._originals.groups
        if training_differs:
            packs = [grads.pack for grads in self._grads]
            slots = [slot.name for pack in packs for slot in pack.layout.slots]
            params = [param for pack in packs for param in pack.params]
            self._options.warn_of_training(groups, dict(zip(params, slots, strict=True)))
        if unseen:
            name = self._edits.first_name()
            everyone = self._process_groups.everyone
            raise unseen_error(everyone.exchange(name, self._device) if together else [name])
        if ranks := [rank for rank, missing in enumerate(unscaled) if missing]:
            raise unscaled_error(ranks)
        if any(options_differ):
            raise self._options.error(groups, together)
        if wrong_tokens:
            everyone, counts = self._process_groups.everyone, [repr(self.tokens)]
            counts = everyone.exchange(counts[0], self._device) if together else counts
            raise RuntimeError(
                "optimizer.count: expected more than 0 tokens in a step, and one number on all "
                "model-parallel ranks of a data-parallel one, got "
                f"{by_rank(enumerate(counts, 0 if together else everyone.rank))}; skip steps "
                "without tokens, and give tensor-parallel ranks and pipeline stages one number"
            )

    def _loss(self, loss: float | Tensor | None) -> list[Tensor]:
        """This rank's loss for the guard, 1-d; nothing where there is none that takes it."""
        if self.guard is None or not self.guard.takes_loss:
            if loss is not None:
                raise TypeError(
                    "step: expected no loss=, which only a guard that looks at the loss takes: set "
                    "guard={'loss': 6.0, 'window': 128} in the configuration"
                )
            return []
        if isinstance(loss, Tensor):
            return [loss.detach().to(self._device, torch.float64).reshape(1)]
        return [self._zero.new_full((1,), 0.0 if loss is None else loss)]

    def _at_own_rank(self, number: Tensor | float) -> list[Tensor]:
        """A place per data-parallel rank, of which this rank fills in its own; in pieces."""
        if not isinstance(number, Tensor):
            if not number:
                return [self._nowhere]
            number = self._one_each[:1] * number
        rank = self._process_groups.dp.rank
        return [self._nowhere[:rank], number.view(1), self._nowhere[rank + 1 :]]

    def _pack_powers(self) -> Tensor:
        """Of own spans; of a copy that counts elsewhere only whether it is finite."""
        packs = [grads.pack.layout for grads in self._grads]
        rows = [self._alignment // pack.dtype.itemsize for pack in packs]
        powers = self._norm.powers([grads.own for grads in self._grads], rows)
        is_primary = [pack.pack_groups.is_primary for pack in packs]
        if all(is_primary):
            return powers
        if len(self._is_primary) != len(packs):  # uploaded once
            self._is_primary = to_device(is_primary, torch.bool, self._device)
        counts = self._is_primary.view(-1, *[1] * (powers.dim() - 1))
        return torch.where(counts | ~powers.isfinite(), powers, self._zero)

    def _group_powers(self, groups: Sequence[GroupId], powers: Tensor) -> Tensor:
        """This rank's part of :attr:`ControlVector.powers`, of the ``powers`` of its packs."""
        if not len(powers):
            own = powers.new_zeros(len(groups), *powers.shape[1:], dtype=torch.float64)
        elif len(groups) == 1:
            own = self._norm.merge(powers)
        else:
            if self._members.shape[:2] != (len(powers), len(groups)):
                in_groups = [[g.pack.layout.group == i for i in groups] for g in self._grads]
                members = to_device(in_groups, torch.bool, self._device)
                self._members = members.view(*members.shape, *[1] * (powers.dim() - 1))
            own = self._norm.merge(torch.where(self._members, powers[:, None], self._zero))
        if not self._norm.is_maximum:
            return own.view(-1)
        rows = own.new_zeros(self._process_groups.dp.size, len(groups))
        rows[self._process_groups.dp.rank] = own
        return rows.view(-1)

    def clip_value(self, limit: float, pending: Decision | None) -> None:
        """Clamp the own spans to ``[-limit, limit]``, loss scale considered.

        Local, but where tokens are counted: then a decision tells how many all ranks have.

        Args:
            pending: the decision by whose factors the gradients are going to be multiplied.
        """
        unscale = self.loss_scale.inverse()
        if pending is None and self.tokens.counted:  # on other ranks: pairs with their next one
            unscale = self.decide(None, judges=False).unscale
        self._clip_value = limit
        for grads in self._grads:
            group = grads.pack.layout.group
            clamp_(grads.own, limit, unscale if pending is None else pending.factors[group])

    def conclude(self, decision: Decision) -> None:
        """Count the step, made or skipped, and adapt the loss scale. Local."""
        if self.tokens.counted or self.tokens.expected:
            self.tokens.conclude()
        self.skips.count(decision)
        skip, verdict = decision.skip, decision.verdict
        if self.guard is not None and verdict is not None:
            self.guard.record(verdict, skip)
            skip = skip & ~verdict.is_spike  # which is no overflow
        if self.loss_scale.value is not None:
            self.loss_scale.update(skip)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; waits for the device."""
        state: dict[str, Any] = {**self.loss_scale.state_dict(), **self.skips.state_dict()}
        return state if self.guard is None else {**state, "guard": self.guard.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.loss_scale.load_state_dict(state)
        self.skips.load_state_dict(state)
        if self.guard is not None and "guard" in state:
            self.guard.load_state_dict(state["guard"])


def _product(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first * second
