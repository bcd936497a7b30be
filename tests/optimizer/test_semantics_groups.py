"""Parameter groups: interleaved, empty, changed by schedulers or by hand, added; their state."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import BATCH, check, mlp, set_grads, steps
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import shardcast
from shardcast.testing import ThreadedWorld, assert_same_sequence

pytestmark = pytest.mark.timeout(60)
WORLDS = (1, 2, 3, 4)


def interleaved(kind: Any, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Weights, nothing, and biases in groups of their own, the biases first."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        groups = [
            {"params": params[1::2], "lr": 3e-3, "weight_decay": 0.0, "mine": "biases"},
            {"params": []},
            {"params": params[0::2], "weight_decay": 0.3},
        ]
        return kind(groups, lr=1e-2, **options)

    return build


KINDS = {
    "AdamW": (torch.optim.AdamW, {}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5}),
}


@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_across_the_order_of_the_model_keep_their_own_options(kind: str, partition: str):
    make, options = KINDS[kind]
    check(interleaved(make, **options), steps(5), worlds=WORLDS, partition=partition)


@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_option_may_be_changed_by_hand_between_steps(kind: str, partition: str):
    changes: dict[str, dict[str, Any]] = {
        "AdamW": {"betas": (0.5, 0.9), "eps": 1e-3, "maximize": True},
        "SGD": {"momentum": 0.5, "nesterov": False, "maximize": True},
        "NAdam": {"betas": (0.5, 0.9), "decoupled_weight_decay": True},
        "RMSprop": {"alpha": 0.5, "momentum": 0.9, "eps": 1e-3},
    }

    def before(step: int, _model: nn.Module, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
            group["weight_decay"] += 0.05
        if step == 3:
            optimizer.param_groups[2].update(changes[kind])

    make, options = KINDS[kind]
    check(interleaved(make, **options), steps(6, before), worlds=(1, 3), partition=partition)


def test_momentum_switched_on_after_steps_starts_from_the_bare_gradient():
    """torch applies no dampening to the first gradient that a buffer takes."""

    def before(step: int, _model: nn.Module, optimizer: Any) -> None:
        if step == 2:
            for group in optimizer.param_groups:
                group["momentum"] = 0.9

    check(interleaved(torch.optim.SGD, dampening=0.5), steps(5, before))


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "StepLR": lambda o: schedulers.StepLR(o, 2, 0.5),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-3, 0.1, 2, cycle_momentum=True),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=9),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)], [2]
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.5, anneal_epochs=3),
}


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("on", ["original", "sharded"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_works_on_either_optimizer(name: str, on: str, tensor: bool):
    """SGD with momentum, which some schedulers change too, and a rate that may be a tensor."""
    made: dict[int, Any] = {}

    def build(model: nn.Module) -> torch.optim.Optimizer:
        rate = torch.tensor(1e-2) if tensor else 1e-2
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        if on == "original":
            made[id(model)] = SCHEDULERS[name](optimizer)
        return optimizer

    def script(model: nn.Module, optimizer: Any, _batch: Tensor, _sharded: bool) -> None:
        scheduler = made[id(model)] if on == "original" else SCHEDULERS[name](optimizer)
        for step in range(7):
            set_grads(model, step)
            optimizer.step()
            scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
            optimizer.zero_grad()

    with warnings.catch_warnings():
        # SequentialLR itself calls its parts before the optimizer and with an epoch.
        warnings.simplefilter("ignore" if name == "SequentialLR" else "error")
        check(build, script, worlds=(1, 2))


@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_groups_added_after_steps_train_with_gradients_of_any_dtype(dtype: str, partition: str):
    """bf16 parameters whose gradients accumulate in fp32, in the new group as in the old one."""

    def run(group: Any) -> list[Tensor]:
        model = mlp()
        optimizer = shardcast.shard(
            model, torch.optim.AdamW(model[0].parameters(), lr=1e-2), process_group=group,
            pack_params=1, grad_dtype="fp32", param_dtype=dtype, partition=partition,
        )  # fmt: skip
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 1e-3})
            model(BATCH).float().square().mean().backward()
            assert model[0].weight.grad.dtype == torch.float32
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.param_groups[1]["weight_decay"] == 1e-2  # torch's default
        return [param.detach().clone() for param in model.parameters()]

    world = ThreadedWorld(3)
    first, *others = world.run(run)
    assert_same_sequence(world.logs)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    start = [param.detach().to(first[0].dtype) for param in mlp().parameters()]
    moved = [not torch.equal(a, b) for a, b in zip(first, start, strict=True)]
    assert moved == [True] * 4 + [False] * 2


def test_a_layer_added_with_its_group_follows_the_rules_of_the_others():
    """A new normalisation layer under ``keep_fp32="norms"`` is kept in fp32, as the first was."""
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5))
    optimizer = shardcast.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), keep_fp32="norms"
    )
    model.append(nn.LayerNorm(5))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert model[1].weight.dtype == model[2].weight.dtype == torch.float32
    model(BATCH).float().square().mean().backward()
    optimizer.step()


def test_keys_of_the_users_own_stay_and_are_saved():
    model = mlp()
    inner = interleaved(torch.optim.AdamW)(model)
    optimizer = shardcast.shard(model, inner)
    optimizer.param_groups[2]["tag"] = ("late", 3)
    saved = optimizer.state_dict()["param_groups"]
    assert saved[0]["mine"] == "biases"
    assert saved[2]["tag"] == ("late", 3)
    assert [len(group["params"]) for group in saved] == [3, 0, 3]
    assert sorted(n for group in saved for n in group["params"]) == list(range(6))


def two_layers(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1e-3}]
    return torch.optim.AdamW(groups, lr=1e-2)


def test_groups_that_are_assigned_are_used():
    """As callbacks that unfreeze layers do when they resume: other dictionaries, and more."""

    def assign(step: int, model: nn.Module, optimizer: Any) -> None:
        groups = [{**group, "lr": group["lr"] * 0.5} for group in optimizer.param_groups]
        if step == 2:
            groups.append({**groups[0], "params": list(model[4].parameters())})
        optimizer.param_groups = groups

    check(two_layers, steps(5, assign))


def test_assigned_groups_that_have_other_parameters_are_refused():
    model = mlp()
    optimizer = shardcast.shard(model, two_layers(model))
    first = optimizer.param_groups[0]
    for wrong in (
        [first],
        [{**first, "params": first["params"][::-1]}, *optimizer.param_groups[1:]],
    ):
        with pytest.raises(ValueError, match="param_groups: expected the present groups"):
            optimizer.param_groups = wrong
    assert optimizer.param_groups[0] is first and len(optimizer.param_groups) == 2


def clears(optimizer: Any) -> None:
    optimizer.state.clear()


def assigns(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def empties(optimizer: Any) -> None:
    for param in list(optimizer.state):
        optimizer.state[param] = {}


def pops(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state.pop(param, None)


def assigns_its_own(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict, optimizer.state)


def pops_and_puts_back(optimizer: Any) -> None:
    for param in list(optimizer.state):
        values = optimizer.state.pop(param)
        optimizer.state[param] = values


def takes_items_and_puts_them_back(optimizer: Any) -> None:
    items = []
    while optimizer.state:
        items.append(optimizer.state.popitem())
    optimizer.state.update(items)


def replaces(optimizer: Any) -> None:
    """As ReLoRA does: new tensors in place of the moments, the count of steps stays."""
    for values in optimizer.state.values():
        for name, value in values.items():
            if name != "step":
                values[name] = value * 0.125


def begins_elsewhere(optimizer: Any) -> None:
    """With moments of the script's own, after all were forgotten."""
    before = {param: dict(values) for param, values in optimizer.state.items()}
    optimizer.state.clear()
    for param, old in before.items():
        values = optimizer.state[param]
        values["step"] = torch.tensor(7.0)
        for name in old.keys() - {"step"}:
            values.setdefault(name, torch.full_like(old[name], 0.25))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize(
    "act",
    [
        clears, assigns, assigns_its_own, empties, pops, pops_and_puts_back, replaces,
        takes_items_and_puts_them_back,
        begins_elsewhere,
    ],
)  # fmt: skip
def test_a_script_may_forget_and_replace_state(act: Any, kind: Any):
    def forget(step: int, _model: nn.Module, optimizer: Any) -> None:
        if step == 3:
            act(optimizer)

    check(lambda model: kind(model.parameters(), lr=0.01), steps(6, forget))


