"""Arguments of clips: all trained parameters, and a bound above 0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor, nn

from shardcast.plan import validate
from shardcast.plan.originals import OptimizerList

Parameters = Iterable[Tensor] | Tensor


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
