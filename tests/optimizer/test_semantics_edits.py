"""Scripts that edit gradients by hand, compared with plain torch on the whole batch."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import run_world
from oracle import BATCH, check, equal, mlp, on_ranks, set_grads, sgd
from pairwise import thinned
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import shardcast
from shardcast import _compat
from shardcast.memory.gradients import Gradients
from shardcast.testing import ThreadedWorld

pytestmark = pytest.mark.timeout(60)


def edits_in_place(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.3)


def replaces(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad * 0.3


@pytest.mark.parametrize("accumulate", ["local", "sharded"])
@pytest.mark.parametrize("hook", [edits_in_place, replaces])
def test_hooks_of_the_script_edit_gradients_before_they_are_sent(hook: Any, accumulate: str):
    def script(model: nn.Module, optimizer: Any, batch: Tensor, _sharded: bool) -> None:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(hook)
        for _ in range(3):  # from the second one on, packs are sent during backward
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    check(sgd, script, tol=1e-6, accumulate=accumulate)


# -- between a clip and its step ------------------------------------------------------------------


def cleared(model: nn.Module) -> None:
    model.zero_grad()


def one_cleared(model: nn.Module) -> None:
    next(model.parameters()).grad = None


def one_replaced(model: nn.Module) -> None:
    param = next(model.parameters())
    param.grad = torch.full_like(param, 0.3)


def all_replaced(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.3)


def all_in_place(model: nn.Module) -> None:
    for param in model.parameters():
        edits_in_place(param)


def all_through_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad.data.mul_(0.3)


def all_in_one_call(model: nn.Module) -> None:
    torch._foreach_mul_([param.grad for param in model.parameters()], 0.3)


def all_shifted(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad.add_(0.004)


def all_bounded(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad.clamp_(-0.002, 0.003)


def all_set_in_part(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad[0] = 0.3


def absent_set(model: nn.Module) -> None:
    """Set gradients of the last layer, which the backward has not reached."""
    for param in model[4].parameters():
        param.grad = torch.full_like(param, 0.3)


AFTER_THE_CLIP = (
    *(cleared, one_cleared, one_replaced, all_replaced, all_in_place, all_through_data),
    *(all_in_one_call, all_shifted, all_bounded, absent_set, all_set_in_part),
)
CLIPS = {  # of whom, whether they clip again after the edit, and the device
    "own": ("own", False, True),
    "own, on an accelerator": ("own", False, False),
    "own, again": ("own", True, True),
    "torch's": ("torch's", False, True),
}


@pytest.mark.parametrize(("edit", "way"), thinned(2, AFTER_THE_CLIP, CLIPS))
def test_gradients_that_are_edited_after_the_clip_train_as_under_ddp(
    edit: Callable[..., None], way: str, monkeypatch: pytest.MonkeyPatch
):
    """Also on an accelerator, where the clip decides and the step sends nothing before its update.

    Neither decay nor momentum may change a parameter without a gradient.
    """
    clips, clips_again, is_host = CLIPS[way]

    def script(model: nn.Module, optimizer: Any, batch: Tensor, sharded: bool) -> None:
        params = list(model.parameters())
        reached = model[:4] if edit is absent_set else model
        for _ in range(3):
            reached(batch).square().mean().backward()
            by_norm: Any = partial(clip_grad_norm_, params)
            by_value: Any = partial(nn.utils.clip_grad_value_, params)
            if sharded and clips == "own":
                by_norm, by_value = optimizer.clip_grad_norm_, optimizer.clip_grad_value_
            by_norm(0.1)
            if not clips_again:
                by_value(0.01)  # applies the factor that the norm left to the update
            edit(model)
            if clips_again:
                by_norm(100.0)  # clips nothing, so that the first factor stays visible
            optimizer.step()
            optimizer.zero_grad()

    monkeypatch.setattr(_compat, "is_host", lambda _device: is_host)
    check(lambda model: sgd(model, momentum=0.9, weight_decay=0.1), script, tol=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_clip_is_seen_on_one_rank_whoever_reads(dtype: str):
    def run(group: Any) -> None:
        model = nn.Linear(8, 8)
        optimizer: Any = shardcast.shard(model, sgd(model), process_group=group, param_dtype=dtype)
        for step in range(3):  # not cleared, so that gradients are added to clipped ones
            model(torch.ones(1, 8)).float().sum().backward()
            before = model.weight.grad.clone()
            assert optimizer.clip_grad_norm_(0.1) > 1
            if dtype == "bf16" and step == 0:  # later means are fp32, with the clip applied
                with pytest.raises(RuntimeError, match=r"'weight'.*gather_gradients"):
                    model.weight.grad.clone()
            norms = [param.grad.norm() for param in model.parameters()]
            torch.testing.assert_close(torch.stack(norms).norm(), torch.tensor(0.1))
            optimizer.gather_gradients()
            assert model.weight.grad.clone().norm() < 0.1 < before.norm()
            optimizer.step()
        backward_of(model)
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert not model.weight.grad.clone().any()  # a clip does not change zeros

    ThreadedWorld(1).run(run)


def backward_of(model: nn.Module, scale: float = 1.0) -> None:
    (model(torch.ones(1, 8)) * scale).float().sum().backward()


def cleared_and_added_to(model: nn.Module, optimizer: Any) -> None:
    one_cleared(model)
    backward_of(model)


def clipped_again_and_replaced(model: nn.Module, optimizer: Any) -> None:
    optimizer.clip_grad_norm_(0.05)
    param = next(model.parameters())
    param.grad = torch.full_like(param, 0.25)


def one_assigned(model: nn.Module, _optimizer: Any) -> None:
    param = next(model.parameters())
    param.grad = torch.full_like(param, 0.25)


def divided_and_edited(model: nn.Module, optimizer: Any) -> None:
    optimizer.divisor = float(optimizer.divisor)
    all_in_place(model)


def clipped_by_torch(model: nn.Module, _optimizer: Any) -> None:
    clip_grad_norm_(model.parameters(), 0.05)


def gathered_and_cleared(model: nn.Module, optimizer: Any) -> None:
    optimizer.gather_gradients()
    one_cleared(model)


def gathered_and_edited(model: nn.Module, optimizer: Any) -> None:
    optimizer.gather_gradients()
    all_in_place(model)


def replaced(model: nn.Module, _optimizer: Any) -> None:
    all_replaced(model)


ACTS = (
    *(cleared_and_added_to, clipped_again_and_replaced, one_assigned, divided_and_edited),
    *(clipped_by_torch, gathered_and_cleared, gathered_and_edited, replaced),
)


@pytest.mark.parametrize("act", ACTS)
def test_acts_after_a_clip_are_the_same_on_one_rank(act: Any):
    """In bf16 one rank's update applies the clip; until then ``.grad`` is a stand-in."""

    def run(group: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer: Any = shardcast.shard(
            model, sgd(model), process_group=group, param_dtype="bf16", pack_params=1
        )
        for step in range(3):
            backward_of(model, 1 + step)
            optimizer.clip_grad_norm_(0.1)
            act(model, optimizer)
            optimizer.step()
            if step:  # the second step adds to gradients of the first
                optimizer.zero_grad()
        return list(optimizer.full_parameters().values())

    expected = ThreadedWorld(2, timeout=20).run(run)[0]
    for mine, theirs in zip(ThreadedWorld(1).run(run)[0], expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_steps_of_one_rank_read_the_mean_where_the_first_backward_put_it():
    """Each replay of a backward's CUDA graph writes the mean there and runs no hook."""
    models = [mlp(), mlp()]
    graphed, plain = (shardcast.shard(it, sgd(it), param_dtype="bf16") for it in models)
    for step in range(3):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
        models[1](x.bfloat16()).float().square().mean().backward()
        if step == 0:
            models[0](x.bfloat16()).float().square().mean().backward()
            memory = [param.grad for param in models[0].parameters()]
        for mine, param in zip(memory, models[1].parameters(), strict=True):
            mine.copy_(param.grad)
        graphed.step()
        plain.step()
        plain.zero_grad()
        assert equal(models[0].parameters(), models[1].parameters())
        assert all(a is p.grad for a, p in zip(memory, models[0].parameters(), strict=True))


@pytest.mark.parametrize("size", [1, 2])
def test_several_ranks_refuse_a_graph_of_a_backward_without_its_step(size: int, monkeypatch: Any):
    """Replays wrote memory that no step read any more, or that lacked an earlier clip."""
    captured = threading.local()  # each rank is a thread
    monkeypatch.setattr(_compat, "is_capturing", lambda _device: captured.now)

    def run(group: Any) -> None:
        model = nn.Linear(8, 8)
        optimizer = shardcast.shard(model, sgd(model), process_group=group)
        for steps in (1, 0):
            captured.now = True
            backward_of(model)
            for _ in range(steps):
                optimizer.step()
            captured.now = False
            refused = pytest.raises(RuntimeError, match="CUDA graph without its step")
            with refused if size > 1 and not steps else contextlib.nullcontext():
                optimizer.step()
        optimizer.zero_grad()
        optimizer.step()

    ThreadedWorld(size).run(run)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("accumulate", ["local", "sharded"])
@pytest.mark.parametrize("first", ["reduced", "in no_sync", "zeroed"])
def test_hooks_that_miss_the_earlier_gradients_of_a_step_are_named(
    size: int, accumulate: str, first: str
):
    """With DDP, hooks of a second backward see the sum."""

    def run(group: Any) -> Any:
        model = nn.Linear(2, 2, bias=False)
        fields = {"param_dtype": "fp32", "process_group": group, "accumulate": accumulate}
        optimizer = shardcast.shard(model, sgd(model), **fields)
        seen: list[float] = []
        model.weight.register_post_accumulate_grad_hook(
            lambda param: seen.append(float(param.grad.sum()))  # type: ignore[union-attr]
        )
        for _ in range(2):
            for number in range(2):
                quiet = first == "in no_sync" and number == 0
                with optimizer.no_sync() if quiet else contextlib.nullcontext():
                    model.weight.sum().backward()
                if first == "zeroed" and number == 0:
                    optimizer.gather_gradients()
                    model.weight.grad.zero_()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    is_summed = first != "zeroed" and (
        size == 1 or (first == "in no_sync" and accumulate == "local")
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = ThreadedWorld(size).run(run)
    assert found == [[4.0, 8.0 if is_summed else 4.0] * 2] * size
    names = [it for it in told if "register_post_accumulate_grad_hook" in str(it.message)]
    assert len(names) == (0 if is_summed or first == "zeroed" else 1)
    assert all("no_sync(), with accumulate 'local'" in str(it.message) for it in names)


def test_a_backward_does_not_wait_in_each_step_for_what_a_script_zeroed(
    monkeypatch: pytest.MonkeyPatch,
):
    """With hooks, the first one looks at the values, for a warning."""
    looks, plain = [], Gradients.is_zeroed
    monkeypatch.setattr(Gradients, "is_zeroed", lambda *of: looks.append(of) or plain(*of))

    def run(group: Any) -> None:
        model = nn.Linear(8, 3)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda _: None)
        optimizer = shardcast.shard(model, sgd(model), process_group=group)
        for _ in range(4):
            backward_of(model)
            optimizer.gather_gradients()
            optimizer.step()
            model.zero_grad(set_to_none=False)

    ThreadedWorld(2).run(run)
    assert len(looks) == 2 * 2


def test_what_was_kept_before_a_clip_is_not_edited_as_if_it_were_clipped():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer: Any = shardcast.shard(model, sgd(model), param_dtype="bf16")
    backward_of(model)
    kept = [(param.grad, param.grad.detach()) for param in model.parameters()]
    optimizer.clip_grad_norm_(0.1)
    for grad, view in kept:
        with pytest.raises(RuntimeError, match=r"reads \.grad of .*does not show it yet"):
            grad.sum()
        view.add_(0.01)  # the clip would shrink this edit
    with pytest.raises(RuntimeError, match=r"kept from before clip_grad_norm_"):
        optimizer.step()


@pytest.mark.parametrize(("dtype", "size"), thinned(2, ["bf16", "fp16"], [1, 2, 3]))
def test_a_step_after_gradients_were_read_has_the_bits_of_one_without(dtype: str, size: int):
    def norm(_optimizer: Any, model: nn.Module) -> None:
        next(model.parameters()).grad.norm()  # type: ignore[union-attr]

    def part(optimizer: Any, _model: nn.Module) -> None:
        with optimizer.owned() as parts:
            for it in parts:
                assert it.grad is not None

    readers: list[Callable[..., Any]] = [lambda it, _: it.gather_gradients(), part]
    readers += [norm] if dtype == "bf16" else []  # refused with a loss scale

    def run(group: Any, clips: bool, read: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 7))
        optimizer: Any = shardcast.shard(
            model, sgd(model), process_group=group, param_dtype=dtype, pack_params=1
        )
        for step in range(3):
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            optimizer.scale_loss(model(batch).float().square().sum()).backward()
            if clips:
                optimizer.clip_grad_norm_(0.1)
            read(optimizer, model)
            optimizer.step()
            optimizer.zero_grad()
        return list(optimizer.full_parameters().values())

    world = ThreadedWorld(size, timeout=20)
    for clips in (False, True):
        expected = world.run(run, clips, lambda *_: None)[0]
        for read in readers:
            assert equal(world.run(run, clips, read)[0], expected)


def loss_and_clip(model: nn.Module, optimizer: Any, batch: Tensor, clips: str) -> None:
    model(batch).float().square().mean().backward()
    if clips == "own":
        optimizer.clip_grad_norm_(0.05)
    else:
        clip_grad_norm_(model.parameters(), 0.05)


def each_micro_batch(model: nn.Module, optimizer: Any, batch: Tensor, clips: str) -> None:
    for part in (batch, 2 * batch):
        loss_and_clip(model, optimizer, part, clips)
    optimizer.step()
    optimizer.zero_grad()


def stepped_twice(model: nn.Module, optimizer: Any, batch: Tensor, clips: str) -> None:
    loss_and_clip(model, optimizer, batch, clips)
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad()


def cleared_in_part(model: nn.Module, optimizer: Any, batch: Tensor, clips: str) -> None:
    loss_and_clip(model, optimizer, batch, clips)
    optimizer.step()
    model[0].zero_grad()


def decayed(model: nn.Module, optimizer: Any, batch: Tensor, clips: str) -> None:
    """Use ``.grad`` as momentum."""
    loss_and_clip(model, optimizer, batch, clips)
    optimizer.step()
    for param in model.parameters():
        param.grad.mul_(0.9)


def read_after_the_step(model: nn.Module, optimizer: Any, batch: Tensor, clips: str) -> None:
    loss_and_clip(model, optimizer, batch, clips)
    optimizer.step()
    if isinstance(optimizer, shardcast.ShardedOptimizer):
        optimizer.gather_gradients()
    grads = [param.grad.clone() for param in model.parameters()]
    optimizer.zero_grad()
    with torch.no_grad():
        for param, grad in zip(model.parameters(), grads, strict=True):
            param -= grad


def dropped(model: nn.Module, optimizer: Any, batch: Tensor, clips: str) -> None:
    """Drop clipped gradients; the clip must not apply to the next ones."""
    loss_and_clip(model, optimizer, 9 * batch, clips)
    model.zero_grad()
    model(batch).float().square().mean().backward()
    optimizer.step()
    model.zero_grad()


KEPT = each_micro_batch, stepped_twice, cleared_in_part, decayed, read_after_the_step, dropped


@pytest.mark.parametrize(("script", "dtype"), thinned(2, KEPT, ["fp32", "bf16"]))
def test_clipped_gradients_stay_clipped_until_they_are_cleared(script: Any, dtype: str):
    """With DDP a clip edits ``.grad`` in place; here the update may apply it."""

    def train(model: nn.Module, optimizer: Any, batch: Tensor, clips: str) -> list[Tensor]:
        for _ in range(3):
            script(model, optimizer, batch.to(model[0].weight.dtype), clips)
        return [param.detach().float() for param in model.parameters()]

    def run(group: Any, clips: str) -> list[Tensor]:
        model = mlp()
        optimizer = shardcast.shard(
            model, sgd(model), process_group=group, param_dtype=dtype, pack_params=1
        )
        return train(model, optimizer, BATCH.chunk(group.size())[group.rank()], clips)

    model = mlp()
    expected = train(model, sgd(model), BATCH, "torch's")
    for size in (1, 2, 3):
        for clips in ("own", "torch's"):
            found = ThreadedWorld(size, timeout=20).run(run, clips)[0]
            for mine, theirs in zip(found, expected, strict=True):
                close = 1e-6 if dtype == "fp32" else 4e-3  # two bf16 spacings of the weights
                torch.testing.assert_close(mine, theirs, rtol=0, atol=close)


@pytest.mark.parametrize("edits", ["none", "all", "on one rank"])
def test_on_an_accelerator_the_step_after_a_clip_decides_nothing(
    edits: str, monkeypatch: pytest.MonkeyPatch
):
    """It only sends parameters. If ranks edit differently, the next step raises."""

    def run(group: Any) -> tuple[list[str], str]:
        model = nn.Linear(8, 8)
        optimizer: Any = shardcast.shard(model, sgd(model), process_group=group)
        model(torch.ones(1, 8)).sum().backward()
        optimizer.clip_grad_norm_(0.1)
        if edits == "all" or (edits == "on one rank" and group.rank() == 1):
            edits_in_place(model.weight)
        begun = len(group.log)
        optimizer.step()
        sent = [entry.op for entry in group.log[begun:]]
        optimizer.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
        error = ""
        try:
            optimizer.step()
        except RuntimeError as it:
            error = str(it)
        return sent, error

    monkeypatch.setattr(_compat, "is_host", lambda _device: False)
    for sent, error in run_world(2, run)[0]:
        assert "all_reduce" not in sent and len(sent) == 1
        assert ("edits of gradients after the clip" in error) == (edits == "on one rank")


# -- warnings -------------------------------------------------------------------------------------


def torchs_own_clip(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
    for _ in range(2):
        model(batch).square().mean().backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def set_after_a_backward_that_is_dropped(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
    model(batch).square().mean().backward()
    optimizer.zero_grad()
    params = list(model.parameters())
    grads = torch.autograd.grad(model(batch).square().mean(), params)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.step()


def edited_through_data(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
    """DINO's clip and hand-written all-reduces write ``p.grad.data``."""
    for _ in range(2):
        model(batch).square().mean().backward()
        for param in model.parameters():
            param.grad.data.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def with_a_graph(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
    for _ in range(2):
        model(batch).square().mean().backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()


def a_clip_before_a_sleep(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
    """``asleep()`` drops gradients like ``zero_grad()``, so the step after it does nothing."""
    model(batch).square().mean().backward()
    optimizer.clip_grad_norm_(0.1)
    with optimizer.asleep():
        pass
    optimizer.step()


def own_clips_and_gradients_by_hand(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
    for step in range(3):
        model(batch).square().mean().backward()
        optimizer.clip_grad_value_(0.1)
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        set_grads(model, step)
        optimizer.step()


@pytest.mark.parametrize(
    ("script", "size", "told"),
    [
        (torchs_own_clip, 1, ""),
        (set_after_a_backward_that_is_dropped, 2, "not averaged over ranks"),
        (edited_through_data, 2, ""),
        (with_a_graph, 1, "which has no graph"),
        (with_a_graph, 2, "which has no graph"),
        (own_clips_and_gradients_by_hand, 2, ""),
        (a_clip_before_a_sleep, 1, ""),
    ],
)
def test_what_trains_otherwise_than_it_seems_is_warned_of_once(script: Any, size: int, told: str):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(script, size)
    messages = [str(w.message) for w in caught if "reference cycle" not in str(w.message)]
    assert len(messages) == bool(told), messages
    assert all(told in message for message in messages)
