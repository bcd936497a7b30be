"""Costs of checkpoints: memory, messages between ranks, and bytes in addition to the state."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import advance, sharded
from torch import nn

from shardcast import checkpoint
from shardcast.checkpoint.access import Snapshot
from shardcast.testing import fake_world

LARGEST = 4 << 20  # bytes of one parameter


def job(group: Any = None, layers: int = 2) -> tuple[nn.Module, Any]:
    model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(layers)])
    optimizer = sharded(model, group, param_dtype=torch.bfloat16)
    advance(model, optimizer, 0, 1)
    return model, optimizer


def peaks(folder: Path) -> tuple[int, int, int]:
    """Return the most memory of a save, a load and an export, above that before the call."""

    def peak_of(call: Callable[[], Any]) -> int:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        call()
        status = Path("/proc/self/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) << 10
        return peak - pages * resource.getpagesize()

    def saved_and_loaded(name: str, model: nn.Module) -> tuple[int, int, int]:
        optimizer = sharded(model, pack_mb=8.0)
        advance(model, optimizer, 0, 1)
        run = folder / name
        options: dict[str, Any] = {"max_shard_mb": 8, "optimizer": False}
        return (
            peak_of(lambda: checkpoint.save(run, model, optimizer, step=1)),
            peak_of(lambda: checkpoint.load(run, model, optimizer)),
            peak_of(lambda: checkpoint.export(run, folder / f"{name}-out", **options)),
        )

    # Make glibc return freed blocks; by default it keeps those up to 32 MB, which would be counted.
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    saved_and_loaded("warm", nn.Linear(3, 3))
    return saved_and_loaded("run", nn.Sequential(*[nn.Linear(1024, 1024, False) for _ in range(6)]))


def test_the_memory_of_saving_loading_and_exporting_does_not_grow_with_the_model(tmp_path: Path):
    """For 72 MB of state, a save takes no extra memory, and a load that of one pack's state.

    An export takes the memory of one file that it writes, here two parameters, and of a chunk.
    """
    told, tell = os.pipe()
    child = os.fork()
    if not child:  # a process of its own, whose memory no other test has used
        try:
            os.write(tell, " ".join(map(str, peaks(tmp_path))).encode())
        except BaseException:
            os.write(tell, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(tell)
    with open(told) as file:
        text = file.read()
    os.waitpid(child, 0)
    assert re.fullmatch(r"[\d -]+", text), text
    saved, loaded, exported = map(int, text.split())
    assert saved < LARGEST  # no copy of a tensor; the kernel counts pages in batches
    of_a_pack = 2 * 2 * LARGEST  # 8 MB of parameters, two moments
    assert of_a_pack < loaded < of_a_pack + 2 * LARGEST
    assert 1.9 * LARGEST < exported < 3.5 * LARGEST


def exchanged(
    world: int, layers: int, base: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[str], int, int]:
    """Return the collectives of a save and of a load until values move, the largest part of a rank
    in one of them, and the length of the rank's message to rank 0."""
    folder = base / f"{world:04d}-{layers:02d}"
    folder.mkdir()
    whole = folder / "whole"
    checkpoint.save(whole, *job(None, layers), step=1)
    with fake_world(world, world // 2) as group:
        model, optimizer = job(group, layers)
        del group.log[:]
        checkpoint.save(folder, model, optimizer, step=1, per_rank=torch.zeros(5000))
        saving = list(group.log)
        del group.log[:]
        monkeypatch.setattr(Snapshot, "publish", lambda _snapshot: None)
        checkpoint.load(whole, model, optimizer)
        loading = list(group.log)
    most = max(collective.nbytes // world for collective in saving + loading)
    message = (folder / f"acknowledged-{world // 2}").stat().st_size
    return [c.op for c in saving], [c.op for c in loading], most, message


def test_what_a_rank_exchanges_to_save_and_load_grows_with_neither_ranks_nor_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Collectives are the same at 8 and 1,024 ranks, and a rank's part in them is small.

    So each rank receives O(W), and rank 0 reads W messages, no larger than with fewer ranks.
    """
    few = exchanged(8, 40, tmp_path, monkeypatch)
    many = exchanged(1024, 40, tmp_path, monkeypatch)
    assert few[:2] == many[:2] and len(few[0]) < 12 and len(few[1]) < 12
    assert many[2] < 300, "arguments and a digest, without records and per_rank"
    assert many[2] == exchanged(1024, 4, tmp_path, monkeypatch)[2]
    assert 20_000 < many[3] <= few[3], "these only go to rank 0"


def test_metadata_and_frames_are_a_small_part_of_a_larger_state(tmp_path: Path):
    model = nn.Linear(1024, 512)
    optimizer = sharded(model, param_dtype=torch.bfloat16)
    advance(model, optimizer, 0, 1)
    checkpoint.save(tmp_path, model, optimizer, step=1)
    state = 3 * 4 * sum(p.numel() for p in model.parameters())
    assert state < checkpoint.inspect(tmp_path).nbytes < 1.01 * state
