"""Run the Python blocks of the pages, unchanged, on two ranks.

:data:`ELSEWHERE` lists the pages that other tests run. :data:`FRAGMENTS` lists the blocks that
cannot run, so that the pages need no marker.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import run_world
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import shardcast
from shardcast import checkpoint
from shardcast.testing import threaded_world

DOCS = Path(__file__).parents[1] / "docs"
ELSEWHERE = {"coming-from": "test_guides", "editing": "optimizer/test_editing"}
SCRIPTS = "GANs, RL and several models"  # test_guides runs the blocks below this heading
WRITTEN_BY_TOOLS = {"evidence", "options", "tested-scripts"}
Key = tuple[str, str, int]  # of a block: page, heading, number of earlier blocks below it
FRAGMENTS: dict[Key, str] = {  # why the block cannot run
    ("hybrid", "Accelerate and Trainer", 0): "needs accelerators",
    ("optimizers", "Optimizers and averages", 0): "needs Sophia, which is not installed",
    ("precision", "fp16", 1): "a part of examples/with_trl_grpo.py, which needs TRL",
    ("troubleshooting", "`step: lr of group 0 differs (rank 0: 0.001; rank 1: 0.0005)`", 0): (
        "the end of a loop that validates"
    ),
}


def _blocks() -> Iterator[tuple[Key, str]]:
    pattern = re.compile(r"^```(\w*)\n(.*?)^```$|^(#+) ([^\n]+)$", re.MULTILINE | re.DOTALL)
    for path in sorted(DOCS.glob("*.md")):
        text, headings, count = path.read_text(), [""], 0
        for found in pattern.finditer(text):
            language, code, level, heading = found.groups()
            if heading is not None:
                headings = [*headings[: len(level)], heading]
                count = 0
            elif language == "python":
                is_elsewhere = path.stem in ELSEWHERE or SCRIPTS in headings or code in EXAMPLES
                if not is_elsewhere:
                    yield (path.stem, headings[-1], count), code
                count += 1


EXAMPLES = "".join(it.read_text() for it in (DOCS.parent / "examples").glob("*.py"))
BLOCKS = dict(_blocks())


def run(key: Key, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(BLOCKS[key], f"docs/{key[0]}.md, {key[1]}", "exec"), names)
    return names


class Net(nn.Module):
    """A model that returns its loss, with parameter names of the pages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.attn = nn.Linear(8, 4)
        self.q_norm, self.k_norm = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.q_norm(self.attn(self.blocks(x))) * self.k_norm(self.attn(x))).float().mean()


class Model(nn.Module):
    """Its parameters are ``layer.attn.weight`` and so on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


BATCH = torch.linspace(-1, 1, 24).view(3, 8)


def plain(**more: Any) -> dict[str, Any]:
    """Return a model and a plain optimizer under the names that the pages use."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"torch": torch, "model": model, "optimizer": optimizer, "batch": BATCH, **more}


def shards(group: Any) -> Any:
    """Return the shardcast module with a ``shard()`` that uses ``group``."""
    shard = partial(shardcast.shard, process_group=group)

    class Module:
        def __getattr__(self, name: str) -> Any:
            return shard if name == "shard" else getattr(shardcast, name)

    return Module()


def sharded(group: Any, steps: int = 2, **options: Any) -> dict[str, Any]:
    names = plain(checkpoint=checkpoint)
    model = names["model"]
    names["optimizer"] = shards(group).shard(model, names["optimizer"], **options)
    for _ in range(steps):
        model(BATCH).backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()
    return names


def loss_of(model: nn.Module, batch: Any, reduction: str = "mean") -> Tensor:
    loss: Tensor = model(getattr(batch, "inputs", batch))
    return loss * 3 if reduction == "sum" else loss


def with_batches(names: dict[str, Any]) -> dict[str, Any]:
    batch = SimpleNamespace(inputs=BATCH, labels=torch.tensor([1, -100, 2]))
    return {
        **names,
        "contextlib": contextlib,
        "loss_of": loss_of,
        "loader": [BATCH, BATCH],
        "micro_batches": [batch, batch],
        "rho": 0.05,
    }


# -- one script for each block ----------------------------------------------------------------


def watch(group: Any, key: Key) -> None:
    writer, wandb = MagicMock(), MagicMock()
    run(key, {**sharded(group), "logging": logging, "writer": writer, "wandb": wandb, "step": 2})
    assert writer.add_scalar.call_args.args[1] > 0
    assert set(wandb.log.call_args.args[0]) == {"grad_norm", "skipped"}


def muon_and_adamw(group: Any, key: Key) -> None:
    names = plain(shardcast=shards(group), batch=BATCH)
    names["model"] = names["model"].layer
    before = [param.detach().clone().float() for param in names["model"].parameters()]
    optimizer = run(key, names)["optimizer"]
    assert len(optimizer.optimizers) == 2
    after = names["model"].parameters()
    assert not any(torch.equal(a, b.float()) for a, b in zip(before, after, strict=True))


def averages(group: Any, key: Key) -> None:
    seen: list[Tensor] = []
    names = plain(shardcast=shards(group), evaluate=lambda model: seen.append(model(BATCH)))
    names["model"](BATCH).backward()
    run(key, names)
    assert len(seen) == 1


