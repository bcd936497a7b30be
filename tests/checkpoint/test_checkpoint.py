"""Checkpoints: exact at any world size and partition, and readable without shardcast."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import CASES, advance, assert_same_bits, job, parts, run_world, sharded, values, whole
from safetensors.torch import load_file
from small_runs import make, saved_by
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardcast import checkpoint
from shardcast.checkpoint.access import Snapshot
from shardcast.testing import SpawnedWorld

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def start(group: Any, case: str, kind: str, fields: dict[str, Any], seed: int = 0) -> Any:
    rank = 0 if group is None else group.rank()
    model = CASES[case].build(seed=seed + rank)
    return model, sharded(model, group, lambda m: make(kind, m), **fields)


def saving(group: Any, folder: str, case: str, kind: str, fields: dict[str, Any]) -> Any:
    """Make three steps and save; return the state, and that after three more steps."""
    model, optimizer = start(group, case, kind, fields)
    advance(model, optimizer, 0, 3)
    optimizer.param_groups[0]["lr"] = 3e-3
    rank = 0 if group is None else group.rank()
    checkpoint.save(folder, model, optimizer, step=3, extra={"rows": 12}, per_rank=rank)
    saved = parts(optimizer), values(model)
    advance(model, optimizer, 3, 6)
    return saved, (parts(optimizer), values(model))


def loading(group: Any, folder: str, case: str, kind: str, fields: dict[str, Any]) -> Any:
    model, optimizer = start(group, case, kind, fields, seed=50)
    advance(model, optimizer, 90, 91)  # state that must be replaced
    resumed = checkpoint.load(folder, model, optimizer)
    assert resumed.step == 3 and resumed.extra == {"rows": 12}
    assert resumed.per_rank == list(range(len(resumed.per_rank)))
    loaded = parts(optimizer), values(model)
    advance(model, optimizer, 3, 6)
    return loaded, (parts(optimizer), values(model))


def compare(saved: list[Any], loaded: list[Any], same_dtype: bool = True) -> None:
    for when in (0, 1):
        assert_same_bits(
            whole(rank[when][0] for rank in loaded), whole(rank[when][0] for rank in saved)
        )
        for rank in loaded:
            assert_same_bits(rank[when][1], loaded[0][when][1])
            if same_dtype:
                assert_same_bits(rank[when][1], saved[0][when][1])


@pytest.mark.parametrize("save", ["save", "save_async"])
def test_a_bit_lost_before_it_was_written_is_seen_by_the_digest_on_any_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: str
):
    def saving(group: Any, digest: bool, step: int) -> None:
        model, optimizer = start(group, "mlp", "adamw", {"averages": {"ema": 0.9}})
        advance(model, optimizer, 0, 2)
        saved_by(save, tmp_path, model, optimizer, step=step, digest=digest)

    def loading(group: Any, step: int, **fields: Any) -> int:
        model, optimizer = start(group, "mlp", "adamw", {"averages": {"ema": 0.9}, **fields})
        return checkpoint.load(tmp_path / f"step-{step:09d}", model, optimizer).step

    run_world(2, saving, True, 1)
    views = Snapshot.views

    def flipped(snapshot: Snapshot) -> Any:
        for view in views(snapshot):
            if view.path[-2:] == ("b.weight", "exp_avg"):
                view = replace(view, flat=view.flat.clone())
                view.flat.view(torch.int32)[0] ^= 1
            yield view

    monkeypatch.setattr(Snapshot, "views", flipped)
    run_world(2, saving, True, 2)
    run_world(2, saving, False, 3)
    assert run_world(3, loading, 1)[0] == [1, 1, 1]

    def refused(group: Any) -> None:
        with pytest.raises(checkpoint.DamagedCheckpointError, match="digest"):
            loading(group, 2)

    run_world(3, refused)
    assert run_world(1, loading, 3)[0] == [3], "the control: not detected without a digest"
    for other in ({"moments": "bf16"}, {"averages": {}}):  # other bits, rightly
        assert loading(None, 2, **other) == 2


@pytest.mark.parametrize("writer", ["format1", "python-3.11.2", "torch-2.15.0"])
def test_a_checkpoint_that_another_release_python_or_torch_wrote_loads(writer: str):
    """``format1`` was written by hand. Up to Python 3.11.3, enum members are pickled with
    ``getattr``. torch 2.15 pickles one more property of tensors. All three contain the same run."""
    torch.manual_seed(0)
    plain, model = nn.Linear(3, 2), nn.Linear(3, 2)
    expected = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for param in plain.parameters():
        param.grad = torch.ones_like(param)
    expected.step()
    optimizer = sharded(model, None, lambda m: torch.optim.AdamW(m.parameters()), param_dtype=BF16)
    resumed = checkpoint.load(Path(__file__).parent / "data" / writer, model, optimizer)
    assert (resumed.step, resumed.extra, resumed.per_rank) == (1, {"a": 1}, ["r"])
    loaded, state = optimizer.full_parameters(), optimizer.full_state_dict()["state"]
    torch.testing.assert_close(loaded, {n: p.detach() for n, p in plain.named_parameters()})
    torch.testing.assert_close(state, expected.state_dict()["state"])
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("save", ["save", "save_async"])
def test_the_very_same_is_saved_again_without_an_error_and_without_a_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, save: str, ranks: int
):
    def saving(group: Any) -> None:
        pair = start(group, "mlp", "adamw", {})

        def step_2(rows: int, digest: bool = False) -> None:
            options = {"step": 2, "extra": {"rows": rows}, "per_rank": torch.arange(3)}
            saved_by(save, tmp_path, *pair, **options, digest=digest)

        advance(*pair, 0, 2)
        step_2(1)
        step_2(1)
        step_2(1, digest=True)
        with pytest.raises((ValueError, RuntimeError), match="exists already, with other contents"):
            step_2(2)
        advance(*pair, 2, 3)
        with pytest.raises((ValueError, RuntimeError), match="exists already, with other contents"):
            step_2(1)

    with caplog.at_level("INFO", "shardcast"):
        run_world(ranks, saving)
    (folder,) = tmp_path.iterdir()
    info = [r.getMessage() for r in caplog.records if r.levelname == "INFO"]
    lines = [message for message in info if message.startswith(f"saved {str(folder)!r}: ")]
    assert len(lines) == 3, "only rank 0 logs"
    assert all(re.search(r"MB in \d+\.\d s, .* MB/s$", line) for line in lines)
    resumed = checkpoint.load(tmp_path, *start(None, "mlp", "adamw", {}))
    assert resumed.extra == {"rows": 1}


EVEN, WHOLE = {"partition": "even"}, {"partition": "whole"}
# Case, kind; ranks and options before; numbers of ranks and options after.
Resumed = tuple[str, str, int, dict[str, Any], tuple[int, ...], dict[str, Any]]
RESUMED: dict[str, Resumed] = {
    "1 rank to 2 and 4": ("gpt", "adamw", 1, EVEN, (2, 4), EVEN),
    "4 ranks to 1 and 3": ("gpt", "adamw", 4, WHOLE, (1, 3), WHOLE),
    "even to whole": ("gpt", "adamw", 3, EVEN, (2,), WHOLE),
    "whole to even": ("scalars", "adamw", 3, WHOLE, (2,), EVEN),
    "groups in one pack": ("gpt", "adamw", 2, {"unpacked_first": 0}, (3,), {"pack_params": 1}),
    "groups in other packs": ("gpt", "adamw", 3, {"pack_params": 1}, (2,), {"unpacked_first": 0}),
    "other packs": ("gpt", "amsgrad", 3, {}, (2,), {"pack_params": 2, "alignment": 8}),
    "fewer elements than ranks": ("tiny", "adamw", 3, {}, (2,), {**WHOLE, "pack_params": 1}),
    "no step in the state": ("mlp", "sgd", 3, {}, (2,), WHOLE),
    "inner optimizer": ("mlp", "rmsprop", 3, WHOLE, (2,), {"pack_params": 3}),
    "state of other shapes": ("mlp", "adafactor", 3, {}, (2,), {"pack_params": 2}),
}


@pytest.mark.parametrize("what", RESUMED)
def test_a_run_goes_on_exactly_with_other_ranks_and_another_layout(tmp_path: Path, what: str):
    case, kind, n, before, sizes, after = RESUMED[what]
    low = {"param_dtype": BF16}
    saved, _ = run_world(n, saving, str(tmp_path), case, kind, {**low, **before})
    for m in sizes:
        loaded, _ = run_world(m, loading, str(tmp_path), case, kind, {**low, **after})
        compare(saved, loaded)


@pytest.mark.parametrize("dtypes", [(BF16, FP32), (FP32, BF16), (FP32, FP16)], ids=str)
def test_other_param_dtypes_have_the_same_masters(tmp_path: Path, dtypes: Any):
    # Gradients have the parameters' dtype, so later steps rightly differ.
    first, second = ({"param_dtype": dtype} for dtype in dtypes)
    saved, _ = run_world(2, saving, str(tmp_path), "gpt", "adamw", first)
    loaded, _ = run_world(3, loading, str(tmp_path), "gpt", "adamw", second)
    before = whole(rank[0][0] for rank in saved)
    assert_same_bits(whole(rank[0][0] for rank in loaded), before)
    for rank in loaded:
        for name, tensor in rank[0][1].items():
            first_name = "wte.weight" if name == "head.weight" else name
            exact = before[f"{first_name}/master"].view(tensor.shape)
            assert torch.equal(tensor, exact.to(tensor.dtype))


@pytest.mark.parametrize("converted", [True, False])
def test_a_frozen_base_that_was_saved_converted_is_loaded_as_it_came_and_the_reverse(
    tmp_path: Path, converted: bool
):
    def run(group: Any, load: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(group.rank() + 10 * load)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        model[0].requires_grad_(False)
        convert = converted is not load
        optimizer = sharded(
            model,
            group,
            lambda m: torch.optim.SGD(m[1].parameters(), lr=0.1),
            param_dtype=BF16,
            convert_rest=convert,
        )
        assert model[0].weight.dtype == (BF16 if convert else FP32)
        if load:
            checkpoint.load(tmp_path, model, optimizer)
        else:
            checkpoint.save(tmp_path, model, optimizer, step=1)
        return values(model)

    saved = run_world(2, run, False)[0][0]
    for tensors in run_world(3, run, True)[0]:
        loaded, wanted = tensors["0.weight"], saved["0.weight"]
        assert torch.equal(loaded, wanted.to(loaded.dtype))


@pytest.mark.parametrize("name", ["step-1", "step-0000000012", "step-000000001"])
def test_a_users_directory_may_be_named_almost_as_a_checkpoint(tmp_path: Path, name: str):
    run, notes = tmp_path / name, tmp_path / name / "step-2"
    pair = job()
    if name != "step-000000001":  # this is a checkpoint's name, so resume() would raise
        assert checkpoint.resume(run, *pair) is None
    notes.mkdir(parents=True)
    for step in (1, 2, 3):
        checkpoint.save(run, *pair, step=step, keep=1)
    resumed = checkpoint.resume(run, *job(steps=0))
    assert resumed is not None and resumed.step == 3
    assert checkpoint.inspect(run).step == 3 and checkpoint.latest(run) == run / "step-000000003"
    assert notes.is_dir(), "keep= ignores it: it is not a checkpoint"
    if name != "step-000000001":
        assert checkpoint.resume(tmp_path, *pair) is None


def test_buffers_come_back_on_every_rank_as_rank_0_had_them(tmp_path: Path):
    def run(group: Any, load: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(group.rank() + 10 * load)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        optimizer = sharded(model, group, param_dtype=BF16, broadcast_buffers=False)
        if load:
            checkpoint.load(tmp_path, model, optimizer)
        else:
            model[1].running_mean += 1.5 + group.rank()  # each rank has its own batches
            checkpoint.save(tmp_path, model, optimizer, step=1)
        return values(model)

    saved, _ = run_world(2, run, False)
    assert not torch.equal(saved[1]["1.running_mean"], saved[0]["1.running_mean"])
    for tensors in run_world(3, run, True)[0]:
        assert_same_bits(tensors, saved[0])


def recomputing(seed: int = 0) -> Any:
    """Return a model with a block in torch's wrapper, whose hook renames state_dict keys."""
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(6)
    norm.register_buffer("scratch", torch.zeros(3), persistent=False)
    norm.running_mean += 1.5 * seed
    model = nn.Sequential(nn.Linear(6, 6), checkpoint_wrapper(nn.Sequential(norm)))
    optimizer = sharded(model)
    advance(model, optimizer, seed, seed + 1)
    return model, optimizer


