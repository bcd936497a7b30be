"""Several optimizers on one model, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import oracle
import pytest
import torch
from oracle import BATCH, Optimizers, difference, mlp, pair, set_grads
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

import shardcast
from shardcast import checkpoint
from shardcast.testing import ThreadedWorld

TOL = 1e-6
Build = Callable[[nn.Module], Optimizers]


def train(model: nn.Module, optimizers: Any, steps: range | int = 6, edit: Any = None) -> None:
    """Train with given gradients, in a script's usual loop over several optimizers."""
    for step in steps if isinstance(steps, range) else range(steps):
        set_grads(model, step)
        if edit is not None:
            edit()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def shard(model: nn.Module, optimizers: Optimizers, group: Any = None, **fields: Any) -> Any:
    fields = {"param_dtype": "fp32", "fuse": "eager", "pack_params": 2, **fields}
    return shardcast.shard(model, optimizers, process_group=group, **fields)


def plain(script: Any = train, build: Build = pair) -> nn.Module:
    model = mlp()
    script(model, build(model))
    return model


def check(
    script: Any = train, build: Build = pair, like: Any = None, tol: float = TOL, **fields: Any
) -> None:
    """Compare the script on handles with ``like`` on plain optimizers, in worlds of 1 to 3."""

    def both(model: nn.Module, optimizers: Any, _batch: Tensor, sharded: bool) -> None:
        if sharded:
            script(model, optimizers.optimizers)
        else:
            (like or script)(model, optimizers)

    oracle.check(build, both, tol=tol, **fields)


# -- parity ---------------------------------------------------------------------------------------


def three(model: nn.Module) -> Optimizers:
    """Muon and two AdamWs with different options."""
    muon, adamw = pair(model)
    biases = adamw.param_groups[0]["params"]
    return [
        torch.optim.AdamW(biases[:1], lr=1e-3),
        muon,
        torch.optim.AdamW(biases[1:], lr=1e-2, betas=(0.5, 0.9)),
    ]


def counting(model: nn.Module) -> Optimizers:
    """The first counts its parameters, which must not be mistaken for needing all of them."""
    muon, adamw = pair(model)
    return [foreign.Counts(muon.param_groups[0]["params"]), adamw]


def options(model: nn.Module) -> Optimizers:
    return pair(model, nesterov=False, weight_decay=0.5)


@pytest.mark.parametrize("build", [pair, options, three, counting])
def test_several_optimizers_together_equal_those_of_plain_torch(build: Build):
    check(build=build, tol=0 if build is counting else TOL)


def added(model: Any, optimizers: Any) -> None:
    model.append(nn.Linear(3, 4))
    for param in model[-1].parameters():
        param.data = torch.linspace(-1, 1, param.numel()).view(param.shape)
    optimizers[1].add_param_group({"params": [model[-1].bias], "lr": 1e-3})
    optimizers[0].add_param_group({"params": [model[-1].weight], "lr": 3e-3})


def replaced(_model: Any, optimizers: Any) -> None:
    optimizers[1].param_groups[0] = {**optimizers[1].param_groups[0], "lr": 0.3}


def replaced_list(_model: Any, optimizers: Any) -> None:
    optimizers[1].param_groups = [{**optimizers[1].param_groups[0], "lr": 0.3}]


@pytest.mark.parametrize("edit", [added, replaced, replaced_list])
def test_groups_are_edited_through_a_handle(edit: Any):
    def script(model: Any, optimizers: Any) -> None:
        train(model, optimizers, 3)
        edit(model, optimizers)
        train(model, optimizers, range(3, 8))

    check(script)


# -- one step for all -----------------------------------------------------------------------------


def test_a_step_has_one_small_all_reduce_and_one_reduction_and_sync_of_each_pack():
    def run(group: Any) -> list[str]:
        model = mlp()
        optimizer = shard(model, pair(model), group, pack_params=None)
        assert [pack.partition for pack in optimizer.layout.packs] == ["whole", "even"]
        train(model, optimizer.optimizers, 1)
        del group.log[:]
        train(model, optimizer.optimizers, range(1, 2))
        return [call.op for call in group.log]

    reductions, norm, syncs = ["all_to_all_single"] * 2, ["all_reduce"], ["all_gather_single"] * 2
    assert ThreadedWorld(2).run(run)[0] == reductions + norm + syncs


