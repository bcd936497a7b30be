"""The contract of an optimizer: state, closures, hooks, clipping; DDP, GradScaler, weights."""

from __future__ import annotations

import copy
import math
import operator
import pickle
from typing import Any

import pytest
import torch
from oracle import BATCH, check, mlp, set_grads, steps
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import shardcast
from shardcast.testing import SpawnedWorld, ThreadedWorld


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def test_closures_are_evaluated_once_and_their_loss_returned():
    def script(model: nn.Module, optimizer: Any, batch: Tensor, _sharded: bool) -> None:
        for step in range(4):
            calls = []

            def closure() -> Tensor:
                calls.append(step)  # noqa: B023 - used within the turn
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0
            assert calls == [step]

    check(adamw, script, tol=1e-6)


def test_hooks_run_also_those_registered_before_sharding():
    model, calls = mlp(), []
    inner = adamw(model)
    inner.register_step_pre_hook(lambda *_: calls.append("pre, original"))
    optimizer = shardcast.shard(model, inner)
    optimizer.register_step_post_hook(lambda *_: calls.append("post, sharded"))
    optimizer.register_state_dict_post_hook(lambda _o, state: {**state, "mine": 1})
    steps(1)(model, optimizer, BATCH, True)
    assert calls == ["pre, original", "post, sharded"]
    assert optimizer.state_dict()["mine"] == 1


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_copying_is_refused_with_the_way_to_save(how: Any):
    model = mlp()
    with pytest.raises(TypeError, match=r"cannot be pickled or copied.*state_dict\(\)"):
        how(shardcast.shard(model, adamw(model)))


def test_it_is_an_optimizer_and_says_what_it_is():
    model = mlp()
    optimizer = shardcast.shard(model, adamw(model))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert repr(optimizer).startswith("ShardedAdamW: Layout: 6 parameters in 1 packs")
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert optimizer.defaults["lr"] == 1e-2


def test_the_local_state_round_trips_bit_for_bit_and_loads_with_weights_only(tmp_path: Any):
    def run(group: Any) -> None:
        model = mlp()
        optimizer = shardcast.shard(model, adamw(model), process_group=group, pack_params=2)
        steps(3)(model, optimizer, BATCH, True)
        path = tmp_path / f"{group.rank()}.pt"
        torch.save(optimizer.state_dict(), path)
        saved, weights = torch.load(path, weights_only=True), values(model)
        steps(2)(model, optimizer, BATCH, True)
        expected = values(model)
        optimizer.load_state_dict(saved)
        assert all(torch.equal(a, b) for a, b in zip(values(model), weights, strict=True))
        steps(2)(model, optimizer, BATCH, True)
        assert all(torch.equal(a, b) for a, b in zip(values(model), expected, strict=True))
        head = {**saved["shardcast"], "rank": 5}
        with pytest.raises(ValueError, match="got one of rank 5"):
            optimizer.load_state_dict({**saved, "shardcast": head})

    ThreadedWorld(2).run(run)


