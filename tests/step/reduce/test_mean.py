"""The mean over ranks of a span: in chunks, of two in one operation, compiled; the same bits."""

from __future__ import annotations

import functools
import shutil
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

from shardcast import ShardcastConfig, _compat, shard
from shardcast.step.reduce import mean, reducer
from shardcast.step.reduce.mean import choose_mean, mean_, mean_in_chunks_
from shardcast.testing import threaded_world

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_mean_of_two_has_the_bits_of_half_their_sum(dtype: torch.dtype):
    """Every value with 200 others, those around powers of two and ties among them."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    torch.manual_seed(0)
    special = torch.tensor([0.0, 1.0, 1.0 + 2**-7, 2**-8, 2**-9, 3 * 2**-9, 2**-24]).to(dtype)
    chosen = torch.cat([special, -special, every[torch.randperm(1 << 16)[:186]]])
    different = 0
    for one in chosen:
        expected, found = torch.empty_like(every), one.repeat(1 << 16)
        mean_([one.expand(1 << 16), every], 2, None, expected)
        mean_in_chunks_([found, every], 2, None, found)
        small = (every.abs() < 1.7e38) & (one.abs() < 1.7e38)
        assert torch.equal(found[small].view(torch.int16), expected[small].view(torch.int16))
        infinite = every.isinf() | one.isinf() | every.isnan() | one.isnan()
        assert not found[infinite].isfinite().any()
        rounded = (every - (every - one) / 2)[small]  # in each operation
        different += int((rounded.view(torch.int16) != found[small].view(torch.int16)).sum())
    assert different > 0, "the control: rounding at each operation shows"


def operands(
    size: int, wire: torch.dtype, out: torch.dtype, carries: bool, numel: int
) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """The pieces of all ranks; the own one, of rank 1, is the output where dtypes allow it."""
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
    numel = 2 * mean.CHUNK + 77
    expected = torch.empty(numel, dtype=out)
    pieces, carry, _ = operands(size, wire, out, carries, numel)
    mean_(pieces, size, carry, expected)
    pieces, carry, found = operands(size, wire, out, carries, numel)
    mean_in_chunks_(pieces, size, carry, found)
    assert torch.equal(found, expected)


@needs_compiler
@pytest.mark.parametrize("size", [2, 3])
def test_compiled_it_has_the_same_bits(size: int):
    compiled = choose_mean(ShardcastConfig(fuse="compile"), size, CPU)
    assert (compiled is mean_in_chunks_) == (size == 3 and not _compat.divides_exactly())
    # Of three, where only the divisor is another one, bf16 alone.
    cases = [case for case in CASES if case[0] == size and (size == 2 or case[1:3] == (BF16, BF16))]
    for _, wire, out, carries in cases:
        torch._dynamo.reset()  # torch 2.11 keeps no more than 8 graphs of a function
        for numel in (0, 64, 70_000):
            expected = torch.empty(numel, dtype=out)
            pieces, carry, _ = operands(size, wire, out, carries, numel)
            mean_(pieces, size, carry, expected)
            pieces, carry, found = operands(size, wire, out, carries, numel)
            compiled(pieces, size, carry, found)
            assert torch.equal(found, expected), (wire, out, carries, numel)


def test_one_graph_serves_all_lengths_and_places(monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = functools.partial(torch.compile, dynamic=True, fullgraph=True, backend=counter)
    monkeypatch.setattr(_compat, "compiled", compiled)
    mean._kernel.cache_clear()
    grads, received = torch.randn(4096).to(BF16), torch.randn(4096).to(BF16)
    # The first as on rank 0 of two, where the offset of what it received is the length too.
    for mine, theirs, numel in ((0, 2048, 2048), (2048, 0, 2048), (64, 128, 960), (128, 64, 64)):
        own, other = grads[mine : mine + numel], received[theirs : theirs + numel]
        expected = (own.float() + other.float()).div(2).to(BF16)
        mean._compiled([own, other], 2, None, own)
        assert torch.equal(own, expected)
    assert counter.frame_count == 1
    mean._kernel.cache_clear()


def test_the_update_and_the_mean_are_compiled_alike():
    eager = ShardcastConfig(fuse="auto")
    assert choose_mean(eager, 2, CPU) is choose_mean(eager, 64, CPU) is mean_in_chunks_


def test_a_mean_of_equal_values_is_that_value_whatever_their_number():
    for size in range(1, 40):
        for dtype in (BF16, FP32):
            value = torch.full((64,), 1 / 3).to(dtype)
            out = torch.empty_like(value)
            mean_in_chunks_([value] * size, size, None, out)
            assert torch.equal(out, value)


def test_another_divisor_compiles_nothing(monkeypatch: pytest.MonkeyPatch):
    """Tokens differ from step to step; a graph is for one number, by which it divides."""
    divisors: list[int] = []

    def recording(pieces: Any, size: int, carry: Any, out: Tensor) -> None:
        divisors.append(size)
        mean_in_chunks_(pieces, size, carry, out)

    monkeypatch.setattr(reducer, "choose_mean", lambda *_: recording)

    def steps(group: Any) -> list[float]:
        model = nn.Linear(1, 4, bias=False)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = shard(model, sgd, process_group=group, param_dtype="fp32")
        grads = []
        for divisor in (None, 5, None, 10):
            optimizer.divisor = divisor
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            grads.append(optimizer.grad_norm.item())
            optimizer.zero_grad()
        return grads

    for grads in threaded_world(2, steps):
        assert grads == pytest.approx([2.0, 4 / 5, 2.0, 4 / 10])
    assert divisors == [2] * 4, "of two ranks, the steps without a divisor"
