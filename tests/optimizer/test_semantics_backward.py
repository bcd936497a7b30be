"""Unusual backwards: autograd.grad, gradient penalties, re-entrant checkpoints, exceptions."""

from __future__ import annotations

import warnings
from typing import Any

import foreign
import pytest
import torch
from oracle import BATCH, check, mlp, set_grads
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import shardcast
from shardcast import _compat
from shardcast.testing import SpawnedWorld, ThreadedWorld, assert_same_sequence

pytestmark = pytest.mark.timeout(60)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def by_hand(model: nn.Module, optimizer: Any, batch: Tensor, _sharded: bool) -> None:
    """Functional style: gradients are computed, not accumulated, and then set."""
    for _ in range(3):
        params = list(model.parameters())
        grads = torch.autograd.grad(model(batch).square().mean(), params)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_of_autograd_grad_set_by_hand_are_averaged():
    check(sgd, by_hand, worlds=(1, 2, 3), tol=1e-6)


def test_taking_autograd_grad_for_a_backward_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    """The control: arming a round for it leaves each rank with its own gradients."""
    monkeypatch.setattr(_compat, "accumulates", lambda: True)
    with pytest.raises((AssertionError, RuntimeError)):
        check(sgd, by_hand, worlds=(2,), tol=1e-6)


