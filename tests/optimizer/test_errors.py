"""Bad input gets a clear error: what was expected, what was found, what to do."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import foreign
import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from models import MLP, adamw, install, sharded
from torch import nn

import shardcast
from shardcast.optimizer import full_state
from shardcast.testing import SpawnedWorld, ThreadedWorld, fake_world

pytestmark = pytest.mark.timeout(60)


def twice(model: nn.Module) -> torch.optim.Optimizer:
    with pytest.warns(UserWarning, match="duplicate"):  # torch only warns
        return torch.optim.SGD([{"params": [model.b.bias, model.b.bias]}], lr=1.0)


def emptied(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    optimizer.param_groups[0]["params"] = []
    return optimizer


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "other parameters": (
        lambda _model: torch.optim.SGD([nn.Parameter(torch.ones(3, 5))], lr=1.0),
        ValueError, r"shape \(3, 5\) that is not one of the model's; build",
    ),
    "a copy's": (lambda model: adamw(copy.deepcopy(model)), ValueError, "this very model"),
    "one twice": (twice, ValueError, r"parameter 'b\.bias' is in its groups twice"),
    "none": (emptied, ValueError, "its groups hold no parameter"),
    "a class": (
        lambda _model: torch.optim.AdamW, TypeError,
        r"expected a torch\.optim\.Optimizer.*not the class",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_optimizers_that_cannot_be_sharded_are_refused(case: str):
    make, error, told = REFUSED[case]
    model = MLP()
    with pytest.raises(error, match=told):
        shardcast.shard(model, make(model))


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, .* got int"):
        shardcast.shard([3], adamw(MLP()))  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["step", "add_param_group", "state_dict", "load_state_dict"])
def test_calls_of_the_original_optimizer_are_refused(call: str):
    model = MLP()
    optimizer = adamw(model)
    shardcast.shard(model, optimizer)
    with pytest.raises(RuntimeError, match=rf"call {call}\(\) of the optimizer that shardcast\.s"):
        getattr(optimizer, call)()


@pytest.mark.parametrize(
    ("dtype", "told"), [(torch.complex64, "complex"), (torch.float64, "float64")]
)
def test_parameters_of_an_unusable_dtype_are_refused_by_name(dtype: torch.dtype, told: str):
    model = nn.Module()
    model.good = nn.Parameter(torch.ones(2))
    model.odd = nn.Parameter(torch.ones(2, dtype=dtype))
    expected = rf"'odd' is {told}; expected float32, bfloat16 or float16.*model\.float\(\)"
    with pytest.raises(TypeError, match=expected):
        shardcast.shard(model, adamw(model))


def test_parameters_left_on_meta_are_refused_by_name():
    with torch.device("meta"):
        model = MLP()
    with pytest.raises(ValueError, match=r"'a\.weight' is on the meta device"):
        shardcast.shard(model, adamw(model))
    with pytest.raises(ValueError, match=r"'a\.weight' is on the meta device"):
        shardcast.pack_parameters(model)


@pytest.mark.parametrize("left", ["1.weight", "stray"])
def test_what_the_optimizer_does_not_hold_may_not_be_left_on_meta_either(left: str):
    model = torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model[0].parameters())
    if left == "stray":
        model.register_buffer("stray", torch.empty(3, device="meta"))
    else:
        model[1].to("meta")
    with pytest.raises(ValueError, match=rf"model: '{left}' is on the meta device .* frozen ones"):
        shardcast.shard(model, optimizer)


def test_two_parameters_on_the_same_memory_are_refused_by_name():
    model = MLP()
    model.d = nn.Linear(13, 5)
    model.d.weight.data = model.b.weight.data
    expected = r"'b\.weight' and 'd\.weight' are two objects on the same memory.*tie the Parameter"
    with pytest.raises(ValueError, match=expected):
        shardcast.shard(model, adamw(model))
    with pytest.raises(ValueError, match=expected):
        shardcast.pack_parameters(model)
    model.d.weight = model.b.weight
    shardcast.shard(model, adamw(model))
    assert model.d.weight is model.b.weight


def test_views_of_one_storage_that_do_not_overlap_and_empty_parameters_are_not_refused():
    """Negative control."""
    flat = torch.arange(8.0)
    model = nn.Module()
    model.first, model.second = (nn.Parameter(part) for part in flat.split(4))
    model.nothing, model.nil = (nn.Parameter(flat[:0]) for _ in range(2))
    shardcast.shard(model, adamw(model))
    assert torch.cat([model.first, model.second]).tolist() == flat.tolist()


@pytest.mark.parametrize("size", [1, 2])
def test_sparse_gradients_are_refused_by_name(size: int):
    def train(group: Any) -> None:
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
        make = lambda m: torch.optim.SGD(m.parameters(), lr=1.0)  # noqa: E731
        optimizer = sharded(model, group if size > 1 else None, make)
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    with pytest.raises(TypeError, match=r"gradient of '0\.weight': expected a dense tensor"):
        ThreadedWorld(size).run(train)


def test_cutting_parameters_of_an_optimizer_that_is_not_elementwise_is_refused():
    model = MLP()
    with pytest.raises(ValueError, match="Normalized is not elementwise; use 'whole'"):
        shardcast.shard(model, foreign.Normalized(model.parameters()), partition="even")
    optimizer = shardcast.shard(model, foreign.Normalized(model.parameters()), partition="auto")
    assert optimizer.layout.partition == "whole"
    for stage, algorithm in (("sync", "all_gather"), ("reduce", "reduce_scatter")):
        model = MLP()
        with pytest.raises(ValueError, match=f"{algorithm} needs equal spans"):
            shardcast.shard(model, foreign.Normalized(model.parameters()), **{stage: algorithm})


def test_sharding_twice_is_refused():
    model = MLP()
    optimizer = adamw(model)
    sharded_once = shardcast.shard(model, optimizer)
    for again in (optimizer, sharded_once, adamw(model)):
        with pytest.raises(RuntimeError, match=r"shard\(\) was called before"):
            shardcast.shard(model, again)


@pytest.mark.parametrize("what", ["moments", "compiler", "meta"])
def test_what_cannot_be_updated_is_refused_before_the_model_is_cast(
    what: str, monkeypatch: pytest.MonkeyPatch
):
    model = nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 3))
    inner: torch.optim.Optimizer = torch.optim.AdamW(model[0].parameters())
    fields: dict[str, Any] = {}
    if what == "moments":
        inner = torch.optim.RMSprop(model[0].parameters())
        fields, told = {"moments": "bf16"}, "moments: 'bf16' needs Adam, AdamW or SGD"
    elif what == "compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
        fields, told = {"fuse": "compile"}, "fuse: expected a C\\+\\+ compiler"
    else:
        model.register_buffer("stray", torch.empty(3, device="meta"))
        told = "'stray' is on the meta device"
    before = [(p.dtype, p.data_ptr()) for p in model.parameters()]
    with pytest.raises(ValueError, match=told):
        shardcast.shard(model, inner, **fields)
    assert [(p.dtype, p.data_ptr()) for p in model.parameters()] == before


@pytest.mark.parametrize("size", [1, 2])
def test_stepping_inside_no_sync_is_refused(size: int):
    def train(group: Any) -> None:
        model = MLP()
        optimizer = sharded(model, group if size > 1 else None)
        with optimizer.no_sync():
            model(torch.ones(1, 7)).sum().backward()
            with pytest.raises(RuntimeError, match=r"step\(\) was called inside no_sync\(\)"):
                optimizer.step()
        optimizer.step()

    ThreadedWorld(size).run(train)


@pytest.mark.parametrize(
    ("dtype", "change"),
    [("bf16", "float"), ("bf16", "double"), ("fp32", "double"), ("fp32", "half")],
)
def test_a_converted_model_is_noticed_before_its_next_training_forward(dtype: str, change: str):
    model = MLP()
    sharded(model, param_dtype=dtype)
    getattr(model, change)()
    batch = torch.ones(2, 7, dtype=model.a.weight.dtype)
    with pytest.raises(RuntimeError, match=r"parameter 'a\.weight' was moved out of its pack"):
        model(batch)


def test_a_converted_model_may_be_used():
    model = MLP()
    sharded(model, param_dtype=torch.float32)
    model.double()
    with torch.no_grad():
        assert model(torch.ones(2, 7, dtype=torch.float64)).isfinite().all()


def test_pickling_and_copying_are_refused():
    optimizer = sharded(MLP())
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"cannot be pickled or copied.*use state_dict\(\)"):
            attempt(optimizer)


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


# -- process groups -------------------------------------------------------------------------------


def test_world_size_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = MLP()
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE is 4 .*init_process_group"):
        shardcast.shard(model, adamw(model))
    with fake_world(4) as group:  # a group that is given is taken at its word
        assert shardcast.shard(model, adamw(model), process_group=group).layout.world_size == 4


def alone_of_two(group: Any) -> str:
    """A process that announces two ranks but made a group of its own."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = MLP()
    try:
        shardcast.shard(model, adamw(model))
    except RuntimeError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "nothing was raised"


