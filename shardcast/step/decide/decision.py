"""The decision on one step, on which all ranks agree; :class:`.Decider` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from shardcast.memory.pack import Pack
from shardcast.plan.layout import GroupId
from shardcast.step.decide.signal import Signal, Verdict


@dataclass(frozen=True)
class Decision:
    """The outcome of one step, on which all ranks agree.

    Attributes:
        norm: 0-dim fp64, the global gradient norm before clipping, without loss scale; of the mean
            over tokens if they are counted.
        skip: 0-dim bool: a gradient on some rank is not finite, a rank made a mistake, or a verdict
            skips the step.
        factors: per optimizer group, 0-dim fp32: the factor of its gradients (unscale and clip);
            ``None``: 1 by construction.
        unscale: the part of these factors that removes loss scale and token count.
        verdicts: verdicts of signals that have one.
        declined: 0-dim bool: a verdict skips the step; ``None`` if there are no verdicts.
        present: per reduced pack and slot, whether any rank has a gradient; exact for slots of
            which this rank owns a part.
        taken: 1 if the step is made, 0 if it is skipped; 0-dim fp64.
        multiplier, increment: 1-d fp64: a step multiplies the totals of :class:`.SkipReport` by the
            first, and adds the second.
    """

    norm: Tensor
    skip: Tensor
    factors: Mapping[GroupId, Tensor | None]
    unscale: Tensor | None
    verdicts: Mapping[Signal, Verdict]
    declined: Tensor | None
    present: Mapping[Pack, tuple[bool, ...]]
    taken: Tensor
    multiplier: Tensor
    increment: Tensor

    def without_factors(self) -> Decision:
        """Return the decision on gradients into which its factors are multiplied."""
        return replace(self, factors=dict.fromkeys(self.factors, self.unscale))

    @cached_property
    def on_host(self) -> Decision:
        """Copy with host numbers, all read at once; waits for the device."""
        read = [self.norm, self.skip, self.taken, self.unscale, *self.factors.values()]
        kept = {number: None for number in read if number is not None}  # each number once
        values = torch.stack([number.double() for number in kept]).cpu()
        here = {number: value.to(number.dtype) for number, value in zip(kept, values, strict=True)}
        factors = {of: None if it is None else here[it] for of, it in self.factors.items()}
        return replace(
            self,
            norm=here[self.norm],
            skip=here[self.skip],
            taken=here[self.taken],
            unscale=None if self.unscale is None else here[self.unscale],
            factors=factors,
        )
