"""Combine: one small all-reduce decides how, and whether, the step is made.

The norm, the non-finite flag, the loss scale and the step's factors are scalars on the device; no
method here waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast.comm import Grid
from shardcast.config import ShardcastConfig
from shardcast.memory.gradients import GradPack
from shardcast.plan.layout import GroupId
from shardcast.plan.originals import Originals
from shardcast.step.combine.clip import clamp_, clip_factors
from shardcast.step.combine.decision import UNSCALED, Control, Decision
from shardcast.step.combine.loss_scale import LossScale, unscaled_error
from shardcast.step.combine.norm import PNorm
from shardcast.step.combine.options import Options
from shardcast.step.combine.skip_report import SkipReport
from shardcast.step.reduce.mean import Divisor


class Combine:
    """Global norm, clipping factors, loss scale and the decision to skip, for every step.

    Args:
        grads: the gradient packs that are reduced; the list may grow.
        device: where the scalars live.
        originals: the optimizers, whose groups it reads.
        divisor: of the mean, which all ranks must have alike.
    """

    def __init__(
        self,
        grads: Sequence[GradPack],
        grid: Grid,
        config: ShardcastConfig,
        device: torch.device,
        originals: Originals,
        divisor: Divisor,
    ) -> None:
        self._grads, self._grid, self._device, self._originals = grads, grid, device, originals
        self._divisor = divisor
        self._clip_value: float | None = None  # since ranks compared it last
        self.loss_scale = LossScale(config, device)
        self._norm = PNorm(config.norm_type, device)
        self._control = Control(grads, grid, self._norm, device)
        self._options = Options(originals.option_names(), grid.dp, device, grid.everyone)
        self.skips = SkipReport(
            grads, grid.dp, device, self._options, config.max_skipped_steps, self.loss_scale.dynamic
        )

    def before_reduce(self, backward: bool) -> None:
        """Look at the gradients that are here, before they are taken for means. Local.

        Args:
            backward: one was run since the last reduction.
        """
        scale = self.loss_scale
        if scale.value is not None and not scale.applied:
            backward = backward or scale.wanted
            scale.wanted = any(
                param.grad is not None and (backward or not grads.holds(position))
                for grads in self._grads
                for position, param in enumerate(grads.pack.params)
            )

    @torch.no_grad()
    def decide(self, max_norm: float | None, pending: Decision | None = None) -> Decision:
        """The decision over all ranks' own spans. Every rank must call it, after the reduction.

        Args:
            max_norm: bound of the norm of all groups that have no ``max_grad_norm`` of their own;
                those that have one are clipped by themselves.
            pending: an earlier decision on these gradients: they count as clipped by it, and the
                new factors hold for both.

        Raises:
            RuntimeError: on every rank, if on one of them the loss was not scaled, or if they
                differ in options of groups. On an accelerator the step is skipped for it, and
                :meth:`SkipReport.poll` raises.
        """
        limits = {
            # Some classes have an option of that name.
            number: None if "max_grad_norm" in owner.defaults else group.get("max_grad_norm")
            for number, owner, group in self._originals.numbered()
        }
        scale = self.loss_scale.value
        pattern = tuple(param.grad is not None for g in self._grads for param in g.pack.params)
        by_pack = [self._power(grads) for grads in self._grads]
        by_group = [self._group_power(number, by_pack) for number in limits]
        bad = UNSCALED if self.loss_scale.missing else self.skips.first_bad(by_pack)
        digests = self._options.pairs(
            self._originals.groups, max_norm, self._clip_value, self._divisor.given
        )
        self._clip_value = None
        sums = self._control.all_reduce(by_group, bad, pattern, digests, self._options)
        self._refuse(sums.bad, sums.differing)
        powers = sums.powers
        skip = ~self._norm.root(powers, scale).isfinite()
        skip = skip | (sums.bad == UNSCALED).any() | self._options.refused(sums.differing)
        factors: dict[GroupId, Tensor | None] = dict.fromkeys(limits, self.loss_scale.inverse())
        if pending is not None:
            factors.update(pending.factors)
            powers = self._norm.multiplied(powers, list(factors.values()), scale)
        clips = clip_factors(self._norm, powers, scale, max_norm, list(limits.values()))
        return Decision(
            norm=self._norm.root(powers, scale),
            skip=skip,
            factors={
                number: _product(factor, clip)
                for (number, factor), clip in zip(factors.items(), clips, strict=True)
            },
            present=self._control.present(pattern, sums),
            bad=sums.bad,
            differing=sums.differing,
        )

    def _refuse(self, bad: Tensor, differing: Tensor) -> None:
        """Raise on every rank for what all of them were told, where the host can read it."""
        if self._grid.everyone.size == 1 and self.loss_scale.missing:
            raise unscaled_error([0])
        if self._grid.everyone.size == 1 or self._device.type != "cpu":
            return
        if ranks := [rank for rank, first in enumerate(bad.tolist()) if first == UNSCALED]:
            raise unscaled_error(ranks)
        wrong = differing.tolist()
        if any(wrong):
            names = {
                param: slot.name
                for grads in self._grads
                for param, slot in zip(grads.pack.params, grads.pack.layout.slots, strict=True)
            }
            self._options.report(wrong, self._originals.groups, names)

    def _power(self, grads: GradPack) -> Tensor:
        """The power of an own span; of a copy that counts elsewhere only whether it is finite."""
        power = self._norm.power(grads.own)
        if grads.pack.layout.sharing.counts:
            return power
        return torch.where(power.isfinite(), torch.zeros_like(power), power)

    def _group_power(self, number: GroupId, by_pack: Sequence[Tensor]) -> Tensor:
        """The power of this rank's spans of one group."""
        mine = [
            power
            for power, grads in zip(by_pack, self._grads, strict=True)
            if grads.pack.layout.group == number
        ]
        if not mine:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return self._norm.merge(torch.stack(mine))

    def clip_value(self, limit: float, pending: Decision | None) -> None:
        """Clamp the own spans to ``[-limit, limit]``, loss scale considered. Local.

        Args:
            pending: the decision by whose factors the gradients are going to be multiplied.
        """
        self._clip_value = limit
        for grads in self._grads:
            factor = self.loss_scale.inverse()
            if pending is not None:
                factor = pending.factors[grads.pack.layout.group]
            clamp_(grads.own, limit, factor)

    def conclude(self, decision: Decision) -> None:
        """Count the step, made or skipped, and adapt the loss scale. Local."""
        self.skips.count(decision)
        self.loss_scale.update(decision.skip)

    def state_dict(self) -> dict[str, float | None]:
        """Plain numbers; waits for the device."""
        return {**self.loss_scale.state_dict(), **self.skips.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.loss_scale.load_state_dict(state)
        self.skips.load_state_dict(state)


def _product(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first * second
