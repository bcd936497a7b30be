"""The norm of spans as an accelerator computes it, in one call with sums in fp32."""

from __future__ import annotations

import math

import pytest
import torch

from shardcast import _compat
from shardcast.step.decide.norm import PNorm

CPU = torch.device("cpu")


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_sums_in_fp32_give_the_norm_of_doubles(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    spans = [
        torch.randn(numel, generator=generator).to(dtype)
        for numel in (0, 5, 4096, 3 * 4096 + 17)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
    norm, rows = PNorm(p, CPU), [1] * len(spans)
    expected = norm.powers(spans, rows)
    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    torch.testing.assert_close(norm.powers(spans, rows).double(), expected, rtol=1e-5, atol=0)
    for bad in (math.inf, -math.inf, math.nan):
        spans[7][4095 if bad > 0 else 0] = bad
        is_finite = norm.powers(spans, rows).isfinite().tolist()
        assert is_finite == [number != 7 for number in range(len(spans))]
