"""Norms of single gradients, which torch's ``clip_grad_norm_`` and logging loops read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import BATCH, adamw, check, on_ranks, sgd
from pairwise import thinned
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

Read = Callable[[nn.Module], Any]
TOL = 1e-6  # for numbers near 1: torch sums norms in fp32, tensor by tensor


def each(norm: Callable[[Tensor], Tensor]) -> Read:
    return lambda model: [norm(param.grad) for param in model.parameters()]  # type: ignore[arg-type]


READS: dict[str, Read] = {
    "clip": lambda model: clip_grad_norm_(model.parameters(), 0.02),
    "clip by foreach": lambda model: clip_grad_norm_(model.parameters(), 0.02, foreach=True),
    "clip by the largest": lambda model: clip_grad_norm_(
        model.parameters(), 0.005, norm_type=math.inf, error_if_nonfinite=True
    ),
    "clip by the sum": lambda model: clip_grad_norm_(model.parameters(), 0.5, norm_type=1),
    "clip each": lambda model: [clip_grad_norm_(param, 0.01) for param in model.parameters()],
    "clip twice": lambda model: [
        clip_grad_norm_(params, 0.01)
        for params in ([*model.parameters()][:2], [*model.parameters()][2:], model.parameters())
    ],
    "total": lambda model: get_total_norm([param.grad for param in model.parameters()]),
    "data": each(lambda grad: grad.data.norm(2)),
    "order 3": each(lambda grad: torch.norm(grad.detach(), p=3)),
    "linalg": each(torch.linalg.norm),
    "views": each(lambda grad: torch.linalg.vector_norm(grad.view(-1), dtype=torch.float64)),
    "foreach": lambda model: torch._foreach_norm([param.grad for param in model.parameters()], 2),
}


def told(read: Read, seen: list[Any]) -> Callable[..., None]:
    """Return a loop that records ``read()`` after both backwards of a step and after the step."""

    def script(model: nn.Module, optimizer: Any, batch: Tensor, _sharded: bool) -> None:
        numbers: list[float] = []

        def note() -> None:
            found = read(model)
            numbers.extend(map(float, found if isinstance(found, (list, tuple)) else [found]))

        for _ in range(3):
            for part in range(2):
                model(batch).square().mean().div(1 + part).backward()
                note()
            optimizer.step()
            note()
            optimizer.zero_grad()
        seen.append(numbers)

    return script


@pytest.mark.parametrize(("name", "partition"), thinned(2, READS, ["even", "whole"]))
def test_norms_and_clips_by_them_are_those_of_ddp(name: str, partition: str):
    seen: list[Any] = []
    check(adamw, told(READS[name], seen), worlds=(2, 3), tol=TOL, partition=partition)
    plain, *sharded = seen
    assert len(sharded) == 5  # ranks of both worlds
    for numbers in sharded:
        assert numbers == pytest.approx(plain, rel=TOL)


def test_a_norm_is_that_of_the_mean_as_it_is_now():
    """After each reduction, edit in place, edit of owned parts, clip and gather."""

    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> list[Tensor]:
        norms = []

        def note() -> None:
            norms.append(torch.stack(torch._foreach_norm([p.grad for p in model.parameters()])))

        model(batch).square().mean().backward()
        model[0].weight.grad.norm().zero_()  # a returned norm belongs to the script
        note()
        model[0].weight.grad.mul_(3.0)
        note()
        model[0].weight.grad[0] = 0.5
        note()
        with optimizer.owned() as parts:
            for part in parts:
                part.grad.mul_(2.0)
        note()
        optimizer.clip_grad_norm_(0.01)
        note()
        model(batch).square().mean().backward()
        note()
        optimizer.zero_grad(set_to_none=False)
        note()
        model(batch).square().mean().backward()
        note()
        for norm, after in ((norms[-1], False), (norms[4], True)):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            if after:  # the same edits as above, but read as whole gradients
                model[0].weight.grad.mul_(3.0)
                model[0].weight.grad[0] = 0.5
                for param in model.parameters():
                    param.grad.mul_(2.0)
                optimizer.clip_grad_norm_(0.01)
            optimizer.gather_gradients()
            whole = torch.stack([param.grad.norm() for param in model.parameters()])
            assert torch.allclose(norm, whole, rtol=TOL)
        return norms

    first, *others = on_ranks(script, 3, sgd)
    for norms in others:
        assert all(map(torch.equal, first, norms))
    once, tripled, row, doubled, clipped, more, zero, again = first
    assert torch.allclose(tripled[0], 3 * once[0]) and torch.equal(tripled[1:], once[1:])
    assert row[0] != tripled[0] and torch.equal(row[1:], once[1:])
    assert torch.allclose(doubled, 2 * row)
    assert torch.allclose(clipped.norm(), torch.tensor(0.01), rtol=1e-4)
    assert not torch.allclose(more, clipped) and not zero.any() and torch.allclose(again, once)


CONVERSIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda grad: grad.float(),
    lambda grad: grad.detach().float().view(-1),
    lambda grad: grad.to(torch.float32, copy=True),
    lambda grad: grad.double(),
    lambda grad: grad.float().data.half(),
)


def test_a_converted_gradient_has_its_norm_in_the_dtype_of_the_copy():
    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        params = [*model.parameters()]

        def check_all() -> None:
            for convert in CONVERSIONS:
                for param in params:
                    norm, copy = param.grad.norm(), convert(param.grad)
                    assert copy.dtype != param.grad.dtype == torch.bfloat16
                    assert copy.norm().dtype == copy.dtype and copy.norm() == norm.to(copy.dtype)
            total = get_total_norm([param.grad for param in params])
            assert get_total_norm([param.grad.float() for param in params]) == total

        model(batch).float().square().mean().backward()
        check_all()
        copy, norm = params[0].grad.float(), params[0].grad.norm()
        for edit in (lambda: copy.mul_(2), lambda: copy[0].zero_(), lambda: copy.view(-1).zero_()):
            with pytest.raises(RuntimeError, match=r"edits an old \.grad"):
                edit()
        with pytest.raises(RuntimeError, match=r"sum reads \.grad.*param.grad.norm\(\).*metrics"):
            copy.sum()
        with pytest.raises(RuntimeError, match=r"norm reads \.grad"):
            params[0].grad[0].float().norm()
        assert params[0].grad.norm() == norm
        optimizer.clip_grad_norm_(0.01)
        check_all()
        optimizer.step()
        check_all()

    on_ranks(script, 3, param_dtype="bf16")


CHANGES: dict[str, Callable[[nn.Module, Any, Tensor], object]] = {
    "an edit": lambda model, _, batch: model[0].weight.grad.mul_(2.0),  # type: ignore[index]
    "a clip": lambda model, optimizer, batch: optimizer.clip_grad_norm_(0.01),
    "a backward": lambda model, _, batch: model(batch).float().square().mean().backward(),
    "zeros": lambda model, optimizer, batch: optimizer.zero_grad(set_to_none=False),
    "no gradient": lambda model, optimizer, batch: optimizer.zero_grad(),
    "an assignment": lambda model, _, batch: setattr(
        model[0].weight,  # type: ignore[index]
        "grad",
        torch.ones_like(model[0].weight),  # type: ignore[index]
    ),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_converted_gradient_has_no_norm_after_the_gradient_changed(how: str):
    """In torch the copy has the old values, which no rank has."""

    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        model(batch).float().square().mean().backward()
        kept = model[0].weight.grad.float()
        kept.norm()
        CHANGES[how](model, optimizer, batch)
        with pytest.raises(RuntimeError, match=r"norm reads \.grad"):
            kept.norm()
        assert how == "no gradient" or model[0].weight.grad.float().norm() > -1

    on_ranks(script, param_dtype="bf16")


def test_a_converted_gradient_is_no_gradient():
    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        model(batch).float().square().mean().backward()
        param = model[0].weight
        param.grad_dtype = None
        param.grad = param.grad.float()
        with pytest.raises(RuntimeError, match=r"gradient of '0\.weight': expected its own"):
            optimizer.step()

    on_ranks(script, param_dtype="bf16")


def test_a_norm_is_new_if_the_mean_moves_and_its_old_memory_stays():
    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        model(batch).square().mean().backward()
        grads = optimizer._packed.reduce.grads
        kept = [it.own for it in grads]
        before = get_total_norm([param.grad for param in model.parameters()])
        optimizer.clip_grad_norm_(0.01)
        after = get_total_norm([param.grad for param in model.parameters()])
        assert before > 0.02 and after == pytest.approx(0.01, rel=0.01)
        assert all(it.own is not own for it, own in zip(grads, kept, strict=True))

    on_ranks(script, param_dtype="bf16")


def test_all_norms_are_one_collective():
    def count(read: Read) -> int:
        counts = []

        def script(model: nn.Module, _optimizer: Any, batch: Tensor) -> None:
            model(batch).square().mean().backward()
            read(model)

        def log(model: nn.Module, optimizer: Any, batch: Tensor) -> int:
            script(model, optimizer, batch)
            return optimizer._packed.comm.watch.begun  # type: ignore[no-any-return]

        counts = on_ranks(log)
        assert len({*counts}) == 1
        return int(counts[0])

    none, one = count(lambda model: None), count(lambda model: model[0].weight.grad.norm())
    assert count(READS["clip"]) == count(READS["data"]) == one > none


def test_a_norm_on_one_rank_alone_raises_on_all():
    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        model(batch).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"rank 0: norm of \.grad.*rank 1: step"):
            if torch.equal(batch, BATCH.chunk(2)[0]):  # rank 0
                model[0].weight.grad.norm()
            optimizer.step()

    on_ranks(script)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("why", ["loss scale", "number of tokens"])
def test_what_is_still_multiplied_is_no_norm_to_clip(why: str, ranks: int):
    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        if why == "loss scale":
            optimizer.scale_loss(model(batch).square().mean()).backward()
        else:
            optimizer.count(batch.numel())
            model(batch).square().sum().backward()
        with pytest.raises(RuntimeError, match=f"{why}.*optimizer.clip_grad_norm_"):
            clip_grad_norm_(model.parameters(), 1.0)

    dtype = {"loss scale": "fp16", "number of tokens": "bf16"}[why]
    on_ranks(script, ranks, param_dtype=dtype)


def test_a_norm_in_a_hook_raises_by_name():
    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        model(batch).square().mean().backward()  # the first backward sends everything at its end
        optimizer.zero_grad()
        found = []

        def hook(_: Tensor) -> None:
            with pytest.raises(RuntimeError, match=r"norm reads \.grad of '4.bias'"):
                model[-1].bias.grad.norm()
            found.append(True)

        model[0].weight.register_post_accumulate_grad_hook(hook)
        model(batch).square().mean().backward()
        assert found

    on_ranks(script, pack_params=1)


@pytest.mark.filterwarnings("ignore:step skipped")
def test_a_clip_by_a_norm_that_is_not_finite_skips_the_step():
    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        before = [param.detach().clone() for param in model.parameters()]
        model(batch * math.inf).square().mean().backward()
        assert not clip_grad_norm_(model.parameters(), 1.0).isfinite()
        optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))

    on_ranks(script)
    assert BATCH.isfinite().all()
