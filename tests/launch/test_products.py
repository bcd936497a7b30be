"""Products in low precision by way of fp32, where torch multiplies by a loop."""

from __future__ import annotations

import warnings

import products
import pytest
import torch
import torch.nn.functional as F
from oracle import mlp
from torch import Tensor

from shardcast import _compat, shard
from shardcast._compat import has_products
from shardcast.optimizer import setup

pytestmark = pytest.mark.timeout(60)
CPU = torch.device("cpu")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """No product in low precision seems to have a kernel, and to take seven times as long."""
    for module in (_compat, products):
        monkeypatch.setattr(module, "has_products", lambda dtype: dtype == torch.float32)
    for module in (setup, products):
        monkeypatch.setattr(module, "slowdown", lambda _dtype: 7.0)


def every_product(dtype: torch.dtype) -> list[Tensor]:
    """Results and gradients of all kinds of products, and one that is written into a tensor."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    a, b, c, bias, vector = random(33, 65), random(65, 17), random(33, 17), random(17), random(65)
    p, q, r, heads = random(3, 9, 20), random(3, 20, 7), random(3, 9, 7), random(2, 3, 16, 8)
    results = [
        *(a @ b, torch.addmm(c, a, b, alpha=0.5, beta=2.0), a @ vector, vector @ vector),
        *(torch.bmm(p, q), torch.baddbmm(r, p, q), torch.addmv(random(33), a, vector)),
        *(F.linear(a, b.t(), bias), F.linear(random(4, 33, 65), b.t(), bias)),
        F.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
    ]
    sum(result.float().square().sum() for result in results).backward()
    written = torch.empty(33, 17, dtype=dtype)
    torch.mm(a.detach(), b.detach(), out=written)
    grads = [leaf.grad for leaf in (a, b, c, bias, vector, p, q, r, heads)]
    return [*(result.detach() for result in results), written, *grads]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_and_their_gradients_are_torchs_own_but_for_the_order_of_sums(
    slow: None, dtype: torch.dtype
) -> None:
    expected = every_product(dtype)
    with products.by_way_of_fp32(CPU) as reason:
        found = every_product(dtype)
    assert "by way of fp32" in reason and "7x" in reason
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype and mine.stride() == theirs.stride()
        apart = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert apart <= torch.finfo(dtype).eps, (mine.shape, apart)


def test_only_products_within_go_by_way_of_fp32_and_only_where_there_is_no_kernel(
    slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded = torch.tensor([[1.0, 1.0, -1.0]]).bfloat16()
    calls: list[torch.dtype] = []
    through = products._through_fp32

    def watched(kernel: object) -> object:
        product = through(kernel)

        def called(keys: object, *operands: Tensor, **options: object) -> object:
            calls.append(operands[0].dtype)
            return product(keys, *operands, **options)

        return called

    monkeypatch.setattr(products, "_through_fp32", watched)
    rounded @ rounded.t()
    assert calls == []
    with products.by_way_of_fp32(CPU):
        rounded @ rounded.t()
    assert calls == [torch.bfloat16]
    rounded @ rounded.t()
    with products.by_way_of_fp32(torch.device("cuda")) as reason:
        rounded @ rounded.t()
    assert (calls, reason) == ([torch.bfloat16], "")
    monkeypatch.setattr(products, "has_products", lambda _dtype: True)
    with products.by_way_of_fp32(CPU) as reason:
        rounded @ rounded.t()
    assert (calls, reason) == ([torch.bfloat16], "")


def test_a_cpu_that_multiplies_slowly_is_named_once(
    slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "told", set())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for dtype in (torch.float32, torch.bfloat16, torch.bfloat16, torch.float16):
            model = mlp()
            shard(model, torch.optim.SGD(model.parameters()), param_dtype=dtype, loss_scale=1.0)
    texts = [str(one.message) for one in told]
    assert len(texts) == 2 and all("7 times" in text for text in texts)
    assert "bfloat16" in texts[0] and "float16" in texts[1] and "bfloat16" not in texts[1]
    assert {one.filename for one in told} == {__file__}


def test_whether_there_is_a_kernel_is_no_matter_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on while the machine is busy has the same bits: nothing is measured."""
    for ratio in (0.5, 50.0):
        monkeypatch.setattr(products, "slowdown", lambda _dtype, ratio=ratio: ratio)
        reasons = {bool(products.why(CPU)), not all(map(has_products, products.LOW))}
        assert len(reasons) == 1, ratio
    assert has_products(torch.float32)


def test_a_measured_ratio_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    setup.slowdown.cache_clear()
    assert setup.slowdown(torch.bfloat16) > 0.0
    assert torch.get_num_threads() == before