def test_what_a_checkpoint_wrapper_holds_has_state_dicts_keys_outside(tmp_path: Path):
    model, optimizer = recomputing(1)
    checkpoint.save(tmp_path / "run", model, optimizer, step=1)
    stored = checkpoint.inspect(tmp_path / "run").tensors
    assert not [key for key in stored if key.endswith("scratch")]
    checkpoint.export(tmp_path / "run", tmp_path / "out", optimizer=False)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert_same_bits(exported, model.state_dict())
    loads = [
        lambda pair, w=weights: checkpoint.load_plain(*pair, w)
        for weights in (exported, model.state_dict())
    ]
    for load in (lambda pair: checkpoint.load(tmp_path / "run", *pair), *loads):
        fresh = recomputing()
        load(fresh)
        assert_same_bits(fresh[0].state_dict(), model.state_dict())


def test_two_processes_save_and_load(tmp_path: Path, gloo: SpawnedWorld):
    fields = {"param_dtype": BF16, "partition": "even"}
    saved = gloo.run(saving, str(tmp_path), "gpt", "adamw", fields)
    loaded = gloo.run(loading, str(tmp_path), "gpt", "adamw", fields)
    compare(saved, loaded)
    compare(saved, [loading(None, str(tmp_path), "gpt", "adamw", fields)])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_alone_reads_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fields = {"param_dtype": BF16}
    saved, _ = run_world(4, saving, str(tmp_path), "gpt", "adamw", fields)
    folder = checkpoint.latest(tmp_path)
    exact = whole(rank[0][0] for rank in saved)
    for name in [name for name in sys.modules if name.split(".")[0] == "shardcast"]:
        monkeypatch.setitem(sys.modules, name, None)  # makes it impossible to import
    with pytest.raises(ImportError):
        importlib.import_module("shardcast.checkpoint.dcp")
    state = {"model": {"wte.weight": torch.empty(37, 18)}}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["model"]["wte.weight"].view(-1), exact["wte.weight/master"])

    dcp_to_torch_save(folder, tmp_path / "all.pt")
    full = torch.load(tmp_path / "all.pt", weights_only=True)
    for key, tensor in exact.items():
        name, kind = key.split("/")
        held = full["model"][name] if kind == "master" else full["optimizer"]["state"][name][kind]
        assert torch.equal(held.reshape(-1), tensor.reshape(-1)), key
    assert full["optimizer"]["param_groups"][0]["lr"] == 3e-3


