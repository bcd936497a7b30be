"""Clips that a script calls: their arguments, and the clip of the present gradients."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from shardcast.comm import warn_first
from shardcast.plan import validate
from shardcast.plan.originals import OptimizerList
from shardcast.step.decide.decision import Decision
from shardcast.step.reduce.reducer import Reducer

Parameters = Iterable[Tensor] | Tensor
EDITED = "step (gradients were edited, replaced or cleared after the clip)"  # a call of its own


class Clip:
    """The clip of the present gradients, if a script has called one: the coming step uses it.

    Attributes:
        decision: the one that it made; ``None`` if there is no clip.
    """

    def __init__(self, reduce: Reducer) -> None:
        self._reduce = reduce
        self._seen: list[int] = []  # versions of the means that it saw
        self.decision: Decision | None = None
        me = weakref.ref(self)
        reduce.before_edit = lambda: None if (it := me()) is None else it.apply()

    def note(self, decision: Decision | None) -> None:
        """Keep a decision on the present gradients; ``None`` forgets the last one."""
        self.decision = decision
        self._seen = self._reduce.versions() if decision else []

    def is_edited(self) -> bool:
        """Return whether a script has edited, assigned or cleared gradients after the clip."""
        return self._reduce.versions() != self._seen or self._reduce.replaced()

    @torch.no_grad()
    def apply(self) -> None:
        """Multiply the means by the factor of a clip, before a script sees or edits one.

        Without it the factor is folded into the update.
        """
        clip = self.decision
        if clip is None or all(factor is clip.unscale for factor in clip.factors.values()):
            return
        self.decision = dataclasses.replace(clip, factors=dict.fromkeys(clip.factors, clip.unscale))
        known: dict[Tensor | None, Tensor | None] = {None: None}
        for factor in clip.factors.values():
            if factor is not None and factor not in known:
                scaled = factor if clip.unscale is None else factor / clip.unscale
                # Without a finite norm there is no factor, and the step is skipped. NaN would
                # reach the padding, which nobody clears.
                known[factor] = scaled.nan_to_num(1.0, 1.0, 1.0)
        factors = {group: known[factor] for group, factor in clip.factors.items()}
        for grads in self._reduce.grads:
            if any(factors[group] is not None for group in grads.pack.layout.groups):
                grads.multiply(factors)
        self._seen = self._reduce.versions()

    def pending(self) -> Decision | None:
        """The last clip, unless a backward came after it."""
        if self.decision is not None and self._reduce.touched:
            self.decision = None
            warn_first(
                "a backward came after clip_grad_norm_, so that this clip is lost: it would have "
                "been folded into the step; clip once, after the last backward of a step"
            )
        return self.decision


def clip_bound(
    call: str,
    originals: OptimizerList,
    parameters: Parameters | float | None,
    name: str,
    bound: Any,
) -> float:
    """The bound of a clip of all trained parameters, which may be called with a bound alone.

    Args:
        name: of the bound, for errors.

    Raises:
        TypeError, ValueError: a bound, or one of a group, is not a number above 0.
        ValueError: ``parameters`` are not all trained ones.
    """
    is_value = isinstance(parameters, Tensor) and not isinstance(parameters, nn.Parameter)
    if bound is None and (is_value or isinstance(parameters, (Real, str))):
        parameters, bound = None, parameters
    for number, optimizer, group in originals.numbered():
        validate.check_limit(group, optimizer.defaults, number)
    if parameters is not None:
        params: Any = [parameters] if isinstance(parameters, Tensor) else parameters
        _check_clipped(call, originals.groups, params)
    return validate.bound_of(name, bound)


def check_norm(call: str, asked: float | None, norm_type: float, error_if_nonfinite: bool) -> None:
    """Raise ValueError for a clip by another norm, or one that is to raise for NaN."""
    if asked not in (None, norm_type):
        raise ValueError(
            f"{call}: expected norm_type {norm_type}, got {asked}; set norm_type: {asked} in the "
            "shardcast configuration"
        )
    if error_if_nonfinite:
        raise ValueError(
            f"{call}: expected error_if_nonfinite=False, got True; a step with a non-finite "
            "gradient is skipped on all ranks, and max_skipped_steps of them in a row raise"
        )


def _check_clipped(call: str, groups: Iterable[Mapping[str, Any]], given: Iterable[Tensor]) -> None:
    """Raise ValueError unless ``given`` are the trained parameters of ``groups``, all and alone."""
    own, params = {param for group in groups for param in group["params"]}, set(given)
    left_out = sum(param.requires_grad for param in own - params)
    if left_out:
        raise ValueError(
            f"{call}: expected all trained parameters, got all but {left_out} of {len(own)}; "
            "pass model.parameters(), or clip a group by itself with a max_grad_norm key in its "
            "optimizer group"
        )
    foreign = sum(param.requires_grad for param in params - own)
    if foreign:
        raise ValueError(
            f"{call}: expected the optimizer's own parameters, got {foreign} others that require "
            "gradients, which nobody averages over the ranks; add them to the optimizer, or "
            "freeze them with requires_grad_(False)"
        )
