"""Scripts of docs/coming-from.md and "GANs, RL" train like their originals on two ranks."""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import full
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import shardcast
from shardcast.testing import SpawnedWorld

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "coming-from.md").read_text()
(LOOP,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
BEFORE, AFTER = ("".join(re.findall(rf"^[ {sign}](.*\n)", LOOP, re.M)) for sign in "-+")


def snippets(section: str) -> list[str]:
    """Return the Python blocks of one section: before and after."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch).float() - batch.roll(1, 1).float()).square().mean()


def trained(_group: Any, code: str) -> tuple[float, Tensor]:
    """Run a snippet; return its final loss and weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    data = torch.Generator().manual_seed(dist.get_rank())
    scope: dict[str, Any] = {
        "torch": torch,
        "shardcast": shardcast,
        "model": model,
        "device": "cpu",
        "loss_of": loss_of,
        "fully_shard": fully_shard,
        "DistributedDataParallel": DistributedDataParallel,
        "ZeroRedundancyOptimizer": ZeroRedundancyOptimizer,
        "batches": [torch.randn(8, 16, generator=data) for _ in range(20)],
    }
    exec(compile(code, "docs/coming-from.md", "exec"), scope)
    weights = [full(param).flatten().float() for param in model.parameters()]
    with torch.no_grad():
        final = loss_of(scope["model"], scope["batches"][0])
    return final.item(), torch.cat(weights)


@pytest.mark.parametrize("section", ["ZeroRedundancyOptimizer", "FSDP2"])
def test_a_script_trains_as_before(gloo: SpawnedWorld, section: str, tolerance: float = 1e-5):
    """Results differ only by the order of fp32 sums."""
    before, after = snippets(section)
    (loss, weights), _ = gloo.run(trained, before)
    (new_loss, new_weights), (_, others) = gloo.run(trained, after)
    assert new_loss == pytest.approx(loss, rel=tolerance)
    assert torch.equal(new_weights, others), "replicas are equal"
    assert (new_weights - weights).abs().max() <= tolerance * weights.abs().max()


class GPT(nn.Module):
    """A model that returns its loss, like language models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(inputs), targets)


def looped(_group: Any, code: str, dtype: torch.dtype, path: str) -> tuple[list[float], Tensor]:
    """Run the page's loop, stop and resume it; return rank 0's evaluated losses and the weights."""
    torch.manual_seed(0)
    tokens = torch.randint(16, (192,))
    data = torch.utils.data.TensorDataset(tokens, (tokens * 5 + 3) % 16)
    losses: list[float] = []

    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            losses.append(model(*data.tensors).float().item())

    scope: dict[str, Any] = {
        "torch": torch,
        "os": os,
        "contextlib": contextlib,
        "evaluate": evaluate,
        "GPT": GPT,
        "DistributedDataParallel": DistributedDataParallel,
        "data": data,
        "path": path,
        "device": torch.device("cpu"),
        "dtype": dtype,
        "rank": dist.get_rank(),
        "ACCUMULATE": 3,
        "STEPS": 12,
    }
    for epochs in (1, 3):
        exec(
            compile(code, "docs/coming-from.md", "exec"), {**scope, "EPOCHS": epochs}, result := {}
        )
        dist.barrier()  # only rank 0 writes the checkpoint of plain torch
    weights = [p.detach().flatten().float() for p in result["model"].parameters()]
    return losses, torch.cat(weights)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 5e-3)]
)
@pytest.mark.filterwarnings("ignore:In CPU autocast")  # which disables itself for fp32
def test_the_whole_loop_of_readme_trains_as_before(
    gloo: SpawnedWorld, dtype: torch.dtype, tolerance: float, tmp_path: Path
):
    (losses, weights), _ = gloo.run(looped, BEFORE, dtype, str(tmp_path / "before.pt"))
    (new, new_weights), (silent, others) = gloo.run(looped, AFTER, dtype, str(tmp_path / "after"))
    assert new == pytest.approx(losses, rel=tolerance) and not silent
    assert losses == sorted(losses, reverse=True) and len(losses) == 3, "it learns, and resumes"
    assert torch.equal(new_weights, others), "replicas are equal"
    assert (new_weights - weights).abs().max() <= 2 * tolerance * weights.abs().max()


def messages(_group: Any, sharded: str, micro_batches: int) -> dict[str, int]:
    """Return how often a rank calls each collective in one step of a model with four layers."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    if sharded == "FSDP2":
        for module in (*model, model):
            fully_shard(module)
        optimizer: Any = torch.optim.AdamW(model.parameters())
    else:
        optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters()))
    for measured in (False, True):
        with torch.profiler.profile() if measured else contextlib.nullcontext() as profile:
            for index in range(micro_batches):
                last = sharded == "FSDP2" or index == micro_batches - 1
                with contextlib.nullcontext() if last else optimizer.no_sync():
                    model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return dict(Counter(e.name for e in profile.events() if e.name.startswith("c10d::")))


