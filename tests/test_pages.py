"""Code of pages that no other test runs, as it stands there, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import run_world
from torch import nn

import shardcast
from shardcast import checkpoint

pytestmark = pytest.mark.timeout(60)
DOCS = Path(__file__).parents[1] / "docs"


def block(page: str, section: str, number: int = 0) -> Any:
    text = (DOCS / f"{page}.md").read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number]
    return compile(code, f"docs/{page}.md", "exec")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.attn = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(self.body(x).relu())


def made(group: Any, **options: Any) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": Net()})
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = shardcast.shard(model, adamw, process_group=group, **options)
    for _ in range(2):
        model["layer"](torch.randn(3, 8)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_both_doors_edit_what_the_page_says() -> None:
    def editing(group: Any) -> None:
        _, optimizer = made(group)
        before = optimizer.full_parameters()
        exec(block("gradients", "Editing what is sharded"), {"optimizer": optimizer})
        after, state = optimizer.full_parameters(), optimizer.full_state_dict()
        if group.rank() == 0:
            weight = after["layer.attn.weight"]
            torch.testing.assert_close(weight.norm(dim=1), torch.ones(4))
            torch.testing.assert_close(
                after["layer.body.weight"], before["layer.body.weight"] * 0.999
            )
            assert not any(it["exp_avg"].any() for it in state["state"].values())

    run_world(2, editing)


def test_a_part_of_a_checkpoint_loads_by_the_lines_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def loading(group: Any) -> None:
        model, optimizer = made(group)
        checkpoint.save("runs/base", model, optimizer, step=2)
        names = {"checkpoint": checkpoint, "model": model, "optimizer": optimizer}
        with pytest.raises(ValueError, match=r"pattern 'body\.\*' matches no parameter"):
            exec(block("checkpoints", "Load a part"), names)
        model, optimizer = made(group)
        code = block("checkpoints", "Load a part")
        checkpoint.save("runs/base", model, optimizer, step=3)
        shifted = nn.ModuleDict({"body": nn.Linear(4, 4)})
        adamw = torch.optim.AdamW(shifted.parameters())
        other = shardcast.shard(shifted, adamw, process_group=group)
        checkpoint.save("runs/base", shifted, other, step=4)
        exec(code, {"checkpoint": checkpoint, "model": shifted, "optimizer": other})

    run_world(2, loading)
