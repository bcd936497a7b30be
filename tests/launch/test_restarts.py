"""Runs that are stopped, or lose a worker, end as the run that was left alone: to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import metrics
import pytest
import torch
from commands import kill_tree
from processes import Processes
from safetensors.torch import load_file
from train import parse_arguments, train

from shardcast import checkpoint
from shardcast.testing import SpawnedWorld

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]
ROOT = Path(__file__).parents[2]
STEPS = 60
RUN = (
    f"--device cpu --steps {STEPS} --warmup-steps 2 --width 32 --depth 1 --heads 2 --context 32 "
    "--batch-size 4 --accumulation 2 --log-interval 2 --validation-interval 60 --corpus-mb 1 "
    "--validation-sequences 8 --sample-bytes 8 --max-grad-norm 1 --checkpoint-interval 7"
).split()


class Run:
    """Two processes of launch/train.py under launch/torchrun.sh, which may restart three times."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.saved = folder, folder / "saved"
        folder.mkdir(exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SHARDCAST_", "TORCH"))}
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        kept |= {"PATH": path, "OMP_NUM_THREADS": "1", "NPROC": "2", "MAX_RESTARTS": "3"}
        folders = ["--output", str(folder), "--checkpoint-dir", str(self.saved)]
        with open(folder / "log", "a") as log:
            self.agent = subprocess.Popen(
                ["bash", "launch/torchrun.sh", *RUN, *folders],
                cwd=ROOT,
                env=kept,
                stdout=log,
                stderr=log,
            )

    def workers(self) -> list[int]:
        listed = subprocess.run(["pgrep", "-P", str(self.agent.pid)], capture_output=True)
        return [int(pid) for pid in listed.stdout.split()]

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def starts(self) -> list[int]:
        """The world sizes of the starts so far that have trained some steps."""
        there = (self.folder / metrics.FILE).is_file()
        records = metrics.read(self.folder) if there else []
        runs = [i for i, record in enumerate(records) if record["kind"] == "run"]
        return [records[i]["world"] for i in runs if len(records) - i > 5]

    def wait_for_start(self, number: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.starts()) < number and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(self.starts()) == number, self.log()

    def end(self) -> int:
        try:
            return self.agent.wait(timeout=60)
        finally:
            if self.agent.poll() is None:
                kill_tree(self.agent.pid)


def result(folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Weights and optimizer state of the last checkpoint, which is that of the last step."""
    found = checkpoint.inspect(folder / "saved")
    assert (found.step, found.world_size) == (STEPS, 2)
    checkpoint.export(folder / "saved", folder / "out")
    state = torch.load(folder / "out" / "optimizer.pt", weights_only=True)
    return load_file(folder / "out" / "model.safetensors"), state["state"]


def train_in(group: Any, flags: list[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    train(parse_arguments(flags), Processes(group.rank(), group.size(), torch.device("cpu")))
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, gloo: SpawnedWorld) -> Any:
    """The result of the run that is left alone."""
    folder = tmp_path_factory.mktemp("whole")
    folders = ["--output", str(folder), "--checkpoint-dir", str(folder / "saved")]
    gloo.run(train_in, [*RUN, *folders], timeout=100)
    return result(folder)


def same(run: Run, whole: Any) -> None:
    (left, left_state), (right, right_state) = result(run.folder), whole
    assert left.keys() == right.keys() and left_state.keys() == right_state.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    for number, values in left_state.items():
        assert all(torch.equal(value, right_state[number][key]) for key, value in values.items())


def test_a_run_that_was_told_to_stop_goes_on_later_and_is_whole_again_after_each_lost_worker(
    tmp_path: Path, whole: Any
) -> None:
    run = Run(tmp_path)
    try:
        run.wait_for_start(1)
        run.agent.send_signal(signal.SIGTERM)
    finally:
        run.end()
    assert "told to stop; saved step" in run.log()
    stopped = checkpoint.inspect(run.saved).step
    assert 0 < stopped < STEPS
    again = Run(tmp_path)
    try:
        for number in (2, 3):
            again.wait_for_start(number)
            os.kill(again.workers()[-1], signal.SIGKILL)
    finally:
        status = again.end()
    assert status == 0, again.log()
    assert f"resumed after step {stopped}" in again.log()
    assert again.starts() == [2, 2, 2, 2], again.log()
    assert "most restarts fail" not in again.log()
    same(again, whole)
