"""Parameter groups: interleaved, empty, changed by schedulers or by hand, added; their state."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import check, mlp, set_grads, steps
from pairwise import thinned
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import shardcast
from shardcast import _compat
from shardcast.comm import Comm
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import ThreadedWorld

pytestmark = pytest.mark.timeout(60)
CPU = torch.device("cpu")


def interleaved(kind: Any, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Build groups of biases, of nothing, and of weights, in this order."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        groups = [
            {"params": params[1::2], "lr": 3e-3, "weight_decay": 0.0, "mine": "biases"},
            {"params": []},
            {"params": params[0::2], "weight_decay": 0.3},
        ]
        return kind(groups, lr=1e-2, **options)

    return build


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


@pytest.mark.parametrize(("name", "on"), thinned(2, SCHEDULERS, ["original", "sharded"]))
def test_every_scheduler_works_on_either_optimizer(name: str, on: str):
    """Use SGD with momentum, which some schedulers also change, and a float or tensor rate."""
    made: dict[int, Any] = {}

    def build(model: nn.Module) -> torch.optim.Optimizer:
        rate = torch.tensor(1e-2) if on == "original" else 1e-2
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
        # SequentialLR calls its parts before the optimizer and with an epoch.
        warnings.simplefilter("ignore" if name == "SequentialLR" else "error")
        check(build, script, worlds=(1, 2))


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


def forgets(state: dict[Any, Any]) -> None:
    state.clear()


def replaces(state: dict[Any, Any]) -> None:
    """Replace the moments by new tensors and keep the step count, like ReLoRA."""
    for values in state.values():
        for name, value in values.items():
            if name not in ("step", "master"):
                values[name] = value * 0.125


def begins_elsewhere(state: dict[Any, Any]) -> None:
    """Set moments and step count to the script's own values."""
    for values in state.values():
        values["step"] = torch.tensor(7.0)
        for name in values.keys() - {"step", "master"}:
            values[name] = torch.full_like(values[name], 0.25)


@pytest.mark.filterwarnings("ignore:state_dict. this")
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("act", [forgets, replaces, begins_elsewhere])
def test_a_script_may_forget_and_replace_state_by_a_state_dict(act: Any, kind: Any):
    def edit(step: int, _model: nn.Module, optimizer: Any) -> None:
        if step == 3:
            state = optimizer.state_dict()
            masters = {
                n: {"master": v["master"]} for n, v in state["state"].items() if "master" in v
            }
            act(state["state"])
            for number, master in masters.items():
                state["state"][number] = master | state["state"].get(number, {})
            optimizer.load_state_dict(state)

    check(lambda model: kind(model.parameters(), lr=0.01), steps(6, edit))


def after_a_step(group: Any = None, **fields: Any) -> tuple[nn.Module, Any]:
    model = mlp()
    optimizer = shardcast.shard(
        model, torch.optim.AdamW(model.parameters()), process_group=group, **fields
    )
    set_grads(model, 0)
    optimizer.step()
    return model, optimizer


FORMS: list[dict[str, Any]] = [{}, {"moments": "int8"}, {"moments": "bf16"}, {"offload": True}]


@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_tensors_of_the_state_raise_by_name_on_every_rank_and_numbers_are_read(fields: Any):
    def run(group: Any) -> None:
        model, optimizer = after_a_step(group, **fields)
        assert len(optimizer.state) == len(list(model.parameters()))
        for name, param in model.named_parameters():
            state = optimizer.state[param]
            assert param in optimizer.state and [*state] == ["step", "exp_avg", "exp_avg_sq"]
            for kind in ("exp_avg", "exp_avg_sq"):
                with pytest.raises(RuntimeError, match="is sharded over the ranks") as caught:
                    state[kind][1:] = 0
                for words in (repr(kind), repr(name), "optimizer.whole(", "optimizer.owned()"):
                    assert words in str(caught.value)
            assert state["step"] == 1 and state.get("step") == 1
            with pytest.raises(RuntimeError, match=r"[Ii]nplace update to inference tensor"):
                state["step"].zero_()
            with pytest.raises(KeyError):
                state["momentum_buffer"]
        with pytest.raises(RuntimeError, match="sharded over the ranks"):
            {param: dict(state) for param, state in optimizer.state.items()}

    for size in (1, 2, 8):
        ThreadedWorld(size).run(run)


COUNTED: list[Any] = [torch.optim.AdamW, torch.optim.NAdam, torch.optim.RMSprop]