@pytest.mark.parametrize("plain", [False, True])
def test_a_state_that_was_loaded_is_the_callers_still(plain: bool):
    """A scheduler multiplies a tensor learning rate in place."""
    model = mlp()
    inner = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    optimizer = shardcast.shard(model, inner, param_dtype="fp32")
    state = copy.deepcopy(optimizer.full_state_dict() if plain else optimizer.state_dict())
    optimizer.load_state_dict(state)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    steps(1)(model, optimizer, BATCH, True)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert state["param_groups"][0]["lr"] == 0.5


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adafactor])
@pytest.mark.parametrize("size", [1, 3])
def test_plain_states_go_in_and_out_with_an_identical_next_step(kind: Any, size: int):
    plain = mlp()
    reference = kind(plain.parameters(), lr=1e-2)
    steps(3)(plain, reference, BATCH, False)
    given, weights = copy.deepcopy((reference.state_dict(), plain.state_dict()))

    def run(group: Any) -> tuple[dict[str, Any], list[Tensor]]:
        model = mlp()
        model.load_state_dict(weights)
        inner = kind(model.parameters(), lr=1.0)
        optimizer = shardcast.shard(
            model, inner, process_group=group, pack_params=2, param_dtype="fp32", fuse="eager"
        )
        optimizer.load_state_dict(copy.deepcopy(given))
        steps(2)(model, optimizer, BATCH, True)
        return optimizer.full_state_dict(), values(model)

    steps(2)(plain, reference, BATCH, False)
    results = ThreadedWorld(size).run(run)
    assert all(full == {} for full, _ in results[1:])
    for _, params in results:
        assert all(torch.equal(a, b) for a, b in zip(params, plain.parameters(), strict=True))
    exported = kind(plain.parameters(), lr=1.0)
    exported.load_state_dict(results[0][0])
    twin = copy.deepcopy(plain)
    other = kind(twin.parameters(), lr=1.0)
    other.load_state_dict(reference.state_dict())
    steps(1)(plain, exported, BATCH, False)
    steps(1)(twin, other, BATCH, False)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), twin.parameters(), strict=True)
    )


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_the_norm_and_the_clipping_equal_torchs_on_the_unsharded_model(p: float):
    norms: dict[bool, list[Tensor]] = {True: [], False: []}

    def script(model: nn.Module, optimizer: Any, _batch: Tensor, sharded: bool) -> None:
        norms[sharded].clear()
        for step in range(4):
            set_grads(model, step)
            if sharded:
                norm = optimizer.clip_grad_norm_(0.3)
            else:
                norm = clip_grad_norm_(model.parameters(), 0.3, norm_type=p)
            norms[sharded].append(norm)
            optimizer.step()
            if sharded:
                assert torch.equal(optimizer.grad_norm, norm)
            optimizer.zero_grad()

    # torch sums the norm in fp32, tensor by tensor: a few ulps of updates of about 0.03
    check(sgd, script, worlds=(1,), tol=1e-7, norm_type=p)
    torch.testing.assert_close(norms[True], norms[False], rtol=1e-6, atol=0)
    check(sgd, script, worlds=(2, 3), tol=1e-7, norm_type=p)


def test_clipping_by_value_equals_torchs_bit_for_bit():
    def script(model: nn.Module, optimizer: Any, _batch: Tensor, sharded: bool) -> None:
        for step in range(4):
            set_grads(model, step)
            if sharded:
                optimizer.clip_grad_value_(0.3)
            else:
                clip_grad_value_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()

    check(sgd, script)


def test_groups_with_a_bound_of_their_own_are_clipped_by_themselves():
    def build(model: nn.Module) -> torch.optim.Optimizer:
        own = {"params": list(model[0].parameters()), "max_grad_norm": 0.2}
        rest = {"params": [*model[2].parameters(), *model[4].parameters()]}
        return torch.optim.SGD([own, rest], lr=0.1)

    def script(model: nn.Module, optimizer: Any, _batch: Tensor, sharded: bool) -> None:
        for step in range(4):
            set_grads(model, step)
            if not sharded:
                clip_grad_norm_(model[0].parameters(), 0.2)
                clip_grad_norm_([*model[2].parameters(), *model[4].parameters()], 0.5)
            optimizer.step()
            optimizer.zero_grad()

    check(build, script, tol=1e-7, max_grad_norm=0.5)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_torchs_grad_scaler_stops_on_every_rank_and_names_the_replacement(dtype: str, clip: bool):
    def run(group: Any) -> None:
        model = mlp()
        optimizer = shardcast.shard(model, adamw(model), process_group=group, param_dtype=dtype)
        scaler = torch.amp.GradScaler("cpu")
        loss = model(BATCH).float().square().mean()
        if group.rank() == 0:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip:
            optimizer.clip_grad_norm_(1.0)
        with pytest.raises(RuntimeError, match=r"remove the GradScaler and call .*scale_loss"):
            scaler.step(optimizer)

    ThreadedWorld(2).run(run)


def test_a_disabled_grad_scaler_changes_nothing():
    model = mlp()
    optimizer = shardcast.shard(model, adamw(model))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    before = values(model)
    scaler.scale(model(BATCH).float().square().mean()).backward()
    scaler.step(optimizer)
    assert not torch.equal(model[0].weight, before[0])


