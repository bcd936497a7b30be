"""Scripts that read and keep gradients on a single rank, compared with plain torch."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from oracle import sgd
from torch import Tensor, nn

import shardcast
from shardcast.memory import gradients
from shardcast.optimizer.sharded import packed_of

pytestmark = pytest.mark.timeout(60)


def fail(_grad: Tensor) -> None:
    raise MemoryError("out of memory")


def fails(model: Any) -> None:
    handle = model[0].register_hook(fail)
    with suppress(MemoryError):
        model[0].sum().backward()
    handle.remove()


def both(model: Any) -> None:
    (model[0].sum() + 2 * model[1].sum()).backward()


def keeps_them_in_a_list(model: Any, optimizer: Any) -> None:
    both(model)
    kept = [param.grad for param in model]
    both(model)
    for grad in kept:
        grad.mul_(0.25)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    both(model)
    for grad in kept:
        grad.mul_(0.25)


def keeps_one_that_it_clears(model: Any, optimizer: Any) -> None:
    both(model)
    kept = [param.grad for param in model]
    optimizer.zero_grad()
    both(model)
    for param, grad in zip(model, kept, strict=True):
        param.grad = param.grad + 0.5 * grad


def keeps_views_of_them(model: Any, optimizer: Any) -> None:
    """PCGrad keeps a task's gradients while it computes the next task's."""
    both(model)
    kept = [param.grad.detach() for param in model]
    optimizer.zero_grad()
    (3 * model[0].sum() + model[1].sum()).backward()
    for param, grad in zip(model, kept, strict=True):
        param.grad = param.grad + 0.5 * grad


def keeps_views_and_clears_one_by_one(model: Any, _optimizer: Any) -> None:
    both(model)
    kept = [param.grad.view(-1) for param in model]
    for param in model:
        param.grad = None
    (3 * model[0].sum()).backward()
    for param, grad in zip(model, kept, strict=True):
        param.grad = grad.clone() if param.grad is None else param.grad + 0.5 * grad


def keeps_views_and_clears_some(model: Any, _optimizer: Any) -> None:
    both(model)
    view, kept = model[0].grad.detach(), model[1].grad
    model[0].grad = None
    both(model)
    kept.mul_(0.5)  # is .grad still
    model[0].grad = model[0].grad + 0.5 * view


def zeroes_in_place_after_a_clear(model: Any, optimizer: Any) -> None:
    both(model)
    kept = [param.grad.detach() for param in model]
    for param in model:
        param.grad = None
    optimizer.zero_grad(set_to_none=False)
    for param, grad in zip(model, kept, strict=True):
        param.grad = grad


def edits_what_it_keeps_through_a_view(model: Any, optimizer: Any) -> None:
    both(model)
    kept = [(param.grad, param.grad.detach()) for param in model]
    optimizer.zero_grad()
    both(model)
    for param, (grad, view) in zip(model, kept, strict=True):
        view.mul_(3)
        param.grad = param.grad + grad


def steps_without_gradients(model: Any, optimizer: Any) -> None:
    both(model)
    kept = [param.grad.data for param in model]
    optimizer.zero_grad()
    optimizer.step()
    for param, grad in zip(model, kept, strict=True):
        param.grad = grad


def assigns_before_a_step(model: Any, optimizer: Any) -> None:
    both(model)
    model[1].grad = model[1].grad * 2
    optimizer.step()


def zeroes_in_place(model: Any, optimizer: Any) -> None:
    both(model)
    model[1].grad = None
    optimizer.zero_grad(set_to_none=False)
    model[0].grad.add_(1.0)
    model[0].sum().backward()


def accumulates_onto_a_mean(model: Any, optimizer: Any) -> None:
    both(model)
    with getattr(optimizer, "no_sync", nullcontext)():
        model[0].sum().backward()
    model[0].grad.mul_(0.5)


def fails_after_a_backward(model: Any, _optimizer: Any) -> None:
    both(model)
    fails(model)


def assigns_after_a_backward_that_failed(model: Any, _optimizer: Any) -> None:
    fails(model)
    for param in model:
        param.grad = torch.ones(3)


SCRIPTS = (
    keeps_them_in_a_list,
    keeps_one_that_it_clears,
    keeps_views_of_them,
    keeps_views_and_clears_one_by_one,
    keeps_views_and_clears_some,
    zeroes_in_place_after_a_clear,
    edits_what_it_keeps_through_a_view,
    steps_without_gradients,
    assigns_before_a_step,
    zeroes_in_place,
    accumulates_onto_a_mean,
    fails_after_a_backward,
    assigns_after_a_backward_that_failed,
)


def two() -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(2))


@pytest.mark.parametrize("pack_params", [1, None])
@pytest.mark.parametrize("script", SCRIPTS)
def test_gradients_of_a_lone_rank_are_plain_tensors(script: Any, pack_params: int | None):
    found = []
    for is_sharded in (False, True):
        model = two()
        optimizer: Any = sgd(model)
        if is_sharded:
            options = {"param_dtype": "fp32", "pack_params": pack_params}
            optimizer = shardcast.shard(model, optimizer, **options)
        script(model, optimizer)
        grads = [None if param.grad is None else param.grad.clone() for param in model]
        optimizer.step()
        found.append((grads, [param.detach().clone() for param in model]))
    (grads, values), (own_grads, own_values) = found
    assert [grad is None for grad in own_grads] == [grad is None for grad in grads]
    pairs = zip([*grads, *values], [*own_grads, *own_values], strict=True)
    assert all(own is None or torch.equal(plain, own) for plain, own in pairs)


def test_a_gradient_that_a_loop_keeps_does_not_keep_the_memory_of_its_neighbours():
    model = two()
    optimizer = shardcast.shard(model, sgd(model), param_dtype="fp32")
    both(model)
    kept, address = model[0].grad, model[1].grad.data_ptr()  # type: ignore[union-attr]
    optimizer.zero_grad()
    both(model)
    assert model[1].grad.data_ptr() == address  # type: ignore[union-attr]
    assert kept.untyped_storage().nbytes() == kept.nbytes  # type: ignore[union-attr]


def test_views_of_gradients_that_make_room_for_kept_ones_are_nan():
    model = two()
    shardcast.shard(model, sgd(model), param_dtype="fp32")
    both(model)
    cleared, stale = (param.grad.detach() for param in model)  # type: ignore[union-attr]
    model[0].grad = None
    both(model)
    assert cleared.eq(1).all() and stale.isnan().all()
    assert model[1].grad.eq(4).all()  # type: ignore[union-attr]


def test_views_stay_right_if_another_parameter_never_had_a_gradient():
    model = two()
    shardcast.shard(model, sgd(model), param_dtype="fp32")
    for count in (1, 2, 3):
        model[0].sum().backward()
        if count == 1:
            kept = model[0].grad.data  # type: ignore[union-attr]
        assert kept.eq(count).all()


@pytest.mark.parametrize("keeps", [False, True])
def test_a_clip_makes_no_new_stand_ins_for_gradients_that_nobody_keeps(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
):
    """A call for each takes longer than the clip. What a script keeps stays ``.grad``."""
    made = []
    for name in ("stand_in", "outdated"):
        plain = getattr(gradients, name)
        monkeypatch.setattr(gradients, name, lambda *of, plain=plain: made.append(of) or plain(*of))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).bfloat16()
    optimizer, batch = shardcast.shard(model, sgd(model)), torch.ones(2, 3, dtype=torch.bfloat16)
    for _ in range(2):
        model(batch).sum().backward()
        kept = [param.grad for param in model.parameters()] if keeps else []
        optimizer.clip_grad_norm_(0.1)
        for param, grad in zip(model.parameters(), kept, strict=False):
            assert param.grad is grad
        if keeps:
            assert nn.utils.get_total_norm(kept).item() == pytest.approx(0.1, rel=1e-2)
        optimizer.step()
        optimizer.zero_grad()
    assert len(made) == 4 * (1 + keeps)


class Tiled(torch.autograd.Function):
    """Runs ``layer`` and its backward inside the backward, for half of the batch at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.x, ctx.layer = x.detach(), layer
        return torch.stack([layer(part).sum() for part in x.chunk(2)]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        made = []
        for part in ctx.x.chunk(2):
            part.requires_grad_()
            with torch.enable_grad():
                torch.autograd.backward(ctx.layer(part).sum() * grads[0])
            made.append(part.grad)
        return torch.cat(made), None


def test_a_lone_rank_takes_a_gradient_that_comes_again_in_a_backward():
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer: Any = sgd(model)
        if is_sharded:
            optimizer = shardcast.shard(model, optimizer, param_dtype="fp32", pack_params=1)
        for inner in (False, True):
            hidden = model[0](torch.arange(16.0).view(4, 4))
            loss = Tiled.apply(hidden, model[1]) if inner else 0.0
            (model[1](hidden).square().sum() + loss).backward()
            grads = [param.grad.clone() for param in model.parameters()]
            optimizer.zero_grad()
        found.append(grads)
    for plain, own in zip(*found, strict=True):
        torch.testing.assert_close(own, plain)


def test_a_clip_that_is_shown_at_once_can_be_read_and_leaves_one_copy_of_the_mean():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8))  # bf16 and fp32
    optimizer: Any = shardcast.shard(model, sgd(model), param_dtype="bf16")
    model(torch.randn(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.clip_grad_norm_(0.1)
    norms = [param.grad.clone().norm() for param in model.parameters()]  # type: ignore[union-attr]
    torch.testing.assert_close(torch.stack(norms).norm(), torch.tensor(0.1))
    elements = sum(shard.pack.layout.numel for shard in packed_of(optimizer).shards)
    assert optimizer.memory_report()["gradients"] == 4 * elements


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_sync_takes_a_lone_rank_no_more_memory_than_one_backward(dtype: str):
    model = nn.Linear(64, 64)
    optimizer: Any = shardcast.shard(model, sgd(model), param_dtype=dtype)
    batch, reports = torch.ones(1, 64, dtype=model.weight.dtype), []
    for in_no_sync in (False, True):
        for _ in range(2 if in_no_sync else 0):
            with optimizer.no_sync():
                model(batch).sum().backward()
            reports.append(optimizer.memory_report()["gradients"])
        model(batch).sum().backward()
        reports.append(optimizer.memory_report()["gradients"])
        optimizer.step()
        optimizer.zero_grad()
    assert max(reports) == reports[0]