@pytest.mark.parametrize(("kind", "on_host"), thinned(2, COUNTED, [True, False]))
def test_every_rank_knows_the_step_of_every_parameter(
    kind: Any, on_host: bool, monkeypatch: pytest.MonkeyPatch
):
    """This includes parameters owned by other ranks, and those without a local gradient."""
    monkeypatch.setattr(_compat, "is_host", lambda _device: on_host)

    def run(group: Any) -> list[list[float]]:
        model = mlp()
        optimizer = shardcast.shard(
            model, kind(model.parameters()), process_group=group, pack_params=2
        )
        params, rank = [*model.parameters()], group.rank()
        seen: list[list[float]] = []

        def step(has: Callable[[int], bool], value: float = 0.5, between: Any = None) -> None:
            for number, param in enumerate(params):
                param.grad = torch.full_like(param, value) if has(number) else None
            if between is not None:
                optimizer.clip_grad_norm_(1.0)
                between()
            optimizer.step()
            optimizer.zero_grad()
            seen.append([float(optimizer.state[p].get("step", 0)) for p in params])
            owners = {
                number: float(values["step"])
                for rank_state in everyone.exchange(optimizer.state_dict().plain(), CPU)
                for number, values in rank_state["state"].items()
                if "step" in values
            }
            assert seen[-1] == [owners.get(number, 0.0) for number in range(len(params))]

        everyone = Comm(group)
        step(lambda number: number != 5)
        step(lambda number: number % 2 == rank % 2)  # each parameter on some ranks
        step(lambda number: number == 0 and rank == 1)
        step(lambda number: True, value=torch.inf)  # skipped
        step(lambda number: number != 2, value=torch.inf)
        step(lambda number: number > 1)
        if not on_host:  # on an accelerator this needs no collective
            step(lambda number: True, between=lambda: setattr(params[3], "grad", None))
        state = optimizer.state_dict()
        optimizer.load_state_dict(optimizer.state_dict())
        step(lambda number: number < 2)
        full = [optimizer.full_state_dict()]
        full = everyone.exchange(full[0], CPU)[:1]
        for values in full[0]["state"].values():
            values["step"] += 10
        optimizer.load_state_dict(full[0])
        step(lambda number: True)
        optimizer.load_state_dict(state)
        step(lambda number: number == rank)
        return seen

    for size in (2, 3):
        first, *others = ThreadedWorld(size).run(run)
        assert all(other == first for other in others)
        assert len({*first[1]}) > 1, "they differ"


class OwnAdam(torch.optim.AdamW):
    """A subclass, which may count steps differently."""


@pytest.mark.parametrize("kind", [torch.optim.NAdam, OwnAdam])
def test_numbers_that_owners_alone_know_raise_by_name_on_every_rank(kind: Any):
    def run(group: Any) -> None:
        model = mlp()
        optimizer = shardcast.shard(model, kind(model.parameters()), process_group=group)
        set_grads(model, 0)
        optimizer.step()
        name = "mu_product" if kind is torch.optim.NAdam else "step"
        for param in model.parameters():
            with pytest.raises(RuntimeError, match=rf"'{name}' of .*full_state_dict\(\), which"):
                optimizer.state[param][name]

    ThreadedWorld(2).run(run)


def test_there_is_no_state_before_a_first_step():
    model = mlp()
    optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters()))
    assert dict(optimizer.state) == {} and model[0].weight not in optimizer.state
    with pytest.raises(KeyError):
        optimizer.state[model[0].weight]["exp_avg"]
    assert optimizer.state[nn.Parameter(torch.ones(1))] == {}


def test_the_state_is_read_only():
    model, optimizer = after_a_step()
    param, digest = model[0].weight, optimizer.digest()
    values = optimizer.state[param]
    writes: list[Callable[[], Any]] = [
        lambda: optimizer.state.__setitem__(param, {}),
        lambda: optimizer.state.pop(param),
        lambda: optimizer.state.clear(),
        lambda: values.__setitem__("step", torch.tensor(1.0)),
        lambda: values.update(step=1.0),
        lambda: values.pop("step"),
        lambda: setattr(optimizer, "state", defaultdict(dict)),
        lambda: optimizer.__setstate__({"state": defaultdict(dict)}),
    ]
    for write in writes:
        with pytest.raises(TypeError, match=r"read-only.* optimizer\.load_state_dict\(state\)"):
            write()
    assert optimizer.digest() == digest


def test_a_copy_of_the_state_is_refused_with_what_to_call():
    _, optimizer = after_a_step()
    for act in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"optimizer\.state_dict\(\).*full_state_dict\(\)"):
            act(optimizer.state)


def original(optimizer: Any) -> torch.optim.Optimizer:
    sharded = isinstance(optimizer, shardcast.ShardedOptimizer)
    return packed_of(optimizer).originals.optimizers[0] if sharded else optimizer


def sets_a_place(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    optimizer.param_groups[0] = groups[0]


def sets_the_list(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    optimizer.param_groups = groups


def sets_the_originals_list(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    original(optimizer).param_groups = groups


@pytest.mark.parametrize("act", [sets_a_place, sets_the_list, sets_the_originals_list])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_groups_that_are_replaced_or_added_by_an_assignment_are_used(kind: Any, act: Any):
    """Callbacks that unfreeze layers do so on resume: they replace and add groups."""
    is_list = act is sets_the_list  # only this way can add a group

    def replace(step: int, model: Any, optimizer: Any) -> None:
        if step == 2:
            first, *others = optimizer.param_groups
            more = [{**first, "params": [*model[4].parameters()]}] if is_list else []
            act(optimizer, [{**first, "lr": 0.3}, *others, *more])
        elif step == 4:
            optimizer.param_groups[0]["lr"] = 0.1  # in the new dictionary

    build = interleaved(kind)
    check(lambda model: build(model[:4] if is_list else model), steps(6, replace))