def test_a_group_of_one_rank_in_a_world_of_two_is_refused(gloo: SpawnedWorld):
    for message in gloo.run(alone_of_two):
        assert "WORLD_SIZE is 2 but the default process group has one rank" in message
        assert "accelerate launch" in message


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
    """What ``shard`` raises where rank 1 differs from the others."""
    odd = group.rank() == 1
    model: nn.Module = MLP()
    if odd and what == "shape":
        model.b = nn.Linear(13, 6)
    if odd and what == "missing":
        del model.c
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
    if odd and what == "state":  # as where rank 0 alone loads one
        model.b.bias.grad = torch.ones_like(model.b.bias)
        optimizer.step()
    for members in optimizer.param_groups:  # no plain value, so not compared
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
    "option": "",
    "class": "ranks 0, 2: optimizer = AdamW; rank 1: optimizer = SGD",
    "lr": "ranks 0, 2: group 0: lr = 0.5; rank 1: group 0: lr = 0.25",
    "weight_decay": "ranks 0, 2: group 0: weight_decay = 0.01; rank 1: group 0: weight_decay = 0.5",
    "state": "; rank 1: b.bias, of which the optimizer has a state",
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
    assert sent <= {torch.int64, torch.uint8}, "rank 0's description, and no tensor of the model"


