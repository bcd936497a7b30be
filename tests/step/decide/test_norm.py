"""The norm of a span as an accelerator computes it."""

from __future__ import annotations

import math

import pytest
import torch

from shardcast.step.decide.norm import PNorm


class Elsewhere(torch.Tensor):
    """A tensor of the host that says it is on an accelerator."""

    @property
    def device(self) -> torch.device:
        return torch.device("xpu")


def power(values: torch.Tensor, p: float) -> float:
    with torch._C.DisableTorchFunctionSubclass():
        own = values.as_subclass(Elsewhere)
    return PNorm(p, torch.device("cpu")).power(own).item()


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("numel", [0, 5, 4096, 3 * 4096 + 17])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_summed_in_fp32_give_the_norm_of_doubles(
    p: float, numel: int, dtype: torch.dtype
) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = PNorm(p, torch.device("cpu")).power(values).item()
    assert power(values, p) == pytest.approx(expected, rel=1e-5, abs=0.0)  # powers are of fp32


@pytest.mark.parametrize("position", [0, 4096, 4100])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_shows_in_the_power_wherever_it_is(
    position: int, bad: float
) -> None:
    values = torch.ones(4101, dtype=torch.bfloat16)
    values[position] = bad
    assert not math.isfinite(power(values, 2.0))
    assert not math.isfinite(power(values, math.inf))