def with_ddp(_group: Any) -> None:
    wrapped = DistributedDataParallel(mlp())
    with pytest.raises(ValueError, match=r"DistributedDataParallel; pass model\.module"):
        shardcast.shard(wrapped, adamw(wrapped))
    model = mlp()
    shardcast.shard(model, adamw(model))
    with pytest.raises(RuntimeError, match="averaged twice"):
        DistributedDataParallel(model)(BATCH)


def test_ddp_around_a_model_is_refused_before_shard_and_after_it(gloo: SpawnedWorld):
    gloo.run(with_ddp)


def test_loaded_weights_become_masters_in_full_precision():
    def run(group: Any) -> None:
        model, other = mlp(), mlp()
        optimizer = shardcast.shard(model, sgd(model), process_group=group, pack_params=2)
        with torch.no_grad():
            for param in other.parameters():
                param += 0.123456
        model.load_state_dict(other.state_dict())
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        loaded = dict(other.named_parameters())
        for master in optimizer.shards:
            for part in master.fragments:
                start, stop = part.param_range
                mine = master.data[master.local(part.start, part.stop)]
                assert torch.equal(mine, loaded[part.slot.name].detach().flatten()[start:stop])

    ThreadedWorld(2).run(run)


@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_gradients_accumulate_in_fp32_on_request(dtype: str | None):
    """64 micro-batches: bf16 accumulation is off by more than a thousandth, fp32 is not."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = shardcast.shard(model, sgd(model), grad_dtype=dtype)
    torch.manual_seed(0)
    exact = torch.zeros(64, 64, dtype=torch.float64)
    for _ in range(64):
        x, y = torch.randn(1, 64).bfloat16(), torch.rand(1, 64).bfloat16()
        (model(x) * y).sum().backward()
        exact += (y.t() @ x).double()
    assert model.weight.grad.dtype == (torch.float32 if dtype else torch.bfloat16)
    error = ((model.weight.grad.double() - exact).norm() / exact.norm()).item()
    assert error < 1e-6 if dtype else 2e-3 < error < 2e-2
    optimizer.step()


def test_copies_and_pickles_of_a_sharded_model_are_plain_models():
    """An EMA copies the model; the copy must hold no masters, and still cast its inputs."""
    model = mlp()
    optimizer = shardcast.shard(model, adamw(model), keep_fp32="4.*")
    expected = model(BATCH)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(BATCH), expected)
        twin(BATCH).sum().backward()
        twin.load_state_dict(model.state_dict())
        assert all(param.grad is None for param in model.parameters())
        hooks = [hook for m in twin.modules() for hook in m._forward_hooks.values()]
        assert any(getattr(hook, "_call", 0) is None for hook in hooks)
    optimizer.close()
    again = shardcast.shard(model, adamw(model))
    steps(1)(model, again, BATCH, True)


def test_values_clipped_after_the_norm_are_those_of_the_clipped_gradient():
    def script(model: nn.Module, optimizer: Any, _batch: Tensor, sharded: bool) -> None:
        set_grads(model, 1)
        if sharded:
            optimizer.clip_grad_norm_(1.0)
            optimizer.clip_grad_value_(0.05)
        else:
            clip_grad_norm_(model.parameters(), 1.0)
            clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()

    check(sgd, script, tol=1e-7)


def test_an_option_of_the_optimizers_own_is_not_taken_for_a_bound_of_the_group():
    class Own(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.defaults["max_grad_norm"] = 1e-3
            for group in self.param_groups:
                group["max_grad_norm"] = 1e-3

    check(lambda model: Own(model.parameters()), steps(2), worlds=(1, 2))


def test_weights_assigned_by_load_state_dict_are_refused():
    model = mlp()
    optimizer = shardcast.shard(model, sgd(model))
    before = list(model.parameters())
    with pytest.raises(RuntimeError, match=r"assign=True.* would replace parameters"):
        model.load_state_dict(mlp().state_dict(), assign=True)
    assert all(map(operator.is_, before, model.parameters()))
    optimizer.step()


def test_a_refused_grad_scaler_does_not_spoil_the_steps_after_it():
    model = mlp()
    optimizer = shardcast.shard(model, sgd(model))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(BATCH).float().sum()).backward()
    with pytest.raises(RuntimeError, match="remove the GradScaler"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    model(BATCH).float().sum().backward()
    optimizer.step()
