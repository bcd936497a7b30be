"""The mean over ranks of a span has the same bits in chunks, for two ranks, and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import run_world, sharded
from pairwise import WHOLE
from torch import Tensor, nn

from shardcast import ShardcastConfig
from shardcast._compat import inductor
from shardcast.step.reduce import mean
from shardcast.step.reduce.mean import choose_mean, mean_, mean_in_chunks_

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
needs_compiler = pytest.mark.needs_compiler


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_mean_of_two_has_the_bits_of_half_their_sum(dtype: torch.dtype):
    """Combine every value with 200 others, including ties and values near powers of two."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    torch.manual_seed(0)
    special = torch.tensor([0.0, 1.0, 1.0 + 2**-7, 2**-8, 2**-9, 3 * 2**-9, 2**-24]).to(dtype)
    chosen = torch.cat([special, -special, every[torch.randperm(1 << 16)[:186]]])
    for one in chosen:
        expected, found = torch.empty_like(every), one.repeat(1 << 16)
        mean_([one.expand(1 << 16), every], 2, None, expected)
        mean_in_chunks_([found, every], 2, None, found)
        small = (every.abs() < 1.7e38) & (one.abs() < 1.7e38)
        assert torch.equal(found[small].view(torch.int16), expected[small].view(torch.int16))
        infinite = every.isinf() | one.isinf() | every.isnan() | one.isnan()
        assert not found[infinite].isfinite().any()


def operands(
    size: int, wire: torch.dtype, out: torch.dtype, carries: bool, numel: int
) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Return the pieces of all ranks; rank 1's own piece is the output if the dtypes are equal."""
    torch.manual_seed(size)
    pieces = [torch.randn(numel).to(wire) * 10.0 ** (rank % 3) for rank in range(size)]
    carry = torch.randn(numel) if carries else None
    return pieces, carry, pieces[1] if out == wire else torch.empty(numel, dtype=out)


CASES = [
    (size, wire, out, carries)
    for size in (2, 3, 4, 8)
    for wire, out in ((BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP32), (FP32, BF16))
    for carries in (False, True)
]


@pytest.mark.parametrize(("size", "wire", "out", "carries"), CASES, ids=str)
def test_in_chunks_it_has_the_bits_of_the_whole(
    size: int, wire: torch.dtype, out: torch.dtype, carries: bool
):
    for numel in (2 * mean.CHUNK + 77, 777):  # several chunks, one chunk
        expected = torch.empty(numel, dtype=out)
        pieces, carry, _ = operands(size, wire, out, carries, numel)
        mean_(pieces, size, carry, expected)
        pieces, carry, found = operands(size, wire, out, carries, numel)
        mean_in_chunks_(pieces, size, carry, found)
        assert torch.equal(found, expected), numel


@needs_compiler
@pytest.mark.parametrize("size", [2, 3])
def test_compiled_it_has_the_same_bits_and_one_graph_for_all_lengths_and_places(size: int):
    compiled = choose_mean(ShardcastConfig(fuse="compile"), size, CPU)
    assert (compiled is mean_in_chunks_) == (size == 3 and not inductor.divides_exactly())
    # For size 3, which changes only the divisor, test only bf16.
    cases = [case for case in CASES if case[0] == size and (size == 2 or case[1:3] == (BF16, BF16))]
    if not WHOLE:  # each pair of dtypes, with or without a carry
        cases = cases[::4] + cases[3::4]
    for _, wire, out, carries in cases:
        # The first is like rank 0 of two, whose received piece has an offset equal to the length.
        for numel in (2048, 0, 64, 70_000):
            expected = torch.empty(numel, dtype=out)
            pieces, carry, _ = operands(size, wire, out, carries, numel)
            mean_(pieces, size, carry, expected)
            pieces, carry, found = operands(size, wire, out, carries, numel)
            with torch._dynamo.config.patch(error_on_recompile=numel in (64, 70_000)):
                compiled(pieces, size, carry, found)
            assert torch.equal(found, expected), (wire, out, carries, numel)


def test_a_mean_of_equal_values_is_that_value_whatever_their_number():
    for size in range(1, 40):
        for dtype in (BF16, FP32):
            value = torch.full((64,), 1 / 3).to(dtype)
            out = torch.empty_like(value)
            mean_in_chunks_([value] * size, size, None, out)
            assert torch.equal(out, value)


def mean_of_different(group: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Make an SGD step of lr 1 from 0 on different gradients, which gives the negative mean."""
    model = nn.Linear(5, 7, bias=False)
    nn.init.zeros_(model.weight)
    make = lambda m: torch.optim.SGD(m.parameters(), lr=1.0)  # noqa: E731
    optimizer = sharded(model, group, make, param_dtype=dtype, keep_fp32=())
    torch.manual_seed(group.rank())
    grad = torch.randn(7, 5).to(dtype) * (100.0 if group.rank() else 1e-2)
    model.weight.grad = grad.clone()
    optimizer.step()
    return grad, model.weight.detach().clone()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_reduction_is_the_mean_summed_in_fp32_and_rounded_once(dtype: torch.dtype):
    ranks, _ = run_world(3, mean_of_different, dtype)
    total = torch.stack([grad.float() for grad, _ in ranks])
    exact = ((total[0] + total[1]) + total[2]) / 3
    for _, weight in ranks:
        # The mean is rounded to the gradient dtype; the weight is its negative.
        assert torch.equal(weight, -exact.to(dtype))
    low = (ranks[0][0] + ranks[1][0] + ranks[2][0]) / 3
    assert not torch.equal(low, exact.to(dtype)), "the control: low-precision sums differ"
