"""Reading while other weights are in the model does not change the training.

Scripts put an average, or another model's weights, into the model, save or read it, and restore the
old weights bit for bit. The masters must equal those of a run that never did so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import assert_same_bits, install, of, on_each_rank, values
from pairwise import thinned
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import shardcast
from shardcast import checkpoint, publish
from shardcast.testing import ThreadedWorld

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

MATRICES = "first.weight", "second.weight"
STEPS = 2


class Net(nn.Module):
    """Matrices that suit each published form, and sizes that no alignment divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 128), nn.Linear(128, 256, bias=False)
        self.odd = nn.Linear(7, 13)


# -- the readers ----------------------------------------------------------------------------------


def averaged(model: nn.Module, optimizer: Any, folder: Path) -> None:
    with optimizer.averaged("ema"):
        optimizer.state_dict()
        checkpoint.save(folder / "inside", model, optimizer, step=1)


def plain_state(model: nn.Module, optimizer: Any, folder: Path) -> None:
    with optimizer.as_plain():
        found = get_optimizer_state_dict(model, optimizer)
        dcp.save({"optimizer": found}, checkpoint_id=folder / "dcp", no_dist=True)


def state_without_masters(_model: nn.Module, optimizer: Any, _folder: Path) -> None:
    """Load a state without masters."""
    with optimizer.as_plain():
        found = optimizer.state_dict()
    for own in found["state"].values():
        own.pop("shardcast_master", None)
    optimizer.load_state_dict(found)


READERS: dict[str, Callable[[nn.Module, Any, Path], Any]] = {
    "state_dict": lambda _, it, __: it.state_dict(),
    "full_state_dict": lambda _, it, __: (it.full_state_dict(), it.full_state_dicts()),
    "full_parameters": lambda _, it, __: (it.full_parameters(), it.full_parameters("ema")),
    "digest": lambda _, it, __: it.digest(),
    "model_state_dict": lambda model, *_: model.state_dict(),
    "state": lambda _, it, __: [[*state] for state in it.state.values()],
    "reports": lambda _, it, __: (it.memory_report(), it.metrics(), it.check_copies()),
    "averaged": averaged,
    "changes": lambda _, it, __: it.changes(since=it.changes().version),
    "save": lambda model, it, to: checkpoint.save(to, model, it, step=1, digest=True),
    "save_async": lambda model, it, to: checkpoint.save_async(to, model, it, step=1).wait(),
    "publish_a_folder": lambda _, it, to: publish.FolderSender(to / "sent", it).send(),
    "plain_state": plain_state,
    "sleep": lambda _, it, to: (it.sleep(to=to), it.wake()),
    "load_average": lambda model, it, _: it.load_average("other", values(model)),
    "state_without_masters": state_without_masters,
}


# -- how masters are stored, and how weights are written -------------------------------------------


adamw = of("AdamW", lr=3e-3)
adafactor = of("Adafactor", lr=3e-3)
KINDS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], dict[str, Any]]] = {
    "bf16": (adamw, {}),
    "fp16": (adamw, {"param_dtype": torch.float16, "loss_scale": 1.0}),
    "split16": (adamw, {"master": "split16"}),
    "fp32": (adamw, {"param_dtype": torch.float32}),
    "device": (adamw, {}),
    "offload": (adamw, {"offload": True}),
    "overlap": (adamw, {"overlap_sync": True, "pack_params": 2}),
    "whole": (adafactor, {}),
    "mxfp8": (adamw, {"published": {"mxfp8": MATRICES}}),
    "fp8_block128": (adamw, {"published": {"fp8_block128": MATRICES}}),
}


