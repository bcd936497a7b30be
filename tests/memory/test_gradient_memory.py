"""Memory of gradients: a rank's part of the mean, plus a few packs during a backward."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from models import adamw, on_each_rank, run_world, sgd, sharded
from pairwise import thinned
from sequences import BoomError, Fail
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardcast.memory.gradients import Gradients
from shardcast.memory.stand_in import StandIn
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import FakeGroup, ThreadedWorld

pytestmark = pytest.mark.timeout(60)
LAYERS, WIDTH = 12, 32
PACK = 2 * WIDTH * WIDTH  # bytes, of a layer in bf16
ALL = LAYERS * PACK


class Stack(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        if kind == "tied":
            self.layers[-1].weight = self.layers[0].weight
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if self.kind in ("reentrant", "tied") and number % 2:
                x = checkpoint(layer, x, use_reentrant=True)
            else:
                x = layer(x)
        return x


def live(optimizer: Any) -> int:
    """Return the bytes of ``.grad``s with values, packs in flight and reused buffers."""
    reduce, total = packed_of(optimizer).reduce, 0
    if reduce._pass is not None:
        total += reduce.buffers.nbytes
    for bucket in reduce.buckets.values():
        for param in bucket.grads.pack.params:
            if param.grad is not None and type(param.grad) is not StandIn:
                total += param.grad.nbytes
        if bucket.grads.in_flight:
            total += bucket._reduction._sent.nbytes + bucket._reduction.received.nbytes
    return total


def held(group: Any, kind: str, how: str, fields: dict[str, Any]) -> list[tuple[int, int]]:
    """Return two numbers of bytes for each of three steps.

    The first is the maximum at a hook, without means; the second is the total before the step.
    """
    model = Stack(kind)
    optimizer = sharded(model, group, adamw, param_dtype=torch.bfloat16, pack_params=1, **fields)
    most = 0

    def look(_param: Tensor) -> None:
        nonlocal most
        most = max(most, live(optimizer))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    seen = []
    for _ in range(3):
        most = 0
        for number in range(1 if how in ("once", "zeros", "zeros by hand") else 3):
            with (
                optimizer.no_sync() if how == "no_sync" and number < 2 else contextlib.nullcontext()
            ):
                x = torch.ones(2, WIDTH, dtype=torch.bfloat16, requires_grad=True)
                model(x).float().square().mean().backward()
        means = [bucket.grads.own for bucket in packed_of(optimizer).reduce.buckets.values()]
        total = sum(mean.nbytes for mean in means) + live(optimizer)
        assert total == optimizer.memory_report()["gradients"]
        seen.append((most, total))
        optimizer.step()
        if how == "zeros by hand":
            for param in model.parameters():
                param.grad.zero_()
        else:
            optimizer.zero_grad(set_to_none=how != "zeros")
    return seen


@pytest.mark.parametrize("size", thinned(2, (2, 4)))
def test_a_rank_keeps_its_part_of_the_mean_and_six_packs_while_a_backward_runs(size: int):
    def of(kind: str, how: str, **fields: Any) -> list[tuple[int, int]]:
        return run_world(size, held, kind, how, fields)[0][0]

    for how in ("once", "zeros", "zeros by hand"):
        for most, after in of("plain", how):
            assert after == ALL // size and most <= 6 * PACK
    for most, after in of("plain", "thrice"):
        assert after == 2 * ALL // size and most <= 6 * PACK, "sums of means are fp32"
    for most, after in of("plain", "no_sync"):
        assert after == ALL // size and ALL <= most <= ALL + 6 * PACK, "negative control"
    for most, after in of("plain", "no_sync", accumulate="sharded"):
        assert after == 2 * ALL // size and most <= 6 * PACK


@pytest.mark.parametrize("kind", ["reentrant", "tied"])
def test_a_backward_inside_another_one_has_its_packs_sent_at_the_end(kind: str):
    (seen, *_), _ = run_world(2, held, kind, "once", {})
    numel = sum(param.numel() for param in Stack(kind).parameters())
    assert [after for _, after in seen] == [numel] * 3  # 2 bytes per element on 2 ranks
    assert all(most <= 2 * numel + 6 * PACK for most, _ in seen)


def test_a_host_uses_the_same_buffers_in_each_step():
    """There are at most six, and none after ``sleep()`` or ``close()``."""
    model = Stack("plain")
    optimizer = sharded(model, FakeGroup(0, 2), adamw, param_dtype=torch.bfloat16, pack_params=2)
    buffers, kept = packed_of(optimizer).reduce.buffers, set()
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    for _ in range(3):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.add(frozenset(buffer.data.data_ptr() for buffer in buffers._free))
        assert buffers.nbytes == 6 * 2 * PACK, "six, each for a pack of two layers"
    assert len(kept) == 1, "the same buffers in each step"
    optimizer.sleep()
    assert not buffers.nbytes
    optimizer.wake()
    model(x).float().square().mean().backward()
    assert buffers.nbytes
    optimizer.close()
    assert not buffers.nbytes


@on_each_rank(2)
def test_no_gradient_is_kept_by_what_was_sent_or_is_shown(group: Any):
    model = Stack("plain")
    kept = sharded(model, group, adamw, param_dtype=torch.bfloat16, pack_params=4)
    came: list[weakref.ref[Tensor]] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: came.append(weakref.ref(p.grad)))
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    model(x).float().sum().backward()
    gc.collect()
    assert len(came) == LAYERS and not any(grad() is not None for grad in came)
    stand_ins = [param.grad for param in model.parameters()]
    for grad in stand_ins:
        assert grad.untyped_storage().nbytes() == grad.element_size()
    kept.step()


class Static(torch.autograd.Function):
    """Function that returns the same memory in each backward, like a graphed callable."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, memory: Tensor, value: float) -> Tensor:
        ctx.memory, ctx.value = memory, value
        return param.sum()

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> Any:
        return ctx.memory.fill_(ctx.value).detach(), None, None


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("pack_params", [1, None])
@on_each_rank("size")
def test_gradients_in_memory_that_comes_again_are_added_up(
    group: Any, size: int, pack_params: int | None
):
    """Plain torch uses it as ``.grad``, and the next backward overwrites it: 4 instead of 3."""
    model = nn.ParameterList(torch.zeros(8) for _ in range(2))
    optimizer = sharded(model, group, lambda m: sgd(m, lr=1.0), pack_params=pack_params)
    memory = [torch.zeros(8) for _ in range(2)]
    for step in range(2):
        for value in (1.0, 2.0):
            with optimizer.no_sync() if value == 1.0 else contextlib.nullcontext():
                loss = sum(Static.apply(p, m, value) for p, m in zip(model, memory, strict=True))
                loss.backward()
        if step == 1:
            with optimizer.no_sync():  # after the reduction: no gradient is in the memory
                pass
        optimizer.step()
        optimizer.zero_grad()
    assert [float(param.unique()) for param in model] == [-6.0, -6.0]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("comes_first", [True, False])
