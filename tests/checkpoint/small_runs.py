"""A small sharded run, whose checkpoints tests save, damage and load."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import advance, everything, job, run_world
from torch import nn

from shardcast import checkpoint
from shardcast.checkpoint.directory import MANIFEST, MARKER
from shardcast.checkpoint.storage import digest_of

DATA, METADATA = "__0_0.distcp", ".metadata"


def make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return a plain optimizer; AdamW has two groups, not in the model's order."""
    params = list(model.parameters())
    if kind == "sgd":
        return torch.optim.SGD(params, lr=1e-2, momentum=0.9)
    if kind == "rmsprop":
        return torch.optim.RMSprop(params, lr=1e-2, momentum=0.5)
    if kind == "adafactor":
        return torch.optim.Adafactor(params, lr=1e-2)
    groups = [{"params": params[3:], "weight_decay": 0.0}, {"params": params[:3]}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, amsgrad=kind == "amsgrad")


def loaded(folder: Path, **options: Any) -> tuple[int, Any]:
    """Load into a fresh pair; return the step and all state."""
    model, optimizer = job(steps=0, **options)
    step = checkpoint.load(folder, model, optimizer).step
    return step, everything(model, optimizer)


def saved_by(name: str, *args: Any, **options: Any) -> Path:
    """Save with ``save``, or with ``save_async`` and wait; return the checkpoint."""
    made = getattr(checkpoint, name)(*args, **options)
    path: Path = made if name == "save" else made.wait()
    return path


def save_two_steps(folder: Path) -> Path:
    """Save checkpoints of two ranks after steps 1 and 2."""

    def saving(group: Any) -> None:
        model, optimizer = job(group, steps=0)
        for step in (1, 2):
            advance(model, optimizer, step - 1, step)
            checkpoint.save(folder, model, optimizer, step=step)

    run_world(2, saving)
    return folder


def seal(folder: Path, edit: Callable[[dict[str, Any]], Any] = lambda manifest: None) -> None:
    """Edit the manifest and recompute all checksums, like a deliberate forgery."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    for name, listed in manifest["files"].items():
        listed["sha256"] = digest_of(folder / name)
        listed["bytes"] = (folder / name).stat().st_size
    data = json.dumps(edit(manifest) or manifest).encode()
    (folder / MANIFEST).write_bytes(data)
    (folder / MARKER).write_text(hashlib.sha256(data).hexdigest())


def truncate(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
