"""``torch.distributed.checkpoint`` gets and sets a sharded optimizer's state as a plain one's."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bag import Bag
from models import CASES, assert_same_bits, everything, of, on_each_rank
from oracle import BATCH, adamw, mlp, pair, set_grads
from pairwise import pairwise
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

import shardcast
from shardcast.optimizer.sharded import packed_of
from shardcast.optimizer.state import MASTER
from shardcast.testing import SpawnedWorld, ThreadedWorld

FLAT, FULL = "flatten_optimizer_state_dict", "full_state_dict"


def shard(group: Any, build: Any = adamw, **fields: Any) -> tuple[nn.Module, Any]:
    model = mlp()
    fields = {"param_dtype": "fp32", "fuse": "eager", "pack_params": 2, **fields}
    return model, shardcast.shard(model, build(model), process_group=group, **fields)


def plain_state(model: nn.Module, optimizer: Any, options: Any = None) -> Any:
    with optimizer.as_plain():
        return copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))


def train(model: nn.Module, optimizer: Any, count: int = 3) -> None:
    for step in range(count):
        loss = model(BATCH).float().square().mean() * (step + 1)
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("dtype", "options", "began"),
    [
        ("fp32", {}, False),
        ("fp32", {FULL: True}, True),
        ("bf16", {FLAT: True}, False),
        ("bf16", {}, True),
        ("fp16", {FULL: True}, False),
        ("fp16", {FLAT: True}, True),
    ],
    ids=str,
)
@on_each_rank(3)
def test_a_state_that_dcp_gets_and_sets_goes_on_with_the_same_masters(
    group: Any, dtype: str, options: Any, began: bool
):
    model, optimizer = shard(group, param_dtype=dtype)
    other, resumed = shard(group, param_dtype=dtype)
    train(model, optimizer)
    if began:
        train(other, resumed, 1)
    with optimizer.as_plain():
        states = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    weights, state = copy.deepcopy(states)  # they are the optimizer's own tensors
    with resumed.as_plain():
        set_state_dict(
            other,
            resumed,
            model_state_dict=weights,
            optim_state_dict=state,
            options=StateDictOptions(**options),
        )
    assert_goes_on_alike((model, optimizer), (other, resumed))


def assert_goes_on_alike(*pairs: tuple[nn.Module, Any]) -> None:
    """Assert that masters, state and parameters are bitwise equal after three more steps."""
    for model, optimizer in pairs:
        train(model, optimizer)
    first, second = (everything(*pair) for pair in pairs)
    assert_same_bits(first, second)


sgd = of("SGD", lr=1e-2)


@pytest.mark.parametrize(
    ("dtype", "options", "build"),
    pairwise(("fp32", "bf16"), ({}, {FLAT: True}), (adamw, sgd)),
    ids=lambda it: getattr(it, "__name__", str(it)),
)
@on_each_rank(2)
def test_parameters_without_a_state_go_round_too(group: Any, dtype: str, options: Any, build: Any):
    """A class may keep no state, and a layer may get no gradient; masters are kept."""
    model, optimizer = shard(group, build, param_dtype=dtype)
    model[0](BATCH).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    dcp_options = StateDictOptions(**options)
    state = plain_state(model, optimizer, dcp_options)
    other, resumed = shard(group, build, param_dtype=dtype)
    other.load_state_dict(model.state_dict())
    if not options:  # torch requires state of each trained parameter
        dcp_options.strict = False
    with resumed.as_plain():
        set_optimizer_state_dict(other, resumed, state, options=dcp_options)
    assert_goes_on_alike((model, optimizer), (other, resumed))


@on_each_rank(2)
def test_a_parameter_without_a_master_in_the_state_keeps_its_own(group: Any):
    model, optimizer = shard(group, param_dtype="bf16")
    train(model, optimizer)
    state = plain_state(model, optimizer, StateDictOptions(**{FLAT: True}))
    wanted = optimizer.full_parameters()
    other, resumed = shard(group, param_dtype="bf16")
    kept, name = resumed.full_parameters(), "0.weight"
    del state[f"state.{name}.{MASTER}"]
    with resumed.as_plain():
        options = StateDictOptions(**{FLAT: True})
        set_optimizer_state_dict(other, resumed, state, options=options)
    loaded = resumed.full_parameters()
    if group.rank() == 0:
        assert_same_bits(loaded, {**wanted, name: kept[name]})
        assert not torch.equal(kept[name], wanted[name])


@pytest.mark.parametrize("build", [adamw, pair])
def test_every_rank_gets_the_state_of_the_plain_optimizers(build: Any):
    plain = mlp()
    optimizers = build(plain)
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]

    def run(group: Any) -> Any:
        model, optimizer = shard(group, build)
        for step in range(3):
            set_grads(model, step)
            optimizer.step()
        return plain_state(model, optimizer)

    for step in range(3):
        set_grads(plain, step)
        for optimizer in optimizers:
            optimizer.step()
    expected = get_optimizer_state_dict(plain, optimizers)
    for state in ThreadedWorld(3).run(run):
        torch.testing.assert_close(state["state"], expected["state"], rtol=1e-6, atol=1e-7)
        assert state["param_groups"] == expected["param_groups"]


def sets_what_rank_0_has(_group: Any) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model, optimizer = shard(None)
    train(model, optimizer)
    state = plain_state(model, optimizer)
    other, resumed = shard(None)
    other.load_state_dict(model.state_dict())
    rank = torch.distributed.get_rank()
    with resumed.as_plain():
        set_optimizer_state_dict(other, resumed, state if rank == 0 else {}, options=options)
    assert_goes_on_alike((model, optimizer), (other, resumed))


def test_rank_0s_state_is_broadcast_to_optimizers_without_one(gloo: SpawnedWorld):
    gloo.run(sets_what_rank_0_has)


def saves_and_loads(_group: Any, folder: str) -> None:
    model, optimizer = shard(None, param_dtype="bf16")
    train(model, optimizer)
    with optimizer.as_plain():
        dcp.save({"app": App(model, optimizer)}, checkpoint_id=folder)
    other, resumed = shard(None, param_dtype="bf16")
    with resumed.as_plain():
        dcp.load({"app": App(other, resumed)}, checkpoint_id=folder)
    assert_goes_on_alike((model, optimizer), (other, resumed))


class App:
    """The Stateful from torch's DCP tutorial."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        weights, state = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optim": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def test_a_checkpoint_of_dcp_resumes_exactly(gloo: SpawnedWorld, tmp_path: Path):
    gloo.run(saves_and_loads, str(tmp_path / "checkpoint"))


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_handles_are_refused_before_a_state_is_touched(inside: bool):
    model, optimizer = shard(None, pair)
    context = optimizer.as_plain() if inside else contextlib.nullcontext()
    with context, pytest.raises(RuntimeError, match=r"shardcast.shard returned"):
        get_optimizer_state_dict(model, list(optimizer.optimizers))
    assert dict(optimizer.state) == {}
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("began", [True, False])
def test_a_state_that_dcp_asks_for_outside_of_as_plain_is_an_error_by_name(
    began: bool, tmp_path: Path
):
    """Otherwise one rank's part would be saved or set as the whole state."""

    def run(group: Any) -> None:
        model, optimizer = shard(group)
        if began:
            train(model, optimizer)
        before = optimizer.digest()
        calls: list[Callable[[], Any]] = [
            lambda: get_optimizer_state_dict(model, optimizer),
            lambda: get_state_dict(model, optimizer),
            lambda: set_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": []}),
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match=r"inside `with optimizer\.as_plain\(\):`"):
                call()
        assert optimizer.digest() == before and packed_of(optimizer).comm.steps == 3 * began
        assert all(param.grad is None for param in model.parameters())

    ThreadedWorld(2).run(run)
    optimizer = shard(None)[1]
    with pytest.raises(RuntimeError, match=r"inside `with optimizer\.as_plain"):
        dcp.save({"optimizer": optimizer}, checkpoint_id=str(tmp_path / "checkpoint"), no_dist=True)


