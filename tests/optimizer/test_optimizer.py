"""A sharded optimizer is an optimizer: what scripts, schedulers and tools expect of it."""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import launches
from models import CASES, MLP, adamw, assert_same_bits, install, parts, run_world, sharded, values
from torch import Tensor, nn

import shardcast

pytestmark = pytest.mark.timeout(60)

BF16 = torch.bfloat16


def batch_loss(model: nn.Module, seed: int = 0) -> Tensor:
    return CASES["mlp"].loss(model, CASES["mlp"].batch(seed))


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
    assert repr(optimizer).startswith("ShardedAdamW: Layout: 6 parameters in 1 packs")


def test_the_plain_script_of_the_readme_trains_to_the_same_values_as_torch():
    model, twin = CASES["mlp"].build(), CASES["mlp"].build()
    optimizer, plain = sharded(model), adamw(twin, foreach=False)
    for m, opt in ((model, optimizer), (twin, plain)):
        for step in range(20):
            batch_loss(m, step).backward()
            opt.step()
            opt.zero_grad()
    assert_same_bits(values(model), values(twin))


def test_an_optimizer_over_named_parameters_can_be_sharded():
    model = MLP()
    optimizer = shardcast.shard(model, torch.optim.AdamW(model.named_parameters(), lr=1e-3))
    install(model, 0)
    optimizer.step()


class Counting(torch.optim.Optimizer):
    """A user's own optimizer, with attributes of its own that its step needs."""

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


@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_with_attributes_of_its_own_keeps_them(size: int):
    def train(group: Any) -> dict[str, Tensor]:
        model = CASES["mlp"].build()
        mine = sharded(model, group, lambda m: Counting(m.parameters(), lr=0.1))
        for step in range(3):
            install(model, step)
            mine.step()
        return values(model)

    twin = CASES["mlp"].build()
    plain = Counting(twin.parameters(), lr=0.1)
    for step in range(3):
        install(twin, step)
        plain.step()
    for found in run_world(size, train)[0]:
        assert_same_bits(found, values(twin))


# -- state ----------------------------------------------------------------------------------------


def resume(group: Any, fields: dict[str, Any]) -> None:
    """Three steps, save, two more; and in a new optimizer: load, the same two."""
    model, other = CASES["mlp"].build(), CASES["mlp"].build(seed=5)
    first, second = sharded(model, group, **fields), sharded(other, group, **fields)
    for step in range(3):
        install(model, step)
        first.step()
    before = 0 if group is None else len(group.log)
    saved = first.state_dict()
    assert group is None or len(group.log) == before, "collective-free"
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    snapshot = copy.deepcopy(saved["state"])
    for step in range(3, 5):
        install(model, step)
        first.step()
    for number, state in snapshot.items():
        assert_same_bits(
            {k: v for k, v in saved["state"][number].items() if isinstance(v, Tensor)},
            {k: v for k, v in state.items() if isinstance(v, Tensor)},
        )  # a state dict is a copy: later steps do not change it
    second.load_state_dict(loaded)
    for step in range(3, 5):
        install(other, step)
        second.step()
    assert_same_bits(values(model), values(other))
    assert_same_bits(parts(first), parts(second))


@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_local_state_resumes_to_the_bit(size: int, partition: str):
    run_world(size, resume, {"param_dtype": BF16, "partition": partition, "pack_params": 3})


def test_the_round_trip_that_accelerate_makes_keeps_masters_in_full_precision():
    model = CASES["mlp"].build()
    optimizer = sharded(model, param_dtype=BF16)
    before = parts(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same_bits(parts(optimizer), before)


def test_clearing_gradients_on_one_rank_alone_does_not_break_the_sequence():
    """A rank may drop what it has, for example after a bad batch: its peers step on."""

    def train(group: Any) -> dict[str, Tensor]:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group)
        for step in range(2):
            batch_loss(model, step).backward()
            if group.rank() == 1:
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    first, second = run_world(2, train)[0]
    assert_same_bits(first, second)


def test_the_default_dtype_of_a_script_changes_no_number():
    def run(default: torch.dtype) -> tuple[dict[str, Tensor], list[Tensor]]:
        torch.manual_seed(0)
        model = MLP()
        optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters()))
        torch.set_default_dtype(default)
        try:
            for step in range(300):  # from 257 on bf16 cannot count
                for number, param in enumerate(model.parameters()):
                    param.grad = torch.full_like(param, 1 + 0.1 * number + step % 7)
                optimizer.clip_grad_value_(3.3)
                optimizer.step()
                optimizer.zero_grad()
            return optimizer.full_parameters(), [
                values["master"] for values in optimizer.state_dict()["state"].values()
            ]
        finally:
            torch.set_default_dtype(torch.float32)

    (full, masters), (other, others) = run(torch.float32), run(torch.bfloat16)
    assert all(torch.equal(other[name], value) for name, value in full.items())
    assert all(torch.equal(left, right) for left, right in zip(masters, others, strict=True))


def test_a_model_can_be_sharded_again_with_another_gradient_dtype():
    model = MLP()
    for fields in ({"grad_dtype": torch.float32}, {}, {"grad_dtype": torch.float32}):
        optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters()), **fields)
        sum(param.sum() for param in model.parameters()).backward()
        expected = fields.get("grad_dtype", torch.bfloat16)
        assert {param.grad.dtype for param in model.parameters()} == {expected}
        optimizer.step()
        optimizer.zero_grad()
        optimizer.close()


def test_a_plain_step_enters_no_file_of_an_option_that_is_off():
    root = str(Path(shardcast.__file__).parent)
    files: set[str] = set()

    def note(frame: Any, event: str, _arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            files.add(str(Path(frame.f_code.co_filename).relative_to(root)))

    def run(group: Any) -> None:
        model = CASES["mlp"].build()
        optimizer = sharded(model, group, param_dtype=BF16, max_grad_norm=1.0)
        for step in range(3):
            batch_loss(model, step).backward()
            if step == 2 and group.rank() == 0:
                sys.setprofile(note)
            optimizer.step()
            sys.setprofile(None)
            optimizer.zero_grad()

    run_world(2, run)
    of_step = {name for name in files if not name.startswith("testing")}
    assert "optimizer/sharded.py" in of_step and len(of_step) <= 22
    off = ("tokens", "loss_scale", "guard", "averages", "metrics", "parallel_dims", "overlap")
    assert not {name for name in of_step if Path(name).stem in off}


def test_a_step_launches_once_for_each_pack_and_25_times_beside():
    with launches.accelerator():
        by_stage, _ = launches.one(15, 1, {})
    packs = by_stage.pop("packs")
    assert sum(by_stage.values()) + 1 <= packs + 25, "one is the sync, which nothing sends here"
