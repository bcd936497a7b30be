"""docs/editing.md: each recipe on a sharded optimizer has the results of its original."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import assert_same_bits, values
from oracle import mlp, set_grads
from torch import Tensor, nn

import shardcast
from shardcast.testing import ThreadedWorld

pytestmark = pytest.mark.timeout(120)

PAGE = (Path(__file__).parents[2] / "docs/editing.md").read_text()
RECIPES = {
    section.partition("\n")[0]: re.findall(r"```python\n(.*?)```", section, re.S)
    for section in re.split(r"^### ", PAGE, flags=re.M)[1:]
}
assert RECIPES, "the page has no recipes, so nothing would be tested"


class Layers(nn.Module):
    def __init__(self, **shapes: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, (rows, columns) in shapes.items():
            setattr(self, name, nn.Linear(columns, rows, bias=False))


def lora() -> nn.Module:
    model = Layers(base=(9, 7), up=(9, 2), down=(2, 7))
    model.base.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "QK-clip": lambda: Layers(q=(12, 8), k=(12, 8)),
    "LoRA merged for a rollout, and undone exactly": lora,
}


def trained(recipe: str, code: str, group: Any = None, **fields: Any) -> dict[str, Tensor]:
    """Run steps, each followed by the recipe; return the weights and those seen by rollouts."""
    model = MODELS.get(recipe, mlp)()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if group is not None:
        fields = {"param_dtype": "fp32", "fuse": "eager", "pack_params": 2, **fields}
        optimizer = shardcast.shard(model, optimizer, process_group=group, **fields)
    seen: dict[str, Tensor] = {}
    for step in range(4):
        set_grads(model, step)
        optimizer.step()
        optimizer.zero_grad()
        names = {
            "torch": torch,
            "F": F,
            "model": model,
            "optimizer": optimizer,
            "generator": torch.Generator().manual_seed(step),
            "masks": {name: (p.detach() > 0).float() for name, p in MASKED.named_parameters()},
            "largest": torch.tensor([90.0, 120.0, 400.0]),
            "dead": torch.tensor([1, 4, 10]),
            "rollout": lambda model, step=step: seen.update(
                {f"{step} {name}": value for name, value in values(model).items()}
            ),
        }
        exec(code, names)
    return {**values(model), **seen}


MASKED = mlp()


@pytest.mark.parametrize("recipe", [*RECIPES])
def test_a_recipe_is_its_original(recipe: str):
    original, ours = RECIPES[recipe]
    wanted = trained(recipe, original)
    assert "optimizer.owned()" in ours or "optimizer.whole(" in ours
    before = trained(recipe, "")
    assert any(not torch.equal(wanted.get(n), before[n]) for n in before) or "rollout" in ours
    for size in (1, 3):
        for found in ThreadedWorld(size).run(lambda group: trained(recipe, ours, group)):
            if recipe != "Noise":  # the generators differ
                assert_same_bits(found, wanted)
                continue
            noise = torch.cat([(found[n] - before[n]).flatten() for n in before]) / 0.01
            assert abs(noise.mean()) < 0.5 and 1.5 < noise.std() < 2.5, "the sum of four steps"


def test_a_merge_that_is_undone_leaves_no_bit_of_it_in_bf16():
    recipe = "LoRA merged for a rollout, and undone exactly"

    def run(group: Any) -> tuple[str, str]:
        digests = []
        for code in ("", RECIPES[recipe][1]):
            model = lora()
            optimizer = shardcast.shard(
                model, torch.optim.AdamW(model.parameters()), process_group=group
            )
            set_grads(model, 0)
            optimizer.step()
            exec(code, {"optimizer": optimizer, "model": model, "rollout": lambda model: None})
            digests.append(optimizer.digest())
        return digests[0], digests[1]

    for without, with_merge in ThreadedWorld(2).run(run):
        assert without == with_merge
