"""``optimizer.sleep()`` frees memory until ``wake()`` and does not change the training."""

from __future__ import annotations

import gc
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import (
    CASES,
    adamw,
    assert_same_bits,
    everything,
    of,
    on_each_rank,
    own_state,
    run_world,
    sharded,
    values,
)
from oracle import pair
from pairwise import thinned
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import shardcast
from shardcast import checkpoint
from shardcast.optimizer.sharded import packed_of
from shardcast.serving import sleep

pytestmark = pytest.mark.timeout(90)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


sgd = of("SGD", lr=0.1, momentum=0.9)
adafactor = of("Adafactor")


def two(model: nn.Module) -> Any:
    params = [*model.parameters()]
    return [torch.optim.AdamW(params[:2], lr=1e-2), torch.optim.SGD(params[2:], lr=1e-2)]


AXES: dict[str, list[Any]] = {
    "optimizer": [adamw, sgd, pair, adafactor, two],
    "size": [1, 2, 3, 4],
    "case": ["mlp", "gpt", "scalars"],
    "param_dtype": [FP32, BF16, FP16],
    "master": ["fp32", "split16"],
    "moments": ["fp32", "bf16", "int8"],
    "accumulate": ["local", "sharded"],
    "averages": [(), {"ema": 0.9, "low": {"decay": 0.5, "stored": "bf16"}}],
    "metrics": [False, 2],
    "guard": [None, {"norm": 50.0, "window": 4}],
    "on_error": ["raise", "skip"],
    "replica_check": [0, 1],
    "overlap_sync": [False, True],
    "offload": [False, True],
    "published": [None, {"mxfp8": ["*.weight"]}],
    "partition": ["auto", "whole"],
    "changes": [False, True],
    "pack_params": [None, 1],
    "keep": [(), ("parameters",), ("masters",), ("parameters", "state")],
    "to": [False, True],
}
APART = ("optimizer", "size", "case", "keep", "to")


# Each digit selects a choice of an axis. Every allowed pair of choices is in some row, and every
# choice in some row of a normal run, which takes every second one.
ROWS = """
    42111010100001010021 03010200110111011130 13220100011010001101 40000000000111010011
    10211211000001001000 31010001011110001110 02000111010110010120 41200101001100001031
    42020211100111011101 41211001110110010031 02011201100010001101 20020001111000001110
    03100201000101000020 40111100110010001131 11120201010101011100 12100001100000010111
    01120000101100001010 22210000010010001110 43220000111011010021 30110010100100001010
    11010111110011011030 13011000001111010110 32020001011110011101 13211110010110011110
    00120201011110000010 02220000101111011030 10220100100010001021 23100000000000010130
    23000000001000011120 20200010010100011001 32200001111110010131 30100000010000011001
    33010000010000001130 41120001001101010020 21000000000000001000 31000000000000001020
    01000000000000000000
""".split()


def rows() -> list[dict[str, Any]]:
    rows = thinned(2, ROWS)
    assert {pair for row in rows for pair in enumerate(row)} == {
        pair for row in ROWS for pair in enumerate(row)
    }
    choices = [zip(AXES.items(), map(int, row), strict=True) for row in rows]
    return [{name: values[number] for (name, values), number in row} for row in choices]


def held(optimizer: Any) -> dict[str, int]:
    """Return the memory report without gradients, which vary."""
    return {kind: n for kind, n in optimizer.memory_report().items() if kind != "gradients"}


def train(row: Mapping[str, Any], group: Any, folder: str | None, sleeps: bool) -> Any:
    case, rank = CASES[row["case"]], group.rank()
    model = case.build()
    model.register_buffer("statistics", torch.zeros(3))
    fields = {name: value for name, value in row.items() if name not in APART and value is not None}
    optimizer = sharded(model, group, row["optimizer"], **fields)
    for step in range(3):
        loss = case.loss(model, case.batch(100 * step + 12 * rank))
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        if sleeps and step < 2:
            before, keep = held(optimizer), row["keep"]
            model.load_state_dict(model.state_dict())  # like a resumed run before its first rollout
            moved = optimizer.sleep(keep, to=folder if row["to"] else None)
            report = optimizer.memory_report()
            gone = {"parameters", "masters", "state", "averages"}.difference(keep)
            if row["offload"]:
                gone &= {"parameters"}
            if "state" in keep:
                gone.discard("averages")
            gone &= before.keys()
            assert report["gradients"] == 0
            assert not any(report[kind] for kind in gone & report.keys())
            assert row["to"] or report["asleep"] == moved
            assert moved >= sum(before[kind] for kind in gone)
            assert optimizer.wake() == moved
            assert held(optimizer) == before
    digest = optimizer.digest()
    state = everything(model, optimizer)
    optimizer.close()
    return digest, state, values(model)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.filterwarnings("ignore")