@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_an_export_goes_on_in_the_plain_optimizer(tmp_path: Path, kind: str):
    fields = {"param_dtype": FP32}
    saved, _ = run_world(3, saving, str(tmp_path / "run"), "gpt", kind, fields)
    checkpoint.export(tmp_path / "run", tmp_path / "out")
    model = CASES["gpt"].build(seed=9)
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    optimizer = make(kind, model)
    optimizer.load_state_dict(torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True))
    advance(model, optimizer, 3, 6)
    assert_same_bits(values(model), saved[0][1][1])


def test_an_export_has_buffers_of_rare_dtypes_and_names_those_that_safetensors_lacks(
    tmp_path: Path,
):
    model = nn.Linear(3, 3)
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.complex64):
        model.register_buffer(str(dtype).split(".")[1], torch.arange(3).to(dtype))
    optimizer = sharded(model)
    checkpoint.save(tmp_path / "run", model, optimizer, step=1)
    checkpoint.export(tmp_path / "run", tmp_path / "new" / "out")
    exported = load_file(tmp_path / "new" / "out" / "model.safetensors")
    assert_same_bits(exported, model.state_dict())
    model.register_buffer("table", torch.zeros(3, dtype=torch.complex128))
    checkpoint.save(tmp_path / "other", model, optimizer, step=1)
    with pytest.raises(ValueError, match=r"\['table'\] have torch.complex128.*view_as_real"):
        checkpoint.export(tmp_path / "other", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "new", "other"}


