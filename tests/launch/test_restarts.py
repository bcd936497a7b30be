"""Runs that are stopped, or lose a worker or a node, end like an uninterrupted run."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import metrics
import psutil
import pytest
import torch
import warm
from commands import ROOT, kill_tree
from patience import patience
from processes import Processes
from safetensors.torch import load_file
from train import parse_arguments, train

from shardcast import checkpoint
from shardcast.checkpoint import directory
from shardcast.testing import SpawnedWorld

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
FLAGS = (
    "--device cpu --warmup-steps 2 --width 32 --depth 1 --heads 2 --context 32 --batch-size 4 "
    "--validation-interval 400 --validation-sequences 8 --sample-bytes 8 --max-grad-norm 1 "
    "--corpus-mb 1"
).split()
RESTARTS = [*FLAGS, *"--steps 60 --accumulation 2 --log-interval 1 --checkpoint-interval 5".split()]
ELASTIC = [
    *FLAGS,
    *"--steps 160 --log-interval 5 --checkpoint-interval 10 --keep-checkpoints 100".split(),
]


class Run:
    """Agents of launch/torchrun.sh that may each restart their workers three times."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self.folder, self.saved = folder, folder / "saved"
        self.flags = [*flags, "--output", str(folder), "--checkpoint-dir", str(self.saved)]
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, **env: str) -> None:
        """Start one more agent."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SHARDCAST_", "TORCH"))}
        path = os.pathsep.join([os.path.dirname(warm.executable()), os.environ["PATH"]])
        kept |= {"PATH": path, "OMP_NUM_THREADS": "1", "MAX_RESTARTS": "3"}
        kept["PYTHON_EXEC"] = warm.executable()  # torchrun starts workers with it
        with open(self.folder / "log", "a") as log:
            self.agents.append(
                subprocess.Popen(
                    ["bash", "launch/torchrun.sh", *self.flags],
                    cwd=ROOT,
                    env={**kept, **env},
                    stdout=log,
                    stderr=log,
                )
            )

    def workers(self) -> list[int]:
        """Return the process IDs of the workers of the only agent."""
        agents = [each for pid in warm.SERVERS for each in psutil.Process(pid).children()]
        agents = agents or [psutil.Process(self.agents[-1].pid)]  # not on Linux
        return [child.pid for agent in agents for child in agent.children()]

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def starts(self) -> list[int]:
        """Return the world size of each start that has trained some steps."""
        there = (self.folder / metrics.FILE).is_file()
        records = metrics.read(self.folder) if there else []
        runs = [i for i, record in enumerate(records) if record["kind"] == "run"]
        return [records[i]["world"] for i in runs if len(records) - i > 5]

    def wait_for(self, come: Callable[[], bool]) -> None:
        while not come():
            ended = all(agent.poll() is not None for agent in self.agents)
            assert not ended or come(), self.log()
            time.sleep(0.02)

    def end(self) -> int:
        """Return the status of the first agent; if it hangs, raise an error with the log."""
        try:
            return self.agents[0].wait(timeout=patience(200))
        except subprocess.TimeoutExpired as hang:
            raise AssertionError(self.log()) from hang
        finally:
            self.kill()

    def kill(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                kill_tree(agent.pid)
                agent.wait()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[[list[str]], Run]]:
    """Yield a constructor of runs in one folder; at the end, kill their processes."""
    started: list[Run] = []

    def run(flags: list[str]) -> Run:
        started.append(Run(tmp_path, flags))
        return started[-1]

    yield run
    for each in started:
        each.kill()


def result(saved: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Return weights and optimizer state of the last checkpoint."""
    checkpoint.export(saved, saved / "out")
    state = torch.load(saved / "out" / "optimizer.pt", weights_only=True)
    return load_file(saved / "out" / "model.safetensors"), state["state"]


def assert_same_results(one: Path, other: Path) -> None:
    (left, left_state), (right, right_state) = result(one), result(other)
    assert left.keys() == right.keys() and left_state.keys() == right_state.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    for number, values in left_state.items():
        assert all(torch.equal(value, right_state[number][key]) for key, value in values.items())


def train_in(group: Any, flags: list[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    train(parse_arguments(flags), Processes(rank, size, torch.device("cpu")))
    signal.signal(signal.SIGTERM, before)


def test_a_run_that_was_told_to_stop_goes_on_later_and_is_whole_again_after_a_lost_worker(
    tmp_path: Path, gloo: SpawnedWorld, runs: Callable[[list[str]], Run]
) -> None:
    run = runs(RESTARTS)
    run.start(NPROC="2")
    run.wait_for(lambda: len(run.starts()) == 1)
    run.agents[0].send_signal(signal.SIGTERM)
    run.end()
    assert "told to stop; saved step" in run.log()
    stopped = checkpoint.inspect(run.saved).step
    assert 0 < stopped < 60
    again = runs(RESTARTS)
    again.start(NPROC="2")
    again.wait_for(lambda: len(again.starts()) == 2)
    os.kill(again.workers()[-1], signal.SIGKILL)
    assert again.end() == 0, again.log()
    assert f"resumed after step {stopped}" in again.log()
    assert again.starts() == [2, 2, 2], again.log()
    assert "most restarts fail" not in again.log()

    alone = Run(tmp_path / "alone", RESTARTS)
    gloo.run(train_in, alone.flags)
    assert checkpoint.inspect(alone.saved).step == checkpoint.inspect(again.saved).step == 60
    assert_same_results(alone.saved, again.saved)


def test_training_goes_on_with_fewer_ranks_from_the_newest_checkpoint(
    tmp_path: Path, runs: Callable[[list[str]], Run]
) -> None:
    """Each of two nodes is an agent with one rank on the loopback interface; one is killed."""
    run = runs(ELASTIC)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    for is_host in (True, False):
        # ``is_host`` and the variables avoid look-ups of host names: by agents that determine
        # which one hosts the store, and by gloo, which uses the address of the machine's name.
        waits = f"last_call_timeout=2,join_timeout=40,read_timeout=30,is_host={is_host}"
        local = {"PET_LOCAL_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        run.start(NPROC="1", NNODES="1:2", RDZV_ENDPOINT=endpoint, PET_RDZV_CONF=waits, **local)
    run.wait_for(lambda: len(directory.steps(run.saved)) >= 3)
    kill_tree(run.agents[1].pid)  # with its worker, as if the machine failed
    assert run.end() == 0, run.log()
    assert [r["world"] for r in metrics.read(run.folder) if r["kind"] == "run"] == [2, 1], run.log()
    steps = directory.steps(run.saved)
    sizes = {step: checkpoint.inspect(path).world_size for step, path in steps.items()}
    assert sizes[160] == 1
    resumed = max(step for step, size in sizes.items() if size == 2)
    assert f"resumed after step {resumed}" in run.log() and 30 <= resumed < 160

    # A single process that starts from a copy of that checkpoint has the same results.
    alone = Run(tmp_path / "alone", ELASTIC)
    shutil.copytree(steps[resumed], alone.saved / steps[resumed].name)
    train_in(None, alone.flags)
    assert_same_results(run.saved, alone.saved)
