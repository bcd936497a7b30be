"""A small sharded run, whose checkpoints tests save, damage and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models import CASES, advance, everything, run_world, sharded

from shardcast import checkpoint

DATA, METADATA = "__0_0.distcp", ".metadata"


def job(group: Any = None, steps: int = 1, case: str = "mlp", seed: int = 0, **fields: Any) -> Any:
    """A bf16 model and its sharded optimizer after some steps."""
    model = CASES[case].build(seed)
    optimizer = sharded(model, group, **{"param_dtype": torch.bfloat16, **fields})
    advance(model, optimizer, 0, steps)
    return model, optimizer


def loaded(folder: Path, **options: Any) -> tuple[int, Any]:
    """The step that a fresh pair loads, and all that it has then."""
    model, optimizer = job(steps=0, **options)
    step = checkpoint.load(folder, model, optimizer).step
    return step, everything(model, optimizer)


def save_two_steps(folder: Path) -> Path:
    """Checkpoints of two ranks after steps 1 and 2."""

    def saving(group: Any) -> None:
        model, optimizer = job(group, steps=0)
        for step in (1, 2):
            advance(model, optimizer, step - 1, step)
            checkpoint.save(folder, model, optimizer, step=step)

    run_world(2, saving)
    return folder


def truncate(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