def test_a_run_with_a_loss_scale_goes_on_with_its_own_from_one_without(tmp_path: Path):
    dynamic = {"steps": 0, "param_dtype": FP16, "loss_scale": "dynamic"}
    plain, scaled, fresh = job(steps=0), job(**dynamic, loss_scale_init=2.0**10), job(**dynamic)
    checkpoint.save(tmp_path, *plain, step=1)
    checkpoint.load(tmp_path, *scaled)
    checkpoint.save(tmp_path, *scaled, step=2)
    checkpoint.load(tmp_path, *fresh)
    assert float(scaled[1].loss_scale) == float(fresh[1].loss_scale) == 2.0**10


def test_a_tensor_on_a_device_that_rank_0_lacks_may_be_in_per_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    size = 13  # tensors of this size count as being on a device that only rank 1 has

    def tag(stored: Any) -> str | None:
        return "elsewhere" if stored.nbytes() == 4 * size else None

    def restore(stored: Any, location: str) -> Any:
        assert location != "elsewhere", "no such device"
        return None

    packages = [(0, tag, restore), *torch.serialization._package_registry]
    monkeypatch.setattr(torch.serialization, "_package_registry", packages)

    def attempt(group: Any) -> None:
        model, optimizer = start(group, "mlp", "adamw", {})
        values = torch.full((size,), 1.0 + group.rank())
        checkpoint.save(tmp_path, model, optimizer, step=1, extra=values, per_rank=values)
        resumed = checkpoint.load(tmp_path, model, optimizer)
        assert [int(ranks_values[0]) for ranks_values in resumed.per_rank] == [1, 2]

    run_world(2, attempt)