# -- handles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["handles", "originals"])
def test_schedulers_of_each_optimizer_work_on_handles_and_on_originals(on: str):
    def schedule(optimizers: Any) -> list[LambdaLR]:
        first, second = optimizers
        return [LambdaLR(first, lambda n: 0.5**n), LambdaLR(second, lambda n: 1 / (1 + n))]

    def loop(model: nn.Module, optimizers: Any, schedulers: Any = None) -> None:
        schedulers = schedulers or schedule(optimizers)
        for step in range(6):
            train(model, optimizers, range(step, step + 1))
            for scheduler in schedulers:
                scheduler.step()

    expected = plain(loop)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for is_joint in (False, True):
            model = mlp()
            originals = pair(model)
            schedulers = schedule(originals) if on == "originals" else None
            optimizer = shard(model, originals)
            schedulers = schedulers or schedule(optimizer.optimizers)
            loop(model, [optimizer] if is_joint else optimizer.optimizers, schedulers)
            assert difference(model, expected) <= TOL


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["a number", "a tensor"])
def test_a_scheduler_between_the_steps_of_two_handles_sets_the_rate_of_the_next_step(lr: Any):
    """``for opt, sched in zip(...): opt.step(); sched.step()``, as in modded-nanogpt."""

    def build(model: nn.Module) -> Optimizers:
        return [torch.optim.AdamW(layer.parameters(), lr=copy.deepcopy(lr)) for layer in model[::2]]

    def script(model: nn.Module, optimizers: Any) -> None:
        schedulers = [LambdaLR(each, lambda n: (1 + n) / 4) for each in optimizers]
        for step in range(4):
            set_grads(model, step)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        assert [float(o.param_groups[0]["lr"]) for o in optimizers] == [pytest.approx(0.125)] * 3

    check(script, build)