def copied(model: nn.Module, shown: Mapping[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        param.copy_(shown[name])


def assigned(model: nn.Module, shown: Mapping[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        param.data = shown[name].to(param.dtype).clone()


def loaded(model: nn.Module, shown: Mapping[str, Tensor]) -> None:
    model.load_state_dict(shown)


def loaded_in_fp32(model: nn.Module, shown: Mapping[str, Tensor]) -> None:
    model.load_state_dict({name: value.float() for name, value in shown.items()})


WAYS = {"copied": copied, "assigned": assigned, "loaded": loaded, "fp32": loaded_in_fp32}


def train(
    group: Any, folder: Path, kind: str, way: str, read: str, switches: bool
) -> dict[str, Tensor]:
    """Run some steps; return masters, averages and the model's values."""
    build, fields = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net()
    fields = {"fuse": "eager", "averages": {"ema": 0.5, "other": 0.9}, "metrics": 1, **fields}
    fields = {"changes": True, **fields}
    optimizer: Any = shardcast.shard(model, build(model), process_group=group, **fields)
    generator = torch.Generator().manual_seed(7)
    for step in range(STEPS):
        install(model, step)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.wait_sync()
        backup = values(model)
        # Some elements do not change, like those of an average that has converged.
        other = {
            name: torch.where(torch.rand(value.shape, generator=generator) < 0.5, value, value / 3)
            for name, value in values(model).items()
        }
        with torch.no_grad():
            if switches:
                WAYS[way](model, {name: value.float() * 1.001 for name, value in other.items()})
            if read:
                READERS[read](model, optimizer, folder / f"{step}")
            if switches:
                WAYS[way](model, backup)
    masters, ema = optimizer.full_parameters(), optimizer.full_parameters("ema")
    ends = {f"average {name}": value for name, value in ema.items()} | masters
    install(model, 9)
    optimizer.step()
    optimizer.wait_sync()
    return ends | {f"shown {name}": value for name, value in values(model).items()}


def assert_reads_move_nothing(folder: Path, kind: str, way: str, read: str) -> None:
    for step in range(STEPS):
        (folder / f"{step}").mkdir()
    found = ThreadedWorld(2).run(train, folder, kind, way, read, True)
    for one, other in zip(found, undisturbed(kind), strict=True):
        assert_same_bits(one, other)


@functools.cache
def undisturbed(kind: str) -> list[dict[str, Tensor]]:
    return ThreadedWorld(2).run(train, Path(), kind, "copied", "", False)


@pytest.mark.parametrize(("read", "kind"), thinned(8, READERS, KINDS))
def test_a_reader_that_sees_other_weights_moves_no_master(
    read: str, kind: str, tmp_path: Path, on_device: Callable[[str], None]
):
    on_device(kind)
    assert_reads_move_nothing(tmp_path, kind, "copied", read)


@pytest.mark.parametrize(("way", "kind"), thinned(2, WAYS, KINDS))
def test_other_weights_that_leave_the_model_move_no_master(
    way: str, kind: str, tmp_path: Path, on_device: Callable[[str], None]
):
    on_device(kind)
    assert_reads_move_nothing(tmp_path, kind, way, "state_dict")


def shown_and_read(group: Any, folder: Path, kind: str, read: str) -> Any:
    """Return the model's values during a read, the values read, and the model's values after it."""
    build, fields = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net()
    fields = {"fuse": "eager", "averages": {"ema": 0.5}, **fields}
    optimizer: Any = shardcast.shard(model, build(model), process_group=group, **fields)
    install(model, 0)
    optimizer.step()
    optimizer.wait_sync()
    with torch.no_grad():
        copied(model, {name: value / 3 + 1 for name, value in values(model).items()})
    shown = values(model)
    if read == "averaged":
        with optimizer.averaged("ema"):
            assert not torch.equal(model.first.weight, shown["first.weight"])
            found = optimizer.full_parameters()
    elif read == "save":
        checkpoint.save(folder, model, optimizer, step=1)
        reloaded = Net()
        again = shardcast.shard(reloaded, build(reloaded), process_group=group, **fields)
        checkpoint.load(folder, reloaded, again)
        found = again.full_parameters()
    else:
        found = optimizer.full_parameters()
    return shown, found, values(model)


@pytest.mark.parametrize(
    ("read", "kind"), thinned(2, ["full_parameters", "averaged", "save"], KINDS)
)
def test_a_reader_sees_the_weights_that_the_model_shows(read: str, kind: str, tmp_path: Path):
    by_rank = ThreadedWorld(2).run(shown_and_read, tmp_path, kind, read)
    shown, found, _ = by_rank[0]
    for name, value in shown.items():
        if kind == "split16":  # the weight and 16 more bits
            assert torch.equal(found[name].to(value.dtype), value), name
        else:
            assert torch.equal(found[name], value.float()), name
    for before, _, after in by_rank:
        assert_same_bits(before, after)


@on_each_rank(2)
def test_a_plain_state_has_the_weights_that_a_script_assigned(group: Any):
    model = Net()
    optimizer: Any = shardcast.shard(
        model, adamw(model), process_group=group, param_dtype="bf16", fuse="eager"
    )
    install(model, 0)
    optimizer.step()
    with optimizer.as_plain():
        for param in model.parameters():
            param.data = param.data * 2
        states = optimizer.state_dict()["state"].values()
        for param, state in zip(model.parameters(), states, strict=True):
            assert torch.equal(state["shardcast_master"], param.float())


def test_a_module_that_is_compiled_in_place_later_keeps_its_masters_and_state():
    """``model.layers[0] = torch.compile(...)`` renames its parameters."""
    model = Net()
    optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters()), param_dtype="bf16")
    before = optimizer.full_parameters()
    model.first = torch.compile(model.first, backend="eager")
    named = [name for name, _ in model.named_parameters()]
    assert "first._orig_mod.weight" in named
    after = optimizer.full_parameters()
    assert list(after) == named
    for name, values_of in after.items():
        assert torch.equal(values_of, before[name.replace("_orig_mod.", "")])
    with optimizer.as_plain():
        state = get_optimizer_state_dict(model, optimizer)["state"]
    assert {len(of_parameter) for of_parameter in state.values()} == {4}
