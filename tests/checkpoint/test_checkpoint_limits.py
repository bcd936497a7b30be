"""Full disks, directories that cannot be written to, and the memory that an export takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import assert_same_bits, parts, run_world, sharded
from torch import nn

from shardcast import checkpoint
from shardcast.checkpoint import saving

pytestmark = pytest.mark.timeout(60)
LARGEST = 8 << 20  # bytes of one parameter
# glibc keeps freed blocks up to 32 MB for itself, which would be counted; these it gives back.
AT_ONCE = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}


def mounted(path: Path, options: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not mounted(disk, "size=2m"):
        pytest.skip("mounting a tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def job(group: Any = None, width: int = 64, **fields: Any) -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    optimizer = sharded(model, group, param_dtype=torch.bfloat16, **fields)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("known", [True, False], ids=["foreseen", "not foreseen"])
def test_a_full_disk_is_told_on_all_ranks_and_the_old_checkpoint_stays(
    small_disk: Path, known: bool, monkeypatch: pytest.MonkeyPatch
):
    run = small_disk / "run"
    told = []

    def fill(group: Any) -> Any:
        model, optimizer = job(group, 160)
        checkpoint.save(run, model, optimizer, step=1)
        before = parts(optimizer)
        with pytest.raises((OSError, RuntimeError)) as caught:
            for step in range(2, 9):
                checkpoint.save(run, model, optimizer, step=step)
        told.append((step, str(caught.value)))
        return before

    if not known:  # the space goes while the save is under way
        monkeypatch.setattr(saving.shutil, "disk_usage", lambda _path: type("", (), {"free": 1e9}))
    states = run_world(2, fill)[0]
    (step, first), (_, second) = told
    wanted = "bytes free in" if known else "No space left on device"
    assert wanted in first and wanted in second
    assert checkpoint.latest(run) == run / f"step-{step - 1:09d}"
    assert not [path for path in run.iterdir() if path.name.startswith(".")]

    def load(group: Any) -> Any:
        model, optimizer = job(group, 160)
        checkpoint.load(run, model, optimizer)
        return parts(optimizer)

    for after, before in zip(run_world(2, load)[0], states, strict=True):
        assert_same_bits(after, before)


def test_a_directory_that_is_read_only_is_told_on_all_ranks(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    told = "is not saved: Read-only file system"
    if not mounted(disk, "size=1m,ro"):
        disk.chmod(0o500)  # enough for users that are not root
        told = "is not saved: Permission denied"

    def attempt(group: Any) -> None:
        model, optimizer = job(group)
        before = parts(optimizer)
        with pytest.raises((OSError, RuntimeError), match=told):
            checkpoint.save(disk / "run", model, optimizer, step=1)
        assert_same_bits(parts(optimizer), before)

    try:
        run_world(2, attempt)
    finally:
        subprocess.run(["umount", "-l", str(disk)], capture_output=True)
        disk.chmod(0o700)


SAVE = """
import resource, sys, torch, shardcast
from torch import nn
from shardcast import checkpoint

def peak_of(call):
    open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
    before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
    call()
    status = open("/proc/self/status").read()
    return (int(status.split("VmHWM:")[1].split()[0]) << 10) - before

model = nn.Sequential(*[nn.Linear(1024, 2048, bias=False) for _ in range(8)])
optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters()), param_dtype="fp32")
for param in model.parameters():
    param.grad = torch.ones_like(param)
optimizer.step()
small = nn.Linear(3, 3)
other = shardcast.shard(small, torch.optim.AdamW(small.parameters()))
for name, pair in (("warm", (small, other)), ("run", (model, optimizer))):
    folder = sys.argv[1] + "/" + name
    saved = peak_of(lambda: checkpoint.save(folder, *pair, step=1))
    loaded = peak_of(lambda: checkpoint.load(folder, *pair))
    options = {"max_shard_mb": 16, "optimizer": False}
    exported = peak_of(lambda: checkpoint.export(folder, folder + "-out", **options))
print(saved, loaded, exported)
"""


@pytest.mark.timeout(120)  # what were two processes with 50 seconds each
def test_the_memory_of_saving_loading_and_exporting_does_not_grow_with_the_model(tmp_path: Path):
    """192 MB of state are saved and loaded; extra is a chunk, and to load the state of a pack.

    An export takes one of the files that it writes, here two parameters, and a chunk.
    """
    finished = subprocess.run(
        [sys.executable, "-c", SAVE, tmp_path],
        capture_output=True,
        text=True,
        timeout=100,
        env=AT_ONCE,
    )
    assert finished.returncode == 0, finished.stderr
    saved, loaded, exported = map(int, finished.stdout.split())
    assert 0.9 * LARGEST < saved < 2 * LARGEST  # pages are counted in batches
    of_a_pack = 2 * 2 * LARGEST  # 16 MB of parameters, two moments
    assert of_a_pack < loaded < of_a_pack + 2 * LARGEST
    assert 1.9 * LARGEST < exported < 3.5 * LARGEST
