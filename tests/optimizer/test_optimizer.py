"""What scripts, schedulers and tools expect of an optimizer."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from benchmarks import groups
from models import CASES, MLP, assert_same_bits, parts, sharded
from oracle import BATCH, adamw, check, mlp, on_ranks, sgd, steps
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import shardcast
from shardcast.optimizer.sharded import packed_of

BF16 = torch.bfloat16


def test_it_is_a_torch_optimizer_over_the_model_parameters():
    model = MLP()
    params = list(model.parameters())
    original = adamw(model)
    optimizer = shardcast.shard(model, original)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, shardcast.ShardedOptimizer)
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert all(mine is theirs for mine, theirs in zip(held, params, strict=True))
    assert optimizer.param_groups[0] is original.param_groups[0]
    assert optimizer.defaults == original.defaults
    assert repr(optimizer).startswith("ShardedAdamW: Layout: 6 parameters in 1 pack,")


class Counting(torch.optim.Optimizer):
    """A user's optimizer whose step needs its own attributes."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.steps, self.rate = 0, 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param -= group["lr"] * self.rate / self.steps * param.grad


@pytest.mark.parametrize(
    "build",
    [
        lambda model: Counting(model.parameters(), lr=0.1),
        lambda model: torch.optim.AdamW(model.named_parameters(), lr=1e-3),
    ],
    ids=["attributes of its own", "named parameters"],
)
def test_optimizers_with_attributes_or_names_are_sharded_as_others(build: Any):
    check(build, steps(3), worlds=(1, 2))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_hooks_of_the_original_and_of_all_optimizers_run_once_per_step(kind: Any):
    calls: list[str] = []
    model = mlp()
    inner = kind(model.parameters())
    inner.register_step_pre_hook(lambda *_: calls.append("pre, original"))
    handle = register_optimizer_step_post_hook(lambda *args: calls.append(type(args[0]).__name__))
    try:
        optimizer = shardcast.shard(model, inner)
        optimizer.register_step_post_hook(lambda *_: calls.append("post, sharded"))
        steps(1)(model, optimizer, BATCH, True)
    finally:
        handle.remove()
    assert sorted(calls) == ["ShardedOptimizer", "post, sharded", "pre, original"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_profiler_with_stacks_sees_steps_and_reads_no_state(count: int):
    """Reading a tensor of the state raises an error."""
    model = mlp()
    parts_of_it = [model] if count == 1 else [model[:2], model[2:]]
    optimizer: Any = shardcast.shard(model, [adamw(layers) for layers in parts_of_it])
    with torch.profiler.profile(with_stack=True) as seen:
        for _ in range(2):
            model(BATCH.bfloat16()).float().square().mean().backward()
            for each in optimizer.optimizers:
                each.step()
            optimizer.zero_grad()
    names = [event.name for event in seen.events()]
    assert names.count("Optimizer.step#ShardedOptimizer.step") == 2


def test_state_dict_hooks_of_the_original_go_on():
    model = mlp()
    inner, seen = sgd(model), []
    inner.register_state_dict_pre_hook(lambda _opt: seen.append("before saving"))
    inner.register_state_dict_post_hook(lambda _opt, _state: seen.append("saved"))
    inner.register_load_state_dict_pre_hook(lambda _opt, _state: seen.append("before loading"))
    inner.register_load_state_dict_post_hook(lambda _opt: seen.append("loaded"))
    optimizer = shardcast.shard(model, inner)
    optimizer.register_state_dict_post_hook(lambda _o, state: {**state, "mine": 1})
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert seen == ["before saving", "saved", "before loading", "loaded"] and state["mine"] == 1


def test_a_disabled_grad_scaler_changes_nothing():
    def script(model: nn.Module, optimizer: Any, batch: Tensor, _sharded: bool) -> None:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)

    check(sgd, script, worlds=(1, 2), tol=1e-6)


# -- state ----------------------------------------------------------------------------------------


def test_the_local_state_is_a_copy_of_plain_values_that_no_collective_makes():
    def script(model: nn.Module, optimizer: Any, _batch: Tensor) -> None:
        steps(2)(model, optimizer, BATCH, True)
        log = packed_of(optimizer).comm.group.log
        begun = len(log)
        saved = optimizer.state_dict()
        assert len(log) == begun
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        before = parts(optimizer)
        steps(1)(model, optimizer, BATCH, True)
        for number, state in loaded["state"].items():
            assert_same_bits(saved["state"][number], state)
        optimizer.load_state_dict(loaded)
        assert_same_bits(parts(optimizer), before)  # masters too

    on_ranks(script, build=adamw, param_dtype=BF16)


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


# -- numbers --------------------------------------------------------------------------------------


def test_the_default_dtype_of_a_script_changes_no_number():
    def run(default: torch.dtype) -> dict[Any, Tensor]:
        model = mlp()
        optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters()))
        torch.set_default_dtype(default)
        try:
            for step in range(300):  # bf16 cannot count beyond 256
                for number, param in enumerate(model.parameters()):
                    param.grad = torch.full_like(param, 1 + 0.1 * number + step % 7)
                optimizer.clip_grad_value_(3.3)
                optimizer.step()
                optimizer.zero_grad()
            return {**optimizer.full_parameters(), **parts(optimizer)}
        finally:
            torch.set_default_dtype(torch.float32)

    assert_same_bits(run(BF16), run(torch.float32))


def test_a_step_launches_once_for_each_pack_and_at_most_32_times_beside():
    few, many = (groups.launches(1, pack_params=groups.TENSORS // packs) for packs in (5, 15))
    assert many - few == 10
    assert many + 1 <= 15 + 32, "the sync is one launch, which a single rank does not make"


@pytest.mark.parametrize("low", [False, True])
def test_shard_says_in_one_line_what_it_did_and_the_report_has_a_total(
    low: bool, caplog: pytest.LogCaptureFixture
):
    """Also how many masters begin in a lower precision."""
    caplog.set_level("INFO", "shardcast")
    model = CASES["mlp"].build()
    if low:
        model.a.bfloat16()
    before = model.a.weight.detach().float()
    optimizer = sharded(model)
    assert torch.equal(optimizer.full_parameters()["a.weight"], before)
    numel = sum(param.numel() for param in model.parameters())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "shardcast"]
    assert f"({numel:,} in " in line and "over 1 of 1 data-parallel ranks" in line
    assert ("104 in bfloat16 were given" in line) == low
    assert ("load those before shard()" in line) == low
    report = optimizer.memory_report()
    assert report.total == sum(report.values()) and isinstance(report, dict)
    assert f"total {report.total / 1e6:.3f} MB" in str(report)