def test_a_state_that_is_asked_for_before_a_first_step_changes_no_later_one():
    """Guard, average, rate and dampened momentum, which count steps, are not affected."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)

    def run(group: Any) -> None:
        options = {"guard": {"loss": 6.0, "norm": 6.0, "window": 2}, "averages": {"ema": 0.5}}
        pairs = [shard(group, build, **options) for _ in range(2)]
        state = plain_state(*pairs[0])
        assert all((v["momentum_buffer"] == 0).all() for v in state["state"].values())
        assert len(state["state"]) == 6 and dict(pairs[0][1].state) == {}
        assert packed_of(pairs[0][1]).comm.steps == 0
        for model, optimizer in pairs:
            for _ in range(4):
                loss = model(BATCH).square().mean()
                loss.backward()
                optimizer.step(loss=loss)
                optimizer.zero_grad()
        states = [packed_of(it).decider.signal_of("guard").state_dict() for _, it in pairs]
        assert states[0] == states[1]
        assert_same_bits(*(everything(*pair) for pair in pairs))

    ThreadedWorld(2).run(run)


def test_a_step_is_refused_while_the_optimizer_looks_like_a_plain_one():
    model, optimizer = shard(None)
    with optimizer.as_plain(), pytest.raises(RuntimeError, match="as_plain"):
        train(model, optimizer, 1)
    train(model, optimizer, 1)


@pytest.mark.parametrize(
    "call",
    ["full_state_dict", "full_parameters", plain_state],
    ids=["full_state_dict", "full_parameters", "dcp"],
)
@on_each_rank({"dp": 2, "tp": 2})
def test_a_gathering_call_beside_tensor_parallelism_is_refused_with_its_dimension(
    mesh: DeviceMesh, call: Any
):
    model = Bag(one=(4, 4), two=(4,))
    model.place(mesh["tp"])
    optimizer = shardcast.shard(model, adamw(model), mesh=mesh)
    with pytest.raises(RuntimeError, match=r"'tp'.* shardcast\.checkpoint\.save"):
        getattr(optimizer, call)() if isinstance(call, str) else call(model, optimizer)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize(
    ("rank", "call"), [(0, lambda _m, o: o.full_state_dict()), (1, plain_state)]
)
@on_each_rank(2)
def test_a_state_that_one_rank_cannot_give_is_an_error_of_all(group: Any, rank: int, call: Any):
    model, optimizer = shard(group, lambda m: torch.optim.RMSprop(m.parameters()))
    train(model, optimizer)
    if group.rank() == rank:
        (update,) = packed_of(optimizer).updates
        stock = update.fragment_state
        update.fragment_state = lambda *args: {**stock(*args), "extra": lambda: None}
    with pytest.raises(Exception, match=r"lambda|pickle") as raised:
        call(model, optimizer)
    assert group.rank() == rank or f"rank {rank}" in str(raised.value)


# -- state_dict(), which is one rank's part -----------------------------------------------------


def called_by(module: str, optimizer: Any) -> Callable[[], Any]:
    """Return a function of ``module`` that calls ``state_dict()``."""
    scope: dict[str, Any] = {"__name__": module, "optimizer": optimizer}
    exec("def save(): return optimizer.state_dict()", scope)
    return scope["save"]


def in_a_file(state: dict[str, Any]) -> None:
    file = io.BytesIO()
    torch.save({"optimizer": state}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["optimizer"]
    assert loaded["param_groups"] == state["param_groups"]


def goes_back(state: dict[str, Any], optimizer: Any) -> None:
    """Read a learning rate, and load a state and copies of it from memory."""
    assert state["param_groups"][0]["lr"] > 0 and "state" in state
    optimizer.load_state_dict(state)
    optimizer.load_state_dict(copy.deepcopy(state))
    optimizer.load_state_dict(copy.copy(state))


TAKES: dict[str, Callable[[dict[str, Any], Any], Any]] = {
    "a file": lambda state, _: in_a_file(state),
    "a file of a copy": lambda state, _: in_a_file(copy.deepcopy(state)),
    "the state alone": lambda state, _: state["state"],
    "get": lambda state, _: state.get("state"),
    "items": lambda state, _: [*state.items()],
    "another dictionary": lambda state, _: {**state},
    "nothing": lambda state, _: None,
    "the way back": goes_back,
}
QUIET = "nothing", "the way back"


def asks_twice_for_its_state(_group: Any, module: str, what: str) -> list[str]:
    _, optimizer = shard(None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            TAKES[what](called_by(module, optimizer)(), optimizer)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("what", TAKES)
def test_a_script_that_takes_one_ranks_part_for_a_state_is_warned_once(
    gloo: SpawnedWorld, what: str
):
    for module in ("script", "transformers.trainer"):
        told = [*filter(None, gloo.run(asks_twice_for_its_state, module, what))]
        assert len(told) == (what not in QUIET)
        for (message,) in told:
            assert "shardcast.checkpoint.save" in message and "full_state_dict()" in message
    for module in ("accelerate.optimizer", "shardcast.testing"):
        assert gloo.run(asks_twice_for_its_state, module, what) == [[], []]
    _, optimizer = shard(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_a_file(optimizer.state_dict())  # on one rank this is the whole state


@pytest.mark.parametrize("size", [1, 3])
def test_parameters_without_elements_have_state_as_in_torch(size: int):
    case = CASES["scalars"]

    def trained(optimizer: Any, model: nn.Module) -> Any:
        for step in range(2):
            case.loss(model, case.batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with getattr(optimizer, "as_plain", contextlib.nullcontext)():
            return copy.deepcopy(get_optimizer_state_dict(model, optimizer))

    def shapes(state: Any) -> Any:
        return {n: {k: v.shape for k, v in of.items()} for n, of in state["state"].items()}

    twin = case.build()
    expected = trained(adamw(twin), twin)

    def run(group: Any) -> None:
        model = case.build()
        fields = {"param_dtype": "fp32", "fuse": "eager"}
        optimizer: Any = shardcast.shard(model, adamw(model), process_group=group, **fields)
        own = trained(optimizer, model)
        assert shapes(own) == shapes(expected)
        assert {float(of["step"]) for of in own["state"].values()} == {2.0}
        for state in (own, expected):
            with optimizer.as_plain():
                set_optimizer_state_dict(model, optimizer, copy.deepcopy(state))

    ThreadedWorld(size).run(run)