def test_a_copy_of_the_state_is_plain_and_a_part_of_another_size_is_refused():
    model = mlp()
    optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters()))
    set_grads(model, 0)
    optimizer.step()
    _param, values = next(iter(optimizer.state.items()))
    copied = copy.deepcopy(optimizer.state)
    assert type(copied) is defaultdict and type(next(iter(copied.values()))) is dict
    assert type(copy.copy(values)) is dict
    assert optimizer.state[nn.Parameter(torch.ones(1))] == {}
    with pytest.raises(ValueError, match=r"'exp_avg' of parameter '0\.weight'"):
        values["exp_avg"] = torch.zeros(3)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_an_option_that_is_removed_from_a_group_stays_away(kind: Any):
    def build(model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        return kind([{"params": params[:3], "max_grad_norm": 1e-3}, {"params": params[3:]}], lr=0.1)

    def script(model: nn.Module, optimizer: Any, _batch: Tensor, sharded: bool) -> None:
        for step in range(5):
            set_grads(model, step)
            group = optimizer.param_groups[0]
            if step == 2:
                group.pop("max_grad_norm")
            if step < 2 and not sharded:
                nn.utils.clip_grad_norm_(group["params"], 1e-3)
            optimizer.step()
            assert ("max_grad_norm" in group) == (step < 2)
            optimizer.zero_grad()

    check(build, script, tol=1e-6)


def original(optimizer: Any) -> torch.optim.Optimizer:
    sharded = isinstance(optimizer, shardcast.ShardedOptimizer)
    return optimizer.originals.optimizers[0] if sharded else optimizer


def sets_a_place(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    optimizer.param_groups[0] = groups[0]


def sets_the_list(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    optimizer.param_groups = groups


def sets_the_originals_list(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    original(optimizer).param_groups = groups


@pytest.mark.parametrize("act", [sets_a_place, sets_the_list, sets_the_originals_list])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_groups_that_are_replaced_are_used(kind: Any, act: Any):
    def replace(step: int, _model: nn.Module, optimizer: Any) -> None:
        if step == 2:
            first, *others = optimizer.param_groups
            act(optimizer, [{**first, "lr": 0.3}, *others])
        elif step == 4:
            optimizer.param_groups[0]["lr"] = 0.1  # of the new dictionary

    check(interleaved(kind), steps(6, replace))


def deletes(groups: list[Any]) -> None:
    del groups[0]


def appends(groups: list[Any]) -> None:
    groups.append({**groups[0], "params": []})


def drops_a_parameter(groups: list[Any]) -> None:
    groups[0]["params"].pop()


def swaps_a_parameter(groups: list[Any]) -> None:
    groups[0]["params"][0] = nn.Parameter(groups[0]["params"][0].detach().clone())


@pytest.mark.parametrize(
    "act", [deletes, list.clear, appends, drops_a_parameter, swaps_a_parameter]
)
@pytest.mark.parametrize("then", ["step", "state_dict", "full_state_dict"])
def test_groups_that_lose_or_get_parameters_behind_the_optimizer_are_refused(act: Any, then: str):
    model = mlp()
    optimizer = shardcast.shard(model, two_layers(model))
    act(optimizer.param_groups)
    with pytest.raises(RuntimeError, match="param_groups: expected"):
        getattr(optimizer, then)()