def test_a_gradient_penalty_costs_no_round_of_its_own():
    def script(model: nn.Module, optimizer: Any, batch: Tensor, _sharded: bool) -> None:
        for _ in range(3):
            inputs = batch.clone().requires_grad_()
            out = model(inputs)
            (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
            (out.square().mean() + slope.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    check(sgd, script, tol=1e-6)

    def count(group: Any) -> None:
        model = mlp()
        optimizer = shardcast.shard(model, sgd(model), process_group=group, pack_params=2)
        world.logs[group.rank()].clear()
        script(model, optimizer, BATCH.bfloat16(), True)

    world = ThreadedWorld(2)
    world.run(count)
    exchanges = [call for call in world.logs[0] if call.op == "all_to_all_single"]
    assert len(exchanges) == 3 * 3, "packs x steps"


@pytest.mark.parametrize("inputs", [[0], [1, 3], [0, 1, 2, 3, 4, 5]])
def test_a_backward_to_some_parameters_alone_reduces_them(inputs: list[int]):
    def script(model: nn.Module, optimizer: Any, batch: Tensor, _sharded: bool) -> None:
        for _ in range(3):
            params = list(model.parameters())
            loss = model(batch).square().mean()
            loss.backward(inputs=[params[number] for number in inputs])
            optimizer.step()
            optimizer.zero_grad()

    check(sgd, script, tol=1e-6)


def edits_in_place(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.3)


def replaces(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad * 0.3


@pytest.mark.parametrize("grads", ["full", "sharded"])
@pytest.mark.parametrize("hook", [edits_in_place, replaces])
def test_hooks_of_the_script_edit_gradients_before_they_are_sent(hook: Any, grads: str):
    def script(model: nn.Module, optimizer: Any, batch: Tensor, _sharded: bool) -> None:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(hook)
        for _ in range(3):  # from the second one on packs are sent while backward runs
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    check(sgd, script, tol=1e-6, grads=grads)


@pytest.mark.parametrize("size", [1, 2])
def test_a_backward_through_a_graph_made_before_the_step_is_refused_as_in_plain_torch(size: int):
    """It would take the new weights and the old activations."""

    def script(model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        first, late = model(batch).square().mean(), model(batch).square().mean()
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()

    def run(group: Any) -> None:
        model = mlp()
        script(model, shardcast.shard(model, sgd(model), process_group=group), BATCH.bfloat16())

    plain = mlp()
    script(plain, sgd(plain), BATCH)
    ThreadedWorld(size).run(run)


def test_a_graph_of_parameters_that_the_step_left_alone_may_still_be_used():
    def script(model: Any, optimizer: Any, batch: Tensor, _sharded: bool) -> None:
        for _ in range(3):
            hidden = model[:2](batch)
            model[2:](hidden.detach()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model[2:](hidden).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    check(sgd, script, tol=1e-6)


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_with_a_graph_of_their_own_are_told_of_once(size: int):
    def run(group: Any) -> None:
        model = mlp()
        optimizer = shardcast.shard(model, sgd(model), process_group=group, param_dtype="fp32")
        for _ in range(2):
            model(BATCH).square().mean().backward(create_graph=True)
            optimizer.step()
            optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ThreadedWorld(size).run(run)
    told = [str(warning.message) for warning in caught]
    assert sum("which has no graph" in message for message in told) == size


class Tied(nn.Module):
    """One weight used outside and, if asked, inside a re-entrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.tied = nn.Linear(7, 7), nn.Linear(7, 7)
        self.inside = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = checkpoint(self.tied, x, use_reentrant=True) if self.inside else self.tied(x)
        return self.tied(x.tanh())  # the backward of this comes before that of the checkpoint


def late(group: Any, start: int) -> None:
    """Rank 0 checkpoints from step ``start`` on, the others never do."""
    model = Tied()
    optimizer = shardcast.shard(
        model, sgd(model), process_group=group, pack_params=1, param_dtype="fp32"
    )
    for step in range(3):
        model.inside = group.rank() == 0 and step >= start
        model(BATCH).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_tied_weight_in_a_reentrant_checkpoint_works_from_the_first_step_on_or_is_refused():
    world = ThreadedWorld(2)
    world.run(late, 0)
    assert_same_sequence(world.logs)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        ThreadedWorld(2, timeout=5).run(late, 1)


def fail(_grad: Tensor) -> None:
    raise MemoryError("out of memory")


def test_closing_after_a_failed_backward_waits_for_what_it_sent():
    """Its buffers are freed with the optimizer; the strict world refuses what nobody waits for."""

    def run(group: Any) -> None:
        model = mlp()
        optimizer = shardcast.shard(
            model, sgd(model), process_group=group, param_dtype="fp32", pack_params=1,
            grads="sharded",
        )  # fmt: skip
        hidden = model[:2](BATCH)
        hidden.register_hook(fail)
        with pytest.raises(MemoryError):
            model[2:](hidden).square().mean().backward()
        optimizer.close()

    world = ThreadedWorld(2)
    world.run(run)
    assert any(call.async_op for call in world.logs[0])  # something was on the way


@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_a_backward_that_failed_everywhere_may_be_tried_again(clear: str):
    def script(model: Any, optimizer: Any, batch: Tensor, _sharded: bool) -> None:
        for step in range(4):
            if step == 2:
                hidden = model[:2](batch)
                hidden.register_hook(fail)
                with pytest.raises(MemoryError):
                    model[2:](hidden).square().mean().backward()
                (optimizer if clear == "optimizer" else model).zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    check(sgd, script, worlds=(1, 2), tol=1e-6)


def clipped_by_torch(group: Any) -> list[str]:
    model = mlp()
    optimizer = shardcast.shard(model, sgd(model), process_group=group)
    told = []
    for _ in range(2):
        model(BATCH).float().square().mean().backward()
        clip_grad_norm_(model.parameters(), 0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        told.append(" ".join(str(warning.message) for warning in caught))
        optimizer.zero_grad()
    return told


def test_torchs_own_clipping_of_a_sharded_model_is_told_once():
    for first, second in ThreadedWorld(2).run(clipped_by_torch):
        assert "use optimizer.clip_grad_norm_" in first
        assert second == ""
    assert ThreadedWorld(1).run(clipped_by_torch) == [["", ""]]


def test_own_clipping_and_gradients_set_by_hand_are_not_told_of():
    def run(group: Any) -> None:
        model = mlp()
        optimizer = shardcast.shard(model, sgd(model), process_group=group)
        for step in range(3):
            model(BATCH).float().square().mean().backward()
            optimizer.clip_grad_value_(0.1)
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            set_grads(model, step)
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ThreadedWorld(2).run(run)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_hooks_of_all_optimizers_run_once_per_step(kind: Any):
    seen: list[str] = []
    handle = register_optimizer_step_post_hook(lambda *args: seen.append(type(args[0]).__name__))
    try:
        model = mlp()
        optimizer = shardcast.shard(model, kind(model.parameters()))
        set_grads(model, 0)
        optimizer.step()
    finally:
        handle.remove()
    assert seen == ["ShardedOptimizer"]


def test_a_class_that_no_trial_could_measure_is_watched_in_its_first_steps():
    def run(group: Any) -> None:
        model = mlp()
        inner = foreign.Unmeasured(model.parameters())
        optimizer = shardcast.shard(model, inner, process_group=group, pack_params=1)
        set_grads(model, 0)
        optimizer.step()

    ThreadedWorld(1).run(run)
    messages = []

    def caught(group: Any) -> None:
        with pytest.raises(
            RuntimeError, match=r"Unmeasured computed 'd' of group 0 as .* with DDP"
        ):
            run(group)
        messages.append(group.rank())

    ThreadedWorld(8).run(caught)  # some ranks own nothing, and raise all the same
    assert len(messages) == 8


def odd_buffers(group: Any) -> bool:
    model = mlp()
    kinds = [torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.complex64]
    for number, kind in enumerate(kinds):
        values = torch.full((3, 2), group.rank() + 1.0).to(kind)
        model.register_buffer(f"odd{number}", values.t() if number % 2 else values)
    model.register_buffer("scalar", torch.tensor(group.rank() + 1, dtype=torch.int16))
    optimizer = shardcast.shard(model, sgd(model), process_group=group, broadcast_buffers=True)
    set_grads(model, 0)
    optimizer.step()
    return all(bool((buffer.to(torch.float32) == 1).all()) for buffer in model.buffers())


def test_buffers_of_every_dtype_become_equal(gloo: SpawnedWorld):
    assert gloo.run(odd_buffers) == [True, True]


def test_sgd_takes_a_plain_state_of_a_buffer_not_begun():
    def run(plain: bool) -> list[Tensor]:
        model = mlp()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        optimizer: Any = inner
        if not plain:
            optimizer = shardcast.shard(model, inner, param_dtype="fp32")
        state = {n: {"momentum_buffer": None} for n in range(6)}
        groups = [{**inner.param_groups[0], "params": list(range(6))}]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        for step in range(3):
            set_grads(model, step)
            optimizer.step()
        return [param.detach() for param in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


@pytest.mark.parametrize("name", ["add_param_group", "state_dict", "load_state_dict"])
def test_the_original_optimizer_refuses_what_only_the_sharded_one_can_do(name: str):
    model = mlp()
    inner = sgd(model)
    shardcast.shard(model, inner)
    with pytest.raises(RuntimeError, match=rf"call {name}\(\) of the optimizer that"):
        getattr(inner, name)(*[{}] * (name != "state_dict"))


def test_state_dict_hooks_of_the_original_go_on():
    model = mlp()
    inner, seen = sgd(model), []
    inner.register_state_dict_pre_hook(lambda _opt: seen.append("before saving"))
    inner.register_state_dict_post_hook(lambda _opt, _state: seen.append("saved"))
    inner.register_load_state_dict_pre_hook(lambda _opt, _state: seen.append("before loading"))
    inner.register_load_state_dict_post_hook(lambda _opt: seen.append("loaded"))
    optimizer = shardcast.shard(model, inner)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before saving", "saved", "before loading", "loaded"]
