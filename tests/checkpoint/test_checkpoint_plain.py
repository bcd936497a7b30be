"""Load plain torch checkpoints, and those of FSDP2, into a sharded run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import CASES, advance, assert_same_bits, parts, run_world, sharded, values, whole
from safetensors.torch import load_file
from small_runs import make
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from shardcast.checkpoint import export, import_dcp, load_plain, save
from shardcast.testing import SpawnedWorld

BF16, FP32 = torch.bfloat16, torch.float32


def trained(kind: str) -> tuple[nn.Module, Any]:
    """Return a plain model and optimizer after some steps."""
    model = CASES["gpt"].build(seed=0)
    optimizer = make(kind, model)
    advance(model, optimizer, 0, 3)
    return model, optimizer


def fresh(group: Any, kind: str, **fields: Any) -> tuple[nn.Module, Any]:
    model = CASES["gpt"].build(seed=9)
    return model, sharded(model, group, lambda m: make(kind, m), **fields)


def taking(group: Any, kind: str, weights: Any, state: Any, fields: dict[str, Any]) -> Any:
    model, optimizer = fresh(group, kind, **fields)
    advance(model, optimizer, 7, 8)  # state that must be replaced
    load_plain(model, optimizer, weights, state)
    loaded = parts(optimizer)
    advance(model, optimizer, 3, 5)
    return loaded, values(model)


def masters(ranks: list[Any]) -> dict[str, Tensor]:
    found = whole(rank[0] for rank in ranks)
    return {k.removesuffix("/master"): v for k, v in found.items() if k.endswith("/master")}


def flat(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().reshape(-1) for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "partition"), [("adamw", "even"), ("sgd", "whole"), ("adafactor", "whole")]
)
def test_a_plain_checkpoint_goes_on_as_if_it_had_been_sharded_before(
    tmp_path: Path, kind: str, partition: str
):
    model, optimizer = trained(kind)
    weights, state = tmp_path / "model.pt", tmp_path / "optimizer.pt"
    torch.save(model.state_dict(), weights)
    torch.save(optimizer.state_dict(), state)
    ranks, _ = run_world(3, taking, kind, weights, state, {"partition": partition})
    assert_same_bits(masters(ranks), flat(model))
    advance(model, optimizer, 3, 5)
    for _, after in ranks:
        assert_same_bits(after, values(model))


def test_low_precision_weights_and_other_forms_are_taken(tmp_path: Path):
    model, _ = trained("adamw")
    low = {f"module._orig_mod.{n}": v.bfloat16() for n, v in model.state_dict().items()}
    (loaded, _), *_ = run_world(1, taking, "adamw", low, None, {"param_dtype": BF16})[0]
    low = {name: value.bfloat16().float() for name, value in flat(model).items()}
    assert_same_bits(masters([(loaded,)]), low)
    assert not any("exp_avg" in key[-1] for key in loaded), "the state is fresh"


def exporting(group: Any, folder: str) -> Any:
    model, optimizer = fresh(group, "adamw", param_dtype=BF16)
    advance(model, optimizer, 0, 3)
    save(folder, model, optimizer, step=3)
    return parts(optimizer), None


@pytest.mark.parametrize("shard_mb", [1000.0, 0.01])
def test_an_export_is_cut_by_size_and_comes_back_to_the_bit(tmp_path: Path, shard_mb: float):
    before, _ = run_world(2, exporting, str(tmp_path / "run"))
    out = tmp_path / "out"
    written = export(tmp_path / "run", out, max_shard_mb=shard_mb)
    assert sorted(written) == sorted(out.iterdir())
    if shard_mb < 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        tensors = {p.name: load_file(p) for p in out.glob("*.safetensors")}
        assert {n: f for f, held in tensors.items() for n in held} == index["weight_map"]
        nbytes = sum(tensor.nbytes for held in tensors.values() for tensor in held.values())
        assert nbytes == index["metadata"]["total_size"] and len(tensors) > 2
    after, _ = run_world(3, taking, "adamw", out, out / "optimizer.pt", {"param_dtype": BF16})
    assert_same_bits(whole(r[0] for r in after), whole(r[0] for r in before))
    with pytest.raises(FileExistsError, match="give a new or an empty directory"):
        export(tmp_path / "run", out)
    with pytest.raises(NotADirectoryError, match=r"out: .* below the file '.*optimizer.pt'"):
        export(tmp_path / "run", out / "optimizer.pt" / "below")


# -- FSDP2 ------------------------------------------------------------------------------------


def with_fsdp(group: Any, folder: str) -> Any:
    """Run three steps of torch's FSDP2, save its checkpoint, and return its whole state."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = CASES["gpt"].build(seed=0)
    fully_shard(model, mesh=init_device_mesh("cpu", (group.size(),)))
    optimizer = make("adamw", model)
    for step in range(3):
        CASES["gpt"].loss(model, CASES["gpt"].batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)
    return get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))


def importing(group: Any, folder: str, fields: dict[str, Any]) -> Any:
    model, optimizer = fresh(group, "adamw", **fields)
    optimizer.param_groups[0]["weight_decay"] = 0.5  # must be overwritten
    import_dcp(folder, model, optimizer)
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.25))
    return parts(optimizer), values(model)


@pytest.mark.parametrize("partition", ["even", "whole"])
def test_fsdp2_files_are_taken_to_the_bit(tmp_path: Path, gloo: SpawnedWorld, partition: str):
    weights, state = gloo.run(with_fsdp, str(tmp_path))[0]
    fields = {"partition": partition, "param_dtype": BF16}
    ranks, _ = run_world(3, importing, str(tmp_path), fields)
    found = whole(rank[0] for rank in ranks)
    expected = {}
    for name, values_ in state["state"].items():
        expected[f"{name}/master"] = weights[name].reshape(-1)
        for key, value in values_.items():
            expected[f"{name}/{key}"] = value.reshape(-1) if value.dim() else value
    assert_same_bits(found, expected)