def test_a_training_that_sleeps_is_the_one_that_does_not_bit_by_bit(part: int, tmp_path: Path):
    for row in rows()[part::4]:

        def both(group: Any, row: Mapping[str, Any] = row) -> None:
            first, second = (train(row, group, str(tmp_path), sleeps) for sleeps in (False, True))
            assert first[0] == second[0], row
            assert_same_bits(first[1], second[1])
            assert_same_bits(first[2], second[2])

        run_world(row["size"], both)
    assert not [*tmp_path.iterdir()]


def made(group: Any = None, case: str = "mlp", **fields: Any) -> tuple[nn.Module, Any]:
    """Return a model and optimizer after one step."""
    model = CASES[case].build()
    optimizer = sharded(model, group, **fields)
    go_on(model, optimizer, 0, 1, case)
    return model, optimizer


def go_on(model: nn.Module, optimizer: Any, first: int, last: int, case: str = "mlp") -> None:
    rank = packed_of(optimizer).comm.rank
    models.train(model, optimizer, (10 * step + rank for step in range(first, last)), case)


def doors(model: nn.Module, optimizer: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return calls that need sleeping memory."""
    x, _ = CASES["mlp"].batch(0)
    extra = {"params": [nn.Parameter(torch.zeros(3))]}
    state = {name: tensor.clone() for name, tensor in CASES["mlp"].build().state_dict().items()}
    return {
        "forward": lambda: model(x),
        "forward of a part": lambda: model.a(x),
        "step": optimizer.step,
        "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(1.0),
        "clip_grad_value_": lambda: optimizer.clip_grad_value_(1.0),
        "gather_gradients": optimizer.gather_gradients,
        "state_dict": optimizer.state_dict,
        "state": lambda: optimizer.state,
        "load_state_dict": lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        "full_state_dict": optimizer.full_state_dict,
        "full_parameters": optimizer.full_parameters,
        "averaged": lambda: optimizer.averaged("ema").__enter__(),
        "average": lambda: optimizer.full_parameters("ema"),
        "load_average": lambda: optimizer.load_average("ema", state),
        "as_plain": lambda: optimizer.as_plain().__enter__(),
        "digest": optimizer.digest,
        "check_copies": optimizer.check_copies,
        "train": optimizer.train,
        "add_param_group": lambda: optimizer.add_param_group(extra),
        "save": lambda: checkpoint.save(folder, model, optimizer, step=9),
        "save_async": lambda: checkpoint.save_async(folder, model, optimizer, step=8),
        "load": lambda: checkpoint.load(folder, model, optimizer),
        "model.state_dict": model.state_dict,
        "model.load_state_dict": lambda: model.load_state_dict(state),
        "sleep": optimizer.sleep,
    }


OF_PARAMETERS = {"forward", "forward of a part", "model.state_dict"}


@pytest.mark.parametrize("keep", [(), ("parameters",)])
@pytest.mark.parametrize("fields", [{}, {"param_dtype": BF16, "overlap_sync": True}], ids=str)
@on_each_rank(2)
def test_what_needs_the_memory_says_wake_on_every_rank_and_changes_nothing(
    group: Any, keep: tuple[str, ...], fields: dict[str, Any], tmp_path: Path
):
    both = []
    for sleeps in (False, True):
        model, optimizer = made(group, averages={"ema": 0.5}, **fields)
        x, _ = CASES["mlp"].batch(5)
        with torch.no_grad():
            seen = model(x)
        if sleeps:
            checkpoint.save(tmp_path, model, optimizer, step=1)
            optimizer.sleep(keep)
            calls = doors(model, optimizer, tmp_path)
            for name in [*calls]:
                if "parameters" in keep and name in OF_PARAMETERS:
                    calls.pop(name)()
            if "parameters" in keep:
                out = model(x)
                assert torch.equal(out, seen)
                calls["backward"] = out.sum().backward
            for name, call in calls.items():
                with pytest.raises(RuntimeError, match=r"wake\(\)"):
                    call()
                    print(name)  # if it did not raise
            assert all(param.grad is None for param in model.parameters())
            optimizer.zero_grad()
            optimizer.wake()
        go_on(model, optimizer, 1, 3)
        both.append(everything(model, optimizer))
    assert_same_bits(*both)
    assert checkpoint.latest(tmp_path).name.endswith("1")


def test_parameters_stay_the_same_objects_and_are_nan_meanwhile():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
            self.last.weight = self.first.weight
            self.views = [self.first.bias.detach()[1:3]]

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x)))

    model = Tied()
    optimizer = shardcast.shard(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before, params = values(model), [*model.parameters()]
    with optimizer.asleep():
        assert [*model.parameters()] == params and model.last.weight is model.first.weight
        assert all(bool(param.isnan().all()) for param in params)
        assert all(param.untyped_storage().nbytes() == param.itemsize for param in params)
        assert bool(model.views[0].isnan().all())
        with pytest.raises(RuntimeError, match="memory location"):
            params[0].data.copy_(torch.ones(5, 5))
    assert_same_bits(values(model), before)
    with torch.no_grad():
        model.first.bias.fill_(2.0)
    assert model.views[0].tolist() == [2.0, 2.0]


def test_what_a_script_writes_meanwhile_is_dropped_with_a_warning():
    model, optimizer = made(case="scalars")
    before = everything(model, optimizer)
    optimizer.sleep()
    model.scale.data.fill_(3.0)
    model.linear.weight.data = torch.ones(3, 3)
    with pytest.warns(UserWarning, match="'scale', 'linear.weight' was written while"):
        optimizer.wake()
    assert_same_bits(everything(model, optimizer), before)


def averages_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Return this rank's first moments, without copying."""
    states = (own_state(optimizer, param) for param in model.parameters())
    return [state["exp_avg"] for state in states if state]


HOLDERS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "parameter 'b.weight'": lambda model, _: model.b.weight.detach(),
    "parameter 'b.bias'": lambda model, _: model.b.bias[1:].detach().numpy(),
    "parameter 'c.weight'": lambda model, _: model(CASES["mlp"].batch(0)[0]).sum(),
    "state": lambda model, optimizer: averages_of(model, optimizer),
}


