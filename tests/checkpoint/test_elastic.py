"""torchrun on two nodes, and an elastic restart with fewer ranks from the newest checkpoint.

The nodes are network namespaces with a cable between them, where making them is permitted; else
two agents on the loopback interface. Each has one rank of launch/train.py.
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


ADDRESSES, LOOPBACK = ["10.77.0.1", "10.77.0.2"], ["127.0.0.1"] * 2
RENDEZVOUS = "last_call_timeout=2,join_timeout=40,read_timeout=30"


class Nodes:
    """Two network namespaces with a cable between them, or else this machine twice."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []
        ends = [f"sc{os.getpid() % 100000}{end}" for end in "ab"]  # of the cable
        self.spaces = [f"shardcast-{end}" for end in ends]
        self.apart = connected(self.spaces, ends, ADDRESSES)
        self.addresses, self.interfaces = (
            (ADDRESSES, ends) if self.apart else (LOOPBACK, ["lo"] * 2)
        )
        self.port = 29400  # nobody else is in these namespaces
        if not self.apart:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]

    def start(self, nnodes: str, *command: str) -> subprocess.Popen[str]:
        """One more agent; the first one hosts the store."""
        number = len(self.started)
        prefix = ["ip", "netns", "exec", self.spaces[number]] if self.apart else []
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={nnodes}", "--nproc-per-node=1", "--max-restarts=3"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={self.addresses[0]}:{self.port}"),
            # Who hosts the store is said: to find out, an agent would ask for names of hosts.
            *("--rdzv-id=test", f"--rdzv-conf={RENDEZVOUS},is_host={number == 0}"),
            f"--local-addr={self.addresses[number]}",
        ]
        kept = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        agent = subprocess.Popen(
            [*prefix, *torchrun, *command],
            cwd=ROOT,
            # gloo would take the address that the machine's name has, which is not the cable's.
            env={**kept, "GLOO_SOCKET_IFNAME": self.interfaces[number]},
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
    if made.apart:
        for space in made.spaces:
            ip(f"netns del {space}")


def ip(arguments: str) -> bool:
    return subprocess.run(["ip", *arguments.split()], capture_output=True).returncode == 0


def connected(spaces: list[str], ends: list[str], addresses: list[str]) -> bool:
    """Make two namespaces and a cable between them; whether that was permitted."""
    if shutil.which("ip") is None:
        return False
    steps = [f"netns add {space}" for space in spaces]
    steps.append(f"link add {ends[0]} netns {spaces[0]} type veth peer {ends[1]} netns {spaces[1]}")
    for space, end, address in zip(spaces, ends, addresses, strict=True):
        steps += [
            f"-n {space} addr add {address}/24 dev {end}",
            f"-n {space} link set {end} up",
            f"-n {space} link set lo up",
        ]
    done = all(ip(step) for step in steps)
    if not done:
        for space in spaces:
            ip(f"netns del {space}")
    return done


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
