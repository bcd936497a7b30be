"""Saves beside training: the same bits, never two at a time, errors on all ranks."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, assert_same_bits, install, parts, run_world, sharded, values, whole

from shardcast import checkpoint
from shardcast.checkpoint import files
from shardcast.checkpoint.background import BACKGROUND, save_async

pytestmark = pytest.mark.timeout(60)


class Gate(files.Files):
    """Data is written only when the gate is open; can also fail, on one rank."""

    def __init__(self, fails: str = "") -> None:
        self.open = threading.Event()
        self.fails = fails

    def reached(self, point: str, path: str) -> None:
        if point == "create" and path.endswith(".distcp"):
            assert self.open.wait(20)
            if self.fails and self.fails in path:
                raise OSError(28, "No space left on device", path)


def job(group: Any = None, seed: int = 0) -> Any:
    model = CASES["gpt"].build(seed=seed)
    return model, sharded(model, group, param_dtype=torch.bfloat16)


def train(model: Any, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        install(model, step)
        optimizer.step()
        optimizer.zero_grad()


def saving(group: Any, folder: str, gate: Gate) -> Any:
    model, optimizer = job(group)
    train(model, optimizer, 0, 2)
    before = parts(optimizer), values(model)
    save = save_async(folder, model, optimizer, step=2, extra={"a": 1}, per_rank=group.rank())
    assert not save.done() and not save.path.exists()
    train(model, optimizer, 2, 5)  # must not get into the checkpoint
    gate.open.set()
    assert save.wait().exists()
    return before


def loading(group: Any, folder: str) -> Any:
    model, optimizer = job(group, seed=7)
    resumed = checkpoint.load(folder, model, optimizer)
    assert (resumed.step, resumed.extra, resumed.per_rank) == (2, {"a": 1}, [0, 1, 2])
    return parts(optimizer), values(model)


def test_steps_during_a_save_are_not_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = Gate()
    monkeypatch.setattr(files, "SYSTEM", gate)
    before, _ = run_world(3, saving, str(tmp_path), gate)
    after, _ = run_world(2, loading, str(tmp_path))
    assert_same_bits(whole(r[0] for r in after), whole(r[0] for r in before))
    assert_same_bits(after[0][1], before[0][1])
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000000002"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000002"]
    assert not list((tmp_path / "step-000000002").glob("acknowledged*"))


def test_without_the_copy_steps_would_get_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Negative control: what the comparison above would see if parts were not copied."""
    from shardcast.checkpoint import background

    gate = Gate()
    monkeypatch.setattr(files, "SYSTEM", gate)
    monkeypatch.setattr(background, "_copied", lambda part: part)
    before, _ = run_world(3, saving, str(tmp_path), gate)
    after, _ = run_world(2, loading, str(tmp_path))
    with pytest.raises(AssertionError):
        assert_same_bits(whole(r[0] for r in after), whole(r[0] for r in before))


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = Gate()
    monkeypatch.setattr(files, "SYSTEM", gate)
    model, optimizer = job()
    first = save_async(tmp_path, model, optimizer, step=1)
    timer = threading.Timer(0.2, gate.open.set)
    timer.start()
    second = save_async(tmp_path, model, optimizer, step=2, keep=1)
    assert first.done() and first.path.exists()
    second.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000002"]
    timer.join()


def test_a_save_in_between_leaves_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = Gate()
    model, optimizer = job()
    monkeypatch.setattr(files, "SYSTEM", gate)
    slow = save_async(tmp_path, model, optimizer, step=1)
    monkeypatch.setattr(files, "SYSTEM", files.Files())
    checkpoint.save(tmp_path, model, optimizer, step=2)
    gate.open.set()
    slow.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000001", "step-000000002"]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_raised_on_all_at_the_next_call(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rank: int,
):
    gate = Gate(fails=f"__{rank}_0")
    gate.open.set()
    monkeypatch.setattr(files, "SYSTEM", gate)

    def two_saves(group: Any) -> None:
        model, optimizer = job(group)
        save_async(tmp_path, model, optimizer, step=1)
        with pytest.raises(RuntimeError, match=r"is lost.*No space"):
            save_async(tmp_path, model, optimizer, step=2)
        gate.fails = ""
        save_async(tmp_path, model, optimizer, step=3).wait()  # and it goes on

    with caplog.at_level(logging.ERROR):
        run_world(2, two_saves)
    assert "is lost" in caplog.text
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000000003"
    assert not list(tmp_path.glob(BACKGROUND + "*"))


def test_rank_0_gives_up_on_a_rank_that_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from shardcast.checkpoint import background

    say = background._Job._say
    monkeypatch.setattr(
        background._Job, "_say", lambda job, answer: job.held.rank or say(job, answer)
    )

    def lost(group: Any) -> None:
        model, optimizer = job(group)
        with pytest.raises(RuntimeError, match=r"rank 1 wrote nothing within 3\.0 seconds"):
            save_async(tmp_path, model, optimizer, step=1, timeout=3.0).wait()

    run_world(2, lost)
    assert checkpoint.latest(tmp_path) is None


SCRIPT = """
import sys, time, torch, shardcast
from torch import nn
from shardcast.checkpoint import files
from shardcast.checkpoint.background import save_async

class Slow(files.Files):
    def reached(self, point, path):
        if point == "create" and path.endswith(".distcp"):
            print("writing", flush=True)
            time.sleep(float(sys.argv[2]))

model = nn.Linear(3, 3)
optimizer = shardcast.shard(model, torch.optim.AdamW(model.parameters()), fuse="eager")
files.SYSTEM = Slow()
save_async(sys.argv[1], model, optimizer, step=1)
"""


def script(folder: Path, seconds: float) -> subprocess.Popen[str]:
    root = Path(__file__).parent.parent
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(seconds)],
        stdout=subprocess.PIPE, text=True, cwd=root, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip


def test_a_process_that_ends_waits_for_its_save(tmp_path: Path):
    with script(tmp_path, 1.0) as process:
        assert process.wait(40) == 0
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000000001"


def test_a_process_that_is_killed_leaves_nothing_that_is_taken(tmp_path: Path):
    with script(tmp_path, 30.0) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    assert checkpoint.latest(tmp_path) is None
    assert list(tmp_path.glob(BACKGROUND + "*")), "the control: it was under way"
    model, optimizer = job()
    save_async(tmp_path, model, optimizer, step=1).wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000001"]
