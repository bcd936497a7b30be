"""The mean over ranks of a span: in chunks, of two in one operation, compiled; the same bits."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from weekly import WEEK

from shardcast import ShardcastConfig
from shardcast._compat import inductor
from shardcast.comm import Buffer
from shardcast.step.reduce import compiled_mean, mean
from shardcast.step.reduce.compiled_mean import mean_
from shardcast.step.reduce.mean import choose_mean, mean_in_chunks_

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
needs_compiler = pytest.mark.needs_compiler


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_mean_of_two_has_the_bits_of_half_their_sum(dtype: torch.dtype):
    """Every value with 200 others, those around powers of two and ties among them."""
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
def test_compiled_it_has_the_same_bits_and_one_graph_for_all_lengths_and_places(size: int):
    compiled = choose_mean(ShardcastConfig(fuse="compile"), size, CPU)
    assert (compiled is mean_in_chunks_) == (size == 3 and not inductor.divides_exactly())
    # Of three, where only the divisor is another one, bf16 alone.
    cases = [case for case in CASES if case[0] == size and (size == 2 or case[1:3] == (BF16, BF16))]
    # Each pair of dtypes with a carry or without one, in turn.
    cases = cases[WEEK % 2 :: 4] + cases[3 - WEEK % 2 :: 4]
    for _, wire, out, carries in cases:
        # The first as on rank 0 of two, where the offset of what it received is the length too.
        for numel in (2048, 0, 64, 70_000):
            expected = torch.empty(numel, dtype=out)
            pieces, carry, _ = operands(size, wire, out, carries, numel)
            mean_(pieces, size, carry, expected)
            pieces, carry, found = operands(size, wire, out, carries, numel)
            with torch._dynamo.config.patch(error_on_recompile=numel in (64, 70_000)):
                compiled(pieces, size, carry, found)
            assert torch.equal(found, expected), (wire, out, carries, numel)


@needs_compiler
def test_dynamo_looks_at_a_length_once_and_every_length_has_its_own_bits(
    monkeypatch: pytest.MonkeyPatch,
):
    """Later calls go to the graph: there is no Python of ours that Dynamo could run eagerly."""
    lengths = 2048, 64, 70_000, 96
    compiled_mean.compiled_mean_(*call_of(8, 4096, 0)[0])
    for numel in lengths:
        compiled_mean.compiled_mean_(*call_of(8, numel, 0)[0])
    expected = {numel: call_of(8, numel, 1) for numel in lengths}
    for arguments, plain in expected.values():
        pieces, size, carry, _ = arguments
        mean_(pieces, size, carry, plain)
    monkeypatch.setattr(compiled_mean, "mean_", None)
    for arguments, plain in expected.values():
        with torch.compiler.set_stance("force_eager"):
            compiled_mean.compiled_mean_(*arguments)
        assert torch.equal(arguments[3], plain)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), pytest.raises(TypeError):
        compiled_mean.compiled_mean_(*arguments)  # another state of the thread
    arguments, _ = call_of(8, 128, 2)
    with torch.compiler.set_stance("force_eager"), pytest.raises(TypeError):
        compiled_mean.compiled_mean_(*arguments)  # the control: a length that Dynamo has not seen


def call_of(size: int, numel: int, seed: int) -> tuple[Any, Tensor]:
    """Arguments of a mean of bf16, and room for what is expected."""
    torch.manual_seed(seed)
    pieces, out = [torch.randn(numel).bfloat16() for _ in range(size)], torch.empty(numel)
    return (pieces, size, None, out.bfloat16()), torch.empty(numel, dtype=BF16)


def test_views_that_are_made_once_do_not_keep_the_memory_of_what_was_received():
    """Without the garbage collector, which does not see what a tensor holds."""
    rows_of = compiled_mean._rows_of
    for numel in (1 << 12, 24):  # in rows, and too short for them
        rows_of(torch.empty(64), 16)  # imports
        gc.disable()
        try:
            buffer = Buffer(8 * numel, BF16, CPU)
            pieces = buffer.pieces(numel)
            row = compiled_mean.ROW if numel % compiled_mean.ROW == 0 else 0
            assert all(rows_of(p, row) is rows_of(p, row) for p in pieces)
            assert all(a is b for a, b in zip(pieces, buffer.pieces(numel), strict=True))
            alive = [weakref.ref(piece) for piece in pieces]
            del buffer, pieces
            assert [ref for ref in alive if ref() is not None] == []
        finally:
            gc.enable()


def test_a_mean_of_equal_values_is_that_value_whatever_their_number():
    for size in range(1, 40):
        for dtype in (BF16, FP32):
            value = torch.full((64,), 1 / 3).to(dtype)
            out = torch.empty_like(value)
            mean_in_chunks_([value] * size, size, None, out)
            assert torch.equal(out, value)


@pytest.mark.parametrize("own", [None, 0, 1])
def test_a_mean_in_the_memory_of_the_last_one_has_its_own_bits(
    own: int | None, monkeypatch: pytest.MonkeyPatch
):
    """What differs from the last backward: pieces, their dtype and number, a carry, own ones."""
    from torch._inductor import compile_fx

    served: list[bool] = []
    serves = compiled_mean._LastMean.serves

    def noted(*arguments: Any) -> bool:
        served.append(serves(*arguments))
        return served[-1]

    monkeypatch.setattr(compiled_mean._LastMean, "serves", noted)
    monkeypatch.setattr(compile_fx, "compile_fx", lambda module, *_, **__: module.forward)
    compiled_mean._graph.cache_clear()
    compiled_mean._kernel.cache_clear()
    out, last = torch.empty(64, dtype=BF16), None
    plain = 2, 2, BF16, False, True
    others = [
        (2, 2, BF16, True, True), (2, 2, BF16, False, False), (2, 4, BF16, False, True),
        (4, 4, BF16, False, True), (2, 2, torch.float32, False, False),
    ]  # fmt: skip
    cases = [plain, plain, *(case for other in others for case in (other, other, plain))]
    for number, case in enumerate(cases):
        count, size, dtype, carries, is_own = case
        generator = torch.Generator().manual_seed(number)
        pieces = [torch.randn(64, generator=generator).to(dtype) for _ in range(count)]
        carry = torch.randn(64, generator=generator) if carries else None
        expected = torch.empty_like(out)
        mean_(pieces, size, carry, expected)
        if own is not None and is_own:
            out.copy_(pieces[own])
            pieces[own] = out
        served.append(False)
        compiled_mean.compiled_mean_(pieces, size, carry, out)
        assert torch.equal(out, expected), case
        is_like = case[:4] == (last or case)[:4] and (own is None or case == last)
        assert served[-1] == (is_like and last is not None and not carries), case
        last = case
    compiled_mean._graph.cache_clear()
    compiled_mean._kernel.cache_clear()