def a_mesh(key: Key, sizes: dict[str, int]) -> None:
    def on_rank(mesh: Any) -> None:
        names = plain(shardcast=shardcast, mesh=mesh)
        run(key, {**names, "init_device_mesh": lambda *_args, **_names: mesh})

    threaded_world(sizes, on_rank)


def checkpoints(group: Any, key: Key) -> None:
    names = sharded(group, steps=1)
    scheduler = torch.optim.lr_scheduler.LinearLR(names["optimizer"])
    run(key, {**names, "scheduler": scheduler, "steps": 1001})
    assert checkpoint.latest("runs/a").name == "step-000001000"  # type: ignore[union-attr]


def read_by_dcp(group: Any, key: Key) -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(37, 18)})
    given = model["wte"].weight.detach().clone()
    optimizer = shards(group).shard(model, torch.optim.AdamW(model.parameters()))
    checkpoint.save("runs/a", model, optimizer, step=1000)
    if group.rank() == 0:
        names = run(key, {})
        assert torch.equal(names["state"]["model"]["wte.weight"], given)


def imports(group: Any, key: Key) -> None:
    names = plain(checkpoint=checkpoint)
    model, optimizer = names["model"], names["optimizer"]
    model(BATCH).backward()
    optimizer.step()
    optimizer.zero_grad()
    if group.rank() == 0:
        save_file(model.state_dict(), "model.safetensors")
        torch.save(optimizer.state_dict(), "optimizer.pt")
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id="fsdp2/step-1000", no_dist=True)
    names["optimizer"] = shards(group).shard(model, optimizer)
    names["optimizer"].check_copies()  # all ranks wait for the files
    run(key, names)


def export(group: Any, key: Key) -> None:
    names = sharded(group)
    checkpoint.save("runs/a", names["model"], names["optimizer"], step=2)
    if group.rank() == 0:
        fresh = Model()
        names |= {
            "model": fresh,
            "groups": fresh.parameters(),
            "safetensors": SimpleNamespace(torch=SimpleNamespace(load_file=load_file)),
        }
        assert len(run(key, names)["optimizer"].state) == len(list(fresh.parameters()))


def plain_state(group: Any, key: Key) -> None:
    names = run(key, {**sharded(group), "get_state_dict": get_state_dict})
    state = names["state"]["state"]["layer.attn.weight"]
    assert state["exp_avg"].shape == state["shardcast_master"].shape == (4, 8)


def gathered(group: Any, key: Key) -> None:
    names = sharded(group)
    names["model"](BATCH).backward()
    run(key, names)
    assert all(torch.isfinite(param.grad).all() for param in names["model"].parameters())


def sam(group: Any, key: Key) -> None:
    names = with_batches(sharded(group))
    before = [param.detach().clone() for param in names["model"].parameters()]
    run(key, names)
    after = names["model"].parameters()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def tokens(group: Any, key: Key) -> None:
    names = run(key, with_batches(sharded(group)))
    assert names["optimizer"].grad_norm > 0


def attempts(group: Any, key: Key) -> None:
    names = {**plain(shardcast=shards(group)), "loader": [[BATCH], [BATCH, BATCH]]}
    assert not run(key, names)["optimizer"].failures()


def metrics(group: Any, key: Key) -> None:
    wandb = MagicMock()
    run(key, plain(shardcast=shards(group), wandb=wandb))
    wandb.log.assert_called_once()


def fp16(group: Any, key: Key) -> None:
    first, second = BLOCKS[key].split("\n\n")
    names = plain(shardcast=shards(group))
    exec(first, names)
    exec(second, {**names, "loss": names["model"](BATCH)})
    assert names["optimizer"].skipped_steps <= 1  # the first scale may be too large


def asleep(group: Any, key: Key) -> None:
    names = sharded(group)
    before = names["model"](BATCH).item()
    run(key, {**names, "engine": MagicMock(), "prompts": []})
    assert names["model"](BATCH).item() == before


def part_of_a_checkpoint(group: Any, key: Key) -> None:
    names = sharded(group)
    checkpoint.save("runs/base", names["model"], names["optimizer"], step=2)
    with pytest.raises(ValueError, match=r"pattern 'body\.\*' matches no parameter"):
        run(key, names)
    model = nn.ModuleDict({"body": nn.Linear(4, 4)})
    optimizer = shards(group).shard(model, torch.optim.AdamW(model.parameters()))
    checkpoint.save("runs/base", model, optimizer, step=3)
    run(key, {"checkpoint": checkpoint, "model": model, "optimizer": optimizer})


def processes(group: Any, key: Key) -> None:
    spawn = MagicMock(side_effect=lambda function, _count: [function(group)])
    run(key, {"__name__": "__main__", "spawn": spawn, "trained": lambda group: group.rank()})
    spawn.assert_called_once()


