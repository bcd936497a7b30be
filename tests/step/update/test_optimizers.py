"""Every optimizer: elementwise ones in both partitions, all others on whole parameters."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import foreign
import lion_pytorch
import pytest
import schedulefree
import torch
from models import own_state, values
from oracle import check, difference, mlp, pair, set_grads, steps
from pairwise import thinned
from torch import Tensor, nn

import shardcast
from shardcast.plan.originals import ELEMENTWISE
from shardcast.testing import ThreadedWorld

ALL = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and kind is not torch.optim.Optimizer
}
OPTIONS: dict[str, dict[str, Any]] = {
    "Adagrad": {"initial_accumulator_value": 0.3},  # its constructor creates state
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "dampening": 0.5},
    "RMSprop": {"momentum": 0.9, "centered": True},
}


def builder(name: str, **options: Any) -> Any:
    kind = ALL[name]

    def build(model: nn.Module) -> torch.optim.Optimizer:
        params = [p for p in model.parameters() if p.dim() == 2 or name != "Muon"]
        return kind(params, lr=1e-2, **{**OPTIONS.get(name, {}), **options})

    return build


@pytest.mark.parametrize(  # for any class, whole masters are like torch's own parameters
    ("name", "partition"),
    [
        *((kind, "even") for kind in sorted(kind.__name__ for kind in ELEMENTWISE)),
        *((kind, "whole") for kind in ("AdamW", "RMSprop", "Rprop")),
        *((kind, "auto") for kind in ("Muon", "Adafactor")),  # need whole parameters
    ],
)
def test_classes_of_torch_equal_plain_torch_bit_for_bit(name: str, partition: str):
    check(builder(name), steps(5), partition=partition)


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"LBFGS", "SparseAdam"}))
def test_every_other_class_of_torch_is_sharded(name: str):
    model = mlp()
    optimizer = shardcast.shard(model, builder(name)(model), param_dtype="fp32")
    assert optimizer.layout.partition == ("even" if ALL[name] in ELEMENTWISE else "whole")


@pytest.mark.parametrize("elementwise", [None, True])
def test_a_third_party_lion_equals_itself_unsharded(elementwise: bool | None):
    check(
        lambda model: lion_pytorch.Lion(model.parameters(), lr=1e-2, weight_decay=0.1),
        steps(6),
        elementwise=elementwise,
    )


@pytest.mark.parametrize(
    "fields",
    [{}, {"elementwise": True}, {"elementwise": True, "offload": True, "param_dtype": "fp32"}],
    ids=["whole", "elementwise", "offload"],
)
def test_a_schedule_free_optimizer_equals_itself_in_both_modes(fields: dict[str, Any]):
    def script(model: nn.Module, optimizer: Any, batch: Tensor, sharded: bool) -> None:
        for _ in range(2):
            optimizer.train()
            steps(3)(model, optimizer, batch, sharded)
            optimizer.eval()

    check(
        lambda model: schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2, warmup_steps=3),
        script,
        **fields,
    )


@pytest.mark.parametrize(
    "options",
    [{"foreach": True}, {"fused": True}, {"capturable": True}, {"lr": torch.tensor(1e-2)}],
    ids=str,
)
def test_flags_of_the_implementation_and_tensor_rates_are_accepted(options: dict[str, Any]):
    """The tolerance is one ulp, since torch's own implementations round differently."""
    options = {**options, "weight_decay": 0.1}

    def build(model: nn.Module) -> torch.optim.Optimizer:
        plain = {key: value for key, value in options.items() if key in ("weight_decay",)}
        return torch.optim.AdamW(model.parameters(), **({"lr": 1e-2} | plain))

    expected = mlp()
    steps(1)(expected, build(expected), torch.empty(0), False)
    model = mlp()
    inner = torch.optim.AdamW(model.parameters(), **({"lr": 1e-2} | options))
    steps(1)(model, shardcast.shard(model, inner, param_dtype="fp32"), torch.empty(0), True)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-23, atol=2**-30)


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "Adafactor", "SGD"])
def test_an_optimizer_that_has_stepped_already_goes_on(name: str):
    def run(group: Any, cut: int) -> list[Tensor]:
        model = mlp()
        optimizer: Any = builder(name)(model)
        for step in range(6):
            if step == cut:
                optimizer = shardcast.shard(
                    model,
                    optimizer,
                    param_dtype="fp32",
                    pack_params=2,
                    fuse="eager",
                    process_group=group,
                )
            set_grads(model, step)
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().clone() for param in model.parameters()]

    plain = ThreadedWorld(1).run(run, 6)[0]
    for params in ThreadedWorld(3).run(run, 3):
        assert all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))


