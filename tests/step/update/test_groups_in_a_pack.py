"""Several groups in one pack: each element is updated with the numbers of its own group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import BATCH, check, mlp, set_grads, steps
from torch import Tensor, nn

import shardcast
from shardcast.testing import ThreadedWorld, fake_world

ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95)}


def layers(model: nn.Module) -> list[dict[str, Any]]:
    """As layer-wise decay: a rate for each layer, and no weight decay of biases."""
    params = list(model.parameters())
    return [
        {"params": [param], "lr": 1e-2 * 0.7**number, "weight_decay": 0.3 * (param.dim() > 1)}
        for number, param in enumerate(params)
    ]


def in_two(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": params[1::2], "weight_decay": 0.0, "lr": 3e-2},
        {"params": params[::2], "weight_decay": 0.2},
    ]


GROUPS = {"layers": layers, "two": in_two}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, **ADAM),
    "Adam": lambda groups: torch.optim.Adam(groups, amsgrad=True, **ADAM),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
}


def packs_of(model: nn.Module, optimizer: torch.optim.Optimizer, **fields: Any) -> int:
    with fake_world(4, rank=1) as group:
        sharded = shardcast.shard(model, optimizer, process_group=group, **fields)
        return len(sharded.layout.packs)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("pack_params", [3, 4])
def test_each_group_has_its_own_numbers(name: str, groups: str, pack_params: int):
    """Also where they change, where gradients are absent, and where a group has a bound."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[name](GROUPS[groups](model))

    def change(step: int, _model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[step % 2]["lr"] *= 0.5
        optimizer.param_groups[1]["weight_decay"] = 0.1 * (step % 3)

    def script(model: nn.Module, optimizer: Any, _batch: Tensor, _sharded: bool) -> None:
        for step in range(6):
            change(step, model, optimizer)
            set_grads(model, step)
            if step in (0, 3):  # the first step of one parameter comes later than that of others
                list(model.parameters())[step % 4 + 1].grad = None
            optimizer.step()
            optimizer.zero_grad()

    tol = 1e-6 if name == "Adafactor" else 0.0
    fields: dict[str, Any] = {"unpacked_first": 0, "pack_params": pack_params}
    check(build, script, worlds=(1, 2, 4), tol=tol, **fields)
    model = mlp()
    packs = packs_of(model, build(model), param_dtype="fp32", **fields)
    assert packs == 2, "as many packs as one group has"


def test_gradients_that_are_read_after_a_clip_show_that_of_their_own_group():
    def run(group: Any) -> list[Tensor]:
        model = mlp()
        inner = torch.optim.SGD(in_two(model), lr=0.1)
        inner.param_groups[0]["max_grad_norm"] = 0.05
        optimizer = shardcast.shard(
            model, inner, process_group=group, param_dtype="fp32", unpacked_first=0
        )
        model(BATCH).float().square().mean().mul(50).backward()
        optimizer.clip_grad_norm_(0.4)
        optimizer.gather_gradients()
        of_groups = [[p.grad.float() for p in own["params"]] for own in inner.param_groups]
        return [torch.nn.utils.get_total_norm(grads) for grads in of_groups]

    for own, rest in ThreadedWorld(2).run(run):
        torch.testing.assert_close(own, torch.tensor(0.05), rtol=1e-5, atol=0)
        torch.testing.assert_close(rest, torch.tensor(0.4), rtol=1e-5, atol=0)


def test_a_flag_that_one_group_gets_later_gives_its_state_to_that_group_alone():
    """As amsgrad: the pack stays, and parameters of the other group have no such state."""

    def flag(step: int, _model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["amsgrad"] = step >= 2

    def build(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(in_two(model), **ADAM)

    def script(model: nn.Module, optimizer: Any, _batch: Tensor, sharded: bool) -> None:
        for step in range(5):
            flag(step, model, optimizer)
            for param in optimizer.param_groups[0]["params"] if step == 2 and not sharded else ():
                optimizer.state[param]["max_exp_avg_sq"] = torch.zeros_like(param)
            set_grads(model, step)
            optimizer.step()

    check(build, script, worlds=(1, 2), unpacked_first=0, pack_params=4)
    model = mlp()
    optimizer = shardcast.shard(model, build(model), param_dtype="fp32", unpacked_first=0)
    steps(4, flag)(model, optimizer, BATCH, True)
    names = [
        {*optimizer.state_dict()["state"][number]} for number in range(len([*model.parameters()]))
    ]
    assert ["max_exp_avg_sq" in own for own in names] == [True] * 3 + [False] * 3


def test_what_chooses_code_or_state_parts_packs():
    model = mlp()
    groups = in_two(model)
    groups[0]["amsgrad"] = True
    assert packs_of(model, torch.optim.AdamW(groups), unpacked_first=0) == 2
    model = mlp()
    groups = in_two(model)
    groups[0]["momentum"] = 0.9
    assert packs_of(model, torch.optim.SGD(groups), unpacked_first=0) == 2


def test_groups_add_no_collective():
    counts = {}
    for name, build in {"one": lambda m: [{"params": list(m.parameters())}], **GROUPS}.items():
        with fake_world(8, rank=0) as group:
            model = mlp()
            inner = torch.optim.AdamW(build(model), lr=1e-3)
            optimizer = shardcast.shard(model, inner, process_group=group, max_grad_norm=1.0)
            for _ in range(2):
                before = len(group.rank_log)
                model(BATCH).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            counts[name] = len(group.rank_log) - before
    assert len({*counts.values()}) == 1, counts
