"""torchrun on two nodes, and an elastic restart with fewer ranks from the newest checkpoint.

The nodes are two agents on the loopback interface. Each has one rank of launch/train.py.
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
from commands import kill_tree
from processes import Processes
from safetensors.torch import load_file
from train import parse_arguments, train

from shardcast import checkpoint
from shardcast.checkpoint import directory

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
ROOT = Path(__file__).parents[2]
RUN = (
    "--device cpu --steps 400 --warmup-steps 2 --width 32 --depth 1 --heads 2 --context 32 "
    "--batch-size 4 --log-interval 5 --validation-interval 400 --validation-sequences 8 "
    "--sample-bytes 8 --max-grad-norm 1 --corpus-mb 1 --checkpoint-interval 20 "
    "--keep-checkpoints 100"
).split()


RENDEZVOUS = "last_call_timeout=2,join_timeout=40,read_timeout=30"


class Nodes:
    """This machine twice."""

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
            # Who hosts the store is said: to find out, an agent would ask for names of hosts.
            *("--rdzv-id=test", f"--rdzv-conf={RENDEZVOUS},is_host={not self.started}"),
            "--local-addr=127.0.0.1",
        ]
        inherited = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        agent = subprocess.Popen(
            [*torchrun, *command],
            cwd=ROOT,
            # gloo would take the address that the machine's name has.
            env={**inherited, "GLOO_SOCKET_IFNAME": "lo"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.started.append(agent)
        return agent


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    for agent in made.started:
        if agent.poll() is None:
            kill_tree(agent.pid)


def ended(agent: subprocess.Popen[str]) -> str:
    try:
        out, _ = agent.communicate(timeout=150)  # 25 where nothing else runs
    except subprocess.TimeoutExpired:
        kill_tree(agent.pid)  # with the worker, which holds the pipe open
        out, _ = agent.communicate()
        raise AssertionError(f"the agent did not end:\n{out}") from None
    assert agent.returncode == 0, out
    return out


def worlds(folder: Path) -> list[int]:
    return [r["world"] for r in metrics.read(folder) if r["kind"] == "run"]


def test_training_goes_on_with_fewer_ranks_from_the_newest_checkpoint(tmp_path: Path, nodes: Nodes):
    saved = tmp_path / "saved"
    command = ["launch/train.py", *RUN, "--output", str(tmp_path / "run")]
    agents = [nodes.start("1:2", *command, "--checkpoint-dir", str(saved)) for _ in range(2)]
    deadline = time.monotonic() + 90
    while len(directory.steps(saved)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(directory.steps(saved)) >= 3, "the two ranks did not come that far in time"
    kill_tree(agents[1].pid)  # and its worker at once, as when a machine fails
    agents[1].communicate()
    out = ended(agents[0])
    assert worlds(tmp_path / "run") == [2, 1], out
    sizes = {
        step: checkpoint.inspect(path).world_size for step, path in directory.steps(saved).items()
    }
    assert sizes[400] == 1
    resumed = max(step for step, size in sizes.items() if size == 2)
    assert f"resumed after step {resumed}" in out and 60 <= resumed < 400

    # One process by itself, from a copy of that checkpoint, comes to the same weights.
    copy = tmp_path / "copy"
    shutil.copytree(directory.steps(saved)[resumed], copy / directory.steps(saved)[resumed].name)
    alone = [*RUN, "--output", str(tmp_path / "alone"), "--checkpoint-dir", str(copy)]
    told = signal.getsignal(signal.SIGTERM)
    train(parse_arguments(alone), Processes.start("cpu"))
    signal.signal(signal.SIGTERM, told)
    weights = []
    for folder in (saved, copy):
        checkpoint.export(folder, folder / "out")
        weights.append(load_file(folder / "out" / "model.safetensors"))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