def test_a_step_sends_as_much_for_four_micro_batches_as_for_one_and_fsdp2_four_times(
    gloo: SpawnedWorld,
):
    """README's first reason: FSDP2 needs two gathers and a reduction per layer and micro-batch."""
    for count in (1, 4):
        (ours, _), (theirs, _) = (gloo.run(messages, s, count) for s in ("shardcast", "FSDP2"))
        assert ours == {"c10d::send": 2, "c10d::recv_": 2, "c10d::allreduce_": 1}
        gathers, reductions = 2 * 4 * count, 4 * count
        assert theirs["c10d::_allgather_base_"] == gathers
        assert theirs["c10d::_reduce_scatter_base_"] == reductions


def test_the_options_that_the_page_names_exist():
    named = set(re.findall(r"`(\w+): ", PAGE))
    assert {"offload"} <= named <= set(shardcast.ShardcastConfig().to_dict())


# -- GANs, RL and several models ------------------------------------------------------------------

OPTIMIZERS = (Path(__file__).parents[1] / "docs" / "optimizers.md").read_text()
# For each script, the widths of its models and of the two tensors of a batch.
SCRIPTS: dict[str, tuple[dict[str, tuple[int, int]], tuple[int, int]]] = {
    "GAN with two learning rates": ({"generator": (4, 2), "critic": (2, 1)}, (2, 4)),
    "One backward through both": ({"encoder": (6, 3), "decoder": (3, 6)}, (6, 6)),
    "Two losses within one model": ({"body": (6, 3), "mix": (3, 6)}, (6, 6)),
    "Target network": ({"critic": (6, 1)}, (6, 6)),
    "Actor and critic": ({"actor": (6, 2), "critic": (8, 1)}, (6, 1)),
}


class Averaging:
    """Plain optimizers that average gradients over ranks before a step."""

    def __init__(self, _model: nn.Module, given: Any) -> None:
        self.optimizers = given if isinstance(given, list) else [given]

    def step(self) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        dist.all_reduce(param.grad)
                        param.grad /= dist.get_world_size()
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def trained_by(_group: Any, section: str, shard: Any) -> list[Tensor]:
    """Run the script of one section; return the weights."""
    torch.manual_seed(0)
    shapes, widths = SCRIPTS[section]
    models = {
        name: nn.Sequential(nn.Linear(a, 16), nn.Tanh(), nn.Linear(16, b))
        for name, (a, b) in shapes.items()
    }
    begun = [param.detach().clone() for net in models.values() for param in net.parameters()]
    data = torch.Generator().manual_seed(dist.get_rank())
    scope: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "F": F,
        "copy": copy,
        **models,
        "shardcast": SimpleNamespace(shard=shard),
        "batches": [[torch.randn(8, n, generator=data) for n in widths] for _ in range(6)],
    }
    text = OPTIMIZERS.split(f"\n### {section}\n")[1].split("\n##")[0]
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "docs/optimizers.md", "exec"), scope)
    nets = [*models.values(), *([scope["target"]] if "target" in scope else [])]
    weights = [param.detach().clone() for net in nets for param in net.parameters()]
    assert all(not torch.equal(new, old) for new, old in zip(weights, begun, strict=False))
    return weights


@pytest.mark.parametrize("section", SCRIPTS)
def test_a_script_of_the_page_trains_as_with_plain_optimizers(gloo: SpawnedWorld, section: str):
    own = gloo.run(trained_by, section, partial(shardcast.shard, param_dtype=torch.float32))
    plain = gloo.run(trained_by, section, Averaging)
    for ranks in zip(*own, *plain, strict=True):
        for weight in ranks[1:]:
            torch.testing.assert_close(weight, ranks[0], rtol=2e-5, atol=2e-6)


def test_every_script_of_the_page_is_tried():
    scripts = OPTIMIZERS.split("\n## GANs, RL and several models\n")[1]
    assert scripts.count("```python") == len(SCRIPTS)