@on_each_rank("size")
def test_what_a_failed_backward_left_in_such_memory_is_added_up_too(
    group: Any, size: int, comes_first: bool
):
    model = nn.ParameterList(torch.zeros(8) for _ in range(2))
    optimizer = sharded(model, group, lambda m: sgd(m, lr=1.0), pack_params=1)
    memory = [torch.zeros(8) for _ in range(2)]
    before = Fail.apply(Static.apply(model[0], memory[0], 1.0))
    with pytest.raises(BoomError):  # after the second one has its gradient
        (before + Static.apply(model[1], memory[1], 1.0)).backward()
    again = [Static.apply(p, m, 2.0) for p, m in zip(model, memory, strict=True)]
    sum(again[::-1] if comes_first else again).backward()
    optimizer.step()
    assert [float(param.unique()) for param in model] == [-2.0, -3.0]


def test_what_a_failed_backward_left_and_nobody_could_keep_is_an_error_on_all(
    monkeypatch: pytest.MonkeyPatch,
):
    """Out-of-memory errors are one cause. No exception leaves the callback."""
    keep = Gradients.keep

    def short(self: Gradients, has_failed: bool = False) -> None:
        if self.arrived and self.pack.comm.rank == 1:
            raise torch.OutOfMemoryError("not 8 bytes more")
        keep(self, has_failed)

    def run(group: Any) -> None:
        model = nn.ParameterList(torch.zeros(8) for _ in range(2))
        optimizer = sharded(model, group, sgd, pack_params=2)
        for fails in (True, False):
            monkeypatch.setattr(Gradients, "keep", short if fails else keep)
            loss = Fail.apply(model[0].sum()) + model[1].sum() if fails else model[0].sum()
            with pytest.raises(BoomError) if fails else contextlib.nullcontext():
                loss.backward()
            monkeypatch.setattr(Gradients, "keep", keep)
            told = "could not be kept.*not 8 bytes more"
            with pytest.raises(RuntimeError, match=told) if fails else contextlib.nullcontext():
                optimizer.step()
            optimizer.zero_grad()

    ThreadedWorld(2).run(run)


@on_each_rank(2)
def test_the_fp32_sum_of_a_step_is_not_kept_beside_the_gradients_of_the_next(group: Any):
    """Operands of an update are kept from step to step, but not this sum."""
    model = Stack("plain")
    optimizer = sharded(model, group, adamw, param_dtype=torch.bfloat16, fuse="auto")
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    for _ in range(2):
        model(x).float().square().mean().backward()
    (shard,) = packed_of(optimizer).shards
    assert shard.grads is not None and shard.grads.own.dtype == torch.float32
    summed = weakref.ref(shard.grads.own)
    optimizer.step()
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    assert shard.grads.own.dtype == torch.bfloat16 and summed() is None


def test_compiled_autograd_is_refused_by_name():
    from torch._dynamo import compiled_autograd

    model = nn.Linear(4, 4)
    optimizer = sharded(model)
    loss = model(torch.ones(2, 4)).sum()
    with (
        pytest.raises(RuntimeError, match="got compiled autograd"),
        compiled_autograd._enable(torch.compile(backend="eager")),
    ):
        loss.backward()
    optimizer.zero_grad()