@pytest.mark.parametrize("name", HOLDERS)
@on_each_rank(2)
def test_memory_that_somebody_else_holds_is_named_on_every_rank_and_stays(group: Any, name: str):
    model, optimizer = made(group)
    before = everything(model, optimizer)
    other = HOLDERS[name](model, optimizer) if group.rank() == 1 else None
    with pytest.raises(RuntimeError, match=f"sleep: memory of .*{name}"):
        optimizer.sleep()
    assert_same_bits(everything(model, optimizer), before)
    if isinstance(other, list):  # they must still be views, not of old memory
        found = averages_of(model, optimizer)
        assert [t.data_ptr() for t in other] == [t.data_ptr() for t in found]
        del found
    elif other is not None and name.endswith("'b.weight'"):
        assert other.data_ptr() == model.b.weight.data_ptr()
    go_on(model, optimizer, 1, 2)
    other = None
    optimizer.sleep()
    optimizer.wake()
    go_on(model, optimizer, 2, 3)
    expected = made(group)
    go_on(*expected, 1, 3)
    assert_same_bits(everything(model, optimizer), everything(*expected))


def test_an_array_of_a_state_of_any_class_has_its_memory_left():
    model = CASES["mlp"].build()
    optimizer = shardcast.shard(model, torch.optim.NAdam(model.parameters()))
    go_on(model, optimizer, 0, 1)
    before = optimizer.memory_report()["state"]
    first = averages_of(model, optimizer)[0]
    array, copy = first.numpy(), first.clone()
    optimizer.sleep()
    assert 0 < optimizer.memory_report()["state"] == first.nbytes < before
    assert torch.equal(torch.from_numpy(array), copy)
    optimizer.wake()


