"""The training script for grids: one curve whatever the grid, also across a change of it."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import metrics
import pytest
import torch
from processes import Processes
from train_hybrid import parse_arguments, train

from shardcast.checkpoint import latest
from shardcast.testing import SpawnedWorld, spawn_world

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
FLAGS = (
    f"--device cpu --config {ROOT}/configs/fp32.yaml --tie-head --width 32 --depth 4 --heads 2 "
    f"--context 16 --batch-size 2 --warmup-steps 2 --data {ROOT}/launch --steps 4 "
)


def run(group: Any, flags: str, output: Path) -> None:
    """One process of a run, alone without a group."""
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    args = parse_arguments([*FLAGS.split(), *flags.split(), "--output", str(output)])
    train(args, Processes(rank, world, torch.device("cpu")))


@pytest.fixture(scope="module")
def four() -> Iterator[SpawnedWorld]:
    with spawn_world(4, timeout=110.0) as world:
        yield world


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[metrics.Record]:
    """torch's own optimizer in one process."""
    output = tmp_path_factory.mktemp("alone")
    run(None, "--baseline", output)
    return metrics.read(output)


@pytest.mark.parametrize(
    "grid",
    [
        "--tp 2 --pp 2",
        "--tp 2 --dp 2",
        "--pp 2 --dp 2",
        "--pp 2 --dp 2 --schedule InterleavedZeroBubble",
    ],
)
def test_a_grid_has_the_losses_of_one_process(
    four: SpawnedWorld, alone: list[metrics.Record], tmp_path: Path, grid: str
) -> None:
    four.run(run, grid, tmp_path)
    assert metrics.largest_difference(alone, metrics.read(tmp_path))[1] < 1e-5


@pytest.fixture(scope="module")
def saved(four: SpawnedWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a run on 2 x 2 tensor and pipeline-parallel ranks, after step 2 of 4."""
    output = tmp_path_factory.mktemp("saved")
    directory = output / "checkpoints"
    flags = f"--tp 2 --pp 2 --checkpoint-dir {directory} --checkpoint-interval 2"
    four.run(run, flags, output)
    shutil.rmtree(latest(directory))
    return directory


@pytest.mark.parametrize(
    "grid", ["", "--tp 2 --dp 2", "--pp 2 --dp 2 --schedule Interleaved1F1B"], ids=str
)
def test_a_run_goes_on_on_another_grid(
    four: SpawnedWorld, alone: list[metrics.Record], saved: Path, tmp_path: Path, grid: str
) -> None:
    directory = shutil.copytree(saved, tmp_path / "checkpoints")
    flags = f"{grid} --checkpoint-dir {directory}"
    handler = signal.getsignal(signal.SIGTERM)
    if grid:
        four.run(run, flags, tmp_path)
    else:
        run(None, flags, tmp_path)
        signal.signal(signal.SIGTERM, handler)  # the script has its own
    found = metrics.read(tmp_path)
    assert sorted(metrics.curve(found, "train")) == [3, 4]
    assert metrics.largest_difference(alone, found)[1] < 1e-5
