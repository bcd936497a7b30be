"""Errors of bad input: what was expected, what was found, what to do."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import Mock

import foreign
import pytest
import torch
import torch.distributed as dist
from models import (
    GPT,
    MLP,
    adamw,
    assert_same_bits,
    install,
    of,
    on_each_rank,
    parts,
    sharded,
    values,
)
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import shardcast
from shardcast.optimizer import state as state_module
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import SpawnedWorld, ThreadedWorld, fake_world, threaded_world

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

# -- shard() --------------------------------------------------------------------------------------


class Refusal(NamedTuple):
    """What to shard, and the error that it gets."""

    told: str
    error: type[Exception] = ValueError
    model: Callable[[], Any] = MLP
    optimizer: Callable[[Any], Any] = adamw
    fields: dict[str, Any] = {}  # noqa: RUF012, never modified


def twice(model: nn.Module) -> torch.optim.Optimizer:
    with pytest.warns(UserWarning, match="duplicate"):  # torch only warns
        return torch.optim.SGD([{"params": [model.b.bias, model.b.bias]}], lr=1.0)


def emptied(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    optimizer.param_groups[0]["params"] = []
    return optimizer


def with_another_step(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # its replacement of step() is allowed
    step = optimizer.step
    optimizer.step = lambda: step()
    return optimizer


rmsprop = of("RMSprop")


def normalized(model: nn.Module) -> torch.optim.Optimizer:
    return foreign.Normalized(model.parameters())


def with_odd(kind: torch.dtype) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = MLP()
        trains = kind.is_floating_point or kind.is_complex
        model.odd = nn.Parameter(torch.ones(2, dtype=kind), requires_grad=trains)
        return model

    return build


def on_same_memory() -> nn.Module:
    model = MLP()
    model.d = nn.Linear(13, 5)
    model.d.weight.data = model.b.weight.data
    return model


def with_stray_buffer() -> nn.Module:
    model = MLP()
    model.register_buffer("stray", torch.empty(3, device="meta"))
    return model


def but_c(model: nn.Module) -> torch.optim.Optimizer:
    params = [*model.a.parameters(), *model.b.parameters()]
    model.c.to("meta")
    return torch.optim.AdamW(params)


AT_SHARD = {
    "no model": Refusal(r"model: .* got int", TypeError, lambda: [3], lambda _model: adamw(MLP())),
    "other parameters": Refusal(
        r"shape \(3, 5\) that is not one of the model's",
        optimizer=lambda _model: torch.optim.SGD([nn.Parameter(torch.ones(3, 5))], lr=1.0),
    ),
    "a copy's": Refusal("this very model", optimizer=lambda m: adamw(copy.deepcopy(m))),
    "one twice": Refusal(r"parameter 'b\.bias' is in its groups twice", optimizer=twice),
    "none": Refusal("its groups hold no parameter", optimizer=emptied),
    "a class": Refusal(
        "optimizer: .*not the class", TypeError, optimizer=lambda _model: torch.optim.AdamW
    ),
    "a step that was replaced": Refusal(
        "the step of this AdamW was replaced", TypeError, optimizer=with_another_step
    ),
    "complex": Refusal(
        "'odd' is complex; expected float32.*; train a real view",
        TypeError,
        with_odd(torch.complex64),
    ),
    "float64": Refusal(r"'odd' is float64; .*model\.float\(\)", TypeError, with_odd(torch.float64)),
    "int64": Refusal(
        "'odd' is int64; expected .* or float16; leave it out", TypeError, with_odd(torch.int64)
    ),
    "on meta": Refusal(r"'a\.weight' is on the meta device", model=lambda: MLP().to("meta")),
    "another parameter on meta": Refusal(r"model: 'c\.weight' is on the meta", optimizer=but_c),
    "a buffer on meta": Refusal("model: 'stray' is on the meta", model=with_stray_buffer),
    "two on the same memory": Refusal(
        r"'b\.weight' and 'd\.weight' .*tie the Parameter", model=on_same_memory
    ),
    "DataParallel": Refusal(
        r"got nn\.DataParallel.*model\.module", TypeError, lambda: nn.DataParallel(MLP())
    ),
    "a script": Refusal("TorchScript in 'the root'", TypeError, lambda: torch.jit.script(MLP())),
    "a trace": Refusal(
        "TorchScript in 'the root'", TypeError, lambda: torch.jit.trace(MLP(), torch.ones(1, 7))
    ),
    "a script inside": Refusal(
        "TorchScript in '0'", TypeError, lambda: nn.Sequential(torch.jit.script(MLP()))
    ),
    "LBFGS": Refusal(
        "LBFGS cannot be sharded .*use a first-order",
        TypeError,
        optimizer=lambda model: torch.optim.LBFGS(model.parameters()),
    ),
    "SparseAdam": Refusal(
        "SparseAdam cannot be sharded .*use a first-order",
        TypeError,
        optimizer=lambda model: torch.optim.SparseAdam(list(model.parameters())),
    ),
    "differentiable": Refusal(
        "differentiable=True cannot be sharded, because",
        optimizer=lambda model: adamw(model, differentiable=True),
    ),
    "cut, not elementwise": Refusal(
        "Normalized .* use 'whole'", optimizer=normalized, fields={"partition": "even"}
    ),
    "all_gather of unequal spans": Refusal(
        "all_gather needs equal spans", optimizer=normalized, fields={"sync": "all_gather"}
    ),
    "reduce_scatter of them": Refusal(
        "reduce_scatter needs", optimizer=normalized, fields={"reduce": "reduce_scatter"}
    ),
    "own state, split masters": Refusal(
        "master: .* got RMSprop", optimizer=rmsprop, fields={"master": "split16"}
    ),
    "own state, bytes": Refusal(
        "moments: 'int8' .* got RMSprop", optimizer=rmsprop, fields={"moments": "int8"}
    ),
    "fp16, split masters": Refusal(
        "master: split16 needs param_dtype .*float16",
        fields={"master": "split16", "param_dtype": torch.float16},
    ),
    "no module of that name": Refusal(
        "fp32_outputs: the pattern 'heads'", model=GPT, fields={"fp32_outputs": "heads"}
    ),
    "no parameter of that name": Refusal(
        r"keep_fp32: the pattern 'blocks\.\*\.n'", model=GPT, fields={"keep_fp32": "blocks.*.n"}
    ),
    "no compiler": Refusal(r"fuse: expected a C\+\+ compiler", fields={"fuse": "compile"}),
}


@pytest.mark.parametrize("case", AT_SHARD)
def test_what_cannot_be_sharded_is_refused_by_name_and_nothing_is_changed(
    case: str, monkeypatch: pytest.MonkeyPatch
):
    told, error, build, make, fields = AT_SHARD[case]
    if case == "no compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    model = build()
    optimizer = make(model)
    params = list(model.parameters()) if isinstance(model, nn.Module) else []
    before = [(param.dtype, param.data_ptr()) for param in params]
    with pytest.raises(error, match=told):
        shardcast.shard(model, optimizer, **fields)
    assert [(param.dtype, param.data_ptr()) for param in params] == before


def test_a_sparse_parameter_is_refused_by_name():
    model = nn.ParameterDict({"odd": nn.Parameter(torch.eye(2).to_sparse())})
    with pytest.raises(ValueError, match=r"'odd' is sparse_coo; expected a dense one"):
        shardcast.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_ties_views_that_do_not_overlap_and_empty_parameters_are_not_refused():
    """Negative control."""
    flat = torch.arange(8.0)
    model = nn.Module()
    model.first, model.second = (nn.Parameter(part) for part in flat.split(4))
    model.nothing, model.nil = (nn.Parameter(flat[:0]) for _ in range(2))
    model.tied = model.first
    shardcast.shard(model, adamw(model))
    assert torch.cat([model.first, model.second]).tolist() == flat.tolist()
    assert model.tied is model.first


def with_ddp(_group: Any) -> None:
    wrapped = DistributedDataParallel(MLP())
    with pytest.raises(ValueError, match=r"DistributedDataParallel; pass model\.module"):
        shardcast.shard(wrapped, adamw(wrapped))
    inside = nn.Sequential(DistributedDataParallel(nn.Linear(4, 4)), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"DistributedDataParallel in '0'; put its \.module"):
        shardcast.shard(inside, adamw(inside))
    model = MLP()
    shardcast.shard(model, adamw(model))
    with pytest.raises(RuntimeError, match="averaged twice"):
        DistributedDataParallel(model)(torch.ones(1, 7))


def test_ddp_around_a_model_is_refused_before_shard_and_after_it(gloo: SpawnedWorld):
    gloo.run(with_ddp)


@on_each_rank({"tp": 2})
def test_a_dtensor_is_refused_by_name(mesh: Any):
    model = nn.Linear(4, 4)
    before = nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)]))
    model.weight = before
    told = "parameter 'weight' is a DTensor; expected a plain tensor"
    with pytest.raises(TypeError, match=told):
        sharded(model, mesh.get_group())
    assert model.weight is before


# -- a sharded optimizer and its model ------------------------------------------------------------


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, others = model.a.parameters(), [*model.b.parameters(), *model.c.parameters()]
    return torch.optim.AdamW([{"params": first}, {"params": others, "lr": 1e-3}], lr=1e-2)


def add_on_meta(model: Any, optimizer: Any) -> None:
    model.late = nn.Linear(3, 3, device="meta")
    optimizer.add_param_group({"params": list(model.late.parameters())})


def assign(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Any:
    def call(_model: Any, optimizer: Any) -> None:
        optimizer.param_groups = change(optimizer.param_groups)

    return call


def turned(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**groups[0], "params": groups[0]["params"][::-1]}, *groups[1:]]


def load_other_groups(model: Any, optimizer: Any) -> None:
    halves = [{"params": [model.a.weight]}, {"params": [model.b.weight]}]
    optimizer.load_state_dict(torch.optim.AdamW(halves).state_dict())


def load_another_shape(_model: Any, optimizer: Any) -> None:
    plain = optimizer.full_state_dict()
    plain["state"][3]["exp_avg"] = torch.zeros(99)  # the fourth of six: some come before it
    plain["state"][0]["exp_avg"] = torch.full((13, 7), 7.0)
    plain["param_groups"][0]["lr"] = 9.0
    optimizer.load_state_dict(plain)


def clip(*arguments: Any, **options: Any) -> Any:
    """Return a call of ``clip_grad_norm_`` with arguments that may be functions of the model."""

    def call(model: Any, optimizer: Any) -> None:
        chosen = (a(list(model.parameters())) if callable(a) else a for a in arguments)
        optimizer.clip_grad_norm_(*chosen, **options)

    return call


def original(optimizer: Any) -> Any:
    return packed_of(optimizer).originals.optimizers[0]


def convert(to: str) -> Any:
    def call(model: Any, _optimizer: Any) -> None:
        getattr(model, to)()
        with torch.no_grad():
            model(torch.ones(2, 7, dtype=model.a.weight.dtype))  # using it is allowed
        model(torch.ones(2, 7, dtype=model.a.weight.dtype))

    return call


PRESENT, ALREADY = "param_groups: expected the present groups", r"shard\(\) was already called"
AFTERWARDS: dict[str, tuple[type[Exception], str, Callable[[Any, Any], Any]]] = {
    "clip with others": (
        ValueError,
        "got 6 others that require",
        clip(lambda all: [*all, *MLP().parameters()], 1.0),
    ),
    "another norm": (ValueError, r"norm_type 2\.0, got inf", clip(list, 1.0, math.inf)),
    "clip without a norm": (TypeError, "max_norm: expected a number", clip(list)),
    "a bound and a bound": (TypeError, r"got 0\.05 besides max_norm 2\.0; write", clip(0.05, 2.0)),
    "a bound before parameters": (
        TypeError,
        r"got 0\.05 .*write clip_grad_norm_\(parameters, 0\.05\)",
        lambda model, optimizer: optimizer.clip_grad_norm_(0.05, parameters=model.parameters()),
    ),
    "clip misspelt": (TypeError, "unexpected .* 'max_nrom'", clip(1.0, max_nrom=1.0)),
    "values without one": (
        ValueError,
        "clip_grad_value_: expected all trained parameters",
        lambda model, optimizer: optimizer.clip_grad_value_(list(model.parameters())[:-1], 1.0),
    ),
    "strangers": (
        ValueError,
        "and add a new module to the model before you add its group",
        lambda _, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    ),
    "one in two groups": (
        ValueError,
        "more than one parameter group",
        lambda model, optimizer: optimizer.add_param_group({"params": [model.a.weight]}),
    ),
    "a group on meta": (ValueError, "on the meta device", add_on_meta),
    "groups assigned, one less": (ValueError, PRESENT, assign(lambda groups: groups[:1])),
    "groups assigned, turned": (ValueError, PRESENT, assign(turned)),
    "plain state of other groups": (ValueError, r"\[2, 4\] .*got \[1, 1\]", load_other_groups),
    "plain state of another shape": (
        ValueError,
        r"'exp_avg' of parameter 'b\.bias' has shape \(99,\)",
        load_another_shape,
    ),
    "state of another layout": (
        ValueError,
        r"another layout; .* shardcast\.checkpoint\.save.* full_state_dict",
        lambda _, optimizer: optimizer.load_state_dict(
            sharded(MLP(), optimizer=two_groups, pack_params=2).state_dict()
        ),
    ),
    "pickled": (TypeError, r"use state_dict\(\)", lambda _, it: pickle.dumps(it)),
    "copied": (TypeError, "cannot be pickled or copied", lambda _, it: copy.copy(it)),
    "copied deeply": (TypeError, "cannot be", lambda _, it: copy.deepcopy(it)),
    "weights assigned": (
        RuntimeError,
        "assign=True.* would replace parameters",
        lambda model, _: model.load_state_dict(MLP().state_dict(), assign=True),
    ),
    "sharded again": (RuntimeError, ALREADY, lambda model, _: shardcast.shard(model, adamw(model))),
    "the sharded sharded": (RuntimeError, ALREADY, shardcast.shard),
    "scripted": (
        AttributeError,
        r"cannot be scripted.*optimizer\.close\(\)",
        lambda model, _: torch.jit.script(model),
    ),
    "on several devices": (
        RuntimeError,
        r"wrapped in nn\.DataParallel",
        lambda model, _: model._replicate_for_data_parallel()(torch.ones(1, 7)),
    ),
    **{
        f"the original's {name}": (
            RuntimeError,
            rf"call {name}\(\) of the optimize",
            lambda _, optimizer, name=name: getattr(original(optimizer), name)(),
        )
        for name in (
            *("step", "add_param_group", "state_dict", "load_state_dict", "zero_grad"),
            "register_step_post_hook",
        )
    },
    "the original's state": (
        RuntimeError,
        "state of the original optimizer",
        lambda model, optimizer: original(optimizer).state[model.a.weight],
    ),
    "a copy of the original": (
        RuntimeError,
        "state of the original optimizer",
        lambda _, optimizer: copy.deepcopy(original(optimizer)),
    ),
    **{
        f"converted by {to}": (RuntimeError, r"'a\.weight' was moved out of its pack", convert(to))
        for to in ("double", "half")
    },
}


@pytest.mark.parametrize("case", AFTERWARDS)
def test_what_a_sharded_optimizer_cannot_do_is_refused_by_name_and_changes_nothing(case: str):
    error, told, call = AFTERWARDS[case]
    model = MLP()
    optimizer = sharded(model, optimizer=two_groups)
    install(model, 0)
    optimizer.step()
    before, state, groups = values(model), parts(optimizer), optimizer.param_groups
    sizes, rate = [len(group["params"]) for group in groups], groups[0]["lr"]
    with pytest.raises(error, match=told):
        call(model, optimizer)
    if not case.startswith("converted"):
        assert_same_bits({name: values(model)[name] for name in before}, before)
    assert optimizer.param_groups is groups and groups[0]["lr"] == rate
    assert [len(group["params"]) for group in groups] == sizes
    assert_same_bits(parts(optimizer), state)


@pytest.mark.parametrize(
    ("change", "then"),
    [
        (lambda groups: groups.pop(0), "step"),
        (list.clear, "full_state_dict"),
        (lambda groups: groups.append({**groups[0], "params": []}), "step"),
        (lambda groups: groups[0]["params"].pop(), "state_dict"),
        (
            lambda groups: groups[0]["params"].__setitem__(0, nn.Parameter(torch.ones(13, 7))),
            "step",
        ),
    ],
)
def test_groups_that_lose_or_get_parameters_behind_the_optimizer_are_refused(
    change: Any, then: str
):
    optimizer = sharded(MLP(), optimizer=two_groups)
    change(optimizer.param_groups)
    with pytest.raises(RuntimeError, match="param_groups: expected"):
        getattr(optimizer, then)()


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_that_went_to_the_meta_device_is_named_and_its_masters_are_kept(size: int):
    def run(group: Any) -> None:
        model = nn.Linear(4, 4)
        optimizer = shardcast.shard(
            model, torch.optim.SGD(model.parameters(), lr=0.1), process_group=group
        )
        before = model.weight.detach().clone()
        model.to("meta")
        with pytest.raises(RuntimeError, match=r"model\.to\('meta'\)"):
            model(torch.ones(2, 4))
        weights = optimizer.full_parameters()
        if not group.rank():
            assert torch.equal(weights["weight"].to(before.dtype), before)

    ThreadedWorld(size).run(run)


def test_a_model_is_scripted_after_the_training():
    model = MLP()
    sharded(model).close()
    assert torch.jit.script(model)(torch.ones(1, 7)).isfinite().all()


BOUNDS = [
    (-1.0, ValueError, "above 0, got -1.0"),
    (0, ValueError, "above 0, got 0"),
    (float("nan"), ValueError, "above 0, got nan"),
    (torch.tensor(-1.0), ValueError, r"above 0, got tensor\(-1"),
    ("a", TypeError, r"above 0, got 'a' \(str\)"),
    (True, TypeError, r"above 0, got True \(bool\)"),
]


@pytest.mark.parametrize(("bound", "error", "told"), BOUNDS, ids=[str(b[0]) for b in BOUNDS])
def test_bounds_that_are_not_above_zero_are_refused_by_name(bound: Any, error: Any, told: str):
    model = MLP()
    optimizer = sharded(model)
    install(model, 0)
    with pytest.raises(error, match=f"max_norm: expected a number {told}"):
        optimizer.clip_grad_norm_(bound)
    with pytest.raises(error, match=f"clip_value: expected a number {told}"):
        optimizer.clip_grad_value_(bound)
    optimizer.param_groups[0]["max_grad_norm"] = bound
    own = f"max_grad_norm of parameter group 0: expected a number {told}"
    with pytest.raises(error, match=own):
        optimizer.clip_grad_norm_(1.0)
    model = MLP()
    inner = torch.optim.SGD([{"params": model.parameters(), "max_grad_norm": bound}], lr=0.1)
    with pytest.raises(error, match=own):
        shardcast.shard(model, inner)
    inner.param_groups[0]["max_grad_norm"] = None
    optimizer = shardcast.shard(model, inner)
    with pytest.raises(error, match=own.replace("0", "1", 1)):
        optimizer.add_param_group({"params": [], "max_grad_norm": bound})


@pytest.mark.parametrize("size", [1, 2])
def test_sparse_gradients_are_refused_by_name(size: int):
    def train(group: Any) -> None:
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
        make = lambda m: torch.optim.SGD(m.parameters(), lr=1.0)  # noqa: E731
        optimizer = sharded(model, group if size > 1 else None, make)
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    with pytest.raises(
        TypeError, match=r"gradient of '0\.weight': expected a dense .*average its gradient"
    ):
        ThreadedWorld(size).run(train)


# -- ranks ----------------------------------------------------------------------------------------


def test_world_size_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = MLP()
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE is 4 .*init_process_group"):
        shardcast.shard(model, adamw(model))
    with fake_world(4) as group:  # a given group is trusted
        assert shardcast.shard(model, adamw(model), process_group=group).layout.world_size == 4


def test_a_group_of_one_rank_in_a_world_of_two_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = MLP()
    told = "WORLD_SIZE is 2 but the default process group has one rank.*accelerate launch"
    with pytest.raises(RuntimeError, match=told):
        shardcast.shard(model, adamw(model))


def closed_late(group: Any) -> bool:
    """Close an optimizer after its group was destroyed, as Accelerate does at exit."""
    model = MLP()
    optimizer = shardcast.shard(model, adamw(model), process_group=dist.new_group([0, 1]))
    install(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    dist.destroy_process_group()
    optimizer.close(restore=False)
    return all(param.grad is None for param in model.parameters())


def test_close_without_restore_needs_no_process_group(gloo: SpawnedWorld):
    assert gloo.run(closed_late) == [True, True]


def outsider(group: Any) -> str:
    only_first = dist.new_group([0])
    model = MLP()
    try:
        shardcast.shard(model, adamw(model), process_group=only_first, fuse="eager")
    except ValueError as error:
        return str(error)
    return "sharded"


def test_a_group_without_this_rank_is_refused(gloo: SpawnedWorld):
    member, other = gloo.run(outsider)
    assert member == "sharded"
    assert "process_group: expected a group that contains this rank" in other


def different(group: Any, what: str) -> str:
    """Return the error of ``shard`` if rank 1 differs in ``what``."""
    odd = group.rank() == 1
    model: nn.Module = MLP()
    if odd and what == "shape":
        model.b = nn.Linear(13, 6)
    if odd and what == "missing":
        del model.c
    if what == "buffer":
        model.register_buffer("table", torch.zeros(5 if odd else 3))
    if odd and what == "name":
        model.d = model.b
        del model.b
    if odd and what == "frozen":
        model.b.bias.requires_grad_(False)
    params: Any = list(model.parameters())
    if what == "group":
        cut = 3 if odd else 2
        params = [{"params": params[:cut]}, {"params": params[cut:]}]
    dtype = torch.float16 if odd and what == "option" else torch.bfloat16
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, lr=torch.tensor(0.5))
    if odd and what == "class":
        optimizer = torch.optim.SGD(params, lr=0.5)
    if odd and what in ("lr", "weight_decay", "betas"):
        value = {"lr": torch.tensor(0.25), "weight_decay": 0.5, "betas": (0.5, 0.9)}[what]
        optimizer.param_groups[-1][what] = value
    if odd and what == "state":  # as if only one rank had loaded a state
        model.b.bias.grad = torch.ones_like(model.b.bias)
        optimizer.step()
    for members in optimizer.param_groups:  # not a plain value, so not compared
        members["mine"] = object()
    try:
        shardcast.shard(model, optimizer, process_group=group, param_dtype=dtype, fuse="eager")
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


DIFFERENCES = {
    "shape": "b.weight",
    "missing": "c.weight",
    "name": "b.weight",
    "frozen": "b.bias",
    "group": "b.weight",
    "buffer": "table (5,)",
    "option": "",
    "class": "ranks 0, 2: optimizer = AdamW; rank 1: optimizer = SGD",
    "lr": "ranks 0, 2: group 0: lr = 0.5; rank 1: group 0: lr = 0.25",
    "weight_decay": "ranks 0, 2: group 0: weight_decay = 0.01; rank 1: group 0: weight_decay = 0.5",
    "state": "; rank 1: b.bias, which has optimizer state",
    "betas": "ranks 0, 2: group 0: betas = (0.9, 0.999); rank 1: group 0: betas = (0.5, 0.9)",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_models_that_differ_are_refused_on_every_rank_by_the_first_difference(what: str):
    world = ThreadedWorld(3)
    messages = world.run(different, what)
    assert messages[0] == messages[1] == messages[2]
    assert "the ranks do not hold the same model and options" in messages[0]
    assert "ranks 0, 2:" in messages[0] and "rank 1:" in messages[0]
    assert DIFFERENCES[what] in messages[0]
    sent = {call.dtype for log in world.logs for call in log if call.op == "broadcast"}
    assert sent <= {torch.int64, torch.uint8}, "rank 0's description, no tensor of the model"


def without_a_master(local: dict[str, Any], _plain: dict[str, Any]) -> dict[str, Any]:
    first, *_ = local["state"]
    return {**local, "state": {**local["state"], first: {}}}


@pytest.mark.parametrize(
    ("spoil", "own", "other"),
    [
        (without_a_master, "'master' of parameter", "rank 1: .*'master' of parameter"),
        (lambda _local, plain: plain, "others a plain one", "others a plain one"),
        (lambda _local, _plain: {}, "returns it on rank 0 only", "rank 1: .*on rank 0 only"),
        (
            lambda local, _plain: {**local, "shardcast": {}},
            "of rank None",
            "rank 1: .*of rank None",
        ),
    ],
    ids=["truncated", "plain", "empty", "no head"],
)
def test_a_state_that_one_rank_cannot_load_is_refused_on_all_and_changes_nothing(
    spoil: Any, own: str, other: str
):
    def load(group: Any) -> str:
        model = MLP()
        optimizer = sharded(model, group)
        install(model, 0)
        optimizer.step()
        local = optimizer.state_dict()
        plain = [optimizer.full_state_dict()]
        torch.distributed.broadcast_object_list(plain, group=group, group_src=0)
        install(model, 1)
        optimizer.step()
        before = optimizer.state_dict()
        wanted = spoil(local, plain[0]) if group.rank() == 1 else local
        with pytest.raises(ValueError) as caught:
            optimizer.load_state_dict(wanted)
        after = optimizer.state_dict()
        for number, tensors in before["state"].items():
            assert_same_bits(after["state"][number], tensors)
        return str(caught.value)

    first, second = ThreadedWorld(2).run(load)
    assert re.search(other, first) and re.search(own, second)


@pytest.mark.parametrize("broken", ["rank 0", "rank 1", "joining"])
@pytest.mark.parametrize("call", ["full_state_dict", "full_parameters"])
def test_an_error_in_a_gathering_call_is_raised_on_all_ranks(
    call: str, broken: str, monkeypatch: pytest.MonkeyPatch
):
    """The error occurs on one rank, or on rank 0 while it joins the parts of all ranks."""

    def run(group: Any) -> None:
        model = MLP()
        optimizer = sharded(model, group, pack_params=2)
        install(model, 0)
        optimizer.step()
        if broken == f"rank {group.rank()}":
            packed_of(optimizer).updates[0].fragment_state = packed_of(optimizer).ready_to_read = (
                fault
            )
        with pytest.raises((RuntimeError, KeyError), match="no room"):
            getattr(optimizer, call)()

    fault = Mock(side_effect=KeyError("no room"))
    if broken == "joining":
        monkeypatch.setattr(state_module, "_joined", fault)
    ThreadedWorld(2).run(run)


def cannot(model: nn.Module) -> None:
    raise OSError(f"no room for {type(model).__name__}")


@pytest.mark.parametrize("on_mesh", [False, True], ids=["group", "mesh"])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"partition": "evn"}, ValueError, "partition: expected one of auto, even, whole, got"),
        ({"max_gradnorm": 1.0}, ValueError, "did you mean 'max_grad_norm'"),
        ({"optimizer": torch.optim.AdamW}, TypeError, "pass the object, not the class"),
        ({"materialize": cannot}, Exception, "no room for MLP"),
    ],
    ids=["value", "name", "optimizer", "materialize"],
)
def test_an_argument_that_one_rank_alone_has_wrong_is_an_error_of_all(
    given: dict[str, Any], error: type[Exception], message: str, on_mesh: bool
):
    def run(group: Any, mesh: Any = None) -> None:
        model, options = MLP(), dict(given if group.rank() == 1 else {})
        where: dict[str, Any] = {"mesh": mesh} if mesh is not None else {"process_group": group}
        optimizer = options.pop("optimizer", None) or adamw(model)
        with pytest.raises(error, match=message):
            shardcast.shard(model, optimizer, **where, **options)

    if on_mesh:
        threaded_world({"dp": 2}, lambda mesh: run(mesh.get_group("dp"), mesh))
    else:
        ThreadedWorld(2).run(run)