def test_tensors_inside_of_others_sleep_too():
    kept: list[Tensor] = []

    class Nested(torch.optim.NAdam):
        """Keeps copies of a moment in a list, in a tensor with inner tensors, like torchao."""

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for state in self.state.values():
                kept[:] = state["exp_avg"].clone(), state["exp_avg"].clone()
                state["copies"] = [TwoTensor(*kept)]

    model = CASES["mlp"].build()
    optimizer = shardcast.shard(model, Nested(model.parameters()))
    go_on(model, optimizer, 0, 1)
    optimizer.sleep()
    assert [copy.untyped_storage().nbytes() for copy in kept] == [0, 0]
    optimizer.wake()
    assert torch.equal(*kept) and kept[0].any()


def test_a_backward_of_a_graph_from_before_says_wake_and_brings_nothing():
    class Shift(nn.Module):  # its graph saves no tensors
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.bias

    def run(group: Any) -> float:
        model = Shift()
        optimizer = sharded(model, group, sgd)
        seen: list[Tensor] = []
        model.bias.register_hook(seen.append)
        loss = model(torch.ones(4)).sum()
        optimizer.sleep()
        with pytest.raises(RuntimeError, match=r"backward: .*wake\(\)"):
            loss.backward()
        assert not seen and optimizer.memory_report()["gradients"] == 0
        optimizer.wake()
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        return float(model.bias[0])

    assert run_world(2, run)[0] == [pytest.approx(-0.1)] * 2


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux")
def test_resident_memory_falls_by_what_was_moved_and_comes_back(tmp_path: Path):
    model = nn.Linear(3000, 4000, bias=False)  # 48 MB, so freed memory is returned at once
    optimizer = shardcast.shard(
        model, torch.optim.AdamW(model.parameters()), param_dtype=FP32, pack_mb=512.0
    )
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    weights = model.weight.detach().clone()
    before = resident()
    moved = optimizer.sleep(to=tmp_path)
    asleep = resident()
    assert moved == 3 * model.weight.nbytes
    assert before - asleep > 0.95 * moved, (before, asleep, moved)  # also gradients
    optimizer.wake()
    assert resident() - asleep > 0.95 * moved
    assert torch.equal(model.weight, weights)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("folder", "told"),
    [
        ("missing", "missing"),
        pytest.param(
            "full",
            r"sleep: to: .*No space.*/full'",
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="as on Linux"),
        ),
    ],
)
def test_a_file_that_one_rank_cannot_write_is_an_error_on_all_and_nothing_sleeps(
    folder: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    inner = tempfile.TemporaryFile

    def opened(dir: str) -> Any:
        return open("/dev/full", "r+b") if dir.endswith("/full") else inner(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", opened)

    def run(group: Any) -> None:
        model, optimizer = made(group)
        before = everything(model, optimizer)
        with pytest.raises((OSError, RuntimeError), match=told):
            optimizer.sleep(to=tmp_path / folder if group.rank() == 1 else tmp_path)
        assert "asleep" not in optimizer.memory_report()
        assert_same_bits(everything(model, optimizer), before)
        with pytest.raises(ValueError, match="keep: expected names among"):
            optimizer.sleep(keep={"moments"} if group.rank() == 0 else ())
        with pytest.raises(TypeError, match="iterable"):
            optimizer.sleep(keep=1 if group.rank() == 0 else ())  # type: ignore[arg-type]
        optimizer.sleep()
        optimizer.wake()
        go_on(model, optimizer, 1, 2)

    run_world(2, run)


def test_where_one_rank_has_no_memory_all_sleep_on(monkeypatch: pytest.MonkeyPatch):
    allocate, full = sleep.Memory.allocate, set[int]()

    def short(memory: Any, file: Any) -> Any:
        if threading.get_ident() in full and memory.label.startswith("masters"):
            raise torch.OutOfMemoryError("no memory left")
        return allocate(memory, file)

    monkeypatch.setattr(sleep.Memory, "allocate", short)

    def run(group: Any) -> None:
        model, optimizer = made(group, param_dtype=BF16, pack_params=2, partition="whole")
        before = everything(model, optimizer)
        optimizer.sleep()
        if group.rank() == 1:
            full.add(threading.get_ident())
        with pytest.raises(RuntimeError, match="no memory left"):
            optimizer.wake()
        with pytest.raises(RuntimeError, match=r"wake\(\)"):
            optimizer.step()
        full.clear()
        optimizer.wake()
        assert_same_bits(everything(model, optimizer), before)

    run_world(2, run)


@on_each_rank(2)
def test_a_save_in_the_background_has_what_was_there_before(group: Any, tmp_path: Path):
    model, optimizer = made(group, param_dtype=BF16)
    before = everything(model, optimizer)
    saving = checkpoint.save_async(tmp_path, model, optimizer, step=1)
    with optimizer.asleep():
        saving.wait()
    go_on(model, optimizer, 1, 2)
    checkpoint.load(tmp_path, model, optimizer)
    assert_same_bits(everything(model, optimizer), before)


@on_each_rank(2)
def test_it_does_not_sleep_beside_an_average_in_the_model_or_twice(group: Any):
    model, optimizer = made(group, averages={"ema": 0.5})
    before = everything(model, optimizer)
    with optimizer.averaged("ema"), pytest.raises(RuntimeError, match="'ema' is in the model"):
        optimizer.sleep()
    with optimizer.as_plain(), pytest.raises(RuntimeError, match="as_plain"):
        optimizer.sleep()
    with optimizer.asleep(), pytest.raises(RuntimeError, match="already asleep"):
        optimizer.sleep()
    assert_same_bits(everything(model, optimizer), before)


@pytest.mark.parametrize("restore", [True, False])
@on_each_rank(2)
def test_close_wakes(group: Any, restore: bool):
    expected = made(group, param_dtype=BF16)
    expected[1].close(restore)
    model, optimizer = made(group, param_dtype=BF16)
    optimizer.sleep()
    optimizer.close(restore)
    assert_same_bits(values(model), values(expected[0]))
    with pytest.raises(RuntimeError, match="was closed"):
        optimizer.sleep()


@on_each_rank({"dp": 2, "tp": 2})
def test_tensor_parallel_parameters_sleep_and_are_named(mesh: DeviceMesh):
    both = []
    for sleeps in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 8, bias=False)
        weight = distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)])
        model.weight = nn.Parameter(weight)
        optimizer = shardcast.shard(
            model, torch.optim.AdamW(model.parameters()), mesh=mesh, param_dtype=FP32
        )
        for step in range(3):
            model.weight.to_local().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if sleeps:
                param = model.weight
                moved = optimizer.sleep()
                assert bool(model.weight.to_local().isnan().all()), step
                assert optimizer.memory_report()["parameters"] == 0 < moved
                optimizer.wake()
                assert model.weight is param
        if sleeps:
            local = model.weight.to_local().detach()
            with pytest.raises(RuntimeError, match="memory of parameter 'weight'"):
                optimizer.sleep()
            del local
        both.append({"weight": model.weight.to_local().detach().clone()})
    assert_same_bits(*both)


def test_memory_that_a_thread_of_a_collective_has_a_moment_longer_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
):
    model, optimizer = made(None)
    held = [model.b.weight.detach()]
    monkeypatch.setattr(time, "sleep", lambda _seconds: held.clear())
    optimizer.sleep()
    assert not held and optimizer.wake()


@on_each_rank(2)
def test_two_models_sleep_each_by_itself(group: Any):
    actor, of_actor = made(group)
    critic, of_critic = made(group, param_dtype=BF16)
    before = everything(critic, of_critic)
    of_actor.sleep()
    assert_same_bits(everything(critic, of_critic), before)
    go_on(critic, of_critic, 1, 2)
    of_critic.sleep()
    of_actor.wake()
    go_on(actor, of_actor, 1, 2)
    of_critic.wake()
