"""torchrun on two nodes, and an elastic restart with fewer ranks from the newest checkpoint.

The nodes are two agents on the loopback interface, each with one rank of launch/train.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import metrics
import pytest
import torch
from safetensors.torch import load_file

from shardcast import checkpoint
from shardcast.checkpoint import commit

pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]
ROOT = Path(__file__).parents[1]
RUN = (
    "--device cpu --steps 400 --warmup-steps 2 --width 32 --depth 1 --heads 2 --context 32 "
    "--batch-size 4 --log-interval 5 --validation-interval 400 --validation-sequences 8 "
    "--sample-bytes 8 --max-grad-norm 1 --corpus-mb 1 --checkpoint-interval 20 "
    "--keep-checkpoints 100"
).split()


RENDEZVOUS = "last_call_timeout=2,join_timeout=40,read_timeout=30"


class Nodes:
    """Two agents on the loopback interface that meet at a free port."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def start(self, nnodes: str, *command: str) -> subprocess.Popen[str]:
        """One more agent; the first one hosts the store."""
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={nnodes}", "--nproc-per-node=1", "--max-restarts=3"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}"),
            *("--rdzv-id=test", f"--rdzv-conf={RENDEZVOUS},is_host={not self.started}"),
            "--local-addr=127.0.0.1",
        ]
        agent = subprocess.Popen(
            [*torchrun, *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.started.append(agent)
        return agent

    def cut_off(self, agent: subprocess.Popen[str]) -> None:
        """Kill an agent and its worker at once, as when a machine fails."""
        listed = subprocess.run(["pgrep", "-P", str(agent.pid)], capture_output=True, text=True)
        for process in [agent.pid, *map(int, listed.stdout.split())]:
            os.kill(process, signal.SIGKILL)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    for agent in made.started:
        if agent.poll() is None:
            made.cut_off(agent)


def ended(agent: subprocess.Popen[str]) -> str:
    try:
        out, _ = agent.communicate(timeout=80)
    except subprocess.TimeoutExpired:
        agent.kill()
        out, _ = agent.communicate()
        raise AssertionError(f"the agent did not end:\n{out}") from None
    assert agent.returncode == 0, out
    return out


def worlds(folder: Path) -> list[int]:
    return [r["world"] for r in metrics.read(folder) if r["kind"] == "run"]


def test_two_nodes_train_together(tmp_path: Path, nodes: Nodes):
    command = ["launch/train.py", *RUN, "--steps", "10", "--output", str(tmp_path / "run")]
    agents = [
        nodes.start("2", *command, "--checkpoint-dir", str(tmp_path / "saved")) for _ in range(2)
    ]
    for agent in agents:
        ended(agent)
    assert worlds(tmp_path / "run") == [2]
    assert checkpoint.inspect(tmp_path / "saved").world_size == 2


def test_training_goes_on_with_fewer_ranks_from_the_newest_checkpoint(tmp_path: Path, nodes: Nodes):
    saved = tmp_path / "saved"
    command = ["launch/train.py", *RUN, "--output", str(tmp_path / "run")]
    agents = [nodes.start("1:2", *command, "--checkpoint-dir", str(saved)) for _ in range(2)]
    deadline = time.monotonic() + 90
    while len(commit.steps(saved)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    nodes.cut_off(agents[1])
    agents[1].communicate()
    out = ended(agents[0])
    assert worlds(tmp_path / "run") == [2, 1], out
    sizes = {
        step: checkpoint.inspect(path).world_size for step, path in commit.steps(saved).items()
    }
    assert sizes[400] == 1
    resumed = max(step for step, size in sizes.items() if size == 2)
    assert f"resumed after step {resumed}" in out and 60 <= resumed < 400

    # One process by itself, from a copy of that checkpoint, comes to the same weights.
    copy = tmp_path / "copy"
    shutil.copytree(commit.steps(saved)[resumed], copy / commit.steps(saved)[resumed].name)
    alone = [sys.executable, *command[:-1], str(tmp_path / "alone")]
    done = subprocess.run(
        [*alone, "--checkpoint-dir", str(copy)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    weights = []
    for folder in (saved, copy):
        checkpoint.export(folder, folder / "out")
        weights.append(load_file(folder / "out" / "model.safetensors"))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
