"""The page "GANs, RL and several models": each script trains as with plain optimizers."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardcast
from shardcast.testing import SpawnedWorld

pytestmark = pytest.mark.timeout(120)

PAGE = (Path(__file__).parents[1] / "docs" / "optimizers.md").read_text()
# Per script, widths of its models and of the two tensors of a batch.
SCRIPTS: dict[str, tuple[dict[str, tuple[int, int]], tuple[int, int]]] = {
    "GAN with two learning rates": ({"generator": (4, 2), "critic": (2, 1)}, (2, 4)),
    "One backward through both": ({"encoder": (6, 3), "decoder": (3, 6)}, (6, 6)),
    "Two losses within one model": ({"body": (6, 3), "mix": (3, 6)}, (6, 6)),
    "Target network": ({"critic": (6, 1)}, (6, 6)),
    "Actor and critic": ({"actor": (6, 2), "critic": (8, 1)}, (6, 1)),
}


class Averaging:
    """Plain optimizers whose gradients are averaged over ranks before a step."""

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


def trained(_group: Any, section: str, shard: Any) -> list[Tensor]:
    """The weights that the script of one section leaves."""
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
    text = PAGE.split(f"\n### {section}\n")[1].split("\n##")[0]
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "docs/optimizers.md", "exec"), scope)
    nets = [*models.values(), *([scope["target"]] if "target" in scope else [])]
    weights = [param.detach().clone() for net in nets for param in net.parameters()]
    assert all(not torch.equal(new, old) for new, old in zip(weights, begun, strict=False))
    return weights


@pytest.mark.parametrize("section", SCRIPTS)
def test_a_script_of_the_page_trains_as_with_plain_optimizers(gloo: SpawnedWorld, section: str):
    own = gloo.run(trained, section, partial(shardcast.shard, param_dtype=torch.float32))
    plain = gloo.run(trained, section, Averaging)
    for ranks in zip(*own, *plain, strict=True):
        for weight in ranks[1:]:
            torch.testing.assert_close(weight, ranks[0], rtol=2e-5, atol=2e-6)


def test_every_script_of_the_page_is_tried():
    scripts = PAGE.split("\n## GANs, RL and several models\n")[1]
    assert scripts.count("```python") == len(SCRIPTS)