# -- state ----------------------------------------------------------------------------------------


def trained() -> shardcast.ShardedOptimizer:
    model = MLP()
    optimizer = sharded(model)
    install(model, 0)
    optimizer.step()
    return optimizer


def test_the_state_of_another_layout_is_refused_with_where_to_load_it():
    optimizer = sharded(MLP(), pack_params=2)
    with pytest.raises(ValueError, match=r"another layout; load .* shardcast\.checkpoint\.load"):
        optimizer.load_state_dict(trained().state_dict())


def without_a_master(local: dict[str, Any], _plain: dict[str, Any]) -> dict[str, Any]:
    first, *_ = local["state"]
    return {**local, "state": {**local["state"], first: {}}}


@pytest.mark.parametrize(
    ("spoil", "own", "other"),
    [
        (without_a_master, "'master' of parameter", "rank 1: .*'master' of parameter"),
        (lambda _local, plain: plain, "others a plain one", "others a plain one"),
        (lambda _local, _plain: {}, "gives one to rank 0 alone", "rank 1: .*to rank 0 alone"),
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
        for number, values in before["state"].items():
            for name, value in values.items():
                assert torch.equal(after["state"][number][name], value)
        return str(caught.value)

    first, second = ThreadedWorld(2).run(load)
    assert re.search(other, first) and re.search(own, second)


def test_a_plain_state_with_other_groups_is_refused():
    model = MLP()
    halves = [{"params": [model.a.weight]}, {"params": [model.b.weight]}]
    other = torch.optim.AdamW(halves)
    with pytest.raises(ValueError, match=r"expected groups with \[6\] parameters, got \[1, 1\]"):
        trained().load_state_dict(other.state_dict())


def test_a_plain_state_of_another_shape_is_refused_and_changes_nothing():
    optimizer = trained()
    plain = optimizer.full_state_dict()
    plain["state"][3]["exp_avg"] = torch.zeros(99)  # the fourth of six: some come before it
    plain["state"][0]["exp_avg"] = torch.full((13, 7), 7.0)
    plain["param_groups"][0]["lr"] = 9.0
    before = [value["exp_avg"].clone() for value in optimizer.state.values()]
    with pytest.raises(ValueError, match=r"'exp_avg' of parameter 'b\.bias' has shape \(99,\)"):
        optimizer.load_state_dict(plain)
    after = [value["exp_avg"] for value in optimizer.state.values()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert optimizer.param_groups[0]["lr"] == 1e-2


def with_a_dtensor(group: Any) -> str:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (group.size(),))
    model = torch.distributed.tensor.distribute_module(nn.Linear(4, 4), mesh)
    before = model.weight
    with pytest.raises(TypeError) as caught:
        sharded(model, group)
    assert model.weight is before
    return str(caught.value)


def test_a_dtensor_is_refused_by_name(gloo: SpawnedWorld):
    for message in gloo.run(with_a_dtensor):
        assert "parameter 'weight' is a DTensor; expected a plain tensor" in message


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("call", ["full_state_dict", "full_parameters"])
def test_an_error_on_one_rank_of_a_gathering_call_is_raised_on_all(call: str, rank: int):
    def run(group: Any) -> None:
        model = MLP()
        optimizer = sharded(model, group)
        install(model, 0)
        optimizer.step()
        if group.rank() == rank:
            broken = Mock(side_effect=ValueError("broken on one rank"))
            optimizer.updates[0].fragment_state = broken
            optimizer.resync_masters = broken
        with pytest.raises(ValueError, match="broken on one rank"):
            getattr(optimizer, call)()

    ThreadedWorld(2).run(run)


# Of a fragment that lacks a state which the first one has, a KeyError.
@pytest.mark.parametrize("error", [RuntimeError("no room"), KeyError("no room")], ids=repr)
@pytest.mark.parametrize("call", ["full_state_dict", "full_parameters"])
def test_an_error_while_rank_0_joins_the_states_is_raised_on_all(
    call: str, error: Exception, monkeypatch: pytest.MonkeyPatch
):
    def run(group: Any) -> None:
        model = MLP()
        optimizer = sharded(model, group, pack_params=2)
        install(model, 0)
        optimizer.step()
        with pytest.raises((RuntimeError, KeyError), match="no room"):
            getattr(optimizer, call)()

    monkeypatch.setattr(full_state, "_joined", Mock(side_effect=error))
    ThreadedWorld(2).run(run)


@pytest.mark.parametrize(
    ("wrap", "told"),
    [
        (nn.DataParallel, r"got nn\.DataParallel.*model\.module"),
        (torch.jit.script, "TorchScript in 'the root'"),
        (lambda model: torch.jit.trace(model, torch.ones(1, 7)), "TorchScript in 'the root'"),
        (lambda model: nn.Sequential(torch.jit.script(model)), "TorchScript in '0'"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_models_whose_forward_is_not_the_models_own_are_refused(wrap: Any, told: str):
    model = wrap(MLP())
    with pytest.raises(TypeError, match=told):
        shardcast.shard(model, adamw(model))
    assert all(param.dtype == torch.float32 for param in model.parameters())


def test_copies_of_a_sharded_model_on_several_devices_are_refused():
    model = MLP()
    sharded(model)
    replica = model._replicate_for_data_parallel()
    with pytest.raises(RuntimeError, match=r"wrapped in nn\.DataParallel"):
        replica(torch.ones(1, 7))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_sharded_model_is_scripted_after_the_training_only():
    model = MLP()
    optimizer = sharded(model)
    with pytest.raises(AttributeError, match=r"cannot be scripted.*optimizer\.close\(\)"):
        torch.jit.script(model)
    optimizer.close()
    assert torch.jit.script(model)(torch.ones(1, 7)).isfinite().all()


def test_an_optimizer_whose_step_was_replaced_is_refused_unless_a_scheduler_did():
    model = MLP()
    inner = adamw(model)
    torch.optim.lr_scheduler.StepLR(inner, 1)
    inner_step = inner.step
    inner.step = lambda: inner_step()
    with pytest.raises(TypeError, match="the step of this AdamW was replaced"):
        shardcast.shard(model, inner)
    inner.step = inner_step
    shardcast.shard(model, inner)