def a_form(group: Any, key: Key) -> None:
    layer = {
        "q_proj": nn.Linear(128, 128, bias=False),
        "o_proj": nn.Linear(128, 128, bias=False),
        "experts": nn.ModuleList([nn.Linear(128, 64, bias=False)]),
    }
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict(layer)])})
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW(model.parameters())
    names = {"shardcast": shards(group), "model": model, "optimizer": optimizer}
    optimizer = run(key, names)["optimizer"]
    assert optimizer.published("layers.0.experts.0.weight").form == "mxfp4"


def sender(group: Any, key: Key) -> None:
    code = BLOCKS[key].replace("/shared/policy", "policy")
    exec(code, plain(shardcast=shards(group)))


def save_in_a_loop(group: Any, key: Key) -> None:
    names = sharded(group, steps=1)
    scheduler = torch.optim.lr_scheduler.LinearLR(names["optimizer"])
    run(key, {**names, "scheduler": scheduler, "step": 0, "directory": "runs/a"})
    assert checkpoint.latest("runs/a").name == "step-000000001"  # type: ignore[union-attr]


HERE: dict[Key, Callable[[Any, Key], None]] = {
    ("getting-started", "3. Save and resume", 1): save_in_a_loop,
    ("getting-started", "5. Watch it", 0): watch,
    ("optimizers", "Several optimizers on one model", 0): muon_and_adamw,
    ("optimizers", "Averages of weights", 0): averages,
    ("checkpoints", "Checkpoints", 0): checkpoints,
    ("checkpoints", "Load a part", 0): part_of_a_checkpoint,
    ("checkpoints", "What is in it", 0): read_by_dcp,
    ("checkpoints", "From and to other systems", 0): imports,
    ("checkpoints", "From and to other systems", 1): export,
    ("checkpoints", "`state_dict()`", 0): plain_state,
    ("gradients", "What `.grad` holds", 0): gathered,
    ("gradients", "SAM", 0): sam,
    ("gradients", "One mean over all tokens", 0): tokens,
    ("gradients", "A rank that fails", 0): attempts,
    ("gradients", "Norms of each parameter", 0): metrics,
    ("precision", "fp16", 0): fp16,
    ("testing", "Processes", 0): processes,
    ("serving", "Free the device between steps", 0): asleep,
    ("serving", "Follow a training run", 0): sender,
    ("serving", "Published forms", 0): a_form,
}
MESHES: dict[Key, dict[str, int]] = {
    ("hybrid", "Tensor parallelism", 0): {"dp": 2, "tp": 2},
    ("hybrid", "Replicas and shards", 0): {"dp_replicate": 2, "dp_shard": 2},
    ("hybrid", "Context parallelism", 0): {"dp": 2, "cp": 2},
}
READERS = [("serving", "Follow a training run", number) for number in (1, 2)]


def test_the_guides_and_the_readme_stay_short() -> None:
    """To add a sentence, remove another one."""
    guides = [path for path in DOCS.glob("*.md") if path.stem not in WRITTEN_BY_TOOLS]
    assert sum(len(path.read_text().split()) for path in guides) <= 12_000
    assert len((DOCS.parent / "README.md").read_text().splitlines()) <= 150


def test_every_block_is_run_or_listed_as_a_fragment() -> None:
    assert BLOCKS.keys() == {*HERE, *MESHES, *READERS, *FRAGMENTS}


@pytest.mark.filterwarnings("ignore::UserWarning")  # slow matmuls on this CPU; torch's own
@pytest.mark.parametrize("key", HERE, ids=lambda key: f"{key[0]}, {key[1]}")
def test_a_block_runs_as_it_stands_there(
    key: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_world(2, HERE[key], key)


@pytest.mark.parametrize("key", MESHES, ids=lambda key: key[1])
def test_a_block_with_a_mesh_runs_as_it_stands_there(key: Key) -> None:
    a_mesh(key, MESHES[key])


def test_a_reader_follows_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def sending(group: Any) -> tuple[Any, dict[str, Tensor]]:
        names = sharded(group, changes=True)
        model, optimizer = names["model"], names["optimizer"]
        shardcast.publish.FolderSender("policy", optimizer).send()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        return optimizer.changes(), weights

    ((own, weights), (other, _)), _ = run_world(2, sending)
    for key in READERS:
        code = BLOCKS[key].replace("/shared/policy", "policy")
        reader = Model()
        for name, param in reader.named_parameters():
            param.data = param.data.to(weights[name].dtype)
        names = {
            "shardcast": shardcast,
            "model": reader,
            "reader_model": reader,
            "version": None,
            "reader_version": None,
            "optimizer": SimpleNamespace(changes=lambda since: own),
            "changes_of_all_ranks": [own, other],
        }
        exec(code, names)
        for name, param in reader.named_parameters():
            assert torch.equal(param, weights[name]), (key, name)


def test_without_safetensors_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """shardcast does not install safetensors, but docs/getting-started.md exports."""
    monkeypatch.chdir(tmp_path)
    names = sharded(None)
    checkpoint.save("runs/a", names["model"], names["optimizer"], step=2)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        checkpoint.export("runs/a", "exported")
    assert not Path("exported").exists()
    with pytest.raises(ImportError, match="pip install safetensors"):
        checkpoint.load_plain(names["model"], names["optimizer"], "model.safetensors")