def test_steps_that_would_count_twice_or_half_are_named():
    model, before = mlp(), list(mlp().parameters())
    optimizer = shard(model, pair(model))
    muon, adamw = optimizer.optimizers
    set_grads(model, 0)
    muon.step()
    told = r"handle of Muon was called twice before step\(\) of AdamW.* \.grad .* to None"
    with pytest.raises(RuntimeError, match=told):
        muon.step()
    with pytest.raises(RuntimeError, match="handle of Muon was stepped, others were not"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    adamw.step()
    assert not any(map(torch.equal, before, model.parameters()))


def test_handles_of_one_class_are_told_apart_by_their_places():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    _, second, third = shard(
        model, [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    ).optimizers
    second.step()
    told = (
        r"SGD \(optimizers\[1\]\) was called twice before step\(\) of SGD \(optimizers\[0\]\), SGD"
    )
    with pytest.raises(RuntimeError, match=told):
        second.step()
    with pytest.raises(RuntimeError, match=r"after step\(\) of SGD \(optimizers\[1\]\)"):
        third.zero_grad()


@torch.no_grad()
def clamp(model: Any) -> None:
    model[0].weight.clamp_(-0.1, 0.1)


CHANGED = "step() of the handle of AdamW came after a backward, a clip or zero"
BETWEEN: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a backward": (lambda model, _: model(BATCH).sum().backward(), CHANGED),
    "an edit": (lambda model, _: model[0].weight.grad.mul_(0.5), CHANGED),
    "zero_grad": (
        lambda _, adamw: adamw.zero_grad(),
        "zero_grad() of the handle of AdamW was called before its own step",
    ),
    "a clamp": (lambda model, _: clamp(model), "AdamW: weights of Muon were written after its"),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_what_changes_between_the_steps_of_handles_is_named(between: str):
    """With separate optimizers, the first one would not have seen it, or only the first one."""
    act, told = BETWEEN[between]
    model = mlp()
    muon, adamw = shard(model, pair(model)).optimizers
    for is_between in (False, True):
        model(BATCH).sum().backward()
        muon.step()
        if is_between:
            with pytest.raises(RuntimeError, match=re.escape(told)):
                act(model, adamw)
                adamw.step()
        else:
            adamw.step()
            clamp(model)
            muon.zero_grad()
            adamw.zero_grad()


@pytest.mark.parametrize("remove", [True, False], ids=["removed", "overwritten"])
def test_row_splits_that_are_removed_from_a_group_stay_away(remove: bool):
    def run(then: Callable[[dict[str, Any]], Any]) -> nn.Module:
        model = mlp()
        optimizers = pair(model)
        optimizers[0].param_groups[0]["params"] = [model[0].weight]
        optimizers[0].param_groups[0]["row_splits"] = (6, 7)
        optimizers[1].add_param_group({"params": [model[2].weight, model[4].weight]})
        optimizer = shard(model, optimizers)
        train(model, [optimizer], 1)
        then(optimizer.param_groups[0])
        train(model, [optimizer], range(1, 5))
        return model

    one = run(lambda group: group.pop("row_splits") if remove else None)
    other = run(lambda group: group.update(row_splits=None))
    assert (difference(one, other) == 0) is remove


def test_the_joint_list_of_groups_of_several_optimizers_is_not_changed():
    model = mlp()
    groups = shard(model, pair(model)).param_groups
    copied = copy.deepcopy(groups)
    assert type(copied) is list and [g["lr"] for g in copied] == [g["lr"] for g in groups]
    for change in (
        groups.clear,
        groups.pop,
        lambda: groups.append({}),
        lambda: groups.extend([]),
        lambda: groups.__delitem__(0),
        lambda: groups.__setitem__(-1, copied[-1]),
    ):
        with pytest.raises(RuntimeError, match=r"param_groups: .*add_param_group"):
            change()


# -- state ----------------------------------------------------------------------------------------


def test_groups_added_to_the_first_optimizer_are_numbered_within_it(tmp_path: Path):
    """States equal those of an optimizer that had the groups from the start."""

    def apart(model: nn.Module) -> tuple[list[Any], list[Any]]:
        return [
            [{"params": [model[n].weight], "lr": 1e-2 / (n + 1)} for n in (0, 2)],
            [{"params": [model[n].bias], "lr": 1e-3 / (n + 1)} for n in (0, 2)],
        ]

    def sharded(model: nn.Module, groups: int, group: Any) -> Any:
        muon, adamw = apart(model)
        optimizers = [torch.optim.Muon(muon[:groups]), torch.optim.AdamW(adamw[:groups])]
        return shard(model, optimizers, group)

    def run(group: Any) -> Any:
        model, twin, later = (mlp()[:4] for _ in range(3))
        model[2].requires_grad_(False)
        optimizer, other = sharded(model, 1, group), sharded(twin, 2, group)
        model.requires_grad_(True)
        for place in (1, 0):
            optimizer.optimizers[place].add_param_group(apart(model)[place][1])
        train(model, optimizer.optimizers, 3)
        train(twin, other.optimizers, 3)
        states = optimizer.full_state_dict(), other.full_state_dict()
        checkpoint.save(tmp_path / str(group.size()), model, optimizer, step=3)
        resumed = sharded(later, 2, group)
        checkpoint.load(tmp_path / str(group.size()), later, resumed)
        train(twin, other.optimizers, range(3, 6))
        train(later, resumed.optimizers, range(3, 6))
        return states, difference(later, twin)

    for size in (1, 2):
        results = ThreadedWorld(size).run(run)
        torch.testing.assert_close(*results[0][0], rtol=0, atol=0)
        assert [worst for _, worst in results] == [0.0] * size


# -- bad input ------------------------------------------------------------------------------------


def edited(edit: Callable[[Any, Any], object]) -> Build:
    """Return a builder of a pair whose groups are edited."""

    def build(model: nn.Module) -> Optimizers:
        optimizers = pair(model)
        edit(*(optimizer.param_groups for optimizer in optimizers))
        return optimizers

    return build


def take_vector(muon: Any, adamw: Any) -> None:
    muon.append({**muon[0], "params": [adamw[0]["params"].pop()]})


def wants_all(model: nn.Module) -> Optimizers:
    muon, adamw = pair(model)
    return [foreign.StepSizeOfAll(muon.param_groups[0]["params"]), adamw]


NOT_TOGETHER: dict[str, tuple[type[Exception], str, Build]] = {
    "twice": (
        ValueError,
        "'0.weight' is in two optimizers, Muon and AdamW; a sharded parameter has one state",
        edited(lambda muon, adamw: adamw[0]["params"].append(muon[0]["params"][0])),
    ),
    "in none": (
        ValueError,
        r"'0.bias' is in none of Muon \+ AdamW; add it to one",
        edited(lambda _, adamw: adamw[0]["params"].pop(0)),
    ),
    "a vector": (ValueError, r"'4.bias' of shape \(3,\) is not a matrix", edited(take_vector)),
    "rows": (
        ValueError,
        r"row_splits: .* 11 rows of parameter '2.weight' .*got \[7, 6\]",
        edited(lambda muon, _: muon[0].update(row_splits=(7, 6))),
    ),
    "empty": (ValueError, "expected at least one, got an empty list", lambda _: []),
    "no optimizer": (TypeError, "or a list of them, got str", lambda m: [pair(m)[0], "adamw"]),
    "LBFGS": (TypeError, "LBFGS cannot be sharded", lambda m: [torch.optim.LBFGS(m.parameters())]),
    "wants all": (TypeError, "StepSizeOfAll cannot be sharded", wants_all),
}


@pytest.mark.parametrize("case", NOT_TOGETHER)
def test_what_cannot_be_sharded_together_is_named_on_every_rank_and_nothing_is_changed(case: str):
    error, message, build = NOT_TOGETHER[case]

    def run(group: Any) -> None:
        model = mlp()
        storages = [param.data_ptr() for param in model.parameters()]
        optimizers = build(model)
        for fields in ({}, {"cost_fn": lambda _name, param: param.numel()}):
            with pytest.raises(error, match=message):
                shard(model, optimizers, group, **fields)
        assert storages == [param.data_ptr() for param in model.parameters()]

    ThreadedWorld(2).run(run)


def test_what_a_handle_cannot_do_says_what_can():
    model = mlp()
    optimizer = shard(model, pair(model))
    muon, _ = optimizer.optimizers
    model.append(nn.LayerNorm(3))
    with pytest.raises(TypeError, match="handle of Muon takes no closure"):
        muon.step(lambda: 0)
    with pytest.raises(RuntimeError, match="have one state; call state_dict"):
        muon.state_dict()
    with pytest.raises(RuntimeError, match="have one state; call load_state_dict"):
        muon.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"Muon .* sharded together"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(ValueError, match=r"'5.weight' of shape .* is not a matrix"):
        muon.add_param_group({"params": [model[-1].weight]})
    assert [len(handle.param_groups) for handle in optimizer.optimizers] == [1, 1]
    train(model, optimizer.optimizers, 1)


@pytest.mark.parametrize(
    "difference_of_last",
    [
        lambda muon, adamw: [adamw, muon],
        lambda muon, _: muon.param_groups[0].update(row_splits=None, nesterov=False),
        lambda muon, adamw: take_vector(adamw.param_groups, muon.param_groups),
    ],
    ids=["order", "options", "assignment"],
)
def test_ranks_that_assign_differently_all_raise(difference_of_last: Any):
    def run(group: Any) -> str:
        model = mlp()
        optimizers = pair(model)
        if group.rank() == 1:
            optimizers = difference_of_last(*optimizers) or optimizers
        with pytest.raises(RuntimeError, match="rank") as caught:
            shard(model, optimizers, group)
        return str(caught.value)

    first, second = ThreadedWorld(2).run(run)
    assert first == second


# -- kernel calls ---------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Counts matmuls; a batched one counts once."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("bmm", "baddbmm", "mm", "addmm")
        return func(*args, **(kwargs or {}))


def products(depth: int, sharded: bool) -> int:
    model = nn.Sequential(*[nn.Linear(*size) for _ in range(depth) for size in ((8, 12), (12, 8))])
    step = shard(model, pair(model), pack_params=None) if sharded else pair(model)[0]
    set_grads(model, 1)
    with Products() as mode:
        step.step()
    return mode.count


def test_kernel_calls_of_a_step_do_not_grow_with_depth_as_plain_torchs_do():
    assert 0 < products(2, sharded=True) == products(8, sharded=True)
    assert products(8, sharded=False) == 4 * products(2, sharded=False) > 0