@pytest.mark.parametrize("name", ["RMSprop", "NAdam", "Adamax"])
def test_the_state_of_a_low_precision_run_is_taken_in_fp32(name: str):
    def trained(model: nn.Module, optimizer: Any) -> None:
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.05)
        optimizer.step()

    torch.manual_seed(0)
    low = nn.Linear(4, 4, bias=False).bfloat16()
    before = builder(name)(low)
    trained(low, before)
    plain, sharded = (nn.Linear(4, 4, bias=False) for _ in range(2))
    optimizers = (
        builder(name)(plain),
        shardcast.shard(sharded, builder(name)(sharded), param_dtype=torch.float32),
    )
    for model, optimizer in zip((plain, sharded), optimizers, strict=True):
        model.weight.data.copy_(low.weight)
        optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
        for _ in range(3):
            trained(model, optimizer)
    state = own_state(optimizers[1], sharded.weight)
    assert all(value.dtype == torch.float32 for value in state.values())
    assert torch.equal(sharded.weight, plain.weight)


def narrow() -> nn.Sequential:
    """Matrices with one row or one column, whose moments of columns or rows have their size."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 8))


# A model, its optimizers, and the tolerance relative to plain torch.
RESUMED: dict[str, tuple[Any, Any, float]] = {
    "state of its own shapes": (narrow, lambda m: [foreign.OwnShapes(m.parameters())], 0),
    "AdamW of torch": (mlp, lambda m: [torch.optim.AdamW(m.parameters(), fused=False)], 0),
    "several optimizers": (mlp, pair, 1e-6),
    "a momentum in bf16": (mlp, lambda m: [foreign.LowMomentum(m.parameters())], 0),
}


@pytest.mark.parametrize(
    ("name", "door"),
    thinned(2, RESUMED, ("local", "full", "plain", "checkpoint", "export")),
)
def test_state_goes_on_through_every_door_at_other_numbers_of_ranks(
    name: str, door: str, tmp_path: Path
):
    build, optimizers_of, tol = RESUMED[name]
    several = name == "several optimizers"

    def made(group: Any) -> tuple[nn.Module, Any]:
        model = build()
        inner = optimizers_of(model)
        return model, shardcast.shard(
            model,
            inner if several else inner[0],
            process_group=group,
            param_dtype="fp32",
            pack_params=2,
        )

    def train(model: nn.Module, optimizers: Any, seeds: range) -> None:
        for seed in seeds:
            set_grads(model, seed)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()

    def save(group: Any) -> Any:
        model, optimizer = made(group)
        train(model, [optimizer], range(3))
        shardcast.checkpoint.save(tmp_path / "run", model, optimizer, step=3)
        full = optimizer.full_state_dicts() if several else [optimizer.full_state_dict()]
        return optimizer.state_dict(), full, values(model)

    def resume(group: Any) -> float:
        model, optimizer = made(group)
        local, _, weights = saved[group.rank() % 2]
        states = copy.deepcopy(saved[0][1])
        if door == "checkpoint":
            shardcast.checkpoint.load(tmp_path / "run", model, optimizer)
        elif door == "plain":
            if several:
                with pytest.raises(ValueError, match=r"states of 2 optimizers .* got 1"):
                    shardcast.checkpoint.load_plain(model, optimizer, weights, states[:1])
            state = states if several else states[0]
            shardcast.checkpoint.load_plain(model, optimizer, weights, state)
        else:
            model.load_state_dict(weights)
            if door == "export":
                states = exported
            state = copy.deepcopy(local) if door == "local" else states
            optimizer.load_state_dict(state if several or door == "local" else state[0])
        train(model, [optimizer], range(3, 6))
        return difference(model, expected)

    expected = build()
    train(expected, optimizers_of(expected), range(6))
    saved = ThreadedWorld(2).run(save)
    assert saved[1][1] in ([], [{}]), "only rank 0 has it"
    _, *files = shardcast.checkpoint.export(tmp_path / "run", tmp_path / "plain")
    exported = [torch.load(file, weights_only=True) for file in files]
    for size in (2,) if door == "local" else (1, 3):
        assert max(ThreadedWorld(size).run(resume)) <= tol
    if door in ("full", "export"):  # also into plain optimizers
        model = build()
        model.load_state_dict(saved[0][2])
        plain = optimizers_of(model)
        for optimizer, state in zip(
            plain, exported if door == "export" else saved[0][1], strict=True
        ):
            optimizer.load_state_dict(state)
        train(model, plain, range(3, 6))
        assert difference(model, expected) <= tol


class Sophia(torch.optim.SGD):
    """Has a second method that uses gradients and state, like Sophia-G."""

    @torch.no_grad()
    def update_hessian(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["hessian"] = param.grad.square()


def test_methods_of_the_original_and_those_that_no_class_has_are_errors_by_name():
    model = mlp()
    inner = Sophia([model[0].weight])
    optimizer = shardcast.shard(model, inner, param_dtype="fp32")
    with pytest.raises(RuntimeError, match=r"update_hessian\(\) of the original optimizer"):
        inner.update_hessian()
    with pytest.raises(AttributeError, match=r"update_hessian: Sophia has .*owned\(\)"):
        optimizer.update_hessian()
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        optimizer.other()
    optimizer.add_param_group({"params": [model[0].bias]})  # probes the class again
    assert [pack.partition for pack in optimizer.layout.packs] == ["whole", "whole"]
    before = model[0].bias.detach().clone()
    model[0].bias.grad = torch.ones_like(model[0].bias)
    optimizer.step()
    assert not torch.equal(model[0].bias, before)
